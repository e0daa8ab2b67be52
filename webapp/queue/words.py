"""Why a job waits, in one sentence with the figures of the decision that made it wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone

from webapp.accounts.models import Team
from webapp.core import units
from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.models import RUNS_JOBS, Host, HostState, Pool
from webapp.jobs.models import Job
from webapp.queue.picture import Picture, least_memory_bytes, picture_of, waiting_jobs
from webapp.queue.rules import Rules
from webapp.queue.snapshot import Wait, Why

SOON = timedelta(hours=20)


@dataclass(frozen=True)
class Line:
    """One job of a queue: its place in the order, why it waits, and when it may start."""

    position: int
    job: Job
    sentence: str
    start_at: datetime | None


def lines_of(pool: Pool) -> list[Line]:
    """Return the whole queue of a pool in its order."""
    jobs = waiting_jobs(pool)
    return lines_in(picture_of(pool, jobs, Rules(jobs))) if jobs else []


def lines_in(picture: Picture) -> list[Line]:
    """Return the queue of a pool as it was read."""
    decision = picture.decide()
    waits = {wait.job: wait for wait in decision.waits}
    return [
        _line(picture, picture.jobs[pk], waits.get(pk), position)
        for position, pk in enumerate(decision.order, 1)
    ]


def _line(picture: Picture, job: Job, wait: Wait | None, position: int) -> Line:
    if wait is None:
        sentence = f"What it needs is free: {_needs(job)}. It starts within seconds."
        return Line(position, job, sentence, now())
    seconds = wait.start_seconds
    start_at = now() + timedelta(seconds=seconds) if seconds is not None else None
    return Line(position, job, Words(picture, job, wait).sentence(), start_at)


def waiting_line(job: Job) -> Line | None:
    """Return a queued job's line; None for one that does not wait."""
    return next((line for line in lines_of(job.pool) if line.job.pk == job.pk), None)


class Words:
    """One wait, told to the people of the job's team."""

    def __init__(self, picture: Picture, job: Job, wait: Wait) -> None:
        self._picture, self._job, self._wait = picture, job, wait
        self._team: Team = job.team

    def sentence(self) -> str:
        """Return why the job waits."""
        wait = self._wait
        if wait.why is Why.HELD_BACK:
            demands = self._picture.snapshot.demands
            return next(one.held_back for one in demands if one.job == self._job.pk)
        if wait.why is Why.IMPOSSIBLE:
            return self._impossible()
        if wait.why is Why.HOSTS:
            return self._shut()
        return self._short()

    def _impossible(self) -> str:
        job = self._job
        where = job.requested_host.name if job.requested_host else f"the pool {job.pool.name}"
        if self._wait.num_ready_hosts and job.num_hosts > 1:
            has = f"has only {_count(self._wait.num_ready_hosts, 'such host')}"
        else:
            has = "has too little of it, whatever is free"
        shut = self._silences([job.requested_host]) if job.requested_host else ""
        return shut or f"It needs {_needs(job)}; {where} {has}. Clone it for another pool or host."

    def _shut(self) -> str:
        """Return which hosts that would do take nothing now."""
        job = self._job
        pinned = [job.requested_host] if job.requested_host else []
        hosts = pinned or list(self._picture.hosts.values())
        told = self._silences(hosts)
        return told if pinned else f"It needs {_needs(job)}. {told}"

    def _silences(self, hosts: Sequence[Host]) -> str:
        told = [words for host in hosts if (words := closed_words(host, self._job))]
        return " ".join(told[:3])

    def _short(self) -> str:
        """Return what is free now, and what makes room when."""
        wait, job = self._wait, self._job
        parts = [f"It needs {_needs(job)}", self._have(), *self._shared()]
        if wait.why is Why.RESERVED:
            parts.append(f"kept for {self._quoted(wait.behind)}, which is before it")
        return "; ".join([*parts, self._next()]) + "."

    def _have(self) -> str:
        """Return what is free of that: on the nearest host, or of how many hosts."""
        wait, job = self._wait, self._job
        if job.num_hosts > 1:
            return f"{wait.num_ready_hosts} of {job.num_hosts} hosts have that free"
        host = self._picture.hosts.get(wait.host or "")
        owned = [one for one in self._picture.devices.values() if one.host_id == wait.host]
        total = sum(1 for one in owned if one.is_present and one.cordoned_at is None)
        name = host.name if host else "no host"
        return f"{name} has {wait.num_free} of {total} free"

    def _shared(self) -> list[str]:
        """Return who holds devices of that host through another host of the same machine."""
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

    def _next(self) -> str:
        wait = self._wait
        whose = f"when {self._quoted(wait.after)} ends" if wait.after else "after those before it"
        if wait.start_seconds is None:
            return f"next free {whose}, which nothing forecasts"
        at = when_words(now() + timedelta(seconds=wait.start_seconds))
        return f"next free ≈ {at} {whose} (predicted)"

    def _quoted(self, job_id: str | None) -> str:
        job = self._picture.jobs.get(job_id or "")
        if job is None or job.team_id != self._team.pk:
            return "another job"
        return f"“{job.name}”"


def closed_words(host: Host, job: Job) -> str:
    """Return why a host takes no such job now, or nothing where it does."""
    if host.kind not in RUNS_JOBS:
        return f"{host.name} is only planned for."
    if host.state != HostState.READY:
        return f"{host.name} is {host.get_state_display().lower()} and takes no new jobs."
    contact = contact_of(host)
    if contact is Contact.UNKNOWN:
        return f"{host.name} has never reported."
    is_single = job.num_hosts == 1 and job.devices_per_host == 1
    if contact is Contact.LIVE or (contact is Contact.DEGRADED and is_single):
        return ""
    silent = units.clock(silent_seconds(host) or 0.0)
    return f"{host.name} has been silent for {silent}; the job starts when it is back."


def _needs(job: Job) -> str:
    """Return what a job asks for: “2 × ≥ 22 GiB on one host”."""  # noqa: RUF002 -- a multiplication sign
    memory = least_memory_bytes(job)
    size = f" ≥ {units.memory(memory)}" if memory else ""
    if job.devices_per_host is None:
        what = "a whole host" if job.num_hosts == 1 else "whole hosts"
        what = f"all of {job.requested_host.name}" if job.requested_host else what
    else:
        each = f" ×{size}" if size else _noun(job.devices_per_host)  # noqa: RUF001 -- a multiplication sign
        what = f"{job.devices_per_host}{each}"
    if job.num_hosts > 1:
        return f"{what} on each of {job.num_hosts} hosts"
    if job.devices_per_host is None:
        return what
    return f"{what} on {job.requested_host.name if job.requested_host else 'one host'}"


def _noun(number: int) -> str:
    return " device" if number == 1 else " devices"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def when_words(at: datetime) -> str:
    """Return an instant as people say it: the time, with the day where that is not today."""
    local = timezone.localtime(at)
    return local.strftime("%H:%M") if at - now() < SOON else local.strftime("%a %d %b %H:%M")
