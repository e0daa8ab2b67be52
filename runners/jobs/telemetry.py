"""GPU figures once a second from inside the job, through NVML; silent without a GPU."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import pynvml

from runners.jobs.events import Emitter

INTERVAL_SECONDS = 1.0
PERCENT = 100.0
MILLIWATTS = 1000.0

Sample = Callable[[], dict[str, float]]


@contextlib.contextmanager
def gpu_telemetry(emitter: Emitter, sample: Sample | None = None) -> Iterator[None]:
    """Emit metrics of source "gpu" while the block runs, when this process sees a GPU."""
    read = sample or nvml_sample()
    if read is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_emit_until, args=(ended, emitter, read), name="telemetry", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * INTERVAL_SECONDS)


def nvml_sample() -> Sample | None:
    """Return a reader of the visible GPUs, or None without torch CUDA or NVML."""
    import torch  # here: an engine's door has GPUs to look at and no torch to load

    return visible_sample() if torch.cuda.is_available() else None


def visible_sample() -> Sample | None:
    """Return a reader of the GPUs that this process is given, or None without NVML or GPU."""
    try:
        pynvml.nvmlInit()
        handles = {
            index: pynvml.nvmlDeviceGetHandleByIndex(index)
            for index in visible_indices(pynvml.nvmlDeviceGetCount())
        }
    except pynvml.NVMLError:
        return None
    return (lambda: _read(handles)) if handles else None


class GpuPeak:
    """Remembers the most memory in use on one GPU while its reader is asked."""

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
        """Return the peak and how it was measured, or None where no GPU was read."""
        how = "most memory in use on one GPU, read through NVML once a second"
        return (self._bytes, how) if self._bytes else None


def visible_indices(count: int) -> list[int]:
    """Return the NVML indices that CUDA_VISIBLE_DEVICES leaves; names by UUID count as all."""
    configured = os.environ.get("CUDA_VISIBLE_DEVICES")
    if configured is None:
        return list(range(count))
    parts = [part.strip() for part in configured.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        return list(range(count))
    return [int(part) for part in parts if int(part) < count]


def _emit_until(ended: threading.Event, emitter: Emitter, read: Sample) -> None:
    while not ended.wait(INTERVAL_SECONDS):
        emitter.metric(read(), source="gpu")


def _read(handles: dict[int, object]) -> dict[str, float]:
    values: dict[str, float] = {}
    for index, handle in handles.items():
        with contextlib.suppress(pynvml.NVMLError):
            values[f"gpu{index}_memory_bytes"] = pynvml.nvmlDeviceGetMemoryInfo(handle).used
            rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
            values[f"gpu{index}_utilization"] = rates.gpu / PERCENT
            power = pynvml.nvmlDeviceGetPowerUsage(handle)
            values[f"gpu{index}_power_watts"] = power / MILLIWATTS
    return values
