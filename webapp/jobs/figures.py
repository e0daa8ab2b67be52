"""Progress figures of a job's pages: its timeline, its progress, the ratio in lists.

All functions read a loaded job; none queries the database.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.timezone import localtime

from webapp.core.clock import now
from webapp.core.units import DAY, about, clock
from webapp.figures.registry import MAIN_FIGURES
from webapp.jobs.models import FINAL_STATES, Event, Job, JobState, Measurement

KIND_WORDS = {
    "train": "Train",
    "compress": "Compress",
    "evaluate": "Evaluate",
    "benchmark": "Benchmark",
    "generate": "Generate",
    "serve": "Serve",
    "drill": "Drill",
    "prove": "Proof",
}


# The state timeline


@dataclass(frozen=True)
class Milestone:
    """One stage in a job's timeline; ``look`` is done, now, bad or empty."""

    label: str
    look: str = ""
    at: datetime | None = None
    note: str = ""


WAY = (JobState.QUEUED, JobState.PREFLIGHT, JobState.STARTING, JobState.RUNNING)


def timeline(job: Job, events: Iterable[Event]) -> list[Milestone]:
    """Return the milestones of a job with the times it reached them."""
    reached: dict[str, datetime] = {event.to_state: event.at for event in events}
    if job.queued_at:
        reached.setdefault(JobState.QUEUED, job.queued_at)
    stops = [_milestone(job, state, reached) for state in WAY]
    if job.state == JobState.STOPPING:
        stops.append(Milestone("Stopping", "now", reached.get(JobState.STOPPING)))
    return [*stops, _end(job)]


def _milestone(job: Job, state: JobState, reached: Mapping[str, datetime]) -> Milestone:
    at = reached.get(state)
    if state == job.state:
        since = clock((now() - at).total_seconds()) if at else ""
        return Milestone(state.label, "now", at, since)
    if job.state in WAY:
        is_past = WAY.index(state) < WAY.index(JobState(job.state))
        return Milestone(state.label, "done" if is_past else "", at if is_past else None)
    return Milestone(state.label, "done" if at else "", at)


def _end(job: Job) -> Milestone:
    if job.state in FINAL_STATES:
        look = "bad" if job.state in {JobState.FAILED, JobState.ERROR} else "done"
        took = clock(elapsed_seconds(job)) if job.started_at else ""
        return Milestone(job.get_state_display(), look, job.ended_at, took)
    if job.state == JobState.RUNNING and job.eta_seconds is not None:
        end = localtime(now() + timedelta(seconds=job.eta_seconds))
        day = "" if job.eta_seconds < DAY else f"{end.day} {end:%b} "
        return Milestone("Done", "", None, f"about {day}{end:%H:%M}")
    return Milestone("Done")


def elapsed_seconds(job: Job) -> float:
    """Return the run time of a job so far, or in total."""
    if job.started_at is None:
        return 0.0
    return ((job.ended_at or now()) - job.started_at).total_seconds()


# Progress


@dataclass(frozen=True)
class Progress:
    """A job's progress: a share between 0 and 1, and text."""

    share: float | None
    percent: str
    words: str


def progress(job: Job) -> Progress:
    """Return a job's progress and, while it runs, the remaining time."""
    share = None
    if job.progress_total and job.progress_done is not None:
        share = min(1.0, job.progress_done / job.progress_total)
    words = [_counted(job)] if share is not None else []
    if job.state == JobState.RUNNING and job.eta_seconds is not None:
        words.append(f"{about(job.eta_seconds)} left")
    if job.phase and job.state not in FINAL_STATES:
        words.insert(0, job.phase)
    percent = "" if share is None else f"{int(share * 100)} %"
    return Progress(share, percent, " · ".join(words))


def _counted(job: Job) -> str:
    """Return for example ``756 of 1,200 steps``; seconds are shown as a duration."""
    done, total = job.progress_done or 0.0, job.progress_total or 0.0
    if job.progress_unit == "seconds":
        return f"{clock(done)} of {clock(total)}"
    return f"{done:,.0f} of {total:,.0f} {job.progress_unit or 'steps'}"


def main_ratio(measurements: Iterable[Measurement]) -> float | None:
    """Return measured over predicted for the job's main figure."""
    by_metric = {row.metric: row.ratio for row in measurements}
    return next((by_metric[name] for name in MAIN_FIGURES if name in by_metric), None)
