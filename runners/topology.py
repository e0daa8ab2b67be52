"""How the GPUs of a host reach each other: NVLink where there is one, else the way over PCIe."""

import functools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

SELF = "X"
# NVML's levels of a common ancestor, in the words of ``nvidia-smi topo -m``.
PCIE = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
UNKNOWN = "?"
MAX_LINKS = 18
_ENABLED = 1
_SWITCH = 2


def matrix(library: types.ModuleType) -> tuple[tuple[str, ...], ...]:
    """Return for each pair of GPUs how they are connected; no row for a single GPU."""
    handles = [
        library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())
    ]
    if len(handles) <= 1:
        return ()
    buses = [_bus(ask(library, handle, "nvmlDeviceGetPciInfo")) for handle in handles]
    links = [_links(library, handle) for handle in handles]
    return tuple(
        tuple(
            SELF if row == column else _link(library, handles, buses, links, (row, column))
            for column in range(len(handles))
        )
        for row in range(len(handles))
    )


def ask(library: types.ModuleType, handle: object, name: str, *arguments: object) -> Any:  # noqa: ANN401 - NVML is untyped
    """Return what NVML answers, or None when GPU or driver does not support the question."""
    question = getattr(library, name, None)
    if question is None:
        return None
    try:
        return question(handle, *arguments)
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
    question = functools.partial(ask, library, handles[row])
    level = question("nvmlDeviceGetTopologyCommonAncestor", handles[column])
    return PCIE.get(level, UNKNOWN)


SWITCHED = "switch"


def _links(library: types.ModuleType, handle: object) -> Counter[str]:
    """Return how many NVLinks lead to each bus id, or to a switch that reaches every GPU."""
    return Counter(_ends(library, handle))


def _ends(library: types.ModuleType, handle: object) -> Iterator[str]:
    for link in range(MAX_LINKS):
        if ask(library, handle, "nvmlDeviceGetNvLinkState", link) != _ENABLED:
            continue
        kind = ask(library, handle, "nvmlDeviceGetNvLinkRemoteDeviceType", link)
        if kind == _SWITCH:
            yield SWITCHED
        else:
            yield _bus(ask(library, handle, "nvmlDeviceGetNvLinkRemotePciInfo", link))


def _bus(info: Any) -> str:  # noqa: ANN401 - NVML is untyped
    """Return a bus id in one spelling; drivers write the domain with four or eight digits."""
    if info is None:
        return ""
    value = info.busId
    text = (value.decode() if isinstance(value, bytes) else str(value)).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}"
