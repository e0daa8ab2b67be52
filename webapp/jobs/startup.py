"""The start of a live job as steps: its phases before the work, with their usual durations."""

import statistics
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from webapp.core.clock import now_ms
from webapp.core.display import about, clock
from webapp.jobs.models import Attempt, AttemptEvent, Job, JobState
from webapp.jobs.progress import SERVING_PHASE, is_serving

MOST_EARLIER = 3  # newest attempts whose phases say what is usual


class StartupStep(NamedTuple):
    """One phase of a job's start; ``status`` is done, now or empty. Durations are in seconds."""

    name: str
    status: str
    seconds: float | None = None
    usual_seconds: float | None = None

    @property
    def words(self) -> str:
        """Return how long it took, or how long it has and what is usual."""
        usual = "" if self.usual_seconds is None else f"usually {clock(self.usual_seconds)} here"
        so_far = "" if self.seconds is None else clock(self.seconds)
        if self.status == "now":
            return " · ".join(each for each in (f"{so_far} so far", usual) if each)
        return so_far or usual


class Startup(NamedTuple):
    """The steps, and the usual time until the work begins; None without an earlier job."""

    steps: tuple[StartupStep, ...]
    seconds_left: float | None

    @property
    def words(self) -> str:
        """Return when the work begins."""
        if self.seconds_left is None:
            return "The first point comes when the work has begun."
        return f"The first point comes after these, in {about(self.seconds_left)}."


def startup_of(job: Job) -> Startup | None:
    """Return the start of a job that has reported no progress yet; else None.

    Usual are the phases of the newest successful jobs of its kind on the same host. An endpoint
    has started once it takes requests.
    """
    attempt = job.current_attempt
    is_starting = job.state in {JobState.STARTING, JobState.RUNNING} and job.progress_at is None
    if attempt is None or not is_starting or is_serving(job):
        return None
    reached = _phases([attempt]).get(attempt.pk, [])
    usual, work = _usual(job)
    names = [name for name, _ in reached]
    if {work, SERVING_PHASE} & {*names} or (not reached and not usual):
        return None
    starts = [at for _, at in reached]
    ends = [*starts[1:], now_ms()]
    steps = [
        StartupStep(
            name=name,
            status="now" if at == len(reached) - 1 else "done",
            seconds=max(0.0, (end - start) / 1000),
            usual_seconds=usual.get(name),
        )
        for at, ((name, start), end) in enumerate(zip(reached, ends, strict=False))
    ]
    steps += [
        StartupStep(name, "", None, took) for name, took in usual.items() if name not in names
    ]
    return Startup(tuple(steps), _left(steps) if usual else None)


def _left(steps: Iterable[StartupStep]) -> float:
    waits = (
        max(0.0, (each.usual_seconds or 0.0) - (each.seconds or 0.0))
        for each in steps
        if each.status != "done"
    )
    return sum(waits)


def _usual(job: Job) -> tuple[dict[str, float], str]:
    """Return the median seconds of each phase before the work, and the phase of the work.

    The work is the phase in which an earlier job spent most of its time; of an endpoint, which
    ends when it is stopped, the phase in which it takes requests.
    """
    attempt, is_endpoint = job.current_attempt, job.kind == "serve"
    earlier = Attempt.objects.filter(
        host_id=attempt.host_id if attempt else None,
        node_rank=0,
        job__kind=job.kind,
        job__state__in=[JobState.SUCCEEDED, *([JobState.STOPPED] if is_endpoint else [])],
        ended_at__isnull=False,
    )
    newest = list(earlier.only("pk", "ended_at").order_by("-id")[:MOST_EARLIER])
    ended = {each.pk: int(each.ended_at.timestamp() * 1000) for each in newest if each.ended_at}
    phases = _phases(newest)
    if is_endpoint:  # one that was stopped before it served says nothing
        phases = {key: all_of for key, all_of in phases.items() if SERVING_PHASE in dict(all_of)}
    if not phases:
        return {}, ""
    took: dict[str, list[float]] = {}
    totals: dict[str, float] = {}
    for key, reached in phases.items():
        ends = [*(at for _, at in reached[1:]), ended[key]]
        for (name, start), end in zip(reached, ends, strict=True):
            took.setdefault(name, []).append(max(0.0, (end - start) / 1000))
            totals[name] = totals.get(name, 0.0) + max(0.0, (end - start) / 1000)
    work = SERVING_PHASE if is_endpoint else max(totals, key=lambda name: totals[name])
    latest = next(phases[each.pk] for each in newest if each.pk in phases)
    names = [name for name, _ in latest]
    before = names[: names.index(work)] if work in names else []
    return {name: statistics.median(took[name]) for name in before}, work


def _phases(attempts: Iterable[Attempt]) -> dict[str, list[tuple[str, int]]]:
    """Return each attempt's phases as names with their start in ms, by the attempt's key."""
    events = AttemptEvent.objects.filter(attempt__in=list(attempts), kind="phase")
    rows = events.order_by("attempt_id", "seq").values_list("attempt_id", "body", "t_ms")
    return {
        key: [(str(body.get("name", "")), t_ms) for _, body, t_ms in group]
        for key, group in groupby(rows, key=lambda row: row[0])
    }
