"""The GPU interconnect topology of a host: NVLink, or the PCIe path."""

import functools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

SELF = "X"
# NVML's common ancestor levels, in the notation of ``nvidia-smi topo -m``.
PCIE = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
UNKNOWN = "?"
MAX_LINKS = 18
_ENABLED = 1
_SWITCH = 2


def matrix(library: types.ModuleType) -> tuple[tuple[str, ...], ...]:
    """Return the connection type of each pair of GPUs; an empty tuple for a single GPU."""
    handles = [
        library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())
    ]
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


def query_nvml(library: types.ModuleType, handle: object, name: str, *arguments: object) -> Any:  # noqa: ANN401 - NVML is untyped
    """Return the result of an NVML query, or None if GPU or driver does not support it."""
    function = getattr(library, name, None)
    if function is None:
        return None
    try:
        return function(handle, *arguments)
    except library.NVMLError:
        return None


def _link(
    library: types.ModuleType,
    handles: list[Any],
    buses: list[str],
    links: list[Counter[str]],
    pair: tuple[int, int],
) -> str:
    row, column = pair
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
    for link in range(MAX_LINKS):
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
