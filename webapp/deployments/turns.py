"""Turns on a device: which replica leaves for one of another deployment that waits in the queue.

The scheduler says whether an end would help: it decides the queue on the pool as it would be
without the replicas that leave. So the order is that of the queue, and nobody leaves for a job
that something else holds back.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from webapp.core.clock import now
from webapp.deployments.models import Replica
from webapp.jobs.models import JobState
from webapp.jobs.pool_state import first_waiting, pool_state_of
from webapp.jobs.quotas import Rules
from webapp.jobs.scheduler import Snapshot, decide

# A gateway reports a request within a second, to a ticker that looks once a second.
IDLE_TURN = timedelta(seconds=2.0)  # without a request
TURN = timedelta(seconds=20.0)  # in which clients come, or come back, and are served
MOST_TURNS = 200  # of the queue; what waits behind them displaces nobody yet


def next_to_leave(waiter: Replica) -> Replica | None:
    """Return the replica that is to leave for a queued one; None: nobody now.

    Of those without requests it is the least recently used. If these do not do and the waiter has
    waited for a turn, it is the one that has been ready longest, once it has had its own turn.
    What leaves already counts as gone, so that only one leaves for each device that is needed.
    """
    others = Replica.objects.filter(ended_at=None).select_related(
        "job__current_attempt", "deployment"
    )
    going = {each.job_id for each in others if is_going(each)}
    able = _in_turn((each for each in others if _may_leave(each, waiter)), waiter, now())
    jobs = first_waiting(waiter.job.pool, MOST_TURNS).jobs if able else []
    if waiter.job_id not in {each.pk for each in jobs}:
        return None
    snapshot = pool_state_of(waiter.job.pool, jobs, Rules(jobs)).snapshot
    holders = {hold.job for each in snapshot.hosts for d in each.devices for hold in d.holds}
    able = [each for each in able if each.job_id in holders]

    def starts(num_leaving: int) -> bool:
        gone = going | {each.job_id for each in able[:num_leaving]}
        return _starts(waiter.job_id, snapshot, gone)

    if starts(0) or not starts(len(able)):
        return None
    return able[bisect_left(range(len(able)), True, key=starts) - 1]  # noqa: FBT003 -- what is sought


def starts_without(waiter: Replica, leaving: Iterable[Replica]) -> bool:
    """Return whether a queued replica gets its devices once others have left theirs."""
    gone = {each.job_id for each in leaving}
    jobs = first_waiting(waiter.job.pool, MOST_TURNS).jobs
    snapshot = pool_state_of(waiter.job.pool, jobs, Rules(jobs)).snapshot
    return _starts(waiter.job_id, snapshot, gone)


def is_going(replica: Replica) -> bool:
    """Return whether a replica frees its devices soon."""
    return replica.is_leaving or replica.job.state == JobState.STOPPING


def _may_leave(replica: Replica, waiter: Replica) -> bool:
    """Return whether a replica is one that gives way: ready, and not to be kept awake."""
    deployment = replica.deployment
    return (
        replica.is_ready
        and replica.job.state == JobState.RUNNING
        and not is_going(replica)
        and not deployment.is_warm(now())
        and deployment.pk != waiter.deployment_id
    )


def _in_turn(replicas: Iterable[Replica], waiter: Replica, instant: datetime) -> list[Replica]:
    """Return the replicas that may leave now, in the order in which they do."""
    idle, busy = [], []
    for each in replicas:
        ready_at, used_at = each.ready_at or instant, each.deployment.last_used_at
        last_at, rest = ready_at, turn_of(each)
        if used_at is not None and used_at >= ready_at:
            last_at, rest = used_at, IDLE_TURN
        if last_at + rest <= instant:
            idle.append((last_at, each))
        elif waiter.created_at + TURN <= instant and ready_at + turn_of(each) <= instant:
            busy.append((ready_at, each))
    ordered = [*sorted(idle, key=_first), *sorted(busy, key=_first)]
    return [each for _, each in ordered]


def turn_of(replica: Replica) -> timedelta:
    """Return how long a replica stays ready: half of a device's time is not spent on loads."""
    return max(TURN, timedelta(seconds=replica.load_seconds or 0.0))


def has_requests(replica: Replica, instant: datetime) -> bool:
    """Return whether a replica that is ready is not idle."""
    used_at = replica.deployment.last_used_at
    return used_at is not None and used_at + IDLE_TURN > instant


def _first(entry: tuple[datetime, Replica]) -> datetime:
    return entry[0]


def _starts(job_id: str, snapshot: Snapshot, gone: Collection[str]) -> bool:
    """Return whether a queued job gets its devices once these jobs have left theirs."""
    hosts = tuple(
        replace(
            host,
            devices=tuple(
                replace(device, holds=tuple(one for one in device.holds if one.job not in gone))
                for device in host.devices
            ),
        )
        for host in snapshot.hosts
    )
    decision = decide(replace(snapshot, hosts=hosts), lambda _, job: job == job_id)
    return any(grant.job == job_id for grant in decision.grants)
