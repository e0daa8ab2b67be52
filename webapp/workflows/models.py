"""Database models of workflows and their steps."""

from typing import Any

from django.db import models
from django.db.models import Q

from runners.jobspec.base import NAME_LENGTH
from runners.plans.workflow import STEP_TITLES
from webapp.jobs.models import Job
from webapp.jobs.series import JobSeries, SeriesPart


class StepState(models.TextChoices):
    """The states of a step: of its job, once it has one."""

    WAITING = "waiting", "Waiting"
    RUNNING = "running", "Running"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    STOPPED = "stopped", "Stopped"


class Workflow(JobSeries):
    """Steps that follow one another; a failed or stopped workflow can be resumed."""

    PARTS = "steps"
    ACTOR = "system:workflows"

    document = models.JSONField()  # runners.plans.workflow.WorkflowDocument, as it was sent

    class Meta(JobSeries.Meta):
        indexes = [
            models.Index(fields=["team", "-created_at", "-id"], name="workflows_listed"),
            models.Index(
                fields=["state", "id"], condition=Q(state="running"), name="workflows_running"
            ),
        ]


class WorkflowStep(SeriesPart):
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

    def unchanged(self) -> "models.QuerySet[WorkflowStep]":
        """Return the row if it is at this try."""
        return super().unchanged().filter(tries=self.tries)

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
