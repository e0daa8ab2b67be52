"""Database models of tunings and their trials."""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q

from runners.jobspec.base import NAME_LENGTH
from webapp.accounts.models import AccessToken, TeamOwned
from webapp.core.ids import UlidModel
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.plans.models import Plan


class TuningState(models.TextChoices):
    """The states of a tuning; ``failed``: nothing could be measured."""

    RUNNING = "running", "Running"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    STOPPED = "stopped", "Stopped"


class TrialState(models.TextChoices):
    """The states of a trial: of its job, once it has one."""

    WAITING = "waiting", "Waiting"
    RUNNING = "running", "Running"
    ENDED = "ended", "Ended"


class Tuning(TeamOwned):
    """Trials of a plan's candidates on one host; ``token`` started it, its budget counts.

    ``candidates`` are fixed at the start (``webapp.tunings.planning.PlannedCandidate``), and so
    is ``trial``, how much each of them measures (``runners.plans.tuning.Trial``).
    """

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    token = models.ForeignKey(
        AccessToken, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    plan = models.ForeignKey(Plan, null=True, on_delete=models.SET_NULL, related_name="tunings")
    host = models.ForeignKey(Host, null=True, on_delete=models.SET_NULL, related_name="+")
    name = models.CharField(max_length=NAME_LENGTH)
    options = models.JSONField()  # runners.plans.tuning.TuningOptions
    document = models.JSONField()  # of the plan, with the host of the tuning
    figure = models.CharField(max_length=32)
    candidates = models.JSONField()
    trial = models.JSONField()
    state = models.CharField(max_length=16, choices=TuningState, default=TuningState.RUNNING)
    problem = models.TextField(blank=True)  # why it failed, or why no version was made
    # The version with the best strategy; None without a gain.
    result = models.ForeignKey(
        Plan, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    idempotency_key = models.CharField(max_length=64, null=True, blank=True, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(fields=["team", "-created_at", "-id"], name="tunings_listed"),
            models.Index(
                fields=["state", "id"], condition=Q(state="running"), name="tunings_running"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class TuningTrial(UlidModel):
    """One job of a tuning, in the order of ``number``; what it has shown once it has ended.

    ``value`` is the tuning's figure in its base unit, ``spread`` its standard error as a share.
    """

    tuning = models.ForeignKey(Tuning, on_delete=models.CASCADE, related_name="trials")
    number = models.PositiveSmallIntegerField()
    candidate = models.PositiveSmallIntegerField()
    state = models.CharField(max_length=16, choices=TrialState, default=TrialState.WAITING)
    ending = models.CharField(max_length=16, blank=True)  # runners.shared.tuning.TrialEnding
    reason = models.TextField(blank=True)  # why it waits, or why it measured nothing
    note = models.TextField(blank=True)  # what disturbed its measurement
    value = models.FloatField(null=True, blank=True)
    spread = models.FloatField(default=0.0)
    is_met = models.BooleanField(default=True)
    seconds = models.FloatField(default=0.0)
    job = models.ForeignKey(
        Job, null=True, blank=True, on_delete=models.SET_NULL, related_name="tuning_trials"
    )

    class Meta:
        ordering = ["number"]
        constraints = [
            models.UniqueConstraint(fields=["tuning", "number"], name="one_trial_per_number")
        ]

    def __str__(self) -> str:
        return f"trial {self.number + 1} of {self.tuning_id}"

    @property
    def key(self) -> str:
        """Return the idempotency key of the trial's job."""
        return f"tuning-{self.tuning_id}-{self.number}"


def document_without_names(document: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's stored document as the question alone."""
    return {key: document[key] for key in document if key not in {"launch", "wizard", "name"}}
