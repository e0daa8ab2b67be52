"""The parts of a gang job, one per host."""

from dataclasses import dataclass

from django.urls import reverse

from runners.shared.reasons import STOPPED, Reason
from webapp.core.display import clock
from webapp.core.problems import InvalidProblem
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.jobs.gangs import members_of
from webapp.jobs.models import Attempt, Job

PARAMETER = "host"  # query parameter: rank of the host, from 0


@dataclass(frozen=True)
class Part:
    """One host of a job in the page's host selector."""

    attempt: Attempt
    url: str
    is_current: bool

    @property
    def words(self) -> str:
        """Return the part's state, where it adds to the job's own state."""
        reason = str(self.attempt.exit_record.get("reason") or "")
        if reason:
            return "succeeded" if reason == "ok" else reason.replace("_", " ")
        if self.is_silent:
            return f"unreachable for {clock(silent_seconds(self.attempt.host) or 0)}"
        return "running" if self.attempt.started_at else "not started"

    @property
    def is_silent(self) -> bool:
        """Return whether the host is unreachable while the part is open."""
        is_open = self.attempt.ended_at is None and bool(self.attempt.claimed_at)
        return is_open and contact_of(self.attempt.host) is Contact.UNREACHABLE

    @property
    def tone(self) -> str:
        """Return the CSS tone of the state."""
        reason = self.attempt.exit_record.get("reason")
        if self.is_silent:
            return "warn"
        if reason in {None, "", Reason.OK}:
            return ""
        return "quiet" if reason in STOPPED else "bad"


def part_at(job: Job, rank: int) -> Attempt | None:
    """Return the job's current attempt on host ``rank``; None if it has no attempt.

    Raises:
        InvalidProblem: the job runs on fewer hosts.
    """
    leader = job.current_attempt
    if leader is None or rank == 0:
        return leader
    part = leader.members.filter(node_rank=rank).select_related("host").first()
    if part is None:
        raise InvalidProblem(
            "no_such_host",
            f"There is no host of rank {rank}; the job runs on {job.num_hosts}, from 0 on.",
        )
    return part


def parts_for(job: Job, shown: Attempt | None, page: str) -> list[Part]:
    """Return the selectable hosts; empty if there is only one."""
    if job.num_hosts == 1 or job.current_attempt is None or shown is None:
        return []
    address = reverse(page, args=[job.pk])
    return [
        Part(each, f"{address}?{PARAMETER}={each.node_rank}", each.pk == shown.pk)
        for each in members_of(job.current_attempt)
    ]
