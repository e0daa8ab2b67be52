"""What a job measured beside what was predicted for it."""

from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.models import Attempt, Job, Measurement


def store_measurements(job: Job, attempt: Attempt, host: Host) -> list[Measurement]:
    """Store one row for each figure that was both predicted and measured, and return them."""
    measured = job.result.get("measured") or {}
    rows = [
        Measurement(
            job=job,
            attempt=attempt,
            host=host,
            metric=metric,
            unit=str(prediction.get("unit", "")),
            predicted=prediction["value"],
            predicted_low=prediction.get("low"),
            predicted_high=prediction.get("high"),
            measured=measured[metric],
            ratio=measured[metric] / prediction["value"],
            measured_at=now(),
        )
        for metric, prediction in job.prediction.items()
        if metric in measured and prediction.get("value")
    ]
    return Measurement.objects.bulk_create(rows, ignore_conflicts=True)
