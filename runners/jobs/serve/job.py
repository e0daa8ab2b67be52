"""The endpoint job of Slipway's own engine: a transformers model with paged attention."""

from runners.jobs.loading import HOW_QUANTISED, pick_device
from runners.jobs.memory import PeakMeter
from runners.jobs.runtime import Job
from runners.jobs.serve.contract import Ready
from runners.jobs.serve.endpoint import PeakUsage, serve
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.model import load_ready
from runners.jobs.telemetry import job_telemetry
from runners.jobspec import ServeSpec


class OwnBackend:
    """Serves a transformers model in this process."""

    def __init__(self) -> None:
        self.meter = PeakMeter(pick_device())

    def load(self, job: Job, spec: ServeSpec, figures: Figures) -> Ready:
        """Return the loaded model.

        Raises:
            BadInputError: it cannot be served, or not with the requested length.
        """
        return load_ready(job, spec, figures)

    def took(self) -> PeakUsage:
        """Return the peak memory since before the model was loaded."""
        peak = self.meter.read()
        return PeakUsage(peak.bytes, peak.how, str(pick_device()))

    def notes(self, spec: ServeSpec) -> dict[str, str]:
        """Return how the weights were quantised, if they were."""
        how = HOW_QUANTISED.get(spec.weight_dtype)
        return {"weight_dtype": how} if how else {}


def work(job: Job) -> None:
    """Run one endpoint attempt."""
    with job_telemetry(job):
        serve(job, OwnBackend())
