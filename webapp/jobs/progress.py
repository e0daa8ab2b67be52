"""Progress of a job as pages show it: timeline, progress, state with the silence of its host."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from django.utils.timezone import localtime

from planner.specs.units import DAY
from runners.jobspec.kinds import KINDS
from runners.shared.reasons import Reason
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.display import NBSP, TIMES, about, clock, listed, memory
from webapp.core.figures import MAIN_FIGURES, definition_of
from webapp.hosts.models import Host
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.jobs.gangs import members_of
from webapp.jobs.models import FINAL_STATES, LIVE_STATES, Attempt, Job, JobState, Measurement

KIND_WORDS: dict[str, str] = {each.name: each.title for each in KINDS.values()}


# The state timeline


@dataclass(frozen=True)
class Milestone:
    """One stage in a job's timeline; ``status`` is done, now, bad or empty."""

    label: str
    status: str = ""
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
        status = "bad" if job.state in {JobState.FAILED, JobState.ERROR} else "done"
        took = clock(elapsed_seconds(job)) if job.started_at else ""
        return Milestone(job.get_state_display(), status, job.ended_at, took)
    if (left := forecast_left(job)) is not None and left >= -OVER_SECONDS:
        end = localtime(now() + timedelta(seconds=left))
        day = "" if left < DAY else f"{end.day} {end:%b} "
        return Milestone("Done", "", None, f"about {day}{end:%H:%M}")
    return Milestone("Done")


def elapsed_seconds(job: Job) -> float:
    """Return the run time of a job so far, or in total."""
    if job.started_at is None:
        return 0.0
    return ((job.ended_at or now()) - job.started_at).total_seconds()


# Progress


QUIET_SECONDS = 30.0
QUIET_STEPS = 3.0
OVER_SECONDS = 10.0  # beyond its forecast, from which on a job takes longer than expected


def quiet_seconds(job: Job) -> float | None:
    """Return how long a running job has reported no progress, if unusually long; else None.

    That is longer than half a minute and than three of its steps so far.
    """
    if job.state != JobState.RUNNING or job.progress_at is None:
        return None
    quiet = (now() - job.progress_at).total_seconds()
    per_step = (elapsed_seconds(job) - quiet) / job.progress_done if job.progress_done else 0.0
    return quiet if quiet > max(QUIET_SECONDS, QUIET_STEPS * per_step) else None


def forecast_left(job: Job) -> float | None:
    """Return the last forecast of a running job less the time since it was made.

    In seconds, negative if the job takes longer than forecast. None if it forecast none, if only
    what follows its last step is late, such as saving, or if it is quiet: a process that has
    stopped says nothing.
    """
    if job.state != JobState.RUNNING or job.eta_seconds is None:
        return None
    if quiet_seconds(job) is not None:
        return None
    age = (now() - job.progress_at).total_seconds() if job.progress_at else 0.0
    left = job.eta_seconds - max(0.0, age)
    is_counted = job.progress_done is not None and bool(job.progress_total)
    has_done_all = is_counted and (job.progress_done or 0.0) >= (job.progress_total or 0.0)
    knows_rest = job.eta_seconds > 0  # of what follows the last step
    return None if left < -OVER_SECONDS and has_done_all and not knows_rest else left


def remaining_seconds(job: Job) -> float | None:
    """Return the time that a running job has left by its forecast; None without one."""
    left = forecast_left(job)
    return None if left is None else max(0.0, left)


@dataclass(frozen=True)
class Progress:
    """A job's progress: a share between 0 and 1, text, and the rest.

    ``remaining_seconds`` is the job's own forecast, ``over_seconds`` how long that has passed,
    ``quiet_seconds`` how long the job has said nothing.
    """

    share: float | None
    percent: str
    words: str
    remaining_seconds: float | None = None
    quiet_seconds: float | None = None
    over_seconds: float | None = None

    @property
    def time_words(self) -> str:
        """Return the time left, how long the job is over it or quiet, or ""."""
        if self.over_seconds is not None:
            return f"{clock(self.over_seconds)} longer than expected"
        if self.remaining_seconds is not None:
            return f"{about(self.remaining_seconds)} left"
        return "" if self.quiet_seconds is None else f"no news for {clock(self.quiet_seconds)}"

    @property
    def time_reason(self) -> str:
        """Return why a job takes longer than expected, as far as its reports tell, or ""."""
        if self.over_seconds is None:
            return ""
        if self.share == 1.0:
            return "what follows its last step, evaluation and saving, takes longer"
        return "it has become slower since its last report"


def progress(job: Job) -> Progress:
    """Return a job's progress and, while it runs, the remaining time or since when it is quiet."""
    share = None
    if job.progress_total and job.progress_done is not None:
        share = min(1.0, job.progress_done / job.progress_total)
    is_counted = share is not None and job.progress_unit != "percent"  # the share says that
    words = [_counted(job)] if is_counted else []
    left = forecast_left(job)
    over = -left if left is not None and left < -OVER_SECONDS else None
    percent = "" if share is None else f"{int(share * 100)} %"
    found = Progress(share, percent, "", remaining_seconds(job), quiet_seconds(job), over)
    words += [": ".join(filter(None, (found.time_words, found.time_reason)))]
    if job.phase and job.state not in FINAL_STATES:
        words.insert(0, job.phase)
    return replace(found, words=" · ".join(filter(None, words)))


def _counted(job: Job) -> str:
    """Return for example ``756 of 1,200 steps``; seconds and bytes are shown in larger units."""
    done, total = job.progress_done or 0.0, job.progress_total or 0.0
    if job.progress_unit == "seconds":
        return f"{clock(done)} of {clock(total)}"
    if job.progress_unit == "bytes":
        return f"{memory(done)} of {memory(total)}"
    return f"{done:,.0f} of {total:,.0f} {job.progress_unit or 'steps'}"


class AgainstPrediction(NamedTuple):
    """A job's main figure against its prediction: measured ÷ predicted, in words, the figure."""

    ratio: float
    words: str
    figure: str


AS_PREDICTED = "as predicted"
SAME = 0.005  # from one, up to which a figure is as predicted
PRECISE = 10.0  # factor from which on it is whole
SEVERAL = 2.0  # from which on a factor is said, below it per cent


def against_prediction(measurements: Iterable[Measurement]) -> AgainstPrediction | None:
    """Return the job's main figure against its prediction; None without one."""
    by_metric = {row.metric: row.ratio for row in measurements if row.ratio}
    name = next((name for name in MAIN_FIGURES if name in by_metric), None)
    if name is None:
        return None
    ratio, definition = by_metric[name], definition_of(name)
    return AgainstPrediction(ratio, ratio_words(ratio, definition.unit), definition.label)


def ratio_words(ratio: float, unit: str) -> str:
    """Return for example ``58 times slower`` or, of memory, ``8 % less``."""
    more, less = ("more", "less")
    if unit in {"tokens_per_second", "seconds"}:
        more, less = ("faster", "slower") if unit == "tokens_per_second" else ("slower", "faster")
    if abs(ratio - 1) < SAME:
        return AS_PREDICTED
    word, factor = (more, ratio) if ratio > 1 else (less, 1 / ratio)
    if factor >= SEVERAL:
        return (
            f"{factor:.2g}{TIMES} {word}" if factor < PRECISE else f"{round(factor)}{TIMES} {word}"
        )
    return f"{round(abs(ratio - 1) * 100)}{NBSP}% {word}"


# A job's state as text, including the silence of its host, the same on all pages.
#
# An unreachable host changes no state of a job; the text only states how old the last report is.


GRAVE = (Contact.UNREACHABLE, Contact.DEGRADED)  # the gravest first


class StateLabel(NamedTuple):
    """A status chip, and a note while the job's host sends no heartbeat."""

    state: str  # selects the chip's style
    word: str = ""  # replaces the style's own word
    note: str = ""


class Silence(NamedTuple):
    """The hosts of a live job without a recent heartbeat, and the longest such time.

    If some are unreachable, hosts that only missed a heartbeat or two are not counted.
    """

    hosts: list[Host]
    seconds: float
    is_lost: bool  # unreachable, including the gang's leader

    @property
    def names(self) -> str:
        """Return the hosts' names as a list in words."""
        return listed([host.name for host in self.hosts])


def silence_of(job: Job) -> Silence | None:
    """Return the hosts of a live job without a recent heartbeat; None if all are in contact."""
    if job.state not in LIVE_STATES:
        return None
    hosts = _hosts_of(job)
    by_contact = {kind: [each for each in hosts if contact_of(each) is kind] for kind in GRAVE}
    silent = next((each for each in by_contact.values() if each), [])
    if not silent:
        return None
    longest = max(silent_seconds(host) or 0.0 for host in silent)
    return Silence(silent, longest, is_lost=hosts[0] in by_contact[Contact.UNREACHABLE])


def _hosts_of(job: Job) -> list[Host]:
    """Return the hosts that still run a part of the job, the leader's first."""
    if job.num_hosts == 1 or job.current_attempt is None:
        return [job.host] if job.host else []
    return [each.host for each in members_of(job.current_attempt) if each.ended_at is None]


SERVING_PHASE = "Serving"  # of an endpoint that takes requests


def is_serving(job: Job) -> bool:
    """Return whether a job is an endpoint that takes requests: a service, without an end."""
    is_running = job.kind == "serve" and job.state == JobState.RUNNING
    return is_running and job.phase == SERVING_PHASE


def state_label_of(job: Job) -> StateLabel:
    """Return a job's last known state as a label."""
    silence = silence_of(job)
    if silence is None:
        return StateLabel("serving" if is_serving(job) else job.state)
    who = _who(silence) if job.num_hosts > 1 else ""
    duration = clock(silence.seconds)
    if not silence.is_lost:
        return StateLabel(
            job.state, note=f"{who + ': ' if who else ''}no heartbeat for {duration}"
        )
    word = f"Last known: {JobState(job.state).label.lower()}"
    return StateLabel("lost", word, f"{who or 'host'} unreachable for {duration}")


def _who(silence: Silence) -> str:
    count = len(silence.hosts)
    return f"{count} hosts" if count > 1 else silence.names


class Leftover(NamedTuple):
    """What is known about the attempt of an abandoned job."""

    is_over: bool
    title: str
    text: str


def leftover_of(job: Job) -> Leftover | None:
    """Return the fate of an abandoned job's parts; None for every other job."""
    given_up = _given_up(job)
    if not given_up:
        return None
    running = [part for part in given_up if part.ended_at is None]
    names = listed([part.host.name for part in running or given_up])
    if not running:
        return Leftover(
            is_over=True,
            title=f"Confirmed by {names}: no process of it is running",
            text=" ".join(dict.fromkeys(_end_words(part) for part in given_up)),
        )
    return Leftover(
        is_over=False,
        title=f"Its attempt may still run {f'on {names}' if job.num_hosts > 1 else 'there'}",
        text=" ".join(_wait_words(part.host) for part in running),
    )


def _given_up(job: Job) -> list[Attempt]:
    reason = Reason.LOST_AND_ABANDONED_BY_USER
    if job.current_attempt is None or (job.num_hosts == 1 and job.reason != reason):
        return []
    return [each for each in members_of(job.current_attempt) if each.stop_reason == reason]


def _wait_words(host: Host) -> str:
    if contact_of(host) is Contact.LIVE:
        return (
            f"{host.name} is connected again and was told to stop the attempt, but has not "
            "confirmed yet."
        )
    return (
        f"{host.name} has sent no heartbeat for {clock(silent_seconds(host) or 0)}. The host is "
        "told to stop the attempt at its next heartbeat. Until then, whether the attempt runs is "
        "unknown."
    )


def _end_words(attempt: Attempt) -> str:
    record = attempt.exit_record
    if record.get("reason") == Reason.OK:
        return "The attempt had succeeded before it could be stopped; its output is on that host."
    return f"The attempt ended there: {str(record.get('reason') or 'unknown').replace('_', ' ')}."
