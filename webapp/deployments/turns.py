"""Turns on a device: which replica leaves for one of another deployment that waits in the queue.

The scheduler says whether an end would help: it decides the queue on the pool as it would be
without the replicas that leave. So the order is that of the queue, and nobody leaves for a job
that something else holds back.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property

from webapp.core.clock import now
from webapp.deployments.models import Replica
from webapp.hosts.models import Pool
from webapp.jobs.models import Job, JobState
from webapp.jobs.pool_state import first_waiting, pool_state_of
from webapp.jobs.queue_decisions import Snapshot, decide, grants_of
from webapp.jobs.quotas import Rules

# A gateway reports a request within a second, to a ticker that looks once a second.
IDLE_TURN = timedelta(seconds=2.0)  # without a request
TURN = timedelta(seconds=20.0)  # in which clients come, or come back, and are served
MOST_TURNS = 200  # of the queue; what waits behind them displaces nobody yet


class Queue:
    """A pool with its queue and its replicas, as all that wait in one round see it.

    It is read once, when the first one that might displace another looks; what is decided to
    leave meanwhile is noted (``left``).
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._granted: dict[frozenset[str], set[str]] = {}  # jobs that would start, by who is gone

    @cached_property
    def replicas(self) -> list[Replica]:
        """The replicas of all pools that have not ended."""
        return list(Replica.objects.live())

    @cached_property
    def jobs(self) -> list[Job]:
        """The first jobs of the queue."""
        return first_waiting(self.pool, MOST_TURNS).jobs

    @cached_property
    def keys(self) -> set[str]:
        """The ids of these jobs."""
        return {each.pk for each in self.jobs}

    @cached_property
    def snapshot(self) -> Snapshot:
        """The pool as the scheduler sees it."""
        return pool_state_of(self.pool, self.jobs, Rules(self.jobs)).snapshot

    @cached_property
    def holding(self) -> set[str | None]:
        """The jobs that hold devices of the pool, or parts of them."""
        devices = (device for host in self.snapshot.hosts for device in host.devices)
        return {hold.job for device in devices for hold in device.holds}

    @cached_property
    def start_seconds(self) -> dict[str, float | None]:
        """When each of the first jobs gets its devices, in seconds from now; None: unknown."""
        decision = decide(self.snapshot, lambda turn, _job: turn >= MOST_TURNS)
        granted = dict.fromkeys((each.job for each in decision.grants), 0.0)
        return granted | {each.job: each.start_seconds for each in decision.waits}

    def starts(self, job_id: str, gone: Iterable[str]) -> bool:
        """Return whether a queued job gets its devices once these jobs are gone."""
        key = frozenset(gone)
        if key not in self._granted:
            self._granted[key] = _granted(self.snapshot, key)
        return job_id in self._granted[key]

    def left(self, replica: Replica) -> None:
        """Note that a replica leaves from now on."""
        for each in self.replicas:
            if each.pk == replica.pk:
                each.left_at = each.left_at or now()


def next_to_leave(waiter: Replica, queue: Queue) -> Replica | None:
    """Return the replica that is to leave for a queued one; None: nobody now.

    Of those without requests it is the least recently used. If these do not do and the waiter has
    waited for a turn, it is the one that has been ready longest, once it has had its own turn.
    What leaves already counts as gone, so that only one leaves for each device that is needed.
    """
    going = {each.job_id for each in queue.replicas if is_going(each)}
    able = _in_turn((each for each in queue.replicas if _may_leave(each, waiter)), waiter, now())
    if not able or waiter.job_id not in queue.keys:
        return None
    able = [each for each in able if each.job_id in queue.holding]

    def starts(num_leaving: int) -> bool:
        return queue.starts(waiter.job_id, going | {each.job_id for each in able[:num_leaving]})

    if starts(0) or not starts(len(able)):
        return None
    return able[bisect_left(range(len(able)), True, key=starts) - 1]  # noqa: FBT003 -- what is sought


def starts_without(waiter: Replica, leaving: Iterable[Replica]) -> bool:
    """Return whether a queued replica gets its devices once others have left theirs."""
    return Queue(waiter.job.pool).starts(waiter.job_id, {each.job_id for each in leaving})


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


def _granted(snapshot: Snapshot, gone: Collection[str]) -> set[str]:
    """Return the queued jobs that get their devices once these jobs have left theirs."""
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
    return {grant.job for grant in grants_of(replace(snapshot, hosts=hosts)) or ()}
