"""Database models of workflows and their steps."""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q

from runners.jobspec.base import NAME_LENGTH
from runners.plans.workflow import STEP_TITLES
from webapp.accounts.models import AccessToken, TeamOwned
from webapp.core.ids import UlidModel
from webapp.jobs.models import Job


class WorkflowState(models.TextChoices):
    """The states of a workflow; a failed or stopped one can be resumed."""

    RUNNING = "running", "Running"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    STOPPED = "stopped", "Stopped"


class StepState(models.TextChoices):
    """The states of a step: of its job, once it has one."""

    WAITING = "waiting", "Waiting"
    RUNNING = "running", "Running"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    STOPPED = "stopped", "Stopped"


class Workflow(TeamOwned):
    """Steps that follow one another; ``token`` is the one that started it, whose budget counts."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    token = models.ForeignKey(
        AccessToken, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    name = models.CharField(max_length=NAME_LENGTH)
    document = models.JSONField()  # runners.plans.workflow.WorkflowDocument, as it was sent
    state = models.CharField(max_length=16, choices=WorkflowState, default=WorkflowState.RUNNING)
    idempotency_key = models.CharField(max_length=64, null=True, blank=True, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(fields=["team", "-created_at", "-id"], name="workflows_listed"),
            models.Index(
                fields=["state", "id"], condition=Q(state="running"), name="workflows_running"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class WorkflowStep(UlidModel):
    """One job of a workflow, made when the step before it has ended.

    Several rows at one ``position`` are the jobs of a sweep; ``settings`` are its values.
    """

    workflow = models.ForeignKey(Workflow, on_delete=models.CASCADE, related_name="steps")
    position = models.PositiveSmallIntegerField()
    variant = models.PositiveSmallIntegerField(default=0)
    goal = models.CharField(max_length=16)  # of a plan, or "evaluate"
    name = models.CharField(max_length=NAME_LENGTH, blank=True)
    settings = models.JSONField(default=dict, blank=True)
    document = models.JSONField()  # of the plan, as it was stated; of an evaluation its tasks
    forecast = models.JSONField(default=dict, blank=True)  # figure -> value, low, high, unit
    key_hashes = models.JSONField(default=list, blank=True)  # of an endpoint
    state = models.CharField(max_length=16, choices=StepState, default=StepState.WAITING)
    problem = models.TextField(blank=True)  # why no job was started
    tries = models.PositiveSmallIntegerField(default=0)  # how often it was resumed
    job = models.ForeignKey(
        Job, null=True, blank=True, on_delete=models.SET_NULL, related_name="workflow_steps"
    )

    class Meta:
        ordering = ["position", "variant"]
        constraints = [
            models.UniqueConstraint(
                fields=["workflow", "position", "variant"], name="one_step_per_place"
            )
        ]

    def __str__(self) -> str:
        return self.title

    @property
    def title(self) -> str:
        """Return the step's name, or what is done; of a sweep with its values."""
        words = self.name or STEP_TITLES[self.goal]
        return f"{words}, {self.settings_words}" if self.settings else words

    @property
    def settings_words(self) -> str:
        """Return the values of a sweep's job."""
        return ", ".join(
            f"{path.split('.')[-1]} {value}" for path, value in self._settings.items()
        )

    @property
    def _settings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.settings
        return found
