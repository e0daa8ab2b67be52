"""Database models of deployments, of their replicas, and of clients' keys and usage."""

from datetime import datetime
from statistics import median
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q

from runners.jobspec.base import NAME_LENGTH
from webapp.accounts.models import AccessToken, TeamOwned
from webapp.core.ids import UlidModel
from webapp.deployments.warm_hours import warm_hours
from webapp.jobs.models import Job
from webapp.plans.models import Plan

MODEL_NAME_LENGTH = 120  # runners.jobspec.serve.ServedName


class Deployment(TeamOwned):
    """A model under a name that lasts: its jobs come and go, its address stays.

    ``token`` is the one that made it, whose budget its jobs count against.
    """

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    token = models.ForeignKey(
        AccessToken, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    name = models.CharField(max_length=MODEL_NAME_LENGTH)  # that clients give as their model
    aliases = models.JSONField(default=list, blank=True)  # further names, such as gpt-4o
    fallbacks = models.JSONField(default=list, blank=True)  # names that answer when it cannot
    plan = models.ForeignKey(Plan, on_delete=models.RESTRICT, related_name="deployments")
    launch = models.JSONField(default=dict, blank=True)  # runners.plans.launch.Launch
    idle_seconds = models.FloatField(null=True, blank=True)  # until it sleeps; null: never
    is_kept_awake = models.BooleanField(default=False)
    warm_hours = models.CharField(max_length=400, blank=True)  # webapp.deployments.warm_hours
    min_replicas = models.PositiveSmallIntegerField(default=1)  # while it is awake
    max_replicas = models.PositiveSmallIntegerField(default=1)
    revision = models.PositiveIntegerField(default=0)  # of what it runs: plan and launch
    busy_since = models.DateTimeField(null=True, blank=True)  # too few replicas run
    spare_since = models.DateTimeField(null=True, blank=True)  # too many do
    is_paused = models.BooleanField(default=False)  # no request wakes it
    asked_at = models.DateTimeField(null=True, blank=True)  # a wake that no replica answers yet
    last_used_at = models.DateTimeField(null=True, blank=True)  # a request was at a replica
    loads = models.JSONField(default=list, blank=True)  # seconds of the last ones, the newest last
    has_chat_template = models.BooleanField(null=True, blank=True)  # as its last load has told
    busy_seconds = models.FloatField(null=True, blank=True)  # its last turn, if used to its end
    problem = models.TextField(blank=True)  # why the last wake failed; "" once a replica is ready
    failed_at = models.DateTimeField(null=True, blank=True)
    failures = models.PositiveSmallIntegerField(default=0)  # in a row
    idempotency_key = models.CharField(max_length=64, null=True, blank=True, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    deleted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["team", "name"],
                condition=Q(deleted_at=None),
                name="one_deployment_per_name",
            )
        ]

    def __str__(self) -> str:
        return self.name

    def is_warm(self, instant: datetime) -> bool:
        """Return whether it is to be awake without a request."""
        return self.is_kept_awake or warm_hours(self.warm_hours).cover(instant)

    @property
    def is_scaled(self) -> bool:
        """Return whether replicas come and go by the site's rules; else a job ends when idle."""
        return self.max_replicas > 1 or bool(self.warm_hours)

    @property
    def load_seconds(self) -> float | None:
        """Return the median of its last loads, from its devices to the first answer."""
        return median(self.loads) if self.loads else None

    @property
    def launch_options(self) -> dict[str, Any]:
        """Return the options with which its jobs are launched."""
        found: dict[str, Any] = self.launch
        return found


class DeploymentDraft(models.Model):
    """A change of a deployment that is not rolled out; ``fields`` has those that differ."""

    deployment = models.OneToOneField(Deployment, on_delete=models.CASCADE, related_name="draft")
    plan = models.ForeignKey(  # a saved version; null: the deployment's stays
        Plan, null=True, blank=True, on_delete=models.RESTRICT, related_name="+"
    )
    fields = models.JSONField(default=dict, blank=True)  # name -> value, as of Deployment
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    saved_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"draft of {self.deployment_id}"


class ReplicaQuerySet(models.QuerySet["Replica"]):
    """Replicas, read in several ways."""

    def live(self) -> "ReplicaQuerySet":
        """Return those that have not ended, the newest first, with what all look at each second.

        That is a few columns of job, attempt and deployment: their documents take a hundred times
        as long to read.
        """
        rows = self.filter(ended_at=None).select_related("job__current_attempt", "deployment")
        return rows.only(
            "plan", "revision", "left_at", "gives_way_to", "created_at", "starts_at",
            "ready_at", "last_used_at", "silent_since", "ended_at", "job__state", "job__pool",
            "job__requested_host", "job__host", "job__deleted_at", "job__shared_bytes",
            "job__current_attempt__host", "job__current_attempt__created_at",
            "deployment__team", "deployment__name", "deployment__is_kept_awake",
            "deployment__warm_hours", "deployment__last_used_at", "deployment__loads",
            "deployment__busy_seconds",
        )  # fmt: skip


class Replica(UlidModel):
    """A job that serves a deployment, with the plan's version that it runs."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="replicas")
    job = models.OneToOneField(Job, on_delete=models.CASCADE, related_name="replica")
    plan = models.ForeignKey(Plan, on_delete=models.RESTRICT, related_name="replicas")
    revision = models.PositiveIntegerField(default=0)  # of the deployment, that it runs
    left_at = models.DateTimeField(null=True, blank=True)  # no new requests from then on
    gives_way_to = models.ForeignKey(  # it leaves so that this one gets its devices
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField()
    starts_at = models.DateTimeField(null=True, blank=True)  # forecast, behind other jobs alone
    ready_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)  # a request was at it
    costed_until = models.DateTimeField(null=True, blank=True)  # webapp.deployments.replica_costs
    silent_since = models.DateTimeField(null=True, blank=True)  # its host has no endpoint there
    ended_at = models.DateTimeField(null=True, blank=True)

    objects = ReplicaQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(fields=["ended_at", "deployment"], name="replicas_live"),
        ]

    def __str__(self) -> str:
        return f"replica of {self.deployment_id}"

    @property
    def is_leaving(self) -> bool:
        """Return whether it gets no new requests, and is stopped."""
        return self.left_at is not None

    @property
    def given_at(self) -> datetime | None:
        """Return when the queue gave it its devices."""
        attempt = self.job.current_attempt
        return attempt.created_at if attempt else None

    @property
    def is_ready(self) -> bool:
        """Return whether the attempt that runs now has answered; a retried job loads again."""
        given_at = self.given_at
        return self.ready_at is not None and given_at is not None and self.ready_at >= given_at

    @property
    def not_answering_since(self) -> datetime | None:
        """Return since when its host has no endpoint there; not since before it was loaded."""
        if self.silent_since is None or self.ready_at is None:
            return None
        return self.silent_since if self.silent_since >= self.ready_at else None

    @property
    def load_seconds(self) -> float | None:
        """Return how long it took from its devices to its first answer."""
        if self.ready_at is None or self.given_at is None:
            return None
        return (self.ready_at - self.given_at).total_seconds()

    @property
    def successor(self) -> str:
        """Return what it gives way to, in the words of its team's pages."""
        other = self.gives_way_to
        if other is None:
            return ""
        is_own = other.deployment.team_id == self.deployment.team_id
        return other.deployment.name if is_own else "another team's deployment"


class GatewayLoad(models.Model):
    """The requests that a gateway answers or holds for a deployment with several replicas."""

    gateway = models.CharField(max_length=32)
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="load")
    requests = models.PositiveIntegerField()
    at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["gateway", "deployment"], name="one_load_per_gateway_and_deployment"
            )
        ]

    def __str__(self) -> str:
        return f"{self.requests} of {self.deployment_id} at {self.gateway}"


class ServingKey(TeamOwned):
    """A client's key for the team's deployments; only its SHA-256 is stored.

    Limits are per key; null: none. A service's key has no owner and outlasts who made it; a
    person's key opens nothing once its owner is gone.
    """

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    is_service = models.BooleanField(default=False)
    name = models.CharField(max_length=NAME_LENGTH)
    digest = models.CharField(max_length=64, unique=True)  # SHA-256 hex
    hint = models.CharField(max_length=20)  # its first characters, to recognise it by
    model_names = models.JSONField(default=list, blank=True)  # of deployments; empty: all
    requests_per_minute = models.PositiveIntegerField(null=True, blank=True)
    max_concurrency = models.PositiveIntegerField(null=True, blank=True)
    tokens_per_day = models.PositiveBigIntegerField(null=True, blank=True)
    tokens_per_month = models.PositiveBigIntegerField(null=True, blank=True)
    hold_seconds = models.FloatField()  # a request waits so long for a model to wake
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    rotated_at = models.DateTimeField(null=True, blank=True)
    earlier_until = models.DateTimeField(null=True, blank=True)  # an earlier secret opens too

    class Meta:
        ordering = ["-created_at", "-id"]

    def __str__(self) -> str:
        return self.name

    @property
    def holder(self) -> str:
        """Return whose key it is, in the words of pages."""
        if self.is_service:
            return "a service"
        return self.owner.get_username() if self.owner else "a deleted account"

    @property
    def has_limits(self) -> bool:
        """Return whether requests or tokens are limited."""
        limits = (self.requests_per_minute, self.max_concurrency)
        return any((*limits, self.tokens_per_day, self.tokens_per_month))


class KeyAlarm(models.Model):
    """That a key has used a share of the tokens of a day or month: told once for each share."""

    key = models.ForeignKey(ServingKey, on_delete=models.CASCADE, related_name="alarms")
    period = models.CharField(max_length=10)  # webapp.deployments.usage.periods_of
    percent = models.PositiveSmallIntegerField()  # 80 or 100
    used_tokens = models.PositiveBigIntegerField()  # when it was seen
    limit_tokens = models.PositiveBigIntegerField()
    at = models.DateTimeField()

    class Meta:
        ordering = ["-at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["key", "period", "percent"], name="one_alarm_per_key_period_and_share"
            )
        ]

    def __str__(self) -> str:
        return f"{self.percent} % of {self.period} by {self.key_id}"

    @property
    def words(self) -> str:
        """Return what was used of what, as a sentence."""
        unit = "day" if len(self.period) > len("2026-11") else "month"
        used, limit = f"{self.used_tokens:,}", f"{self.limit_tokens:,}"
        return f"{used} of the {limit} tokens that it has for the {unit} (UTC) were used."


class EarlierSecret(models.Model):
    """A secret that a key had before it was rotated; it opens the same until ``valid_until``."""

    key = models.ForeignKey(ServingKey, on_delete=models.CASCADE, related_name="earlier_secrets")
    digest = models.CharField(max_length=64, unique=True)  # SHA-256 hex
    valid_until = models.DateTimeField()

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"earlier secret of {self.key_id}"


class Usage(models.Model):
    """What a key used of a deployment on a day (UTC): answers and tokens."""

    key = models.ForeignKey(ServingKey, on_delete=models.CASCADE, related_name="usage")
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="usage")
    day = models.DateField()
    requests = models.PositiveBigIntegerField(default=0)
    failed = models.PositiveBigIntegerField(default=0)  # of the requests: status 500 and above
    cut = models.PositiveBigIntegerField(default=0)  # of the requests: ended before their end
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)  # of the prompt tokens
    completion_tokens = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ["-day", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["key", "deployment", "day"], name="one_usage_per_key_and_day"
            )
        ]
        indexes = [
            models.Index(fields=["deployment", "day"], name="usage_of_deployment"),
            models.Index(fields=["-day", "id"], name="usage_newest_first"),
        ]

    def __str__(self) -> str:
        return f"{self.key_id} on {self.day}"


class DeploymentCost(models.Model):
    """The device time of a deployment's replicas on a day (UTC), and what it cost."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="costs")
    day = models.DateField()
    usd = models.FloatField(default=0.0)  # of the time whose cost is known
    device_seconds = models.FloatField(default=0.0)
    unpriced_seconds = models.FloatField(default=0.0)  # of them: the host states no cost

    class Meta:
        ordering = ["-day", "id"]
        constraints = [
            models.UniqueConstraint(fields=["deployment", "day"], name="one_cost_per_day")
        ]

    def __str__(self) -> str:
        return f"cost of {self.deployment_id} on {self.day}"


class UsageJournal(models.Model):
    """How much of a gateway's journal of answers is counted in ``Usage``."""

    name = models.CharField(max_length=64, primary_key=True)  # of the file
    counted_bytes = models.PositiveBigIntegerField(default=0)
    has_open = models.BooleanField(default=True)  # answers that its gateway had not ended
    at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return self.name
