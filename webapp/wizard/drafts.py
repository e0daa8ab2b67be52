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

from planner.catalog.devices import get_device
from planner.cost.parameters import count_parameters
from planner.specs.base import PlannerError
from planner.specs.model import ModelSpec
from webapp.accounts.models import Team
from webapp.core.site_settings import demo_seconds
from webapp.datasets.models import Dataset
from webapp.hosts.models import RUNS_JOBS, Host, HostState, Pool
from webapp.jobs.models import Job, JobState
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.draft import HardwareStep, ModelStep, PlanDraft
from webapp.plans.explanation import (
    GOAL_WORDS,
    SLO_WORDS,
    completed_draft,
    hardware_words,
    missing_step,
    model_words,
    workload_words,
)
from webapp.plans.models import Plan, PlanState
from webapp.plans.questions import PERCENTILES, percentile_of
from webapp.plans.serving import chosen_engine, engine_choices
from webapp.plans.sharing import pool_words, pools_among, reachable_hosts
from webapp.plans.training import MIX_ROWS
from webapp.wizard.forms import GoalForm, HardwareForm, ModelForm, PinsForm, StepForm
from webapp.wizard.workload_forms import TRAINING_FORMS, WORKLOAD_FORMS

# ---------------------------------------------------------------------------
# Drafts: defaults for every step, and suggestions applied to them.
# ---------------------------------------------------------------------------


# Default drafts: every step of a new plan has a valid value.


DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"
DEFAULT_DEVICE = "rtx-4090"
GOALS = ("serve", "generate", "finetune", "pretrain", "compress")
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

READERS = ("serve", "generate", "finetune")  # goals limited by the model's context
DEMO_SIZES = ("sequence_length", "global_batch_size", "million_tokens")
TOKENS_PER_PARAMETER = 20
MOST_TOKENS = 4096  # per sequence, as in the pre-training of the catalog's models
LARGE, LARGE_BATCH, SMALL_BATCH = 10e9, 4_194_304, 524_288  # parameters; tokens per batch

_NO_SOURCE = {"source": "", "path": "", "weight": None, "reference": None}
_DATA = {
    "data_source": "host",
    "data_path": "",
    "data_format": "",
    "dataset": "",
    "rows": "packed",
    "too_long": "cut",
    **{f"mix_{name}_{row}": value for row in MIX_ROWS for name, value in _NO_SOURCE.items()},
    "mix_weights": "fixed",
    "mix_every": 50,
}
_TRAINING = {
    **_DATA,
    "optimizer": "adamw",
    "activation_offload": "none",
    "optimizer_offload": "none",
    "lengths": "fixed",
    "rounding": "none",
    "on_spike": "stop",
    "early_stop": "never",
    "exported_weights": "best",
    "text_samples": "none",
    "sample_prompts": "",
    "checkpoint_writing": "auto",
    "attention": "auto",
    "products": "auto",
    "training_step": "plain",
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "serve": {
        "input_tokens": 1024,
        "output_tokens": 256,
        "max_request_tokens": None,
        "concurrency": 16,
        "prefix_share_percent": 0,
    },
    "generate": {
        "batch_size": 32,
        "input_tokens": 1024,
        "output_tokens": 256,
        "prompts_path": "",
        "batching": "given",
        "kv_cache": "plain",
        "guessing": "",
        "decode_step": "",
    },
    "finetune": {
        "method": "lora",
        "sequence_length": 2048,
        "global_batch_size": 16,
        "lora_rank": 16,
        "time_budget_minutes": None,
        "million_tokens": 10.0,
        **_TRAINING,
    },
    "pretrain": {
        "sequence_length": 256,
        "global_batch_size": 2,  # small steps reduce the loss most in the demo's two minutes
        "time_budget_minutes": 2.0,
        "million_tokens": None,
        **_TRAINING,
    },
    "compress": {
        "method": "int8_weight_only",
        "bits": 4,
        "group_size": 64,
        "sparsity": "50",
        "recovery_steps": 0,
    },
}


def _hardware(host: Host | None) -> HardwareStep:
    choice = f"host:{host.pk}" if host else "catalog"
    return {"choice": choice, "device": DEFAULT_DEVICE, "devices_per_node": 1, "nodes": 1}


def _draft(preset: str, goal: str, model: ModelStep, host: Host | None) -> PlanDraft:
    return {
        "preset": preset,
        "is_touched": False,
        "goal": {"goal": goal, "objective": "balanced", "slo": "chat", "percentile": "p95"},
        "model": model,
        "workload": {kind: dict(values) for kind, values in WORKLOADS.items()},
        "hardware": _hardware(host),
        "pins": {},
    }


def _model(source: str) -> ModelStep:
    return {"catalog_id": DEFAULT_MODEL, "source": source}


def demo_draft(host: Host | None) -> PlanDraft:
    """Return the draft for new users: train the demo model on this machine in two minutes."""
    draft = _draft("demo", "pretrain", _model("demo"), host)
    draft["workload"]["pretrain"]["time_budget_minutes"] = demo_minutes()
    for goal in READERS:
        _fit_context(draft["workload"][goal], _demo_context())
    return draft


def demo_minutes() -> float:
    """Return the demo's training time in minutes: SLIPWAY_DEMO_SECONDS, or two minutes."""
    return round(demo_seconds(os.environ) / 60, 2)


def serve_draft(host: Host | None) -> PlanDraft:
    """Return the default draft: serve an 8B model as a chat to 16 concurrent users."""
    return _draft("serve", "serve", _model("catalog"), host)


def finetune_draft(host: Host | None) -> PlanDraft:
    """Return a fine-tuning draft, whose model and data a template fills in."""
    return _draft("template", "finetune", _model("catalog"), host)


def model_draft(preset: str, model: TeamModel, host: Host | None) -> PlanDraft:
    """Return a preset's draft for a team model, on the host that stores its weights."""
    goal, chosen = MODEL_PRESETS[preset], _model("team")
    chosen["team_model"] = model.pk
    draft = _draft(preset, goal, chosen, model.host or host)
    _fit_context(draft["workload"][goal], model.config.get("max_position_embeddings"))
    return draft


def _demo_context() -> int:
    return int(demo_config()["max_position_embeddings"])


def adapt_requests(draft: PlanDraft) -> None:
    """Reset request lengths that still fit the demo model, if another model is chosen."""
    if draft["model"]["source"] == "demo":
        return
    for goal in READERS:
        demo_values = dict(WORKLOADS[goal])
        _fit_context(demo_values, _demo_context())
        shortened = {
            name: value for name, value in demo_values.items() if value != WORKLOADS[goal][name]
        }
        values = draft["workload"][goal]
        if all(values.get(name) == value for name, value in shortened.items()):
            values |= {name: WORKLOADS[goal][name] for name in shortened}


def adapt_pretraining(draft: PlanDraft, shape: ModelSpec | None) -> None:
    """Replace an unchanged demo pre-training workload by one that fits the chosen model.

    The number of tokens is compute-optimal, the batch up to some millions of tokens.
    Source: Hoffmann et al. 2022, arXiv:2203.15556 (20 tokens per parameter); batch sizes as in
    Touvron et al. 2023, arXiv:2302.13971 (4 million tokens for the largest, 0.5 million for 1B).
    """
    values = draft["workload"]["pretrain"]
    demo_values = {name: WORKLOADS["pretrain"][name] for name in DEMO_SIZES}
    has_demo_sizes = all(values.get(name) == demo_values[name] for name in DEMO_SIZES)
    minutes = {WORKLOADS["pretrain"]["time_budget_minutes"], demo_minutes()}
    is_untouched = has_demo_sizes and values.get("time_budget_minutes") in minutes
    if shape is None or draft["model"]["source"] == "demo" or not is_untouched:
        return
    parameters = count_parameters(shape).total
    length = min(MOST_TOKENS, shape.max_position_embeddings)
    batch = LARGE_BATCH if parameters > LARGE else SMALL_BATCH
    values |= {
        "sequence_length": length,
        "global_batch_size": max(1, batch // length),
        "time_budget_minutes": None,
        "million_tokens": float(round(TOKENS_PER_PARAMETER * parameters / 1e6)) or 1.0,
    }


def _fit_context(values: dict[str, Any], context: object) -> None:
    """Limit lengths to the model's context; reserve a quarter for the output if it is exceeded."""
    names = ("input_tokens", "output_tokens")
    if not isinstance(context, int):
        return
    if "sequence_length" in values:
        values["sequence_length"] = min(values["sequence_length"], context)
    if not all(name in values for name in names):
        return
    if sum(values[name] for name in names) > context:
        values["output_tokens"] = max(1, context // 4)
        values["input_tokens"] = max(1, context - values["output_tokens"])


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
    model: TeamModel | None = None,
    host: Host | None = None,
) -> Plan:
    """Return a new draft plan; if the owner has an identical unedited draft, return that one.

    Without ``host`` it is for the team's default one.
    """
    draft = _first_draft(team, preset, model, host or first_host(team))
    untouched = Plan.objects.filter(team=team, owner=owner, state=PlanState.DRAFT, draft=draft)
    return untouched.first() or Plan.objects.create(team=team, owner=owner, draft=draft)


def _first_draft(team: Team, preset: str, model: TeamModel | None, host: Host | None) -> PlanDraft:
    if preset in MODEL_PRESETS and model is not None:
        return model_draft(preset, model, host)
    if preset == "demo":
        return demo_draft(host)
    has_finished_job = Job.objects.filter(team=team, state=JobState.SUCCEEDED).exists()
    return serve_draft(host) if has_finished_job or preset == "serve" else demo_draft(host)


def proposals_fill(plan: Plan) -> Plan:
    """Fill each missing step of a plan's draft with a default, without saving it."""
    if missing_step(plan.draft):
        plan.draft = completed_draft(plan.draft, serve_draft(first_host(plan.team)))
    return plan


def suggestion_apply(draft: PlanDraft, changes: dict[str, Any]) -> list[str]:
    """Apply a suggestion to a draft; return the changes that the draft has no field for."""
    appliers: dict[str, Callable[[PlanDraft, Any], list[str]]] = {
        "workload": _apply_workload,
        "pins": _apply_pins,
        "cluster": _apply_cluster,
    }
    appliers |= {"constraints": _apply_constraints, "engine": _apply_engine}
    unapplied = []
    for name, value in changes.items():
        apply = appliers.get(name)
        unapplied += apply(draft, value) if apply else [name]
    draft["is_touched"] = True
    return unapplied


def _apply_workload(draft: PlanDraft, workload: dict[str, Any]) -> list[str]:
    values = draft["workload"][draft["goal"]["goal"]]
    for name, value in workload.items():
        if name in values and value is not None:
            values[name] = value
    method = workload.get("method")
    return [f"method {method}"] if method not in {None, "pretrain", values.get("method")} else []


def _apply_pins(draft: PlanDraft, pins: dict[str, Any]) -> list[str]:
    draft["pins"] = pins
    return []


def _apply_engine(draft: PlanDraft, engine: str) -> list[str]:
    """Choose an engine that the draft's goal has."""
    if engine not in engine_choices(draft["goal"]["goal"]):
        return [f"engine {engine}"]
    draft["hardware"]["engine"] = engine
    return []


def _apply_constraints(draft: PlanDraft, constraints: dict[str, Any]) -> list[str]:
    """Clear the memory limit if it is no longer among the constraints."""
    if "per_device_peak_bytes" not in constraints:
        draft["hardware"]["memory_limit_gib"] = None
    return []


def _apply_cluster(draft: PlanDraft, cluster: dict[str, Any]) -> list[str]:
    """Choose catalog hardware instead of a host, because a host cannot be enlarged."""
    device = cluster["device"]
    name = device if isinstance(device, str) else str(device.get("id"))
    try:
        device_id = get_device(name).id
    except PlannerError:
        return [f"device {name}"]
    draft["hardware"] |= {
        "choice": "catalog",
        "device": device_id,
        "devices_per_node": cluster.get("devices_per_node", 1),
        "nodes": cluster.get("nodes", 1),
    }
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
        unready = {HostState.RETIRED, HostState.PENDING}
        own = [host for host in self.reachable if host.team_id == self.team.pk]
        return tuple(host for host in own if host.state not in unready)

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

    def host_of(self, draft: PlanDraft) -> Host | None:
        """Return the chosen host of a draft, or None if it is not available."""
        choice = draft["hardware"]["choice"] or ""
        if not choice.startswith("host:"):
            return None
        return next((host for host in self.hosts if f"host:{host.pk}" == choice), None)

    def place_of(self, draft: PlanDraft) -> str:
        """Return the name of the chosen host or pool of a draft, or "" if not available."""
        choice = draft["hardware"]["choice"] or ""
        if host := self.host_of(draft):
            return host.name
        if not choice.startswith("pool:"):
            return ""
        chosen = [pool for pool, _ in self.pools if f"pool:{pool.pk}" == choice]
        return " ".join(f"pool {pool_words(pool, self.team)}" for pool in chosen)

    def team_model_of(self, draft: PlanDraft) -> TeamModel | None:
        """Return the chosen team model of a draft, or None if it is not available."""
        chosen = draft["model"].get("team_model")
        if not chosen:
            return None
        return next((model for model in self.team_models if model.pk == chosen), None)


def options_for(plan: Plan, slug: str = "") -> Options:
    """Return the options of a plan's team for a step."""
    return Options(plan.team, has_documents=slug == "hardware")


def step_form(
    slug: str,
    draft: PlanDraft,
    options: Options,
    data: QueryDict | None = None,
    files: MultiValueDict[str, Any] | None = None,
) -> StepForm | None:
    """Return a step's form, filled from ``data`` or else from the draft; None for review."""
    bound: dict[str, Any] = {"data": data, "files": files} if data is not None else {}
    if slug == "goal":
        initial = {**draft["goal"], "percentile": percentile_of(draft)}
        return GoalForm(initial=initial, **bound)
    if slug == "model":
        models = options.team_models
        return ModelForm(initial=dict(draft["model"]), team_models=models, **bound)
    if slug == "workload":
        goal = draft["goal"]["goal"]
        if goal in TRAINING_FORMS:
            host = options.host_of(draft)
            is_known = host is not None and host.kind != "virtual"
            has_gpus = not is_known or bool(host and host.facts.get("gpus"))
            bound |= {"datasets": options.datasets, "has_gpus": has_gpus}
        return WORKLOAD_FORMS[goal](initial=draft["workload"][goal], **bound)
    if slug == "hardware":
        pools = [pool for pool, _ in options.pools]
        bound |= {"hosts": options.hosts, "engines": engine_choices(draft["goal"]["goal"])}
        return HardwareForm(initial=dict(draft["hardware"]), pools=pools, **bound)
    return None


def pins_form(draft: PlanDraft, data: QueryDict | None = None) -> PinsForm:
    """Return the form of the strategy pins, part of the hardware step."""
    bound: dict[str, Any] = {"data": data} if data is not None else {}
    initial = {**draft["pins"], **(draft["pins"].get("disaggregated") or {})}
    is_serving = draft["goal"]["goal"] == "serve"
    return PinsForm(initial=initial, prefix="pin", is_serving=is_serving, **bound)


def store(slug: str, draft: PlanDraft, values: Mapping[str, Any]) -> None:
    """Store a step's cleaned values in the draft; other goals' workloads stay unchanged."""
    if slug == "workload":
        draft["workload"][draft["goal"]["goal"]].update(values)
    elif slug == "pins":
        draft["pins"] = _merged_pins(draft["pins"], values)
    else:
        steps: dict[str, Any] = {name: draft[name] for name in ("goal", "model", "hardware")}
        steps[slug].update(values)
    draft["is_touched"] = True


def fit_context(draft: PlanDraft, context: int) -> bool:
    """Shorten every workload that exceeds ``context`` tokens; return whether any did."""
    is_shorter = False
    for values in draft["workload"].values():
        if "input_tokens" in values:
            total = values["input_tokens"] + values["output_tokens"]
            if total > context:
                values["output_tokens"] = max(1, min(values["output_tokens"], context // 4))
                values["input_tokens"] = max(1, context - values["output_tokens"])
                is_shorter = True
            if (values.get("max_request_tokens") or 0) > context:
                values["max_request_tokens"] = context
                is_shorter = True
        elif values.get("sequence_length", 0) > context:
            values["sequence_length"] = context
            is_shorter = True
    return is_shorter


def _merged_pins(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the form's pins; a suggestion's other pins stay while the weight dtype is the same."""
    is_same = old.get("weight_dtype") == new.get("weight_dtype")
    return {**(old if is_same else {}), **new}


def neighbours(slug: str) -> tuple[Step | None, Step | None]:
    """Return the previous and the next step of a step."""
    at = SLUGS.index(slug)
    return (STEPS[at - 1] if at else None, STEPS[at + 1] if at + 1 < len(STEPS) else None)


def summaries(draft: PlanDraft, options: Options) -> dict[str, str]:
    """Return a short summary of each step's values."""
    goal = draft["goal"]["goal"]
    slo = f" · {SLO_WORDS[draft['goal']['slo']]}" if goal == "serve" else ""
    if goal == "serve" and draft["goal"]["slo"] != "none":
        slo += f" at {PERCENTILES[percentile_of(draft)]}"
    team_model = options.team_model_of(draft)
    engine = engine_choices(goal).get(chosen_engine(draft) or "")
    return {
        "goal": GOAL_WORDS[goal] + slo,
        "model": model_words(draft, team_model.name if team_model else ""),
        "workload": workload_words(draft),
        "hardware": hardware_words(draft, options.place_of(draft))
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
