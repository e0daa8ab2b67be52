"""The spec of a training's job: method, batches, layout, duration and data."""

from typing import Any

from planner.specs.estimate import PlannedStrategy
from planner.specs.model import ModelSpec
from planner.specs.workload import OffloadSpec
from runners.jobspec import (
    DataParallel,
    DemoModel,
    FolderModel,
    HubModel,
    ModelRef,
    RandomModel,
    TrainSpec,
)
from runners.jobspec.base import PackingStrategy, StoredModel, TextSamples
from runners.jobspec.objectives import OBJECTIVES, TRL, TrainEngine
from runners.jobspec.train import USUAL_LEARNING_RATES, against_comparisons
from runners.plans.methods import CLASSIFICATION, TRAININGS
from runners.plans.model_checks import check_encoder, needs_weights
from runners.plans.refusals import DraftProblem, validated
from runners.plans.training_data import Uploads, data_fields
from runners.plans.training_layout import layout_of
from runners.plans.training_options import chosen_options, loss_and_rewards, stages_of
from runners.plans.workloads import FinetuneWork, PretrainWork, TrainingData

TRLS_PACKING: PackingStrategy = "bfd"  # its default where it packs
COMPUTE_DTYPES = ("fp32", "bf16", "fp16", "fp8")
FRESH_ENCODER_RATE = 1e-3
TRAINED_ENCODER_RATE = 5e-5  # the largest of BERT's fine-tuning rates
ANSWERS_EVERY_STEPS = 20
STATE_PLACES = {"none": "none", "cpu": "cpu", "nvme": "disk"}  # the planner's -> the trainer's


def train_spec(
    values: PretrainWork,
    model: ModelRef,
    best: PlannedStrategy,
    shape: ModelSpec | None = None,
    uploads: Uploads | None = None,
    *,
    trainer: TrainEngine,
    teacher: StoredModel | None = None,
) -> TrainSpec:
    """Return the job spec of a training, without its data; of one by TRL with them.

    ``teacher``: whose probabilities a distillation learns.

    Raises:
        DraftProblem: the trainer does not support the document.
    """
    is_classifier = isinstance(values, FinetuneWork) and values.method == CLASSIFICATION
    check_encoder(shape, is_classifier=is_classifier)
    if is_classifier:
        fields = {"model": model, **_train_fields(values, best, trainer)}
        is_fresh = isinstance(model, RandomModel)
        rate = FRESH_ENCODER_RATE if is_fresh else TRAINED_ENCODER_RATE
        fields["learning_rate"] = values.learning_rate or rate
        fields["layout"] = layout_of(best.strategy)
        return _validated(fields)
    if isinstance(values, FinetuneWork):
        needs_weights(model, "Fine-tuning")
    elif not isinstance(model, DemoModel):
        raise DraftProblem(
            "Only the demo model can be pre-trained from scratch. Choose the demo model, or the "
            "goal “Fine-tune” with a model on the host.",
            "source",
        )
    fields = {"model": model, **_train_fields(values, best, trainer)}
    fields["layout"] = layout_of(best.strategy, best.memory.per_stage_layers)
    if fields.get("engine") == TRL:
        _refuse_copies(best)
        data = data_fields(values, uploads or {})
        fields["teacher"] = teacher
        fields = _of_trl(values, fields) | _rows_of_trl(data, _packing_of(values, best))
        return _validated(fields, "data_source")
    if values.learning_rate is None and isinstance(model, HubModel | FolderModel):
        fields["learning_rate"] *= _published_rate_ratio(values)
    return _validated(fields)


def _refuse_copies(best: PlannedStrategy) -> None:
    """Refuse a plan of several copies, which has no layout of its own.

    Raises:
        DraftProblem: the plan takes several devices.
    """
    if (copies := best.strategy.data_parallel_size or 1) > 1:
        raise DraftProblem(
            f"TRL's jobs train on one device, and this plan has {copies} copies of the model. Set "
            "data parallel to 1, or choose Slipway's own trainer for a supervised training.",
            "data_parallel_size",
        )


def _of_trl(values: PretrainWork, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a training by TRL: its own learning rate, batch and steps."""
    objective = OBJECTIVES.get(fields["objective"])
    if objective is None:  # the spec says that it is none of TRL's
        return fields
    usual = objective.adapter_learning_rate if fields.get("lora") else objective.learning_rate
    batch = values.sequences_per_step
    least = max(fields["micro_batch_size"], objective.least_batch)
    micro = next((size for size in range(least, batch) if not batch % size), batch)
    own: dict[str, Any] = {
        "learning_rate": values.learning_rate or usual,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": batch // micro,
        "keep_best": False,
    }
    if values.tokens:
        read = batch * values.sequence_length * len(objective.sequences)
        own["max_steps"] = max(1, round(values.tokens / read))
    return fields | own


def _packing_of(values: TrainingData, best: PlannedStrategy) -> PackingStrategy | None:
    """Return how TRL packs: as chosen, by its default where the plan packs, or not at all.

    ``rows`` padded wins over the plan's strategy.

    Raises:
        DraftProblem: the plan packs, which cuts samples that are to be left out.
    """
    if values.packing_strategy or values.rows == "padded" or not best.strategy.packed:
        return values.packing_strategy
    if values.too_long == "leave_out":
        raise DraftProblem(
            f"The plan's strategy states packed, for which TRL packs rows by {TRLS_PACKING} and "
            "cuts longer samples, and too_long is leave_out. Set pins.packed to false, rows to "
            "padded, or too_long to cut.",
            "packed",
            path=("pins", "packed"),
        )
    return TRLS_PACKING


def _rows_of_trl(fields: dict[str, Any], packing: PackingStrategy | None) -> dict[str, Any]:
    """Return the data fields of a training by TRL, which packs only by a strategy.

    Raises:
        DraftProblem: the rows are to be padded, and a strategy packs them.
    """
    if packing is not None and fields["samples"].rows == "padded":
        raise DraftProblem(
            f"rows is padded, and packing_strategy {packing} packs them. Leave one of them out.",
            "packing_strategy",
        )
    rows = "padded" if packing is None else "packed"
    options = {"rows": rows, "packing_strategy": packing}
    return fields | {"samples": fields["samples"].model_copy(update=options)}


def _published_rate_ratio(values: PretrainWork) -> float:
    """Return the ratio of a published model's usual learning rate to the demo model's.

    Source: QLoRA's 2e-4 for adapters of models up to 13B (Dettmers et al. 2023, arXiv:2305.14314,
    table 9); Alpaca's 2e-5 for all weights, both with AdamW. Other optimisers keep their ratio to
    it.
    """
    method = TRAININGS[values.method] if isinstance(values, FinetuneWork) else None
    rate = 2e-4 if method is not None and method.adapter_base else 2e-5
    return rate / USUAL_LEARNING_RATES["adamw"]


def _validated(fields: dict[str, Any], at: str = "optimizer") -> TrainSpec:
    words = "The training cannot run as chosen"
    return validated(TrainSpec, fields, words, at, names_its_field=True)


def _train_fields(
    values: PretrainWork, best: PlannedStrategy, trainer: TrainEngine
) -> dict[str, Any]:
    batch, own = values.sequences_per_step, values.fields_of(TrainSpec)
    if isinstance(values, FinetuneWork):
        del own["beta"], own["generator"]  # left open they are the objective's and the job's
        own |= loss_and_rewards(values)
    micro = min(best.strategy.micro_batch_size or batch, batch)
    steps = round(values.tokens / (batch * values.sequence_length)) if values.tokens else None
    compute = best.strategy.compute_dtype
    planned = best.strategy.offload or OffloadSpec()
    found = best.reliability
    saves = {"checkpoint_every_seconds": found.checkpoint_interval_seconds} if found else {}
    return {
        **own,
        **saves,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": max(1, batch // micro),
        "max_steps": max(1, steps) if steps is not None else None,
        "compute_dtype": compute if compute in COMPUTE_DTYPES else "bf16",
        "activation_recomputation": best.strategy.activation_recomputation or "none",
        "activation_offload": "cpu" if planned.activations_cpu > 0 else "none",
        "optimizer_offload": STATE_PLACES[planned.optimizer],
        "length_schedule": stages_of(values),
        "text_samples": _text_samples(values),
        **chosen_options(values, trainer),
    }


def _text_samples(values: PretrainWork) -> TextSamples | None:
    """Return the text-sampling options of a training; None if it samples no text."""
    every: int | None = values.text_samples_every_steps
    if every is None and isinstance(values, FinetuneWork) and values.is_rewarded:
        every = ANSWERS_EVERY_STEPS  # its answers are there anyway
    is_classifier = isinstance(values, FinetuneWork) and values.method == CLASSIFICATION
    if every is None or is_classifier:
        return None
    return TextSamples(every_steps=every, prompts=values.prompt_lines)


def data_and_parallel_fields(
    spec: TrainSpec, policy: DataParallel, processes: int, values: TrainingData, uploads: Uploads
) -> dict[str, Any]:
    """Return a training's data fields and its ranks' policy.

    Raises:
        DraftProblem: the chosen file is gone, or the options or the file's records are not for
            the trainer.
    """
    fields = data_fields(values, uploads)
    if spec.engine != TRL:
        for why in against_comparisons(fields["data"]):
            raise DraftProblem(f"The training cannot run as chosen: {why}.", "objective")
    else:
        packing = values.packing_strategy or spec.samples.packing_strategy
        packing = None if values.rows == "padded" and not values.packing_strategy else packing
        fields = _rows_of_trl(fields, packing)
        if processes > 1:
            raise DraftProblem(
                f"TRL's jobs train in one process, and a host has {processes} of this plan. Leave "
                "the ranks of a host out.",
                "ranks_per_host",
            )
    is_fixed = spec.layout is not None and not spec.layout.is_pipeline_alone
    if is_fixed and policy.on_lost_rank == "shrink":
        policy = DataParallel()  # such a layout has a fixed number of ranks
    parallel = policy.model_copy(update={"processes_per_host": processes})
    return {"parallel": parallel, **fields}
