"""What a new plan starts from: every step has a working answer before anyone touches it."""

import os
from typing import Any

from webapp.hosts.models import Host
from webapp.modelhub.models import TeamModel
from webapp.plans.training_data import MIX_ROWS

Draft = dict[str, Any]

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"
DEFAULT_DEVICE = "rtx-4090"
GOALS = ("serve", "generate", "finetune", "pretrain", "compress")
# What a model's page offers -> the goal of the plan that does it.
MODEL_PRESETS = {
    "quantize": "compress",
    "endpoint": "serve",
    "benchmark": "serve",
    "generate": "generate",
    "tune": "finetune",
}
# Where a preset opens, if not at the goal: at the review where nothing is left to ask.
FIRST_STEPS = dict.fromkeys(("demo", *MODEL_PRESETS), "review") | {"tune": "workload"}

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
        "global_batch_size": 2,  # small steps learn most in the demo's two minutes
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
        "goal": {"goal": goal, "objective": "balanced", "slo": "chat"},
        "model": {"catalog_id": DEFAULT_MODEL, **model},
        "workload": {kind: dict(values) for kind, values in WORKLOADS.items()},
        "hardware": _hardware(host),
        "pins": {},
    }


def demo_draft(host: Host | None) -> Draft:
    """Return the newcomer's draft: train the demo model on this machine in two minutes."""
    draft = _draft("demo", "pretrain", {"source": "demo"}, host)
    draft["workload"]["pretrain"]["time_budget_minutes"] = demo_minutes()
    return draft


def demo_minutes() -> float:
    """Return how long the demo trains: two minutes, or what SLIPWAY_DEMO_SECONDS says."""
    return round(float(os.environ.get("SLIPWAY_DEMO_SECONDS", "120")) / 60, 2)


def serve_draft(host: Host | None) -> Draft:
    """Return the usual draft: serve an 8B model to sixteen people as a chat."""
    return _draft("serve", "serve", {"source": "catalog"}, host)


def finetune_draft(host: Host | None) -> Draft:
    """Return a draft that fine-tunes; a template says which model, and on what."""
    return _draft("template", "finetune", {"source": "catalog"}, host)


def model_draft(preset: str, model: TeamModel, host: Host | None) -> Draft:
    """Return a draft that does with one of the team's models, where its weights lie, as asked."""
    goal, chosen = MODEL_PRESETS[preset], {"source": "team", "team_model": model.pk}
    draft = _draft(preset, goal, chosen, model.host or host)
    _fit_context(draft["workload"][goal], model.config.get("max_position_embeddings"))
    return draft


def _fit_context(values: dict[str, Any], context: object) -> None:
    """Ask no more tokens of a model than it has positions for: a quarter is left for answers."""
    asked = ("input_tokens", "output_tokens")
    if not isinstance(context, int):
        return
    if "sequence_length" in values:
        values["sequence_length"] = min(values["sequence_length"], context)
    if not all(name in values for name in asked):
        return
    if sum(values[name] for name in asked) > context:
        values["output_tokens"] = max(1, context // 4)
        values["input_tokens"] = max(1, context - values["output_tokens"])
