"""Drafts: defaults for every step, and suggestions applied to them."""

import os
from collections.abc import Callable
from typing import Any

from django.contrib.auth.models import User

from planner.catalog.devices import get_device
from planner.cost.parameters import count_parameters
from planner.errors import PlannerError
from planner.specs.model import ModelSpec
from webapp.accounts.models import Team
from webapp.hosts.models import RUNS_JOBS, Host, HostState
from webapp.jobs.models import Job, JobState
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config
from webapp.plans.engines import engine_choices
from webapp.plans.errors import completed, missing_step
from webapp.plans.models import Plan, PlanState
from webapp.plans.training import MIX_ROWS

# Default drafts: every step of a new plan has a valid value.


Draft = dict[str, Any]

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


def _hardware(host: Host | None) -> dict[str, Any]:
    choice = f"host:{host.pk}" if host else "catalog"
    return {"choice": choice, "device": DEFAULT_DEVICE, "devices_per_node": 1, "nodes": 1}


def _draft(preset: str, goal: str, model: dict[str, Any], host: Host | None) -> Draft:
    return {
        "preset": preset,
        "is_touched": False,
        "goal": {"goal": goal, "objective": "balanced", "slo": "chat", "percentile": "p95"},
        "model": {"catalog_id": DEFAULT_MODEL, **model},
        "workload": {kind: dict(values) for kind, values in WORKLOADS.items()},
        "hardware": _hardware(host),
        "pins": {},
    }


def demo_draft(host: Host | None) -> Draft:
    """Return the draft for new users: train the demo model on this machine in two minutes."""
    draft = _draft("demo", "pretrain", {"source": "demo"}, host)
    draft["workload"]["pretrain"]["time_budget_minutes"] = demo_minutes()
    for goal in READERS:
        _fit_context(draft["workload"][goal], _demo_context())
    return draft


def demo_minutes() -> float:
    """Return the demo's training time in minutes: SLIPWAY_DEMO_SECONDS, or two minutes."""
    return round(float(os.environ.get("SLIPWAY_DEMO_SECONDS", "120")) / 60, 2)


def serve_draft(host: Host | None) -> Draft:
    """Return the default draft: serve an 8B model as a chat to 16 concurrent users."""
    return _draft("serve", "serve", {"source": "catalog"}, host)


def finetune_draft(host: Host | None) -> Draft:
    """Return a fine-tuning draft, whose model and data a template fills in."""
    return _draft("template", "finetune", {"source": "catalog"}, host)


def model_draft(preset: str, model: TeamModel, host: Host | None) -> Draft:
    """Return a preset's draft for a team model, on the host that stores its weights."""
    goal, chosen = MODEL_PRESETS[preset], {"source": "team", "team_model": model.pk}
    draft = _draft(preset, goal, chosen, model.host or host)
    _fit_context(draft["workload"][goal], model.config.get("max_position_embeddings"))
    return draft


def _demo_context() -> int:
    return int(demo_config()["max_position_embeddings"])


def adapt_requests(draft: Draft) -> None:
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


def adapt_pretraining(draft: Draft, shape: ModelSpec | None) -> None:
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
    *, team: Team, owner: User, preset: str = "", model: TeamModel | None = None
) -> Plan:
    """Return a new plan with a complete draft, or the owner's existing untouched equal one."""
    draft = _first_draft(team, preset, model)
    untouched = Plan.objects.filter(team=team, owner=owner, state=PlanState.DRAFT, draft=draft)
    return untouched.first() or Plan.objects.create(team=team, owner=owner, draft=draft)


def _first_draft(team: Team, preset: str, model: TeamModel | None) -> Draft:
    host = first_host(team)
    if preset in MODEL_PRESETS and model is not None:
        return model_draft(preset, model, host)
    if preset == "demo":
        return demo_draft(host)
    has_finished_job = Job.objects.filter(team=team, state=JobState.SUCCEEDED).exists()
    return serve_draft(host) if has_finished_job or preset == "serve" else demo_draft(host)


def proposals_fill(plan: Plan) -> Plan:
    """Fill each missing step of a plan's draft with a default, without saving it."""
    if missing_step(plan.draft):
        plan.draft = completed(plan.draft, serve_draft(first_host(plan.team)))
    return plan


def suggestion_apply(draft: Draft, changes: dict[str, Any]) -> list[str]:
    """Apply a suggestion to a draft; return the changes that the draft has no field for."""
    appliers: dict[str, Callable[[Draft, Any], list[str]]] = {
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


def _apply_workload(draft: Draft, workload: dict[str, Any]) -> list[str]:
    """Copy the fields that the goal's form has."""
    values = draft["workload"][draft["goal"]["goal"]]
    for name, value in workload.items():
        if name in values and value is not None:
            values[name] = value
    method = workload.get("method")
    return [f"method {method}"] if method not in {None, "pretrain", values.get("method")} else []


def _apply_pins(draft: Draft, pins: dict[str, Any]) -> list[str]:
    draft["pins"] = pins
    return []


def _apply_engine(draft: Draft, engine: str) -> list[str]:
    """Choose an engine that the draft's goal has."""
    if engine not in engine_choices(draft["goal"]["goal"]):
        return [f"engine {engine}"]
    draft["hardware"]["engine"] = engine
    return []


def _apply_constraints(draft: Draft, constraints: dict[str, Any]) -> list[str]:
    """Clear the memory limit if it is no longer among the constraints."""
    if "per_device_peak_bytes" not in constraints:
        draft["hardware"]["memory_limit_gib"] = None
    return []


def _apply_cluster(draft: Draft, cluster: dict[str, Any]) -> list[str]:
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
