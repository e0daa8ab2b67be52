"""GPU figures once a second from inside the job, through NVML; silent without a GPU."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import pynvml
import torch

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
    if not torch.cuda.is_available():
        return None
    try:
        pynvml.nvmlInit()
        handles = {
            index: pynvml.nvmlDeviceGetHandleByIndex(index)
            for index in visible_indices(pynvml.nvmlDeviceGetCount())
        }
    except pynvml.NVMLError:
        return None
    return lambda: _read(handles)


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
