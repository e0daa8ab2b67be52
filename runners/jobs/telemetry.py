"""What a job's process sees of its host's devices once a second: GPU figures, and joules."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from runners.jobs.energy import EnergyMeter, Sample
from runners.jobs.powercap import zones
from runners.jobs.runtime import Job

INTERVAL_SECONDS = 1.0


def nvml_sample() -> Sample | None:
    """Return a reader of the visible GPUs, or None without torch CUDA or NVML."""
    import torch  # here: an engine's door has GPUs to look at and no torch to load

    from runners.jobs.nvml import visible_sample  # nor has every environment NVML

    return visible_sample() if torch.cuda.is_available() else None


def no_gpus() -> None:
    """Return no reader: the job computes on processors alone."""


@contextlib.contextmanager
def job_telemetry(job: Job, sample: Callable[[], Sample | None] = nvml_sample) -> Iterator[None]:
    """Look at the devices while the block runs: metrics of source "gpu", joules in the result."""
    gang = job.request.gang
    meter = EnergyMeter(sample(), zones(), hosts=gang.num_nodes if gang else 1)
    job.emitter.meter = meter
    meter.look()
    ended = threading.Event()
    thread = threading.Thread(
        target=_look_until, args=(ended, job, meter), name="telemetry", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * INTERVAL_SECONDS)


def _look_until(ended: threading.Event, job: Job, meter: EnergyMeter) -> None:
    while meter.has_sensor and not ended.wait(INTERVAL_SECONDS):
        job.emitter.metric(meter.look(), source="gpu")
