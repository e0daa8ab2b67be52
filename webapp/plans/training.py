"""Convert the training goals to a job spec: method, batches, duration."""

from typing import Any

from pydantic import ValidationError

from planner.specs.model import ModelSpec
from planner.specs.plan import PlannedStrategy
from runners.jobspec import DemoModel, ModelRef, RandomModel, TrainSpec
from runners.jobspec.base import BaseDtype, LoraOptions, QuantizedTraining, TextSamples
from runners.jobspec.train import USUAL_LEARNING_RATES
from webapp.plans.errors import DraftProblem
from webapp.plans.training_layout import layout_of

Draft = dict[str, Any]
COMPUTE_DTYPES = ("fp32", "bf16", "fp16", "fp8")
CLASSIFICATION = "classification"
FRESH_ENCODER_RATE = 1e-3
TRAINED_ENCODER_RATE = 5e-5  # the largest of BERT's fine-tuning rates
TUNING_METHODS = ("full", "lora", "qlora", "lomo", "adalomo", "qft", "alphatuning", CLASSIFICATION)
ADAPTER_BASES: dict[str, BaseDtype] = {"lora": "compute", "qlora": "nf4"}
OPTIMIZER_METHODS = (
    "lomo",
    "adalomo",
    "qft",
)  # the planner has these as methods, the trainer as more
STATE_PLACES = {"none": "none", "cpu": "cpu", "nvme": "disk"}  # the planner's -> the trainer's
EARLY_STOPS = {"2": 2, "3": 3}  # the wizard's values -> validations without improvement
GROWTH_DIVISORS = (8, 4, 2, 1)  # four stages, as from 128 to 1024 tokens in the paper
ALPHA_PER_RANK = 2  # scale of an adapter, as in most recipes


def train_spec(
    draft: Draft, model: ModelRef, best: PlannedStrategy, shape: ModelSpec | None = None
) -> TrainSpec:
    """Return the job spec of a training.

    Raises:
        DraftProblem: the trainer does not support the draft.
    """
    goal = draft["goal"]["goal"]
    values = draft["workload"][goal]
    is_classifier = goal == "finetune" and values["method"] == CLASSIFICATION
    check_encoder(shape, is_classifier=is_classifier)
    if is_classifier:
        fields = {"model": model, **_train_fields(values, best)}
        fields |= classification_fields(model) | {"layout": layout_of(best.strategy)}
        return _validated(fields)
    if goal == "finetune":
        needs_weights(model, "Fine-tuning")
        if values["method"] not in TUNING_METHODS:
            raise DraftProblem(
                f"{values['method']} is no method that runs. Choose “full”, “LoRA”, “QLoRA”, "
                "“LOMO”, “AdaLomo”, “QFT” or “AlphaTuning”.",
                "method",
            )
    elif not isinstance(model, DemoModel):
        raise DraftProblem(
            "Only the demo model can be pre-trained from nothing in this release. Choose it, or "
            "fine-tune a model that is on the host.",
            "source",
        )
    fields = {"model": model, **_train_fields(values, best)}
    if goal == "finetune" and values["method"] in ADAPTER_BASES:
        rank, base = values["lora_rank"], ADAPTER_BASES[values["method"]]
        fields["lora"] = LoraOptions(rank=rank, alpha=ALPHA_PER_RANK * rank, base_dtype=base)
    if goal == "finetune" and values["method"] in OPTIMIZER_METHODS:
        fields |= _optimizer_fields(values["method"])
    fields["layout"] = layout_of(best.strategy, best.memory.per_stage_layers)
    return _validated(fields)


def check_encoder(shape: ModelSpec | None, *, is_classifier: bool) -> None:
    """Refuse classification with a text model, and text training with an encoder.

    Raises:
        DraftProblem: with a remedy.
    """
    is_encoder = shape is not None and shape.is_encoder
    if is_classifier and not is_encoder:
        raise DraftProblem(
            "Classification needs an encoder (DistilBERT); this model is a decoder. "
            "Choose an encoder, or another method.",
            "method",
        )
    if is_encoder and not is_classifier:
        raise DraftProblem(
            "This model is an encoder, which predicts no text. Fine-tune it with the method "
            "“Classification”.",
            "method",
        )


def classification_fields(model: ModelRef) -> dict[str, Any]:
    """Return the objective and learning rate of a classification training."""
    is_fresh = isinstance(model, RandomModel)
    rate = FRESH_ENCODER_RATE if is_fresh else TRAINED_ENCODER_RATE
    return {"objective": CLASSIFICATION, "learning_rate": rate}


def _validated(fields: dict[str, Any]) -> TrainSpec:
    """Return the validated spec; incompatible options raise a DraftProblem."""
    try:
        return TrainSpec.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        field = str(first["loc"][0]) if first["loc"] else "optimizer"
        raise DraftProblem(f"The training cannot run as chosen: {message}.", field) from error


def _quantized_training(values: dict[str, Any]) -> QuantizedTraining | None:
    """Return the quantisation of a training: trained scales, or rounded weights."""
    if values.get("method") == "alphatuning":
        return QuantizedTraining(method="alphatuning")
    rounding = values.get("rounding")
    if rounding in {"4", "8"}:
        return QuantizedTraining(method="qat", bits=4 if rounding == "4" else 8)
    return None


def stages_of(values: dict[str, Any]) -> tuple[tuple[int, float], ...] | None:
    """Return the stages of growing lengths, each with its share of the tokens."""
    if values.get("lengths") != "grow":
        return None
    longest = values["sequence_length"]
    lengths = sorted({max(1, longest // divisor) for divisor in GROWTH_DIVISORS})
    return tuple((length, 1.0 / len(lengths)) for length in lengths)


def _optimizer_fields(optimizer: str) -> dict[str, Any]:
    rate = USUAL_LEARNING_RATES.get(optimizer)  # the draft may name an unknown optimiser
    return {"optimizer": optimizer} | ({"learning_rate": rate} if rate else {})


def _optimizer_offload(values: dict[str, Any], best: PlannedStrategy) -> str:
    """Return where optimiser states are offloaded: as requested, else as planned."""
    requested = str(values.get("optimizer_offload") or "none")
    planned = best.strategy.offload.optimizer if best.strategy.offload else "none"
    return requested if requested != "none" else STATE_PLACES[planned]


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
        "activation_recomputation": best.strategy.activation_recomputation or "none",
        "activation_offload": values.get("activation_offload") or "none",
        "optimizer_offload": _optimizer_offload(values, best),
        **_optimizer_fields(values["optimizer"]),
        "length_schedule": stages_of(values),
        "quantized": _quantized_training(values),
        "on_spike": values.get("on_spike") or "stop",
        "early_stop_validations": EARLY_STOPS.get(str(values.get("early_stop"))),
        "text_samples": _text_samples(values),
        "keep_best": values.get("exported_weights") != "last",
        "checkpoint_writing": values.get("checkpoint_writing") or "auto",
        "attention": values.get("attention") or "auto",
        "compiled": values.get("training_step") == "compiled",
    }


def _text_samples(values: dict[str, Any]) -> TextSamples | None:
    """Return the text-sampling options of a training; None if it samples no text."""
    every = str(values.get("text_samples") or "")
    is_classifier = values.get("method") == CLASSIFICATION
    if not every.isdecimal() or not int(every) or is_classifier:
        return None
    lines = str(values.get("sample_prompts") or "").split("\n")
    prompts = tuple(each for each in lines if each.strip())
    return TextSamples(every_steps=int(every), prompts=prompts)


def needs_weights(model: ModelRef, verb: str) -> None:
    """Refuse a model without trained weights on the host.

    Raises:
        DraftProblem: with a remedy.
    """
    if isinstance(model, RandomModel | DemoModel):
        raise DraftProblem(
            f"{verb} needs trained weights, and this model has none on the host. Train the demo "
            "model first and choose the one that it leaves, or name a folder on the host.",
            "source",
        )
