"""The GPU interconnect topology of a host: NVLink, or the PCIe path."""

import functools
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

SELF = "X"
# NVML's common ancestor levels, in the notation of ``nvidia-smi topo -m``.
PCIE = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
UNKNOWN = "?"
SAME = "SAME"  # MIG instances or partitions of one GPU
MAX_LINKS = 18  # for bindings that do not say NVML's own maximum
_MEMORY_READ, _GRANTED = 0, 0  # nvml.h: NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK
_ENABLED = 1
_SWITCH = 2


def matrix(
    library: types.ModuleType, handles: Sequence[Any] | None = None
) -> tuple[tuple[str, ...], ...]:
    """Return the connection type of each pair of GPUs; an empty tuple for a single GPU.

    ``handles``: of the GPUs; of a MIG instance, that of its GPU. Default: all.
    """
    handles = _all(library) if handles is None else handles
    if len(handles) <= 1:
        return ()
    buses = [_bus(query_nvml(library, handle, "nvmlDeviceGetPciInfo")) for handle in handles]
    links = [_links(library, handle) for handle in handles]
    return tuple(
        tuple(
            SELF if row == column else _link(library, handles, buses, links, (row, column))
            for column in range(len(handles))
        )
        for row in range(len(handles))
    )


def peer_access(
    library: types.ModuleType, handles: Sequence[Any]
) -> tuple[tuple[bool | None, ...], ...]:
    """Return for each pair of GPUs whether one reads the other's memory directly.

    None: the driver does not say, or the pair is one GPU.
    """
    if len(handles) <= 1:
        return ()
    return tuple(
        tuple(None if row is column else _grants(library, row, column) for column in handles)
        for row in handles
    )


def _grants(library: types.ModuleType, row: object, column: object) -> bool | None:
    status = query_nvml(library, row, "nvmlDeviceGetP2PStatus", column, _MEMORY_READ)
    return None if status is None else status == _GRANTED


def num_links(library: types.ModuleType, handle: object) -> int:
    """Return how many NVLinks of a GPU are active."""
    return sum(_links(library, handle).values())


def _all(library: types.ModuleType) -> list[Any]:
    return [
        library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())
    ]


def query_nvml(library: types.ModuleType, handle: object, name: str, *arguments: object) -> Any:  # noqa: ANN401 - NVML is untyped
    """Return the result of an NVML query, or None if GPU or driver does not support it."""
    function = getattr(library, name, None)
    if function is None:
        return None
    try:
        return function(handle, *arguments)
    except library.NVMLError:
        return None


def query_system(library: types.ModuleType, name: str) -> Any:  # noqa: ANN401 - NVML is untyped
    """Return the result of an NVML query about the whole host, or None."""
    function = getattr(library, name, None)
    if function is None:
        return None
    try:
        return function()
    except library.NVMLError:
        return None


def _link(
    library: types.ModuleType,
    handles: Sequence[Any],
    buses: list[str],
    links: list[Counter[str]],
    pair: tuple[int, int],
) -> str:
    row, column = pair
    if handles[row] is handles[column]:
        return SAME
    through_switch = min(links[row][SWITCHED], links[column][SWITCHED])
    if num_links := links[row][buses[column]] or through_switch:
        return f"NV{num_links}"
    query = functools.partial(query_nvml, library, handles[row])
    level = query("nvmlDeviceGetTopologyCommonAncestor", handles[column])
    return PCIE.get(level, UNKNOWN)


SWITCHED = "switch"


def _links(library: types.ModuleType, handle: object) -> Counter[str]:
    """Return the number of NVLinks to each bus id, or to an NVSwitch."""
    return Counter(_ends(library, handle))


def _ends(library: types.ModuleType, handle: object) -> Iterator[str]:
    for link in range(getattr(library, "NVML_NVLINK_MAX_LINKS", MAX_LINKS)):
        if query_nvml(library, handle, "nvmlDeviceGetNvLinkState", link) != _ENABLED:
            continue
        kind = query_nvml(library, handle, "nvmlDeviceGetNvLinkRemoteDeviceType", link)
        if kind == _SWITCH:
            yield SWITCHED
        else:
            yield _bus(query_nvml(library, handle, "nvmlDeviceGetNvLinkRemotePciInfo", link))


def _bus(info: Any) -> str:  # noqa: ANN401 - NVML is untyped
    """Return a bus id in a canonical form; drivers write the domain with 4 or 8 digits."""
    if info is None:
        return ""
    value = info.busId
    text = (value.decode() if isinstance(value, bytes) else str(value)).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}"
