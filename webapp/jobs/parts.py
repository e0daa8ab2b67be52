"""The parts of a job on several hosts, one a host: which of them a page shows."""

import re
from dataclasses import dataclass

from django.http import HttpRequest
from django.urls import reverse

from runners.reasons import STOPPED, Reason
from webapp.core.problems import InvalidProblem
from webapp.core.units import clock
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.jobs.gangs import members_of
from webapp.jobs.models import Attempt, Job

PARAMETER = "host"  # of the address: the number of the host, from 0
NUMBER = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class Part:
    """One host of a job as the page offers it."""

    attempt: Attempt
    url: str
    is_current: bool

    @property
    def words(self) -> str:
        """Return how this part stands, where that says more than the job's own state."""
        reason = str(self.attempt.exit_record.get("reason") or "")
        if reason:
            return "ended well" if reason == "ok" else reason.replace("_", " ")
        if self.is_silent:
            return f"silent {clock(silent_seconds(self.attempt.host) or 0)}"
        return "running" if self.attempt.started_at else "not started"

    @property
    def is_silent(self) -> bool:
        """Tell whether nobody hears the host while its part is open."""
        is_open = self.attempt.ended_at is None and bool(self.attempt.claimed_at)
        return is_open and contact_of(self.attempt.host) is Contact.UNREACHABLE

    @property
    def tone(self) -> str:
        """Return the look of these words."""
        reason = self.attempt.exit_record.get("reason")
        if self.is_silent:
            return "warn"
        if reason in {None, "", Reason.OK}:
            return ""
        return "quiet" if reason in STOPPED else "bad"


def part_at(job: Job, rank: int) -> Attempt | None:
    """Return a job's current attempt on its host number ``rank``; None before it has one.

    Raises:
        InvalidProblem: it does not run on so many hosts.
    """
    leader = job.current_attempt
    if leader is None or rank == 0:
        return leader
    found = leader.members.filter(node_rank=rank).select_related("host").first()
    if found is None:
        raise InvalidProblem(
            "no_such_host", f"{PARAMETER} is {rank}; the job runs on {job.num_hosts}, from 0 on."
        )
    return found


def rank_of(request: HttpRequest) -> int:
    """Return the number of the host that an address asks for; the first where that is none."""
    asked = request.GET.get(PARAMETER, "0")
    return int(asked) if NUMBER.fullmatch(asked) else 0


def shown_part(request: HttpRequest, job: Job) -> Attempt | None:
    """Return the part that a page is asked to show, the first where there is no such."""
    try:
        return part_at(job, rank_of(request))
    except InvalidProblem:
        return job.current_attempt


def parts_for(job: Job, shown: Attempt | None, page: str) -> list[Part]:
    """Return the hosts to choose from; nothing where there is only one."""
    if job.num_hosts == 1 or job.current_attempt is None or shown is None:
        return []
    address = reverse(page, args=[job.pk])
    return [
        Part(each, f"{address}?{PARAMETER}={each.node_rank}", each.pk == shown.pk)
        for each in members_of(job.current_attempt)
    ]
