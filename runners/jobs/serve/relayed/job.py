"""One endpoint attempt of an engine that speaks OpenAI's form itself."""

from collections.abc import Callable

from runners.jobs.nvml import GpuPeak, visible_sample
from runners.jobs.runtime import Job
from runners.jobs.serve.endpoint import serve
from runners.jobs.serve.relayed.backend import RelayBackend, Speaker
from runners.jobs.telemetry import job_telemetry


def prepare() -> None:
    """Do nothing: this process holds no model, its child does."""


def work_of(speaker: Speaker) -> Callable[[Job], None]:
    """Return the program of an endpoint that has this engine."""

    def work(job: Job) -> None:
        peak = GpuPeak(visible_sample())
        with job_telemetry(job, lambda: peak.sample):
            serve(job, RelayBackend(speaker, peak.read))

    return work
