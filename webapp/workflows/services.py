"""Start, advance, stop and resume workflows."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import structlog
from django.contrib.auth.models import User
from django.db import IntegrityError, InterfaceError, OperationalError, transaction

from runners.jobspec.base import NAME_LENGTH
from runners.jobspec.compress import EvaluationTasks
from runners.plans.document import ModelChoice
from runners.plans.refusals import DraftProblem
from runners.plans.workflow import EVALUATE, MAKES_MODEL, WorkflowDocument
from runners.shared.reasons import Reason
from webapp.accounts.models import Role, Team
from webapp.accounts.services import has_role
from webapp.accounts.tokens import acting_as, acting_token
from webapp.core.clock import now
from webapp.core.names import checked_name
from webapp.core.problems import (
    ConflictProblem,
    Problem,
)
from webapp.hosts.services import Contact, contact_of
from webapp.jobs.endpoints import hashes_of, new_key
from webapp.jobs.evaluating import evaluation_submit
from webapp.jobs.launching import plan_launch
from webapp.jobs.models import FINAL_STATES, Job, JobState
from webapp.jobs.series import (
    PASSING,
    SeriesState,
    advance_each,
    late_parts_stop,
    part_stop,
    series_stop,
)
from webapp.jobs.services import is_resumable, job_clone, job_resume, job_submit
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan
from webapp.plans.planning import plan_answer, plan_keep
from webapp.wizard.documents import document_parse, draft_of_document
from webapp.workflows.models import StepState, Workflow, WorkflowStep
from webapp.workflows.planning import PlannedStep, workflow_plan

log = structlog.get_logger(__name__)
REPORT_TIME = timedelta(seconds=30)  # until its host has reported what it left
ROLE = Role.PRACTITIONER  # that a person needs to launch
ENDS = {JobState.SUCCEEDED: StepState.SUCCEEDED, JobState.STOPPED: StepState.STOPPED}
FAULT = (
    "Slipway failed while it started this step; its log says where. Resume the workflow to try "
    "again."
)
GONE = "The account that started the workflow is no longer a practitioner of the team."
NO_MODEL = "{} left no model, so there is nothing to go on with. See its page."
MODEL_GONE = "The model that {} made was deleted. Resume the workflow from there, or start anew."


class Started(NamedTuple):
    """A new workflow, and the key of its endpoint, which is not shown again."""

    workflow: Workflow
    endpoint_key: str | None


# Start


def workflow_start(
    *,
    team: Team,
    by: User,
    document: WorkflowDocument,
    first: Plan | None = None,
    idempotency_key: str | None = None,
) -> Started:
    """Plan a workflow, store it, and queue the jobs of its first step.

    ``first`` is the plan of that step, where a person has made it. It is done as a whole or not at
    all. The same key returns the workflow of the first call.

    Raises:
        Problem: a step cannot be planned or launched, or the job service refuses the first one.
    """
    if existing := Workflow.of_key(team, idempotency_key):
        return Started(existing, None)
    planned = workflow_plan(team, by, document, first)
    key = new_key() if any(each.is_endpoint for each in planned) else None
    try:
        with transaction.atomic():
            workflow = _store(team, by, document, planned, key, idempotency_key)
            begin = [each for each in planned if each.position == 0]
            for step, each in zip(workflow.steps.filter(position=0), begin, strict=True):
                _launch_plan(step, each.plan, by)
    except IntegrityError:
        if existing := Workflow.of_key(team, idempotency_key):
            return Started(existing, None)
        raise
    return Started(workflow, key)


def workflow_of(
    team: Team, by: User, document: WorkflowDocument, planned: Sequence[PlannedStep]
) -> tuple[Workflow, list[WorkflowStep]]:
    """Return a planned workflow with its steps; none is stored."""
    workflow = Workflow(
        team=team,
        owner=by,
        name=checked_name(document.title, "name"),
        document=document.model_dump(mode="json", exclude_unset=True),
    )
    steps = [
        WorkflowStep(
            workflow=workflow,
            position=each.position,
            variant=each.variant,
            goal=each.goal,
            name=each.name,
            settings=dict(each.settings),
            document=each.document,
            forecast=each.forecast,
        )
        for each in planned
    ]
    return workflow, steps


def _store(
    team: Team,
    by: User,
    document: WorkflowDocument,
    planned: Sequence[PlannedStep],
    key: str | None,
    idempotency_key: str | None,
) -> Workflow:
    workflow, steps = workflow_of(team, by, document, planned)
    workflow.token, workflow.idempotency_key = acting_token(), idempotency_key
    workflow.save(force_insert=True)
    for step, each in zip(steps, planned, strict=True):
        step.key_hashes = list(hashes_of(key)) if key and each.is_endpoint else []
        step.save(force_insert=True)
    workflow.event("started", by.get_username(), steps=len(planned))
    return workflow


# Advance


def advance_all() -> int:
    """Advance every workflow that runs, and return their number; each failure is its own."""
    num_running = advance_each(Workflow, workflow_advance)
    late_parts_stop(Workflow, WorkflowStep, _settle)
    return num_running


def workflow_advance(workflow: Workflow) -> None:
    """Read what the jobs of a workflow have become, and start the next step when it is due.

    Two calls at once start each job once: its idempotency key is the step's.
    """
    steps = list(workflow.steps.select_related("job"))
    for step in steps:
        if step.state == StepState.RUNNING:
            _settle(step)
    for position in sorted({each.position for each in steps}):
        group = [each for each in steps if each.position == position]
        if any(each.state == StepState.RUNNING for each in group):
            return
        waiting = [each for each in group if each.state == StepState.WAITING]
        if waiting:
            before = [each for each in steps if each.position < position]
            _start(workflow, waiting, before)
            return
        if not any(each.state == StepState.SUCCEEDED for each in group):
            stopped = all(each.state == StepState.STOPPED for each in group)
            _end(workflow, SeriesState.STOPPED if stopped else SeriesState.FAILED)
            return
    _end(workflow, SeriesState.SUCCEEDED)


def _settle(step: WorkflowStep) -> None:
    """Store how a step's job has ended, if it has."""
    job = step.job
    if job is None:
        state = StepState.FAILED
    elif job.state not in FINAL_STATES:
        return
    elif job.kind == "serve" and job.state == JobState.STOPPED and job.started_at:
        state = StepState.SUCCEEDED  # an endpoint has done its work when somebody stops it
    else:
        state = ENDS.get(JobState(job.state), StepState.FAILED)
    step.change(StepState.RUNNING, state=state)


def _start(
    workflow: Workflow, waiting: Iterable[WorkflowStep], before: Sequence[WorkflowStep]
) -> None:
    """Start the jobs of a step, or say at each why it was not started.

    What passes by itself lets the step wait, with its reason; anything else fails it, so that
    nothing is tried again and again unseen.
    """
    for step in waiting:
        if not workflow.still_runs():
            return
        try:
            _launch(workflow, step, before)
        except PASSING as problem:
            step.change(StepState.WAITING, problem=str(problem))
        except (DraftProblem, Problem) as problem:
            is_passing = isinstance(problem, DraftProblem) and problem.is_passing
            state = StepState.WAITING if is_passing else StepState.FAILED
            step.change(StepState.WAITING, state=state, problem=str(problem))
        except (OperationalError, InterfaceError, IntegrityError):
            raise  # locked, gone, or another call's: the next round
        except Exception:
            log.exception("step not started", step=step.pk, workflow=workflow.pk)
            step.change(StepState.WAITING, state=StepState.FAILED, problem=FAULT)


def _launch(workflow: Workflow, step: WorkflowStep, before: Sequence[WorkflowStep]) -> None:
    """Start a step's job with the model of the step before it.

    Raises:
        DraftProblem: it cannot be planned or launched.
        Problem: the model is gone, the owner may not launch any more, or the service refuses.
    """
    owner = workflow.owner
    if owner is None or not owner.is_active or not has_role(owner, workflow.team, ROLE):
        raise ConflictProblem("owner_gone", GONE)
    model = model_for(before) if before else None
    with acting_as(workflow.token):
        if step.goal == EVALUATE and model is not None:
            _launch_evaluation(step, model, owner)
            return
        plan, _ = draft_of_document(
            workflow.team,
            owner,
            document_parse(step.document),
            model=ModelChoice(source="team", team_model=model.pk) if model else None,
            host=model.host if model else None,
        )
        plan_answer(plan)
        with transaction.atomic():
            _launch_plan(step, plan, owner)


def _launch_plan(step: WorkflowStep, plan: Plan | None, owner: User) -> None:
    """Store the plan of a step and queue its job; with a job of an earlier call, neither."""
    if plan is None:
        return
    document = document_parse(step.document)
    if existing := Job.objects.filter(team=plan.team, idempotency_key=_key(step)).first():
        _follow(step, existing)
        return
    if plan._state.adding:  # noqa: SLF001 (documented)
        plan.save(force_insert=True)
    saved = plan_keep(plan, by=owner.get_username())
    job = plan_launch(
        plan=saved,
        by=owner,
        launch=document.launch,
        name=document.launch.name or _job_name(step),
        key_hashes=tuple(step.key_hashes),
        idempotency_key=_key(step),
        is_named=False,
    )
    _follow(step, job)


def _launch_evaluation(step: WorkflowStep, model: TeamModel, owner: User) -> None:
    tasks = step.document.get("tasks")
    job = evaluation_submit(
        model=model,
        by=owner,
        tasks=EvaluationTasks.model_validate(tasks) if tasks else None,
        name=_job_name(step),
        idempotency_key=_key(step),
    )
    _follow(step, job)


def _key(step: WorkflowStep) -> str:
    return f"workflow-{step.pk}-{step.tries}"


def _job_name(step: WorkflowStep) -> str:
    return f"{step.workflow.name}: {step.title.lower()}"[:NAME_LENGTH]


def _follow(step: WorkflowStep, job: Job) -> None:
    """Let a step follow a job; if the workflow was stopped meanwhile, stop it."""
    if not step.change(StepState.WAITING, state=StepState.RUNNING, job=job, problem=""):
        return
    if not step.workflow.still_runs():
        part_stop(step, Workflow.ACTOR)


def _end(workflow: Workflow, state: SeriesState) -> None:
    with transaction.atomic():
        if Workflow.running().filter(pk=workflow.pk).update(state=state, ended_at=now()):
            workflow.state = state
            workflow.event(state, Workflow.ACTOR)


# The model that a step leaves to the next one


def model_for(before: Sequence[WorkflowStep]) -> TeamModel:
    """Return the model of the last steps that made one; of a sweep's jobs the best.

    Raises:
        ConflictProblem: it is gone.
    """
    made = [each for each in before if each.goal in MAKES_MODEL]
    last = max(each.position for each in made)
    done = [each for each in made if each.position == last and each.state == StepState.SUCCEEDED]
    best = best_of(done)
    job = best.job
    if job is None:
        raise ConflictProblem("model_gone", MODEL_GONE.format(best.title))
    model = TeamModel.objects.filter(
        team_id=job.team_id, attempt_id=job.current_attempt_id or ""
    ).first()
    if model is None:
        words = MODEL_GONE if job.deleted_at else NO_MODEL
        raise ConflictProblem("no_model", words.format(best.title))
    return model


def best_of(steps: Sequence[WorkflowStep]) -> WorkflowStep:
    """Return the step whose model has the lowest perplexity, else the highest accuracy."""
    return min(steps, key=lambda step: (quality_of(step), step.variant))


def quality_of(step: WorkflowStep) -> float:
    """Return a figure of a step's model that is lower the better it is; infinite without one."""
    measured = (step.job.result.get("measured") or {}) if step.job else {}
    for name, sign in (("perplexity", 1), ("adapter_perplexity", 1), ("accuracy", -1)):
        value = measured.get(name)
        if isinstance(value, int | float):
            return sign * float(value)
    return float("inf")


# Stop and resume


def workflow_stop(workflow: Workflow, by: User) -> Workflow:
    """Stop what runs of a workflow, and start nothing else of it (``series_stop``)."""
    return series_stop(workflow, by, way_out="Resume it to go on with it.")


def workflow_resume(workflow: Workflow, by: User) -> Workflow:
    """Go on with a failed or stopped workflow: what has succeeded stays.

    A step that has not succeeded goes on from what its job left on the host, or starts anew. The
    workflow belongs to ``by`` from here on, as do the jobs that it starts.

    Raises:
        ConflictProblem: it runs, or has succeeded; or its model is gone.
        Problem: the job service refuses.
    """
    if workflow.state not in {SeriesState.FAILED, SeriesState.STOPPED}:
        raise ConflictProblem(
            "not_resumable",
            f"{workflow.name} is {workflow.get_state_display().lower()}; only one that failed or "
            "was stopped is resumed.",
        )
    steps = list(workflow.steps.select_related("job"))
    for step in steps:
        if step.state == StepState.RUNNING:  # stopped with the workflow
            _settle(step)
            if step.state == StepState.RUNNING:
                raise ConflictProblem(
                    "still_live", f"{step.title} has not ended yet. Try again in a moment."
                )
    with transaction.atomic():
        rows = Workflow.objects.filter(pk=workflow.pk, state=workflow.state)
        taken = {"owner": by, "token": acting_token()}  # whose budget counts from here on
        if not rows.update(state=SeriesState.RUNNING, ended_at=None, **taken):
            raise ConflictProblem("not_resumable", f"{workflow.name} was resumed meanwhile.")
        for step in steps:
            if step.state in {StepState.FAILED, StepState.STOPPED}:
                _again(step, by)
        workflow.event("resumed", by.get_username())
    workflow.refresh_from_db()
    workflow_advance(workflow)
    workflow.refresh_from_db()
    return workflow


def _again(step: WorkflowStep, by: User) -> None:
    """Let a step that has not succeeded wait, or follow the job that goes on from its last one."""
    before = step.state
    step.tries += 1
    WorkflowStep.objects.filter(pk=step.pk).update(
        tries=step.tries, state=StepState.WAITING, problem=""
    )
    step.state, job = StepState.WAITING, step.job
    later = _resumed_meanwhile(job) if job else None
    if later is not None:
        _follow(step, later)
        return
    can_resume = job is not None and _leaves_something(job)
    if job is None or (step.position and not can_resume):
        return  # planned again for the model as it is now
    copy = job_resume(job=job, owner=by) if can_resume else job_clone(job=job, owner=by)
    copy.idempotency_key = _key(step)
    copy.save(update_fields=["idempotency_key"])
    _follow(step, job_submit(job=copy, by=by.get_username()))
    log.info("step resumed", step=step.pk, was=before, job=copy.pk)


def _leaves_something(job: Job) -> bool:
    """Return whether a job can be gone on from.

    Raises:
        ConflictProblem: its host has not said yet what the job has left.
    """
    was_resumed_in_vain = job.reason == Reason.PREFLIGHT_FAILED and job.spec.get("resume_from")
    if was_resumed_in_vain or not is_resumable(job):
        return False
    attempt = job.current_attempt
    if attempt is None or attempt.checkpoint_bytes is not None:
        return True
    is_live = contact_of(attempt.host) is Contact.LIVE
    if is_live and now() - (job.ended_at or now()) < REPORT_TIME:
        raise ConflictProblem(
            "still_live",
            f"{attempt.host.name} has not reported yet what {job.name} left there. Try again in a "
            "moment.",
        )
    return not is_live


def _resumed_meanwhile(job: Job) -> Job | None:
    """Return the job by which a person has gone on from a step's job, unless it failed too."""
    rows = Job.objects.filter(team=job.team_id, spec__resume_from=job.pk, deleted_at=None)
    good = rows.exclude(state__in=FINAL_STATES - {JobState.SUCCEEDED})
    return good.order_by("-created_at").first()
