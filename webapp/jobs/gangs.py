"""A job on several hosts: claimed together, running together, ended by what its parts report.

No host starts before every one has claimed. What a member's exit does is the job's policy: with
``stop`` the others are stopped, with ``shrink`` they go on while enough are left. Silence does
nothing by itself: a silent member keeps its devices and stays last known running, and the job
ends by what the members report that are heard.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Q

from runners.messages import ExitRecord
from runners.reasons import STOPPED, Reason
from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.jobs.finish import job_finished
from webapp.jobs.holding import devices_release
from webapp.jobs.models import LIVE_STATES, Attempt, Command, Event, Job, JobState
from webapp.jobs.reasons import final_state
from webapp.jobs.transitions import transition

ACTOR = "system:gang"
# What a rank reports that only lost the others: the cause is with one of those.
CONSEQUENCES = frozenset({Reason.RANK_LOST, Reason.NCCL_TIMEOUT})
_REPORTED = frozenset(ExitRecord.model_fields)


class Ended(NamedTuple):
    """A member that ended, and how."""

    member: Attempt
    record: ExitRecord


def members_of(leader: Attempt) -> list[Attempt]:
    """Return every attempt of a gang, the leader first; alone, it is its own gang."""
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
    """End a gang of which nothing has started: none of its hosts was given the start signal."""
    for member in members_of(leader):
        Attempt.objects.filter(pk=member.pk).update(ended_at=now())
        Command.objects.filter(attempt=member).exclude(state="acked").update(state="dead")
        devices_release(member)


def missing_words(leader: Attempt) -> str:
    """Return which hosts did not claim their part in time."""
    names = [member.host.name for member in members_of(leader) if member.claimed_at is None]
    verb = "did not take its part" if len(names) == 1 else "did not take their parts"
    return f"{' and '.join(names)} {verb} of the job in time; nothing was started."


# Ending together


def order_stop(members: Sequence[Attempt], reason: Reason) -> None:
    """Have the hosts of those members that run stop them."""
    for member in members:
        if member.ended_at is None and not member.stop_reason:
            Attempt.objects.filter(pk=member.pk).update(
                stop_reason=reason, stop_requested_at=now()
            )
            Command.objects.create(host=member.host, kind="stop", attempt=member, next_at=now())


def member_ended(member: Attempt, record: ExitRecord) -> None:
    """Do what the policy says of a member that has ended, and end the job once all have."""
    leader, job = member.head, member.job
    if job.current_attempt_id != leader.pk or job.state not in LIVE_STATES:
        return
    gang = members_of(leader)
    failed = record.reason is not Reason.OK and record.reason not in STOPPED
    if failed and _goes_on(job, gang, member):
        _note_lost(job, member, record)
        return
    if failed and not leader.stop_reason:
        cause = _why(Ended(member, record), len(gang))
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


def _goes_on(job: Job, gang: Sequence[Attempt], lost: Attempt) -> bool:
    """Return whether the job is to shrink, and enough of it is left."""
    policy = job.spec.get("parallel") or {}
    left = [each for each in gang if each.ended_at is None and not each.stop_reason]
    return (
        policy.get("on_lost_rank") == "shrink"
        and lost.leader_id is not None
        and any(each.leader_id is None for each in left)
        and len(left) >= int(policy.get("min_hosts") or 1)
    )


def _note_lost(job: Job, member: Attempt, record: ExitRecord) -> None:
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
    """End the job once every member that is heard has ended; return whether it ended.

    A member on a host out of contact is not waited for where another has reported the end; it
    keeps its devices, and is told to stop as soon as its host is heard.
    """
    gang = members_of(leader)
    leader, job = gang[0], gang[0].job
    open_members = [each for each in gang if each.ended_at is None]
    if any(contact_of(each.host) is not Contact.UNREACHABLE for each in open_members):
        return False
    if leader in open_members and job.state != JobState.STOPPING:
        return False  # it has shrunk, and its lead is only silent
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
            detail=_why(cause, len(gang)),
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
    """Return what the host reported, without what was stored beside it."""
    said = {key: value for key, value in member.exit_record.items() if key in _REPORTED}
    return ExitRecord.model_validate(said)


def _was_stopped(leader: Attempt, cause: Ended) -> bool:
    is_order = leader.stop_reason not in {"", Reason.PEER_ENDED}
    return is_order and cause.record.reason is not Reason.OK


def _cause(leader: Attempt, ended: Sequence[Ended]) -> Ended | None:
    """Return the end that decides the job's: the lead's success, else what failed first.

    A rank that only lost the others comes after one that failed by itself, however early it
    said so. None: what has ended so far decides nothing.
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
    """Return the part whose end decided the job's, of those that have reported theirs."""
    gang = members_of(leader)
    return _cause(gang[0], _ended(gang))


def deciding_part(job: Job) -> Attempt | None:
    """Return the part of a job's attempt whose end is the job's: its only one, mostly."""
    if job.current_attempt is None or not job.is_shared_out:
        return job.current_attempt
    first = first_ended(job.current_attempt)
    return first.member if first else job.current_attempt


def _order(each: Ended) -> tuple[bool, int]:
    """Sort causes before consequences, then by time on the server's clock."""
    return each.record.reason in CONSEQUENCES, ended_at_ms(each.member, each.record)


def ended_at_ms(member: Attempt, record: ExitRecord) -> int:
    """Return when a part ended in Unix milliseconds, by the server's clock."""
    return record.ended_at_ms - (member.host.clock_offset_ms or 0)


def _why(cause: Ended, num_hosts: int) -> dict[str, Any]:
    """Return what the event of the end says: of which host, and what it reported."""
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
    """End the jobs that only waited for hosts which have since fallen silent."""
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
