"""Accuracy of the predictions for one host."""

from dataclasses import dataclass
from statistics import median

from webapp.hosts.models import Host
from webapp.jobs.models import Attempt, Measurement

NUM_MEASUREMENTS = 200


@dataclass(frozen=True)
class Accuracy:
    """Prediction accuracy on a host: median relative error, share inside the interval."""

    n: int
    median_error: float
    share_inside: float


def accuracy_of(host: Host) -> Accuracy | None:
    """Return the accuracy of the last predictions for this host, or None without any."""
    rows = Measurement.objects.filter(host=host, job__num_hosts=1, is_excluded=False)
    rows = rows.order_by("-id")
    pairs = [
        (abs(row.ratio - 1), _is_inside(row)) for row in rows[:NUM_MEASUREMENTS] if row.ratio > 0
    ]
    if not pairs:
        return None
    inside = sum(1 for _, is_inside in pairs if is_inside)
    return Accuracy(len(pairs), median(error for error, _ in pairs), inside / len(pairs))


def jobs_together(host: Host) -> int:
    """Return the number of measured jobs that ran here together with other hosts."""
    parts = Attempt.objects.filter(host=host, job__num_hosts__gt=1)
    return parts.filter(job__measurements__isnull=False).values("job").distinct().count()


def _is_inside(row: Measurement) -> bool:
    low, high = row.predicted_low, row.predicted_high
    return low is not None and high is not None and low <= row.measured <= high
