"""Explain in one sentence why a job waits, with the figures of the queue decision."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from django.utils import timezone

from webapp.accounts.models import Team
from webapp.core import display
from webapp.core.clock import now
from webapp.hosts.models import RUNS_JOBS, Host, HostState, Pool
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.jobs.models import Job, JobState
from webapp.jobs.pool_state import (
    PoolState,
    first_waiting,
    least_memory_bytes,
    num_before,
    num_by_team,
    pool_state_of,
    waiting_jobs,
)
from webapp.jobs.queue_decisions import Decision, Wait, Why, decide
from webapp.jobs.quotas import Rules

SOON = timedelta(hours=20)
FORESEEN_TURNS = 200  # jobs behind these turns are shown their position, but no start time
WHATEVER_IS_BEFORE = frozenset({Why.HELD_BACK, Why.IMPOSSIBLE, Why.HOSTS})


@dataclass(frozen=True)
class Line:
    """One job of a queue: its position, why it waits, and when it may start.

    The position is unknown far back in a queue of several teams.
    """

    position: int | None
    job: Job
    sentence: str
    start_at: datetime | None


def lines_of(pool: Pool) -> list[Line]:
    """Return a pool's whole queue in order."""
    jobs = waiting_jobs(pool)
    if not jobs:
        return []
    picture = pool_state_of(pool, jobs, Rules(jobs))
    return lines_in(picture, decide(picture.snapshot))


def lines_in(picture: PoolState, decision: Decision, turns: slice = slice(None)) -> list[Line]:
    """Return some turns of a decided queue."""
    waits = {wait.job: wait for wait in decision.waits}
    numbered = list(enumerate(decision.order, 1))[turns]
    return [_line(picture, picture.jobs[pk], waits.get(pk), position) for position, pk in numbered]


def _line(picture: PoolState, job: Job, wait: Wait | None, position: int) -> Line:
    if wait is None:
        sentence = (
            f"The devices that the job needs are free: {_needs(job)}. The job starts within "
            "seconds."
        )
        return Line(position, job, sentence, now())
    seconds = wait.start_seconds
    start_at = now() + timedelta(seconds=seconds) if seconds is not None else None
    return Line(position, job, Words(picture, job, wait).wait_reason(), start_at)


def waiting_line(job: Job) -> Line | None:
    """Return a queued job's line; None for any other job.

    Beyond the first turns nothing is forecast: every earlier job may change its start.
    """
    if not Job.objects.filter(pk=job.pk, state=JobState.QUEUED, deleted_at=None).exists():
        return None
    num_earlier = num_before(job)
    if num_earlier >= FORESEEN_TURNS:
        return _far_behind(job, num_earlier)
    numbers = num_by_team(job.pool)
    turns = num_earlier + 1 if len(numbers) == 1 else FORESEEN_TURNS
    jobs = first_waiting(job.pool, turns).jobs
    if job.pk not in {each.pk for each in jobs}:
        return None  # it was started meanwhile
    picture = pool_state_of(job.pool, jobs, Rules(jobs))
    decision = decide(picture.snapshot, lambda turn, pk: pk == job.pk or turn >= turns)
    turn = decision.order.index(job.pk)
    if turn >= turns:
        return _far_behind(job, num_earlier)
    return lines_in(picture, decision, slice(turn, turn + 1))[0]


def _far_behind(job: Job, num_own: int) -> Line:
    """Return the line of a job far back in the queue, from facts that no other job can change."""
    picture = pool_state_of(job.pool, [job], Rules([job]))
    waits = [wait for wait in decide(picture.snapshot).waits if wait.why in WHATEVER_IS_BEFORE]
    position = num_own + 1 if len(num_by_team(job.pool)) == 1 else None
    if waits:
        return Line(position, job, Words(picture, job, waits[0]).wait_reason(), None)
    before = f"{num_own}" if position else f"more than {FORESEEN_TURNS}"
    return Line(
        position,
        job,
        f"It needs {_needs(job)}; {before} jobs are ahead in the queue, and a start is forecast "
        f"only for the first {FORESEEN_TURNS}.",
        None,
    )


class Words:
    """Describes one wait for members of the job's team."""

    def __init__(self, picture: PoolState, job: Job, wait: Wait) -> None:
        self._picture, self._job, self._wait = picture, job, wait
        self._team: Team = job.team

    def wait_reason(self) -> str:
        """Return the sentence why the job waits, with the devices that it needs."""
        wait = self._wait
        if wait.why is Why.HELD_BACK:
            demands = self._picture.snapshot.demands
            return next(demand.held_back for demand in demands if demand.job == self._job.pk)
        if wait.why is Why.IMPOSSIBLE:
            return self._impossible()
        if wait.why is Why.HOSTS:
            return self._closed_hosts()
        return self._shortage()

    def _impossible(self) -> str:
        job = self._job
        where = job.requested_host.name if job.requested_host else f"the pool {job.pool.name}"
        if self._wait.num_ready_hosts and job.num_hosts > 1:
            has = f"has only {display.counted(self._wait.num_ready_hosts, 'such host')}"
        else:
            has = "has too few of them in total"
        closed = self._closed_sentences([job.requested_host]) if job.requested_host else ""
        return (
            closed or f"It needs {_needs(job)}; {where} {has}. Clone it for another pool or host."
        )

    def _closed_hosts(self) -> str:
        """Return which suitable hosts accept no jobs now."""
        job = self._job
        pinned = [job.requested_host] if job.requested_host else []
        hosts = pinned or list(self._picture.hosts.values())
        sentences = self._closed_sentences(hosts)
        return sentences if pinned else f"It needs {_needs(job)}. {sentences}"

    def _closed_sentences(self, hosts: Sequence[Host]) -> str:
        sentences = (words for host in hosts if (words := closed_words(host, self._job)))
        return " ".join(islice(sentences, 3))

    def _shortage(self) -> str:
        """Return what is free now, and what will free devices when."""
        wait, job = self._wait, self._job
        parts = [f"It needs {_needs(job)}", self._available(), *self._shared_holder()]
        if wait.why is Why.RESERVED:
            parts.append(f"kept for {self._quoted(wait.behind)}, which is before it")
        return "; ".join([*parts, self._next_free()]) + "."

    def _available(self) -> str:
        """Return the free devices: on the nearest host, or the number of hosts with enough."""
        wait, job = self._wait, self._job
        if job.num_hosts > 1:
            return f"{wait.num_ready_hosts} of {job.num_hosts} hosts have that free"
        host = self._picture.hosts.get(wait.host or "")
        owned = [
            device for device in self._picture.devices.values() if device.host_id == wait.host
        ]
        usable = [device for device in owned if device.is_present and device.cordoned_at is None]
        total, name = len(usable), host.name if host else "no host"
        if job.shared_bytes is not None:
            left = max((self._picture.bytes_left(device.pk) for device in usable), default=0)
            return f"{name} has {display.memory(left)} left on a device"
        return f"{name} has {wait.num_free} of {total} free"

    def _shared_holder(self) -> list[str]:
        """Return which job holds devices of the host through another host of the same machine."""
        host = self._picture.hosts.get(self._wait.host or "")
        devices = self._picture.devices
        through = [
            each
            for pk, each in self._picture.elsewhere.items()
            if host is not None and devices[pk].host_id == host.pk
        ]
        if host is None or not through or self._job.num_hosts > 1:
            return []
        job, other = through[0].attempt.job, through[0].host
        if self._team.pk not in (job.team_id, other.team_id):
            return [f"another team's job holds the machine of {host.name}, which several share"]
        name = f" as {other.name}" if other.team_id == self._team.pk else ""
        return [f"the machine of {host.name} is held{name} by {self._quoted(job.pk)}"]

    def _next_free(self) -> str:
        wait = self._wait
        whose = f"when {self._quoted(wait.after)} ends" if wait.after else "after those before it"
        if wait.start_seconds is None:
            return f"next free {whose}, which nothing forecasts"
        at = when_words(now() + timedelta(seconds=wait.start_seconds))
        return f"next free ≈ {at} {whose} (predicted, with a margin)"

    def _quoted(self, job_id: str | None) -> str:
        job = self._picture.jobs.get(job_id or "")
        if job is None or job.team_id != self._team.pk:
            return "another job"
        return f"“{job.name}”"


def closed_words(host: Host, job: Job) -> str:
    """Return why a host accepts no such job now; empty if it does."""
    if host.kind not in RUNS_JOBS:
        return f"{host.name} is a planning-only host; no job can run on it."
    if host.state != HostState.READY:
        return f"{host.name} is {host.get_state_display().lower()} and takes no new jobs."
    contact = contact_of(host)
    if contact is Contact.UNKNOWN:
        return f"{host.name} has never reported."
    is_single = job.num_hosts == 1 and job.devices_per_host == 1
    if contact is Contact.LIVE or (contact is Contact.DEGRADED and is_single):
        return ""
    silent = display.clock(silent_seconds(host) or 0.0)
    return f"{host.name} has sent no heartbeat for {silent}; the job starts when it is back."


def _needs(job: Job) -> str:
    """Return a job's requirements: “2 × ≥ 22 GiB on one host”."""  # noqa: RUF002 -- a multiplication sign
    if job.shared_bytes is not None and job.num_hosts == 1:
        where = job.requested_host.name if job.requested_host else "one host"
        return f"{display.memory(job.shared_bytes)} of a device that jobs share, on {where}"
    memory = least_memory_bytes(job)
    size = f" ≥ {display.memory(memory)}" if memory else ""
    if job.devices_per_host is None:
        what = "a whole host" if job.num_hosts == 1 else "whole hosts"
        what = f"all of {job.requested_host.name}" if job.requested_host else what
    else:
        what = display.counted(job.devices_per_host, "device")
        if size:
            what = f"{job.devices_per_host} ×{size}"  # noqa: RUF001 -- a multiplication sign
    if job.num_hosts > 1:
        return f"{what} on each of {job.num_hosts} hosts"
    if job.devices_per_host is None:
        return what
    return f"{what} on {job.requested_host.name if job.requested_host else 'one host'}"


def when_words(at: datetime) -> str:
    """Return an instant for display: the time, with the day if it is not soon."""
    local = timezone.localtime(at)
    return local.strftime("%H:%M") if at - now() < SOON else local.strftime("%a %d %b %H:%M")


def waiting_sentence(job: Job) -> str | None:
    """Return why a queued job has not started, in one sentence; None for any other job."""
    if job.state != JobState.QUEUED:
        return None
    line = waiting_line(job)
    if line is None:
        return None
    retry = f"Retry {job.num_retries} of {job.max_retries}. " if job.num_retries else ""
    is_first = line.position is None or line.position == 1
    turn = "" if is_first else f" It is number {line.position} in the queue."
    return f"{retry}{line.sentence}{turn}"


def scheduler_words(job: Job) -> str:
    """Return what a claimed job waits for in its host's scheduler: “Slurm: Resources”."""
    if job.state != JobState.STARTING or job.host is None:
        return ""
    reported = job.host.last_beat.get("attempts") or ()
    matching = [each for each in reported if each.get("attempt_id") == job.current_attempt_id]
    return str(matching[0].get("waits_for") or "") if matching else ""
