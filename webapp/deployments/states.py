"""What state a deployment is in, and how long its model takes to load."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate

from django.db import models

from webapp.core.clock import now
from webapp.deployments.models import Deployment, Replica
from webapp.deployments.services import mark_ready, next_try_at
from webapp.deployments.turns import TURN, has_requests, is_going, turn_of
from webapp.jobs.models import JobState

# Of a short turn, as measured where requests of all models wait: used within a second or two, idle
# for IDLE_TURN, seen by the ticker; then stopped, with its exit reported.
STAY_SECONDS, LEAVE_SECONDS = 4.0, 2.0
READ_WITH_REPLICAS = (
    "job__current_attempt", "job__host", "plan", "deployment", "gives_way_to__deployment",
)  # fmt: skip


class DeploymentState(models.TextChoices):
    """The states of a deployment."""

    ASLEEP = "asleep", "Asleep"
    LOADING = "loading", "Loading"
    READY = "ready", "Ready"
    SILENT = "silent", "Not answering"
    FAILING = "failing", "Failing"
    PAUSED = "paused", "Paused"


@dataclass(frozen=True)
class DeploymentView:
    """A deployment with the replicas that have not ended, the newest first.

    ``queue_seconds`` is how long it still waits for its devices, None if that is unknown.
    """

    deployment: Deployment
    replicas: tuple[Replica, ...] = ()
    queue_seconds: float | None = 0.0

    @property
    def serving(self) -> tuple[Replica, ...]:
        """Return the replicas that take requests, the newest first."""
        return tuple(
            each
            for each in self.replicas
            if each.is_ready and not each.is_leaving and each.job.state == JobState.RUNNING
        )

    @property
    def coming(self) -> Replica | None:
        """Return the replica that is being loaded."""
        waiting = (each for each in self.replicas if not each.is_ready and not each.is_leaving)
        return next(waiting, None)

    @property
    def silent_since(self) -> datetime | None:
        """Return since when no replica takes requests; None while one does, as far as is known."""
        found = [each.not_answering_since for each in self.serving]
        silent = [each for each in found if each is not None]
        return max(silent) if silent and len(silent) == len(found) else None

    @property
    def state(self) -> DeploymentState:
        """Return the state, by what a request would meet."""
        if self.serving:
            return DeploymentState.SILENT if self.silent_since else DeploymentState.READY
        if self.deployment.is_paused:
            return DeploymentState.PAUSED
        if self.coming or (self.deployment.asked_at and not self.deployment.problem):
            return DeploymentState.LOADING
        return DeploymentState.FAILING if self.deployment.problem else DeploymentState.ASLEEP

    @property
    def next_try_at(self) -> datetime | None:
        """Return when a request wakes a failing deployment again; None: at once."""
        return next_try_at(self.deployment, now())

    @property
    def seconds_to_go(self) -> float | None:
        """Return how long queue and load are still expected to take, at least a second.

        None before its first load, and behind jobs whose end nothing forecasts.
        """
        if self.load_seconds is None or self.state != DeploymentState.LOADING:
            return None
        if self.queue_seconds is None:
            return None
        since = self.coming.given_at if self.coming else None
        return max(1.0, self.queue_seconds + self.load_seconds - seconds_since(since))

    @property
    def load_seconds(self) -> float | None:
        """Return the median of its last loads; None before the first one."""
        return self.deployment.load_seconds


def views_of(
    deployments: Sequence[Deployment], replicas: Iterable[Replica] | None = None
) -> list[DeploymentView]:
    """Return deployments with their replicas and loads, read at once.

    ``replicas``: all that have not ended, by default with what pages show of them.
    """
    if replicas is None:
        replicas = Replica.objects.filter(ended_at=None).select_related(*READ_WITH_REPLICAS)
    rows = list(replicas)
    mark_ready(rows)
    live: dict[str, list[Replica]] = {}
    for each in rows:
        live.setdefault(each.deployment_id, []).append(each)
    lines = Lines(rows)
    return [_view(each, live.get(each.pk, []), lines) for each in deployments]


def _view(deployment: Deployment, own: list[Replica], lines: "Lines") -> DeploymentView:
    view = DeploymentView(deployment, tuple(own))
    waiter = view.coming or (own[0] if own else None)  # what leaves is queued again where it was
    if waiter and (waiter.is_leaving or not waiter.given_at):
        view = replace(view, queue_seconds=lines.seconds(waiter, own))
    return view


class Lines:
    """How long replicas wait until those before them have had turns on the devices."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._replicas = replicas
        self._lines: dict[tuple[str, str | None], Line] = {}

    def seconds(self, waiter: Replica, own: Iterable[Replica]) -> float | None:
        """Return how long one waits, None if unknown; ``own`` are those of its deployment."""
        key = (waiter.job.pool_id, waiter.job.requested_host_id)
        if key not in self._lines:
            self._lines[key] = Line(self._replicas, *key)
        return self._lines[key].seconds(waiter, own)


class Line:
    """What holds a pool's devices, or a host's, and what waits for them, read once for all.

    A turn is short, or long where the last one was, and while there are requests. Where no
    deployment holds any, the scheduler's forecast counts, which is stored.
    """

    def __init__(self, replicas: Iterable[Replica], pool: str, host: str | None) -> None:
        near = [each for each in replicas if each.job.pool_id == pool]
        if host:
            near = [
                each for each in near if host in {each.job.requested_host_id, each.job.host_id}
            ]
        self._queued = sorted(
            (each for each in near if each.job.state == JobState.QUEUED),
            key=lambda each: each.created_at,
        )
        self._keys = {each.pk for each in self._queued}
        self._begun = [each.created_at for each in self._queued]
        self._turns = [0.0, *accumulate(map(_turn_seconds, self._queued))]
        instant = now()
        holders = [each for each in near if each.given_at and not each.deployment.is_warm(instant)]
        self._num_holders = len(holders)
        self._idle_seconds = self._busy_seconds = math.inf  # until the first one is gone
        for each in holders:
            if (left := _turn_left(each)) is not None:
                self._busy_seconds = min(self._busy_seconds, left)
            else:
                self._idle_seconds = min(self._idle_seconds, _seconds_held(each))

    def seconds(self, waiter: Replica, own: Iterable[Replica]) -> float | None:
        """Return how long a replica waits; None if that is unknown."""
        if not self._num_holders:
            if waiter.starts_at is None:
                return None
            return max((waiter.starts_at - now()).total_seconds(), 0.0)
        waits = TURN.total_seconds() - seconds_since(waiter.created_at)  # until it may displace
        busy = max(self._busy_seconds, waits, 0.0) + LEAVE_SECONDS
        at = len(self._begun) if waiter.is_leaving else bisect_left(self._begun, waiter.created_at)
        turns = self._turns[at]
        for each in own:
            is_before = waiter.is_leaving or each.created_at < waiter.created_at
            if is_before and each.pk in self._keys:
                turns -= _turn_seconds(each)
        return min(self._idle_seconds, busy) + max(turns, 0.0) / self._num_holders


def _turn_seconds(replica: Replica) -> float:
    row = replica.deployment
    return (row.load_seconds or 0.0) + (row.busy_seconds or STAY_SECONDS) + LEAVE_SECONDS


def _turn_left(holder: Replica) -> float | None:
    """Return the rest of a turn, of a holder that has requests; None of others."""
    ready_for = seconds_since(holder.ready_at)
    if is_going(holder) or not holder.ready_at or ready_for <= STAY_SECONDS:
        return None
    if not has_requests(holder, now()):
        return None
    return turn_of(holder).total_seconds() - ready_for


def _seconds_held(holder: Replica) -> float:
    """Return how long a holder without requests still keeps its devices."""
    if is_going(holder):
        return LEAVE_SECONDS
    stay = holder.deployment.busy_seconds or STAY_SECONDS
    if holder.ready_at:
        left = stay - seconds_since(holder.ready_at)
    else:
        load = (holder.deployment.load_seconds or 0.0) - seconds_since(holder.given_at)
        left = max(load, 0.0) + stay
    return max(left, 0.0) + LEAVE_SECONDS


def seconds_since(instant: datetime | None) -> float:
    """Return the time since an instant, 0 if there is none."""
    return (now() - instant).total_seconds() if instant else 0.0


def view_of(deployment: Deployment) -> DeploymentView:
    """Return a deployment with its replicas and loads."""
    return views_of([deployment])[0]
