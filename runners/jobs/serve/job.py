"""An endpoint whose answers are written here: a model of transformers, our own paged engine."""

from runners.jobs.loading import HOW_QUANTISED, pick_device
from runners.jobs.memory import PeakMeter
from runners.jobs.runtime import Job
from runners.jobs.serve.contract import Ready
from runners.jobs.serve.endpoint import Took, serve
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.model import load_ready
from runners.jobs.telemetry import job_telemetry
from runners.jobspec import ServeSpec


class OwnBackend:
    """Writes answers in this process."""

    def __init__(self) -> None:
        self.meter = PeakMeter(pick_device())

    def load(self, job: Job, spec: ServeSpec, figures: Figures) -> Ready:
        """Return the loaded model.

        Raises:
            BadInputError: it cannot be served, or not as long as asked.
        """
        return load_ready(job, spec, figures)

    def took(self) -> Took:
        """Return the peak of memory since before the model was loaded."""
        peak = self.meter.read()
        return Took(peak.bytes, peak.how, str(pick_device()))

    def notes(self, spec: ServeSpec) -> dict[str, str]:
        """Return how the weights were made smaller, where they were."""
        how = HOW_QUANTISED.get(spec.weight_dtype)
        return {"weight_dtype": how} if how else {}


def work(job: Job) -> None:
    """Run one endpoint attempt."""
    with job_telemetry(job):
        serve(job, OwnBackend())
