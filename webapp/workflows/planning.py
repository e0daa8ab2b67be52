"""Plan a workflow as a whole, before its first job: each step's figures, and what refuses it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from django.contrib.auth.models import User

from planner.catalog.models import published_config
from planner.specs.estimate import PlannedStrategy
from runners.jobspec import ArtefactModel, EvaluateSpec, ServeSpec
from runners.plans.compression_spec import compress_spec
from runners.plans.document import ModelChoice, PlanDocument
from runners.plans.job_specs import spec_of
from runners.plans.launch import LaunchOptionError, check_used
from runners.plans.refusals import DraftProblem
from runners.plans.serving_spec import needs_gguf
from runners.plans.workflow import (
    MAKES_MODEL,
    EvaluateStep,
    WorkflowDocument,
    document_of_variant,
    variants_of,
)
from runners.plans.workloads import TRAINING_GOALS, CompressWork
from webapp.accounts.models import Team
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host
from webapp.jobs.launching import launch_context, launchable_of
from webapp.modelhub.models import TeamModel, num_parameters, quantised_config
from webapp.plans.models import Plan
from webapp.plans.places import NamedRows, draft_shape
from webapp.plans.planning import plan_answer, verdict_answer
from webapp.plans.predicting import evaluation_prediction
from webapp.plans.verdict import verdict_of
from webapp.wizard.documents import document_parse, draft_of_document

BYTES_OF_A_WEIGHT = 2  # of the model that a training leaves
# The model that a step will make, before there is one.
TO_COME = ArtefactModel(attempt_id="0" * 26)


@dataclass
class PlannedStep:
    """One job of a workflow as it is planned: ``plan`` is not stored, None of an evaluation."""

    position: int
    variant: int
    goal: str
    name: str
    settings: Mapping[str, Any]
    document: dict[str, Any]
    plan: Plan | None = None
    forecast: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_endpoint: bool = False


@dataclass
class _Made:
    """What is known of the model that steps pass on, while a workflow is planned."""

    model: ModelChoice  # of the first step: later ones have its shape
    config: str | dict[str, Any]  # as the planner takes it
    host: Host
    weight_dtype: str = "bf16"
    method: str = ""  # of its compression


def workflow_plan(
    team: Team, owner: User, document: WorkflowDocument, first: Plan | None = None
) -> list[PlannedStep]:
    """Return the jobs of a workflow with their forecasts; nothing is stored.

    ``first``: the plan of the first step, where a person has made it already.

    A later step is planned for the shape of the first one's model, on the same host; it is planned
    again for the model itself when that is there. After a sweep it is planned for the largest of
    its models, because nobody knows yet which is the best.

    Raises:
        InvalidProblem: a step cannot be planned or launched; the sentence names the step's field.
        Problem: the model's repository cannot be read.
    """
    planned: list[PlannedStep] = []
    made: _Made | None = None
    for position, step in enumerate(document.steps):
        left: list[tuple[float, _Made]] = []
        for variant, settings in enumerate(variants_of(step)):
            stated = (
                step.model_dump(mode="json", exclude_unset=True)
                if isinstance(step, EvaluateStep)
                else document_of_variant(step, settings)
            )
            each = PlannedStep(position, variant, step.goal, step.name, settings, stated)
            each.plan = first if position == 0 and not settings else None
            with _at(position):
                if isinstance(step, EvaluateStep):
                    each.forecast = _evaluation(made)
                else:
                    after = _plan_step(each, team, owner, made)
                    left.append((each.forecast.get("disk_bytes", {}).get("value", 0.0), after))
            planned.append(each)
        if left:
            made = max(left, key=lambda one: one[0])[1]
    return planned


@contextmanager
def _at(position: int) -> Iterator[None]:
    """Name the step in what refuses it."""
    path = f"steps.{position}"
    try:
        yield
    except DraftProblem as problem:
        name = ".".join(problem.path) or problem.field
        raise refusal(f"{path}.{name}" if name else path, problem.sentence) from problem
    except InvalidProblem as problem:
        known = cast("list[dict[str, str]]", problem.facts.get("errors") or [])
        faults = [{**each, "field": f"{path}.{each['field']}"} for each in known] or [
            {"field": f"{path}.{problem.code}", "message": problem.detail}
        ]
        detail = f"Step {position + 1}: {problem.detail}"
        raise InvalidProblem(problem.code, detail, errors=faults) from problem


def refusal(path: str, sentence: str) -> InvalidProblem:
    """Return the problem of one field of a workflow."""
    position = int(path.split(".")[1]) + 1
    return InvalidProblem(
        "invalid", f"Step {position}: {sentence}", errors=[{"field": path, "message": sentence}]
    )


def _plan_step(step: PlannedStep, team: Team, owner: User, made: _Made | None) -> _Made:
    """Plan one job that has a plan, and return what the next one starts from."""
    document = document_parse(step.document)
    try:
        check_used(document.goal, document.launch)
    except LaunchOptionError as error:
        raise InvalidProblem(f"launch.{error.name}", str(error)) from error
    is_first = step.position == 0
    if step.plan is not None:
        plan, answer = step.plan, verdict_answer(step.plan)
    else:
        plan, _ = draft_of_document(
            team,
            owner,
            document,
            model=None if is_first or made is None else made.model,
            host=made.host if made else None,
        )
        answer = plan_answer(plan, brief=not is_first)  # the first one is launched at once
    if not answer.plans:
        verdict = verdict_of(answer, plan.document)
        raise DraftProblem(f"{verdict.sentence.rstrip('.')}. {verdict.detail}".strip(), "")
    step.plan, best = plan, answer.plans[0]
    step.is_endpoint = document.launch.run == "endpoint"
    host = _check(plan, document, None if is_first else made)
    step.forecast = _figures(best, plan)
    if is_first or made is None:
        made = _Made(plan.document.model, NamedRows(plan.document, plan).model, host)
    if isinstance(values := plan.document.workload, CompressWork):
        spec = compress_spec(values, TO_COME)
        config = published_config(made.config) if isinstance(made.config, str) else made.config
        stored = ModelChoice(source="config", config=quantised_config(config, spec.weight_dtype))
        return replace(made, model=stored, weight_dtype=spec.weight_dtype, method=spec.method)
    return made


def _check(plan: Plan, document: PlanDocument, made: _Made | None) -> Host:
    """Refuse a plan that cannot be launched with what comes before it; return its host."""
    if made is None:
        return launchable_of(plan, document.launch).host
    context = replace(launch_context(plan), model=TO_COME)
    if context.host.pk != made.host.pk:
        raise DraftProblem(
            f"The step before it leaves the model on {made.host.name}, and this one is to run on "
            f"{context.host.name}. Leave the hardware out.",
            "hardware.host",
        )
    case = context.case(document.launch)
    lacks = document.launch.run == "endpoint" and needs_gguf(document.launch.engine)
    spec = spec_of(
        plan.document,
        document.launch,
        replace(case, model=TO_COME, lacks_gguf=lacks and made.method != "gguf"),
    )
    if made.method == "gguf" and isinstance(spec, ServeSpec) and not lacks:
        raise DraftProblem(
            f"The step before it writes a GGUF file, which {document.launch.engine} does not "
            "read. Choose the engine llama.cpp, or another method of compression.",
            "launch.engine",
        )
    return context.host


def _evaluation(made: _Made | None) -> dict[str, dict[str, Any]]:
    """Return the forecast of evaluating the model of the last step."""
    if made is None:
        return {}
    spec = EvaluateSpec.model_validate(
        {"model": TO_COME, "weight_dtype": made.weight_dtype, "original": TO_COME}
    )
    model = TeamModel(config=made.config, host=made.host)
    figures = evaluation_prediction(spec, model, made.config)
    return {name: figures[name] for name in ("duration_seconds",) if name in figures}


def _figures(best: PlannedStrategy, plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the duration, the price and the disk of a step, as far as they are known."""
    found: dict[str, dict[str, Any]] = {}
    goal = plan.document.goal
    values = plan.document.workload
    budget = getattr(values, "time_budget_seconds", None)
    seconds = best.performance.duration_seconds or budget
    if seconds and goal != "serve":
        interval = best.interval.get("duration_seconds")
        low, high = interval or (None, None)
        found["duration_seconds"] = _figure(seconds, "seconds", low, high)
        if best.run_cost_usd:
            found["cost_usd"] = _figure(best.run_cost_usd, "usd")
    size = float(best.memory.checkpoint_bytes or 0)
    if goal in TRAINING_GOALS and (shape := draft_shape(plan)):
        size = float(num_parameters(shape) * BYTES_OF_A_WEIGHT)
    if goal in MAKES_MODEL and size:
        found["disk_bytes"] = _figure(size, "bytes")
    return found


def _figure(
    value: float, unit: str, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "unit": unit}


def totals(steps: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sums of steps' forecasts: figure -> value, low, high and unit.

    ``low`` and ``high`` are sums as well: the ends of an 80 % interval where the steps err
    together, as they do by a host's own factor, and of a wider one where they do not. They are
    None where a step has no interval.
    """
    sums: dict[str, dict[str, Any]] = {}
    for forecast in steps:
        for name, figure in forecast.items():
            into = sums.setdefault(name, _figure(0.0, figure["unit"], 0.0, 0.0))
            for part in ("value", "low", "high"):
                whole, more = into[part], figure[part]
                into[part] = None if whole is None or more is None else whole + more
    return sums
