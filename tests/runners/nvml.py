# ruff: noqa: N802 -- the names are NVML's own
"""Machines as NVML describes them, in the shapes that its Python binding returns.

No GPU was there when this was written: names, bus ids and levels follow NVML's documentation and
published ``nvidia-smi topo -m`` tables of these machines.
"""

from types import SimpleNamespace

SINGLE, HOSTBRIDGE, SYSTEM = 10, 30, 50
TO_GPU, TO_SWITCH = 0, 2


class NotSupportedError(Exception):
    pass


def refuse(*_: object) -> None:
    raise NotSupportedError


class Machine:
    """A stand-in for the library: GPUs by index, NVLinks by pair, PCIe levels by pair."""

    NVMLError = NotSupportedError

    def __init__(self, num_gpus: int, *, wide_domain: bool = True) -> None:
        self.num_gpus = num_gpus
        self.domain = "00000000" if wide_domain else "0000"
        self.links: dict[int, list[int | None]] = {}  # of a GPU: the GPU at the end, None: switch
        self.levels: dict[frozenset[int], int] = {}

    def bus(self, index: int) -> str:
        return f"{self.domain}:{0x18 + index:02X}:00.0"

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.bus(index).encode())

    def nvmlDeviceGetNvLinkState(self, index: int, link: int) -> int:
        if link >= len(self.links.get(index, [])):
            raise NotSupportedError
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, index: int, link: int) -> int:
        return TO_SWITCH if self.links[index][link] is None else TO_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, index: int, link: int) -> SimpleNamespace:
        end = self.links[index][link]
        return SimpleNamespace(busId=f"0000:{0x18 + end:02x}:00.0".encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, left: int, right: int) -> int:
        return self.levels.get(frozenset((left, right)), SYSTEM)


def dgx_h100() -> Machine:
    """Eight GPUs, each with 18 links to the switches."""
    machine = Machine(8)
    machine.links = {index: [None] * 18 for index in range(8)}
    return machine


def two_bridged_pairs() -> Machine:
    """Four GPUs in two pairs, each with a bridge of four links."""
    machine = Machine(4)
    machine.links = {0: [1] * 4, 1: [0] * 4, 2: [3] * 4, 3: [2] * 4}
    return machine


def workstation() -> Machine:
    """Two boards without NVLink behind one host bridge."""
    machine = Machine(2, wide_domain=False)
    machine.levels = {frozenset((0, 1)): HOSTBRIDGE}
    return machine
