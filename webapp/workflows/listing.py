"""Workflows as lists and pages show them: steps with what was planned and what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.db.models import QuerySet

from webapp.core.figures import REGISTRY, FigureDefinition
from webapp.jobs.models import Job
from webapp.jobs.progress import elapsed_seconds
from webapp.jobs.reason_words import words_for
from webapp.modelhub.models import TeamModel
from webapp.workflows.models import StepState, Workflow, WorkflowStep
from webapp.workflows.planning import totals
from webapp.workflows.services import best_of, quality_of

# Of what a step's job measured: quality first, then speed and size.
COMPARED = (
    *("perplexity", "adapter_perplexity", "accuracy", "tokens_per_second", "ttft_seconds"),
    *("peak_memory_bytes", "disk_bytes"),
)
OF_STEP = ("job__host", "job__requested_host", "job__pool", "job__current_attempt", "job__owner")


@dataclass(frozen=True)
class StepRow:
    """A step with the figures of its job, and the model that it made."""

    step: WorkflowStep
    model: TeamModel | None = None
    is_best: bool = False  # of a sweep: the next step has gone on with it

    @property
    def job(self) -> Job | None:
        """Return the job, None before it is started or after it was deleted."""
        job = self.step.job
        return job if job is not None and job.deleted_at is None else None

    @property
    def elapsed_seconds(self) -> float | None:
        """Return how long the job has run."""
        job = self.job
        return elapsed_seconds(job) if job is not None and job.started_at else None

    @property
    def problem(self) -> str:
        """Return why no job was started, or why the job of a failed step has ended, or ""."""
        job = self.job
        if self.step.problem or job is None or self.step.state != StepState.FAILED:
            return self.step.problem
        return words_for(job.reason).sentence if job.reason else ""

    @cached_property
    def measured(self) -> dict[str, float]:
        """Return the compared figures that the job has measured, in base units."""
        result = (self.step.job.result.get("measured") or {}) if self.step.job else {}
        found = {name: result.get(name) for name in COMPARED}
        return {name: float(x) for name, x in found.items() if isinstance(x, int | float)}


@dataclass(frozen=True)
class WorkflowView:
    """A workflow with its steps in order."""

    workflow: Workflow
    rows: list[StepRow]

    @property
    def num_done(self) -> int:
        """Return how many jobs have succeeded."""
        return sum(row.step.state == StepState.SUCCEEDED for row in self.rows)

    @property
    def current(self) -> StepRow | None:
        """Return the first step that has not succeeded."""
        return next((row for row in self.rows if row.step.state != StepState.SUCCEEDED), None)

    @property
    def totals(self) -> dict[str, dict[str, Any]]:
        """Return the sums of the steps' forecasts."""
        return totals([row.step.forecast for row in self.rows])

    @property
    def sweeps(self) -> list[list[StepRow]]:
        """Return the rows of each position that has several."""
        groups = self._groups
        return [group for group in groups if len(group) > 1]

    @property
    def _groups(self) -> list[list[StepRow]]:
        positions = sorted({row.step.position for row in self.rows})
        return [[row for row in self.rows if row.step.position == each] for each in positions]


def visible_workflows(team_ids: Sequence[str]) -> QuerySet[Workflow]:
    """Return the workflows of teams, the newest first."""
    rows = Workflow.objects.filter(team__in=list(team_ids)).select_related("owner", "team")
    return rows.order_by("-created_at", "-id")


def views_of(workflows: Sequence[Workflow]) -> list[WorkflowView]:
    """Return workflows with their steps, read at once."""
    steps = WorkflowStep.objects.filter(workflow__in=workflows).select_related(*OF_STEP)
    by_workflow: dict[str, list[WorkflowStep]] = {each.pk: [] for each in workflows}
    for step in steps.order_by("position", "variant"):
        by_workflow[step.workflow_id].append(step)
    attempts = [each.job.current_attempt_id for each in steps if each.job]
    models = {
        each.attempt_id: each
        for each in TeamModel.objects.filter(attempt_id__in=[each for each in attempts if each])
    }
    return [WorkflowView(each, _rows(by_workflow[each.pk], models)) for each in workflows]


def view_of(workflow: Workflow) -> WorkflowView:
    """Return a workflow with its steps."""
    return views_of([workflow])[0]


def _rows(steps: Sequence[WorkflowStep], models: dict[str, TeamModel]) -> list[StepRow]:
    rows = []
    for step in steps:
        group = [each for each in steps if each.position == step.position]
        done = [each for each in group if each.state == StepState.SUCCEEDED]
        is_over = len(group) > 1 and all(each.state in OVER for each in group) and done
        is_best = bool(is_over) and best_of(done) is step and quality_of(step) != float("inf")
        attempt = (step.job.current_attempt_id if step.job else "") or ""
        rows.append(StepRow(step, models.get(attempt), is_best))
    return rows


OVER = {StepState.SUCCEEDED, StepState.FAILED, StepState.STOPPED}


def compared(rows: Sequence[StepRow]) -> list[FigureDefinition]:
    """Return the figures that any of the rows has measured, in the order of comparison."""
    return [REGISTRY[name] for name in COMPARED if any(name in row.measured for row in rows)]
