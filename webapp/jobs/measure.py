"""Store a job's measurements with their predictions and validity."""

from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.models import Attempt, Job, Measurement
from webapp.jobs.validity import evidence_of, invalid_reason


def store_measurements(job: Job, attempt: Attempt, host: Host) -> list[Measurement]:
    """Store one row for each figure that was both predicted and measured, and return them."""
    measured = job.result.get("measured") or {}
    attempt.refresh_from_db(fields=["exit_record", "started_at", "ended_at"])
    evidence = evidence_of(job, attempt)
    rows = [
        Measurement(
            team_id=job.team_id,
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
            validity=evidence,
            invalid_reason=(why := invalid_reason(metric, evidence)[:300]),
            is_excluded=bool(why),
        )
        for metric, prediction in job.prediction.items()
        if metric in measured and prediction.get("value")
    ]
    return Measurement.objects.bulk_create(rows, ignore_conflicts=True)
