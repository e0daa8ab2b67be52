"""Samples the host's devices once a second for a job: GPU figures and energy."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from runners.devices import amd
from runners.jobs.energy import EnergyMeter, Sample, zones
from runners.jobs.runtime import Job

# GPU figures from inside the job on AMD GPUs, through amdsmi.


def amd_sample() -> Sample | None:
    """Return a sampler of this process's visible GPUs, or None without amdsmi or GPU."""
    library = amd.initialised()
    if library is None or not list(amd.loads(library)):
        return None

    def sample() -> dict[str, float]:
        values: dict[str, float] = {}
        for index, load in enumerate(amd.loads(library)):
            values[f"gpu{index}_memory_bytes"] = float(load.memory_used_bytes)
            values[f"gpu{index}_utilization"] = load.utilization
            if load.power_watts is not None:
                values[f"gpu{index}_power_watts"] = load.power_watts
        return values

    return sample


INTERVAL_SECONDS = 1.0


def nvml_sample() -> Sample | None:
    """Return a sampler of the visible GPUs, or None without torch CUDA or the vendor's library."""
    import torch  # here: serving engines' environments have GPUs but no torch

    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return amd_sample()
    from runners.jobs.nvml import visible_sample  # not every environment has NVML

    return visible_sample()


def no_gpus() -> None:
    """Return None: the job computes on the CPU only."""


@contextlib.contextmanager
def job_telemetry(job: Job, sample: Callable[[], Sample | None] = nvml_sample) -> Iterator[None]:
    """Sample the devices while the block runs: "gpu" metrics, and joules in the result."""
    gang = job.request.gang
    meter = EnergyMeter(sample(), zones(), hosts=gang.num_nodes if gang else 1)
    job.emitter.meter = meter
    meter.read()
    ended = threading.Event()
    thread = threading.Thread(
        target=_read_until, args=(ended, job, meter), name="telemetry", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * INTERVAL_SECONDS)


def _read_until(ended: threading.Event, job: Job, meter: EnergyMeter) -> None:
    while meter.has_sensor and not ended.wait(INTERVAL_SECONDS):
        job.emitter.metric(meter.read(), source="gpu")
