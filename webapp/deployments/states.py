"""What state a deployment is in, and how long its model takes to load."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from django.db import models

from webapp.core.clock import now
from webapp.deployments.models import Deployment, Replica
from webapp.deployments.services import rest_after
from webapp.jobs.models import AttemptEvent, JobState

READ_WITH_REPLICAS = (
    "job__current_attempt", "job__host", "plan", "deployment", "gives_way_to__deployment",
)  # fmt: skip


class DeploymentState(models.TextChoices):
    """The states of a deployment."""

    ASLEEP = "asleep", "Asleep"
    LOADING = "loading", "Loading"
    READY = "ready", "Ready"
    FAILING = "failing", "Failing"
    PAUSED = "paused", "Paused"


@dataclass(frozen=True)
class DeploymentView:
    """A deployment with the replicas that have not ended, the newest first.

    ``load_seconds`` is the median of its last loads, from its devices to the first answer; None
    before the first one.
    """

    deployment: Deployment
    replicas: tuple[Replica, ...] = ()
    load_seconds: float | None = None

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
    def state(self) -> DeploymentState:
        """Return the state, by what a request would meet."""
        if self.serving:
            return DeploymentState.READY
        if self.deployment.is_paused:
            return DeploymentState.PAUSED
        if self.coming or (self.deployment.asked_at and not self.deployment.problem):
            return DeploymentState.LOADING
        return DeploymentState.FAILING if self.deployment.problem else DeploymentState.ASLEEP

    @property
    def next_try_at(self) -> datetime | None:
        """Return when a request wakes a failing deployment again; None: at once."""
        row = self.deployment
        return row.failed_at + rest_after(row.failures) if row.failed_at else None

    @property
    def seconds_to_go(self) -> float | None:
        """Return how long the load is still expected to take, at least a second."""
        if self.load_seconds is None or self.state != DeploymentState.LOADING:
            return None
        since = self.coming.given_at if self.coming else None
        elapsed = (now() - since).total_seconds() if since else 0.0
        return max(1.0, self.load_seconds - elapsed)


def views_of(deployments: Sequence[Deployment]) -> list[DeploymentView]:
    """Return deployments with their replicas and loads, read at once."""
    keys = [each.pk for each in deployments]
    rows = Replica.objects.filter(deployment__in=keys, ended_at=None)
    live: dict[str, list[Replica]] = {}
    for each in rows.select_related(*READ_WITH_REPLICAS):
        live.setdefault(each.deployment_id, []).append(each)
    mark_ready(each for group in live.values() for each in group)
    return [
        DeploymentView(
            each, tuple(live.get(each.pk, ())), median(each.loads) if each.loads else None
        )
        for each in deployments
    ]


def view_of(deployment: Deployment) -> DeploymentView:
    """Return a deployment with its replicas and loads."""
    return views_of([deployment])[0]


def mark_ready(replicas: Iterable[Replica]) -> None:
    """Set ``ready_at`` of replicas whose endpoint has answered since the ticker's last round."""
    waiting = {
        each.job.current_attempt_id: each
        for each in replicas
        if not each.is_ready and each.job.state == JobState.RUNNING
    }
    if not waiting:
        return
    events = AttemptEvent.objects.filter(attempt__in=list(waiting), kind="endpoint")
    for attempt_id in set(events.values_list("attempt_id", flat=True)):
        waiting[attempt_id].ready_at = now()
