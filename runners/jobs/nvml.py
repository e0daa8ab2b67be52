"""GPU figures from inside the job, through NVML."""

import contextlib
import os
from collections.abc import Callable, Sequence

import pynvml

from runners.devices import nvidia
from runners.devices.visibility import cuda_visible
from runners.jobs.energy import Sample

PERCENT = 100.0
MILLIWATTS = 1000.0
FIGURES: dict[str, Callable[[object], float]] = {
    "memory_bytes": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
    "utilization": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / PERCENT,
    "power_watts": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / MILLIWATTS,
}


def visible_sample() -> Sample | None:
    """Return a sampler of this process's visible GPUs, or None without NVML or GPU."""
    try:
        pynvml.nvmlInit()
        handles = {
            device.index: device.handle for device in visible(nvidia.listed(pynvml, env={}))
        }
    except pynvml.NVMLError:
        return None
    return (lambda: _read(handles)) if handles else None


def visible(devices: Sequence[nvidia.Listed]) -> list[nvidia.Listed]:
    """Return those that CUDA gives this process."""
    places = cuda_visible([device.cuda for device in devices], os.environ)
    return [devices[place] for place in places]


class GpuPeak:
    """Tracks the peak memory use of one GPU over the samples."""

    def __init__(self, read: Sample | None) -> None:
        self._read = read
        self._bytes = 0
        self.sample = self._sample if read else None

    def _sample(self) -> dict[str, float]:
        values = self._read() if self._read else {}
        used = [int(value) for name, value in values.items() if name.endswith("_memory_bytes")]
        self._bytes = max([self._bytes, *used])
        return values

    def read(self) -> tuple[int, str] | None:
        """Return the peak and how it was measured, or None without GPU."""
        how = "most memory in use on one GPU, read through NVML once a second"
        return (self._bytes, how) if self._bytes else None


def _read(handles: dict[int, object]) -> dict[str, float]:
    values: dict[str, float] = {}
    for index, handle in handles.items():
        for name, figure in FIGURES.items():  # separately: a MIG slice has no utilisation
            with contextlib.suppress(pynvml.NVMLError):
                values[f"gpu{index}_{name}"] = figure(handle)
    return values
