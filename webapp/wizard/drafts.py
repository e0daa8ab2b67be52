"""Drafts of the wizard, and its steps."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.http import QueryDict
from django.urls import reverse
from django.utils.datastructures import MultiValueDict
from pydantic import ValidationError

from planner.catalog.devices import get_device
from planner.catalog.models import find_model
from planner.catalog.usual_batch import usual_batch, usual_length
from planner.cost.parameters import count_parameters
from planner.specs.base import PlannerError
from planner.specs.model import ModelSpec
from planner.specs.workload import Strategy
from planner.techniques.registry import Technique
from runners.jobspec.objectives import TRL
from runners.plans.document import (
    DEFAULT_MODEL,
    GOALS,
    PLANS,
    HardwareChoice,
    ModelChoice,
    PlanDocument,
    of_goal,
    read_stored,
    repaired,
)
from runners.plans.engine_choice import chosen_engine, engine_choices, trainer_of
from runners.plans.fields import Part
from runners.plans.refusals import DraftProblem
from runners.plans.rotary_scaling import scalings_taken
from runners.plans.workloads import TRAINING_GOALS, WORKLOADS, FinetuneWork, ServeWork
from webapp.accounts.models import Team
from webapp.core.display import TIMES
from webapp.core.site_settings import demo_seconds
from webapp.datasets.models import Dataset
from webapp.hosts.models import RUNS_JOBS, Device, Host, HostState, Pool
from webapp.jobs.models import Job, JobState
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.explanation import SLO_WORDS, hardware_words, model_words, workload_words
from webapp.plans.models import Plan, PlanState
from webapp.plans.places import (
    UNREADY,
    Names,
    draft_shape,
    pool_words,
    pools_among,
    reachable_hosts,
)
from webapp.plans.targets import PERCENTILES
from webapp.wizard.combobox import Several
from webapp.wizard.forms import (
    GOAL_FIELDS,
    FormOfPart,
    GoalForm,
    HardwareForm,
    ModelForm,
    PinsForm,
    StepForm,
)
from webapp.wizard.serving_form import ServingForm
from webapp.wizard.technique_drafts import technique_document
from webapp.wizard.workload_forms import workload_form

# ---------------------------------------------------------------------------
# Drafts: defaults for every step, and suggestions applied to them.
# ---------------------------------------------------------------------------


# Action on a model's page -> goal of the plan that it starts.
MODEL_PRESETS = {
    "quantize": "compress",
    "endpoint": "serve",
    "benchmark": "serve",
    "generate": "generate",
    "tune": "finetune",
}
# Preset -> first step to show, if not the goal step.
PRESETS = ("demo", "serve", *MODEL_PRESETS)  # that a link to a new plan may name
FIRST_STEPS = dict.fromkeys(("demo", *MODEL_PRESETS), "review") | {"tune": "workload"}


def first_step(preset: str, *, has_model: bool, has_technique: bool) -> str:
    """Return the first step of a new plan that a link's parameters leave open."""
    if has_technique:
        return "model"
    if has_model:
        return FIRST_STEPS.get(preset, "workload" if preset else "goal")
    return "goal" if preset in MODEL_PRESETS else FIRST_STEPS.get(preset, "goal")


# Sizes of a workload that depend on the model; a person's own stay when the model changes.
LENGTHS = ("input_tokens", "output_tokens", "max_request_tokens", "sequence_length")
RUN = ("global_batch_size", "time_budget_seconds", "tokens")
TOKENS_PER_PARAMETER = 20


def default_workload(
    goal: str, shape: ModelSpec | None, *, is_demo: bool, devices: int = 1
) -> Part:
    """Return a goal's workload for a model on a number of devices, if nothing is given.

    Lengths are within the model's context. The tokens of a pre-training are compute-optimal, its
    length and batch those of published ones; the demo trains for its two minutes.
    Source: Hoffmann et al. 2022, arXiv:2203.15556 (20 tokens per parameter); lengths and batches:
    planner/catalog/data/training_batches.csv.
    """
    values = WORKLOADS[goal]()
    if is_demo and goal == "pretrain":
        return values.with_values(time_budget_seconds=demo_seconds(os.environ))
    if shape is None:
        return values
    if goal == "pretrain":
        return values.with_values(**_compute_optimal(shape, devices))
    fitted = fit_context(values, shape.max_position_embeddings)
    if isinstance(fitted, FinetuneWork):
        batch = usual_batch(shape, fitted.sequence_length, devices, pretrains=False)
        return fitted.with_values(global_batch_size=batch.value)
    return fitted


def _compute_optimal(shape: ModelSpec, devices: int) -> dict[str, Any]:
    parameters = count_parameters(shape).total
    length = usual_length(shape, pretrains=True).value
    millions = round(TOKENS_PER_PARAMETER * parameters / 1e6) or 1
    return {
        "sequence_length": length,
        "global_batch_size": usual_batch(shape, length, devices, pretrains=True).value,
        "time_budget_seconds": None,
        "tokens": millions * 1_000_000,
    }


def fit_context(values: Part, context: int) -> Part:
    """Return a workload within a model's context; if it is exceeded, a quarter for the answer."""
    changes: dict[str, Any] = {}
    given = values.model_dump()
    if "sequence_length" in given and given["sequence_length"] > context:
        changes["sequence_length"] = context
    elif "input_tokens" in given and given["input_tokens"] + given["output_tokens"] > context:
        answer = max(1, min(given["output_tokens"], context // 4))
        changes = {"output_tokens": answer, "input_tokens": max(1, context - answer)}
    if (given.get("max_request_tokens") or 0) > context:
        changes["max_request_tokens"] = context
    return values.with_values(**changes) if changes else values


def resized(plan: Plan, before: Part, *, is_shortened: bool = True) -> None:
    """Give a draft the default sizes for its new model or hardware, where it had the old ones'.

    ``before``: the goal's default workload for the old ones. ``is_shortened``: lengths fit the
    new model's context.
    """
    document = plan.document
    names = [name for name in (*LENGTHS, *RUN) if hasattr(before, name)]
    values = document.workload
    if any(getattr(values, name) != getattr(before, name) for name in names):
        return
    is_fitted = is_shortened or document.goal == "pretrain"
    after = workload_of(plan, document.goal) if is_fitted else WORKLOADS[document.goal]()
    sizes = {name: getattr(after, name) for name in names}
    plan.document = document.model_copy(update={"workload": values.with_values(**sizes)})


def workload_of(plan: Plan, goal: str) -> Part:
    """Return a goal's default workload for a draft's model and hardware."""
    document = plan.document
    is_demo = document.model.source == "demo"
    devices = _devices_for(goal, document.hardware, is_demo=is_demo)
    return default_workload(goal, draft_shape(plan), is_demo=is_demo, devices=devices)


def _devices_for(goal: str, hardware: HardwareChoice, *, is_demo: bool) -> int:
    """Return the devices that a training's batch grows with, at least one.

    They are those of catalog hardware, or the GPUs of a host or pool.
    """
    if is_demo or goal not in TRAINING_GOALS:
        return 1
    if hardware.is_catalog:
        return hardware.devices_per_node * hardware.nodes
    gpus = Device.objects.filter(is_present=True, kind="gpu")
    place = {"host": hardware.host} if hardware.host else {"host__pool": hardware.pool}
    return max(1, gpus.filter(**place).count())


def _hardware(host: Host | None) -> HardwareChoice:
    return HardwareChoice(host=host.pk if host else None)


def new_document(
    goal: str, model: ModelChoice, host: Host | None, shape: ModelSpec | None = None
) -> PlanDocument:
    """Return the document of a new plan for a model on a host, else on catalog hardware."""
    is_demo = model.source == "demo"
    shape = find_model(demo_config()) if is_demo else shape
    hardware = _hardware(host)
    devices = _devices_for(goal, hardware, is_demo=is_demo)
    return PLANS[goal](
        goal=goal,
        model=model,
        hardware=hardware,
        workload=default_workload(goal, shape, is_demo=is_demo, devices=devices),
    )


def demo_document(host: Host | None) -> PlanDocument:
    """Return the document for new users: train the demo model on this machine in two minutes."""
    return new_document("pretrain", ModelChoice(source="demo"), host)


def serve_document(host: Host | None) -> PlanDocument:
    """Return the default document: serve an 8B model as a chat to 16 concurrent users."""
    return new_document("serve", ModelChoice(source="catalog"), host)


def model_document(preset: str, model: TeamModel | str, host: Host | None) -> PlanDocument:
    """Return a preset's document for a model of the catalog or the team.

    A team model is planned for the host that stores its weights.
    """
    goal = MODEL_PRESETS.get(preset, "serve")
    if isinstance(model, str):
        named = ModelChoice(source="catalog", catalog_id=model)
        return new_document(goal, named, host, find_model(model))
    chosen = ModelChoice(source="team", team_model=model.pk)
    return new_document(goal, chosen, model.host or host, find_model(model.config))


def stored_draft(document: PlanDocument, preset: str = "") -> dict[str, Any]:
    """Return the value of ``Plan.draft`` for a document that nobody has changed."""
    wizard = {"preset": preset, "is_touched": False}
    return {**document.model_dump(mode="json"), "wizard": wizard}


def first_host(team: Team) -> Host | None:
    """Return the default host of a new plan: the first enrolled ready host, else the first."""
    hosts = Host.objects.filter(team=team, kind__in=RUNS_JOBS).exclude(
        state__in=[HostState.RETIRED, HostState.PENDING]
    )
    ready = hosts.filter(state=HostState.READY).order_by("created_at").first()
    return ready or hosts.order_by("created_at").first()


def draft_begin(
    *,
    team: Team,
    owner: User,
    preset: str = "",
    model: TeamModel | str | None = None,
    host: Host | None = None,
    technique: Technique | None = None,
    devices: Several | None = None,
) -> Plan:
    """Return a new draft plan; if the owner has an identical unedited draft, return that one.

    ``model`` is a model of the team or the id of one of the catalog. Without ``host`` the plan is
    for the team's default one.
    """
    host = host or first_host(team)
    if technique is not None:
        document = technique_document(technique, host)
    else:
        document, preset = _first_document(team, preset, model, host)
    if devices is not None:
        chosen = {"device": devices.device, "devices_per_node": devices.devices_per_node}
        hardware = document.hardware.with_values(host=None, nodes=devices.nodes, **chosen)
        document = document.model_copy(update={"hardware": hardware})
    draft = stored_draft(document, preset)
    untouched = Plan.objects.filter(team=team, owner=owner, state=PlanState.DRAFT, draft=draft)
    return untouched.first() or Plan.objects.create(team=team, owner=owner, draft=draft)


def _first_document(
    team: Team, preset: str, model: TeamModel | str | None, host: Host | None
) -> tuple[PlanDocument, str]:
    if model is not None:
        return model_document(preset, model, host), preset or "serve"
    if preset == "demo":
        return demo_document(host), "demo"
    if MODEL_PRESETS.get(preset, "serve") != "serve":
        return model_document(preset, DEFAULT_MODEL, host), preset
    runs_jobs = host is None or host.kind in RUNS_JOBS
    has_finished_job = Job.objects.filter(team=team, state=JobState.SUCCEEDED).exists()
    if has_finished_job or preset == "serve" or not runs_jobs:
        return serve_document(host), "serve"
    return demo_document(host), "demo"


def proposals_fill(plan: Plan) -> Plan:
    """Give a plan the defaults for what it lacks or what is not valid today, without saving it."""
    try:
        read_stored(plan.draft)
    except DraftProblem:
        kept = repaired(plan.draft)
        plan.draft = kept or stored_draft(serve_document(first_host(plan.team)))
    return plan


def goal_change(plan: Plan, goal: str) -> None:
    """Change a draft's goal; each goal keeps its changed workload while another is chosen."""
    document = plan.document
    if goal == document.goal:
        return
    others = plan.wizard.setdefault("others", {})
    if document.workload != workload_of(plan, document.goal):  # else the model decides again
        others[document.goal] = document.workload.model_dump(mode="json")
    kept = others.pop(goal, None)
    workload = WORKLOADS[goal].model_validate(kept) if kept else workload_of(plan, goal)
    plan.document = of_goal(document, goal, workload)


def suggestion_apply(plan: Plan, changes: Mapping[str, Any]) -> list[str]:
    """Apply a suggestion to a draft; return the changes that the document has no field for."""
    appliers: dict[str, Callable[[PlanDocument, Any], list[str]]] = {
        "workload": _apply_workload,
        "pins": _apply_pins,
        "cluster": _apply_cluster,
        "constraints": _apply_constraints,
        "engine": _apply_engine,
    }
    document, unapplied = plan.document, []
    for name, value in changes.items():
        apply = appliers.get(name)
        unapplied += apply(document, value) if apply else [name]
    plan.document = document
    plan.wizard["is_touched"] = True
    return unapplied


def _apply_workload(document: PlanDocument, workload: Mapping[str, Any]) -> list[str]:
    values = document.workload
    own = {
        name: value
        for name, value in workload.items()
        if name in type(values).model_fields and value is not None
    }
    try:
        document.workload = values.with_values(**own)
    except ValidationError:  # a method that only the planner has
        document.workload = values.with_values(
            **{name: value for name, value in own.items() if name != "method"}
        )
    method = workload.get("method")
    now = getattr(document.workload, "method", None)
    return [f"method {method}"] if method not in {None, "pretrain", now} else []


def _apply_pins(document: PlanDocument, pins: Mapping[str, Any]) -> list[str]:
    document.pins = Strategy.model_validate(pins)
    return []


def _apply_engine(document: PlanDocument, engine: str) -> list[str]:
    """Choose an engine that the draft's goal has."""
    if engine not in engine_choices(document.goal):
        return [f"engine {engine}"]
    document.hardware.engine = engine
    return []


def _apply_constraints(document: PlanDocument, constraints: Mapping[str, Any]) -> list[str]:
    """Clear the memory limit if it is no longer among the constraints."""
    if "per_device_peak_bytes" not in constraints:
        document.hardware.memory_limit_gib = None
    return []


def _apply_cluster(document: PlanDocument, cluster: Mapping[str, Any]) -> list[str]:
    """Choose catalog hardware instead of a host, because a host cannot be enlarged."""
    device = cluster["device"]
    name = device if isinstance(device, str) else str(device.get("id"))
    try:
        device_id = get_device(name).id
    except PlannerError:
        return [f"device {name}"]
    document.hardware = document.hardware.with_values(
        host=None,
        pool=None,
        device=device_id,
        devices_per_node=cluster.get("devices_per_node", 1),
        nodes=cluster.get("nodes", 1),
        **{name: cluster.get(name) for name in HardwareChoice.TOPOLOGY},
    )
    return []


# ---------------------------------------------------------------------------
# The five steps of the wizard: order, questions, forms and storage.
# ---------------------------------------------------------------------------


class Step(NamedTuple):
    """One page of the wizard."""

    slug: str
    name: str
    question: str


STEPS = (
    Step("goal", "Goal", "What should the model do?"),
    Step("model", "Model", "Which model?"),
    Step("workload", "Workload", "How much work is it?"),
    Step("hardware", "Hardware", "Where should it run?"),
    Step("review", "Review", "Is this what you want?"),
)
SLUGS = tuple(step.slug for step in STEPS)


@dataclass(frozen=True)
class Options:
    """The hosts, pools, models and datasets a draft can choose from, each loaded once on demand.

    ``has_documents`` loads the hosts' JSON columns, which only the hardware step shows.
    """

    team: Team
    has_documents: bool = False

    @cached_property
    def reachable(self) -> list[Host]:
        """Return the hosts on which the team may run jobs, single or in a pool."""
        return reachable_hosts(self.team, has_documents=self.has_documents)

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """Return the team's own hosts, neither pending nor retired; virtual ones last."""
        own = [host for host in self.reachable if host.team_id == self.team.pk]
        return tuple(host for host in own if host.state not in UNREADY)

    @cached_property
    def pools(self) -> tuple[tuple[Pool, list[Host]], ...]:
        """Return the pools that the team may use, with their hosts."""
        return tuple(pools_among(self.reachable, self.team))

    @cached_property
    def team_models(self) -> tuple[TeamModel, ...]:
        """Return the team's models."""
        return tuple(TeamModel.objects.filter(team=self.team).select_related("host"))

    @cached_property
    def datasets(self) -> tuple[Dataset, ...]:
        """Return the team's uploaded datasets."""
        return tuple(Dataset.objects.filter(team=self.team))

    def host_of(self, hardware: HardwareChoice) -> Host | None:
        """Return the chosen host, or None if it is not available."""
        return next((host for host in self.hosts if host.pk == hardware.host), None)

    def named_model(self, model: ModelChoice) -> str | dict[str, Any]:
        """Return a chosen model's name in the catalog, or its config.json."""
        if model.source == "demo":
            return demo_config()
        if model.source == "team":
            own = (each.config for each in self.team_models if each.pk == model.team_model)
            return next(own, {})
        return model.catalog_id if model.source in {"catalog", None} else model.config or {}

    def names_of(self, document: PlanDocument) -> Names:
        """Return the names of the chosen model of the team, and of the host or pool."""
        models = (each for each in self.team_models if each.pk == document.model.team_model)
        model = next((each.name for each in models), "")
        return Names(model, self._place_of(document.hardware))

    def _place_of(self, hardware: HardwareChoice) -> str:
        """Return the name of the chosen host or pool, or "" if not available."""
        if host := self.host_of(hardware):
            return host.name
        if hardware.pool is None:
            return ""
        chosen = [pool for pool, _ in self.pools if pool.pk == hardware.pool]
        return " ".join(f"pool {pool_words(pool, self.team)}" for pool in chosen)


def options_for(plan: Plan, slug: str = "") -> Options:
    """Return the options of a plan's team for a step."""
    return Options(plan.team, has_documents=slug == "hardware")


def step_form(
    slug: str,
    document: PlanDocument,
    options: Options,
    data: QueryDict | None = None,
    files: MultiValueDict[str, Any] | None = None,
) -> StepForm | None:
    """Return a step's form, filled from ``data`` or else from the document; None for review."""
    if slug == "goal":
        initial = {name: getattr(document, name) for name in ("goal", *GOAL_FIELDS)}
        return GoalForm(data, initial=initial)
    if slug == "model":
        return ModelForm(
            data, files, model=document.model, team=options.team, team_models=options.team_models
        )
    if slug == "workload":
        own: dict[str, Any] = {}
        if document.goal in TRAINING_GOALS:
            host = options.host_of(document.hardware)
            is_known = host is not None and host.kind != "virtual"
            has_gpus = not is_known or bool(host and host.facts.get("gpus"))
            by_trl = trainer_of(document) == TRL
            own = {"datasets": options.datasets, "has_gpus": has_gpus, "by_trl": by_trl}
        elif document.goal == "serve":
            model = options.named_model(document.model)
            taken = scalings_taken(chosen_engine(document), model)
            own = {"scaling": document.model.rope_scaling, "taken": taken}
        return workload_form(document.goal, document.workload, data, **own)
    if slug == "hardware":
        pools = [pool for pool, _ in options.pools]
        return HardwareForm(
            data,
            hardware=document.hardware,
            hosts=options.hosts,
            pools=pools,
            engines=engine_choices(document.goal),
        )
    return None


def pins_form(document: PlanDocument, data: QueryDict | None = None) -> PinsForm:
    """Return the form of the strategy pins, part of the hardware step."""
    return PinsForm(data, pins=document.pins, prefix="pin", goal=document.goal)


def store(plan: Plan, form: StepForm) -> None:
    """Store a step's valid form in the draft; other goals' workloads stay unchanged."""
    if isinstance(form, GoalForm):
        goal_change(plan, form.cleaned_data["goal"])
    document = plan.document
    if isinstance(form, GoalForm):
        for name in GOAL_FIELDS:
            setattr(document, name, form.cleaned_data[name])
    elif isinstance(form, ModelForm):
        before = workload_of(plan, document.goal)
        document.model = form.chosen
        plan.document = document
        plan.wizard.pop("lacks_model", None)
        # The button shortens lengths, and says so; a choice among models does not yet.
        resized(plan, before, is_shortened=False)
        document = plan.document
    elif isinstance(form, HardwareForm):
        before = workload_of(plan, document.goal)
        document.hardware = form.chosen
        plan.document = document
        resized(plan, before)
        document = plan.document
    elif isinstance(form, PinsForm):
        document.pins = form.chosen
    elif isinstance(form, FormOfPart):
        document.workload = form.part
        if isinstance(form, ServingForm):
            document.model = document.model.with_values(rope_scaling=form.scaling)
    plan.document = document
    plan.wizard["is_touched"] = True


def neighbours(slug: str) -> tuple[Step | None, Step | None]:
    """Return the previous and the next step of a step."""
    at = SLUGS.index(slug)
    return (STEPS[at - 1] if at else None, STEPS[at + 1] if at + 1 < len(STEPS) else None)


def summaries(document: PlanDocument, names: Names) -> dict[str, str]:
    """Return a short summary of each step's values; ``names``: of the rows that it names."""
    goal, target = document.goal, ""
    if isinstance(document.workload, ServeWork):
        target = f" · {SLO_WORDS[document.latency_target]}"
        if document.latency_target != "none":
            target += f" at {PERCENTILES[document.percentile]}"
    engine = engine_choices(goal).get(chosen_engine(document) or "")
    scaling = document.model.rope_scaling
    stretched = f" · context {TIMES} {scaling.factor:g}" if scaling else ""
    return {
        "goal": GOALS[goal][0] + target,
        "model": model_words(document.model, names.model),
        "workload": workload_words(document.workload) + stretched,
        "hardware": hardware_words(document.hardware, names.place)
        + (f" · {engine}" if engine else ""),
        "review": "",
    }


def stepper(plan: Plan, current: str, summaries: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the entries of the stepper; steps before the current one are done."""
    at = SLUGS.index(current)
    return [
        {
            "name": step.name,
            "url": reverse("plan-step", args=[plan.pk, step.slug]),
            "summary": summaries[step.slug],
            "is_current": index == at,
            "is_done": index < at,
        }
        for index, step in enumerate(STEPS)
    ]
