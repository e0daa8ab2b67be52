"""Gangs (jobs on several hosts): claim, start and end together.

No host starts before all have claimed. The job's policy decides what a member's exit does:
``stop`` stops the others, ``shrink`` lets them continue while enough are left. A silent host
changes nothing by itself: its member keeps its devices and its last known state, and the job
ends by the reports of the other members.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Q

from runners.messages import ExitRecord
from runners.reasons import STOPPED, Reason
from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.jobs.models import LIVE_STATES, Attempt, Command, Event, Job, JobState
from webapp.jobs.reasons import final_state
from webapp.jobs.reservations import devices_release
from webapp.jobs.results import job_finished
from webapp.jobs.transitions import transition

ACTOR = "system:gang"
# Reasons of ranks that only lost their peers: the cause is on another rank.
CONSEQUENCES = frozenset({Reason.RANK_LOST, Reason.NCCL_TIMEOUT, Reason.NCCL_ERROR})
_REPORTED = frozenset(ExitRecord.model_fields)


class Ended(NamedTuple):
    """A member that ended, with its exit record."""

    member: Attempt
    record: ExitRecord


def members_of(leader: Attempt) -> list[Attempt]:
    """Return every attempt of a gang, the leader first; a single attempt is a gang of one."""
    rows = Attempt.objects.filter(Q(pk=leader.pk) | Q(leader=leader))
    return list(rows.select_related("host", "job").order_by("node_rank"))


# Starting together


def all_claimed(leader: Attempt) -> bool:
    """Return whether every host of the gang has claimed its part."""
    return all(member.claimed_at for member in members_of(leader))


def all_started(leader: Attempt) -> bool:
    """Return whether every host of the gang has started its part."""
    return all(member.started_at for member in members_of(leader))


def release_unstarted(leader: Attempt) -> None:
    """End a gang that has not started: no host received the start signal."""
    for member in members_of(leader):
        Attempt.objects.filter(pk=member.pk).update(ended_at=now())
        Command.objects.filter(attempt=member).exclude(state="acked").update(state="dead")
        devices_release(member)


def missing_words(leader: Attempt) -> str:
    """Return the sentence that names the hosts which did not claim in time."""
    names = [member.host.name for member in members_of(leader) if member.claimed_at is None]
    verb = "did not take its part" if len(names) == 1 else "did not take their parts"
    return f"{' and '.join(names)} {verb} of the job in time; nothing was started."


# Ending together


def order_stop(members: Sequence[Attempt], reason: Reason) -> None:
    """Request the hosts of running members to stop them."""
    for member in members:
        if member.ended_at is None and not member.stop_reason:
            Attempt.objects.filter(pk=member.pk).update(
                stop_reason=reason, stop_requested_at=now()
            )
            Command.objects.create(host=member.host, kind="stop", attempt=member, next_at=now())


def member_ended(member: Attempt, record: ExitRecord) -> None:
    """Apply the job's policy to a member's exit, and end the job once all members ended."""
    leader, job = member.head, member.job
    if job.current_attempt_id != leader.pk or job.state not in LIVE_STATES:
        return
    gang = members_of(leader)
    failed = record.reason is not Reason.OK and record.reason not in STOPPED
    if failed and _shrinks(job, gang, member):
        _record_failed_rank(job, member, record)
        return
    if failed and not leader.stop_reason:
        cause = _exit_detail(Ended(member, record), len(gang))
        detail = {"sentence": cause["sentence"]}
        transition(
            job,
            JobState.STOPPING,
            actor=ACTOR,
            attempt=leader,
            reason=record.reason,
            detail=detail,
        )
        order_stop(gang, Reason.PEER_ENDED)
    settle(leader)


def _shrinks(job: Job, gang: Sequence[Attempt], failed: Attempt) -> bool:
    """Return whether the job shrinks: the policy allows it and enough members are left."""
    policy = job.spec.get("parallel") or {}
    remaining = [each for each in gang if each.ended_at is None and not each.stop_reason]
    return (
        policy.get("on_lost_rank") == "shrink"
        and failed.leader_id is not None
        and any(each.leader_id is None for each in remaining)
        and len(remaining) >= int(policy.get("min_hosts") or 1)
    )


def _record_failed_rank(job: Job, member: Attempt, record: ExitRecord) -> None:
    Event.objects.create(
        at=now(),
        team_id=job.team_id,
        kind="job.rank_lost",
        subject=job.pk,
        attempt_id=member.pk,
        reason=record.reason,
        actor=f"host:{member.host.slug}",
        detail={"host": member.host.name, "node_rank": member.node_rank},
    )


def settle(leader: Attempt) -> bool:
    """End the job once every reachable member has ended; return whether it ended.

    If a member has reported the job's end, members on unreachable hosts do not delay it; they
    keep their devices, and are stopped when their hosts are back in contact.
    """
    gang = members_of(leader)
    leader, job = gang[0], gang[0].job
    open_members = [each for each in gang if each.ended_at is None]
    if any(contact_of(each.host) is not Contact.UNREACHABLE for each in open_members):
        return False
    if leader in open_members and job.state != JobState.STOPPING:
        return False  # a shrunk gang whose leader is only silent
    cause = _cause(leader, _ended(gang))
    if cause is None:
        return False
    reason = Reason(leader.stop_reason) if _was_stopped(leader, cause) else cause.record.reason
    with transaction.atomic():
        moved = transition(
            job,
            final_state(reason),
            actor=f"host:{cause.member.host.slug}",
            attempt=leader,
            reason=reason,
            detail=_exit_detail(cause, len(gang)),
        )
        if moved:
            order_stop(open_members, Reason.PEER_ENDED)
            job_finished(job, leader)
    return moved


def _ended(gang: Sequence[Attempt]) -> list[Ended]:
    return [
        Ended(each, _record_of(each))
        for each in gang
        if each.ended_at is not None and each.exit_record
    ]


def _record_of(member: Attempt) -> ExitRecord:
    """Return the fields of the host's report, without those stored in addition."""
    reported = {key: value for key, value in member.exit_record.items() if key in _REPORTED}
    return ExitRecord.model_validate(reported)


def _was_stopped(leader: Attempt, cause: Ended) -> bool:
    is_order = leader.stop_reason not in {"", Reason.PEER_ENDED}
    return is_order and cause.record.reason is not Reason.OK


def _cause(leader: Attempt, ended: Sequence[Ended]) -> Ended | None:
    """Return the exit that decides the job's: the leader's success, else the first failure.

    A rank that only lost its peers comes after one that failed by itself, even if it reported
    earlier. Return None while the exits so far decide nothing.
    """
    lead = next((each for each in ended if each.member.pk == leader.pk), None)
    if lead is not None and lead.record.reason is Reason.OK:
        return lead
    failures = [
        each
        for each in ended
        if each.record.reason is not Reason.OK and each.record.reason not in STOPPED
    ]
    decisive = failures or ([lead] if lead else [])
    return min(decisive, key=_order, default=None)


def first_ended(leader: Attempt) -> Ended | None:
    """Return the reported exit that decided the job's."""
    gang = members_of(leader)
    return _cause(gang[0], _ended(gang))


def deciding_part(job: Job) -> Attempt | None:
    """Return the attempt whose exit decided the job's: for a single process, its only one."""
    if job.current_attempt is None or not job.is_shared_out:
        return job.current_attempt
    first = first_ended(job.current_attempt)
    return first.member if first else job.current_attempt


def _order(each: Ended) -> tuple[bool, int]:
    """Sort causes before consequences, then by time on the server's clock."""
    return each.record.reason in CONSEQUENCES, ended_at_ms(each.member, each.record)


def ended_at_ms(member: Attempt, record: ExitRecord) -> int:
    """Return when a member ended, in Unix milliseconds of the server's clock."""
    return record.ended_at_ms - (member.host.clock_offset_ms or 0)


def _exit_detail(cause: Ended, num_hosts: int) -> dict[str, Any]:
    """Return the detail of the end's event: the host and its exit record."""
    record, member = cause.record, cause.member
    detail: dict[str, Any] = {
        "exit_code": record.exit_code,
        "signal": record.signal,
        "by": record.by,
        "host": member.host.name,
        "node_rank": member.node_rank,
        "sentence": "",
    }
    if record.reason is not Reason.OK and num_hosts > 1:
        detail["sentence"] = (
            f"It ended first on {member.host.name}, host {member.node_rank + 1} of {num_hosts}."
        )
    return detail


def settle_all() -> list[Job]:
    """End jobs that wait only for hosts that have since become unreachable."""
    waiting = Job.objects.filter(
        Q(current_attempt__exit_record__reason__isnull=False)
        | Q(current_attempt__members__exit_record__reason__isnull=False),
        state__in=LIVE_STATES,
        num_hosts__gt=1,
    ).distinct()
    settled = []
    for job in waiting.select_related("current_attempt"):
        with transaction.atomic():
            locked = Job.objects.select_for_update().get(pk=job.pk)
            leader = locked.current_attempt
            if leader is not None and settle(leader):
                settled.append(job)
    return settled
