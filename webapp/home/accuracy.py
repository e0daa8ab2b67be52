"""How good the predictions were: the median error of what jobs measured."""

from datetime import timedelta
from statistics import median
from typing import NamedTuple

from django.contrib.auth.models import AnonymousUser, User

from webapp.core.clock import now
from webapp.jobs.models import Job, Measurement

WINDOW_DAYS = 30
KINDS = (
    ("memory", ("peak_memory_bytes",)),
    ("speed", ("tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second")),
    ("time", ("ttft_seconds", "tpot_seconds", "step_seconds")),
)


class Accuracy(NamedTuple):
    """The median of |measured / predicted - 1|, over how many figures of how many jobs."""

    error: float
    num_figures: int
    num_jobs: int
    by_kind: list[tuple[str, float]]


def accuracy_for(user: User | AnonymousUser) -> Accuracy | None:
    """Return how far predictions were off in the last days, or nothing before the first job."""
    jobs = Job.objects.visible_to(user).filter(deleted_at=None)
    rows = Measurement.objects.filter(
        job__in=jobs, is_excluded=False, measured_at__gte=now() - timedelta(days=WINDOW_DAYS)
    ).values_list("metric", "ratio", "job_id")
    errors = [(metric, abs(ratio - 1)) for metric, ratio, _ in rows]
    if not errors:
        return None
    by_kind = [
        (name, median(found))
        for name, metrics in KINDS
        if (found := [error for metric, error in errors if metric in metrics])
    ]
    overall = median(error for _, error in errors)
    return Accuracy(overall, len(errors), len({job for _, _, job in rows}), by_kind)
