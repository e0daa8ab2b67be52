"""Accuracy of a team's latest predictions: the median error of measured against predicted."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from statistics import median
from typing import NamedTuple

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Count

from webapp.accounts.models import team_ids_of
from webapp.core.clock import now
from webapp.jobs.models import Measurement

WINDOW_DAYS = 30
MOST_FIGURES = 2000  # the latest figures that are read
KINDS = (
    ("memory", ("peak_memory_bytes",)),
    ("speed", ("tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second")),
    ("time", ("ttft_seconds", "tpot_seconds", "step_seconds")),
)


class Accuracy(NamedTuple):
    """The median of |measured / predicted - 1|, with its numbers of figures and jobs."""

    error: float
    num_figures: int
    num_jobs: int
    by_kind: list[tuple[str, float]]
    left_out: list[tuple[str, int]] = []  # numbers of figures by kind that do not count

    @property
    def is_cut(self) -> bool:
        """Return whether there may be more figures than were read."""
        return self.num_figures == MOST_FIGURES


def accuracy_for(user: User | AnonymousUser) -> Accuracy | None:
    """Return the accuracy of the latest predictions in the window, or None without any."""
    rows = _latest(team_ids_of(user))
    errors = [(metric, abs(ratio - 1)) for _, metric, ratio, _ in rows]
    if not errors:
        return None
    by_kind = [
        (name, median(kind_errors))
        for name, metrics in KINDS
        if (kind_errors := [error for metric, error in errors if metric in metrics])
    ]
    overall = median(error for _, error in errors)
    num_jobs = len({job for *_, job in rows})
    return Accuracy(overall, len(errors), num_jobs, by_kind, _left_out(team_ids_of(user)))


def _left_out(teams: Sequence[str]) -> list[tuple[str, int]]:
    """Return how many figures of the window do not count, by kind."""
    since = now() - timedelta(days=WINDOW_DAYS)
    rows = Measurement.objects.filter(team__in=teams, is_excluded=True, measured_at__gte=since)
    counts = dict(rows.order_by().values_list("metric").annotate(Count("pk")))
    by_kind = ((name, sum(counts.get(each, 0) for each in metrics)) for name, metrics in KINDS)
    return [(name, number) for name, number in by_kind if number]


def _latest(teams: Sequence[str]) -> list[tuple[datetime, str, float, str]]:
    """Return (time, metric, ratio, job id) of the teams' latest measurements, latest first.

    Each team's rows come in order from an index and are merged, as in ``webapp.core.queries``.
    Those of deleted jobs count, as they do for the factors and the accuracy of their host.
    """
    valid = Measurement.objects.filter(
        is_excluded=False, measured_at__gte=now() - timedelta(days=WINDOW_DAYS)
    )
    if not teams:
        return []
    shown = valid.order_by().values_list("measured_at", "metric", "ratio", "job_id")
    first, *others = (shown.filter(team=team) for team in teams)
    merged = first.union(*others, all=True) if others else first
    return list(merged.order_by("-measured_at")[:MOST_FIGURES])
