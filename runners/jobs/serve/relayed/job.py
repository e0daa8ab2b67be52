"""The endpoint job of an engine with its own OpenAI API."""

from collections.abc import Callable

from runners.jobs.nvml import GpuPeak, visible_sample
from runners.jobs.runtime import Job
from runners.jobs.serve.endpoint import serve
from runners.jobs.serve.relayed.backend import EngineAdapter, RelayBackend
from runners.jobs.telemetry import job_telemetry


def prepare() -> None:
    """Do nothing: the model is in the child process, not in this one."""


def work_of(speaker: EngineAdapter) -> Callable[[Job], None]:
    """Return the job function of an endpoint with this engine."""

    def work(job: Job) -> None:
        peak = GpuPeak(visible_sample())
        with job_telemetry(job, lambda: peak.sample):
            serve(job, RelayBackend(speaker, peak.read))

    return work
