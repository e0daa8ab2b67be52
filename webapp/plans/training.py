"""The two training goals as a job: which method trains, in which batches, until when."""

from typing import Any

from planner.specs.plan import PlannedStrategy
from runners.adapter_options import LoraOptions
from runners.jobspec import DemoModel, ModelRef, RandomModel, TrainSpec
from webapp.plans.errors import DraftProblem

Draft = dict[str, Any]
COMPUTE_DTYPES = ("fp32", "bf16", "fp16")
TUNING_METHODS = ("full", "lora")
ALPHA_PER_RANK = 2  # the scale of an adapter, as most recipes have it


def train_spec(draft: Draft, model: ModelRef, best: PlannedStrategy) -> TrainSpec:
    """Return the typed document of a training.

    Raises:
        DraftProblem: the trainer does not run what was drafted.
    """
    goal = draft["goal"]["goal"]
    values = draft["workload"][goal]
    if goal == "finetune":
        needs_weights(model, "Fine-tuning")
        if values["method"] not in TUNING_METHODS:
            raise DraftProblem(
                f"{values['method']} is planned but does not run yet. Choose the method “full” "
                "or “LoRA”.",
                "method",
            )
    elif not isinstance(model, DemoModel):
        raise DraftProblem(
            "Only the demo model can be pre-trained from nothing in this release. Choose it, or "
            "fine-tune a model that is on the host.",
            "source",
        )
    if values["optimizer"] != "adamw":
        raise DraftProblem(
            f"The trainer runs AdamW; {values['optimizer']} is planned but does not run yet.",
            "optimizer",
        )
    fields = {"model": model, **_train_fields(values, best)}
    if goal == "finetune" and values["method"] == "lora":
        rank = values["lora_rank"]
        fields["lora"] = LoraOptions(rank=rank, alpha=ALPHA_PER_RANK * rank)
    return TrainSpec.model_validate(fields)


def _train_fields(values: dict[str, Any], best: PlannedStrategy) -> dict[str, Any]:
    batch, budget = values["global_batch_size"], values.get("time_budget_minutes")
    micro = min(best.strategy.micro_batch_size or batch, batch)
    million = values.get("million_tokens")
    steps = round(million * 1e6 / (batch * values["sequence_length"])) if million else None
    compute = best.strategy.compute_dtype
    return {
        "sequence_length": values["sequence_length"],
        "micro_batch_size": micro,
        "gradient_accumulation_steps": max(1, batch // micro),
        "max_steps": max(1, steps) if steps is not None else None,
        "time_budget_seconds": budget * 60 if budget else None,
        "compute_dtype": compute if compute in COMPUTE_DTYPES else "bf16",
    }


def needs_weights(model: ModelRef, verb: str) -> None:
    """Refuse a model that has no trained weights on the host.

    Raises:
        DraftProblem: with the way out.
    """
    if isinstance(model, RandomModel | DemoModel):
        raise DraftProblem(
            f"{verb} needs trained weights, and this model has none on the host. Train the demo "
            "model first and choose the one that it leaves, or name a folder on the host.",
            "source",
        )
