"""What the options of a training mean to trainer and planner, before there is a plan."""

from typing import Any

from runners.jobspec.base import LoraOptions, QuantizedTraining
from runners.jobspec.objectives import OBJECTIVES, ObjectiveName, TrainEngine
from runners.jobspec.train import SIZES, USUAL_LEARNING_RATES
from runners.plans.methods import ALPHATUNING, CLASSIFICATION, TRAININGS
from runners.plans.workloads import FinetuneWork, PretrainWork

LAYOUT_SIZES = (*SIZES, "zero_stage", "expert_parallel_size")
OFFLOADED = ("activation_offload", "optimizer_offload")
GROWTH_DIVISORS = (8, 4, 2, 1)  # four stages, as from 128 to 1024 tokens in the paper
ALPHA_PER_RANK = 2  # scale of an adapter, as in most recipes


def stages_of(values: PretrainWork) -> tuple[tuple[int, float], ...] | None:
    """Return the stages of growing lengths in tokens, each with its share of all tokens."""
    if values.length_schedule != "grow":
        return None
    longest = values.sequence_length
    lengths = sorted({max(1, longest // divisor) for divisor in GROWTH_DIVISORS})
    return tuple((length, 1.0 / len(lengths)) for length in lengths)


def chosen_options(values: PretrainWork, trainer: TrainEngine) -> dict[str, Any]:
    """Return those fields of a training's spec by which a document may limit the layout.

    They do not depend on the plan (``runners.jobspec.train.LAYOUT_RULES``).
    """
    method = TRAININGS[values.method] if isinstance(values, FinetuneWork) else None
    optimizer: str = values.optimizer
    if method and method.is_optimizer and isinstance(values, FinetuneWork):
        optimizer = values.method
    # An answer with activations on disk is without the offload.
    places = {name: str(getattr(values, name)) for name in OFFLOADED}
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "learning_rate": values.learning_rate or USUAL_LEARNING_RATES[optimizer],
        **{name: place for name, place in places.items() if place != "none"},
        "quantized": _quantized_training(values),
        "compiled": values.compiled,
        "attention": values.attention,
    }
    if values.compute_dtype == "fp8":
        options["compute_dtype"] = "fp8"
    if not isinstance(values, FinetuneWork) or method is None:
        return options
    if base := method.adapter_base:
        rank = values.lora_rank
        options["lora"] = LoraOptions(rank=rank, alpha=ALPHA_PER_RANK * rank, base_dtype=base)
    return options | {"engine": trainer, "objective": objective_of(values)}


def objective_of(values: FinetuneWork) -> ObjectiveName:
    """Return what a fine-tuning learns, in the spec's words."""
    if values.method == CLASSIFICATION:
        return "classification"
    return "next_token" if values.objective == "supervised" else values.objective


def loss_and_rewards(values: FinetuneWork) -> dict[str, Any]:
    """Return what a fine-tuning's loss compares with, in the spec's words."""
    objective = objective_of(values)
    stated: dict[str, Any] = {"reward_functions": values.reward_functions}
    if values.beta is not None:
        return stated | {"beta": values.beta}
    return stated | ({"beta": OBJECTIVES[objective].beta} if objective in OBJECTIVES else {})


def _quantized_training(values: PretrainWork) -> QuantizedTraining | None:
    """Return the quantisation of a training: trained scales, or rounded weights."""
    if isinstance(values, FinetuneWork) and values.method == ALPHATUNING:
        return QuantizedTraining(method="alphatuning")
    return QuantizedTraining(method="qat", bits=values.qat_bits) if values.qat_bits else None
