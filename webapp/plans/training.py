"""Convert the training goals to a job spec: data, method, batches, layout, duration."""

from typing import Any

from pydantic import ValidationError

from planner.specs.estimate import PlannedStrategy
from planner.specs.model import ModelSpec
from planner.specs.workload import OffloadSpec, Strategy
from runners.jobspec import (
    DataParallel,
    DemoModel,
    FileData,
    HostText,
    MixedData,
    ModelRef,
    RandomModel,
    SampleOptions,
    TrainData,
    TrainSpec,
    UploadedData,
)
from runners.jobspec.base import TextSamples, weights_of
from runners.jobspec.train import LayoutOptions
from runners.plans.methods import CLASSIFICATION
from runners.plans.refusals import DraftProblem, first_message
from runners.plans.training_options import LAYOUT_SIZES, chosen_options, stages_of
from runners.plans.workloads import FinetuneWork, MixtureSource, PretrainWork, TrainingData
from webapp.accounts.models import Team
from webapp.core.display import percent
from webapp.datasets.models import Dataset

# Convert a training plan's strategy to the trainer's layout options.


WITH_ZERO = ("zero_stage", "zero_shard_size")
WITH_PIPELINE = ("pipeline_schedule", "virtual_pipeline_size")
# Compression ratio -> dtype of exchanged gradients; otherwise they have 32 bits.
NARROWER = {2.0: "bf16", 4.0: "int8"}


def layout_of(
    strategy: Strategy, stage_layers: tuple[int, ...] | None = None
) -> LayoutOptions | None:
    """Return the parallel layout of a training; None for plain data parallelism.

    ``stage_layers``: the plan's number of layers per stage, if uneven for different devices.

    Raises:
        DraftProblem: the trainer does not support a field of the strategy; the message names it.
    """
    fields = {name: value for name in LAYOUT_SIZES if (value := getattr(strategy, name))}
    interval = strategy.synchronization_interval_steps or 1
    if fields.get("tensor_parallel_size", 1) > 1 and strategy.sequence_parallel:
        fields["sequence_parallel"] = True
    if fields.get("data_parallel_size", 1) == 1:
        fields.pop("zero_stage", None)  # no replicas to shard states over
    fields |= _with(strategy, WITH_ZERO if fields.get("zero_stage") else ())
    is_staged = fields.get("pipeline_parallel_size", 1) > 1
    fields |= _with(strategy, WITH_PIPELINE if is_staged else ())
    is_single = (strategy.virtual_pipeline_size or 1) == 1
    if is_staged and is_single and stage_layers and max(stage_layers) - min(stage_layers) > 1:
        fields["pipeline_layers"] = stage_layers
    if (ratio := strategy.gradient_compression_ratio or 1.0) > 1:
        fields["gradient_compression"] = _narrower(ratio)
    if interval > 1:
        fields["synchronization_interval_steps"] = interval
    options = _checked(fields)
    is_plain = options.is_unsharded and interval == 1 and ratio == 1.0
    return None if is_plain else options


def _with(strategy: Strategy, names: tuple[str, ...]) -> dict[str, object]:
    return {name: value for name in names if (value := getattr(strategy, name))}


def _narrower(ratio: float) -> str:
    if ratio not in NARROWER:
        ways = " or ".join(f"{each:g} ({name})" for each, name in NARROWER.items())
        raise DraftProblem(
            f"gradient_compression_ratio is {ratio:g}; the trainer exchanges gradients {ways} "
            "times smaller. Choose one of these.",
            "gradient_compression_ratio",
        )
    return NARROWER[ratio]


def _checked(fields: dict[str, object]) -> LayoutOptions:
    try:
        return LayoutOptions.model_validate(fields)
    except ValidationError as error:
        message = first_message(error)
        field = next((name for name in fields if message.startswith(name)), "tensor_parallel_size")
        raise DraftProblem(f"The trainer does not run this layout: {message}.", field) from error


# The data of a training plan: fields of its job spec, and their description.


def shared_out(
    spec: TrainSpec, policy: DataParallel, processes: int, values: TrainingData, team: Team
) -> dict[str, Any]:
    """Return a training's data fields and its ranks' policy."""
    is_fixed = spec.layout is not None and not spec.layout.is_pipeline_alone
    if is_fixed and policy.on_lost_rank == "shrink":
        policy = DataParallel()  # such a layout has a fixed number of ranks
    parallel = policy.model_copy(update={"processes_per_host": processes})
    return {"parallel": parallel, **data_fields(values, team)}


def data_fields(values: TrainingData, team: Team) -> dict[str, Any]:
    """Return ``data`` and ``samples`` of a training's spec.

    Raises:
        DraftProblem: the chosen file is gone, or the options are invalid.
    """
    try:
        data = _data(values, team)
        samples = SampleOptions(rows=values.rows, too_long=values.too_long)
    except ValidationError as error:
        message = f"The training data cannot be read: {first_message(error)}."
        raise DraftProblem(message, "data_source") from error
    return {"data": data, "samples": samples}


def _data(values: TrainingData, team: Team) -> TrainData:
    if values.data_source == "file":
        return FileData(path=values.data_path, format=values.data_format)
    if values.data_source == "upload":
        return _uploaded(values.dataset, team)
    return _mixed(values, team) if values.data_source == "mixed" else HostText()


def _mixed(values: TrainingData, team: Team) -> MixedData:
    is_dynamic = values.mixture_weights == "dynamic"
    parts = [
        {
            "data": _source(row, team),
            "weight": row.weight,
            **({"reference_loss": row.reference_loss} if is_dynamic else {}),
        }
        for row in values.mixture
    ]
    if not is_dynamic:
        return MixedData.model_validate({"parts": parts})
    moving = {"weights": "dynamic", "update_every_steps": values.mixture_update_every_steps}
    return MixedData.model_validate({"parts": parts, **moving})


def _source(row: MixtureSource, team: Team) -> TrainData:
    if row.source == "file":
        return FileData(path=row.path)
    return HostText() if row.source == "host" else _uploaded(row.source, team)


def _uploaded(dataset_id: str, team: Team) -> UploadedData:
    dataset = Dataset.objects.filter(team=team, pk=dataset_id).first()
    if dataset is None:
        raise DraftProblem(
            "No uploaded file is chosen, or it was deleted. Upload one, or choose the host's own "
            "text.",
            "dataset",
        )
    return UploadedData.model_validate(
        {
            "dataset_id": dataset.pk,
            "name": dataset.name,
            "sha256": dataset.sha256,
            "size_bytes": dataset.size_bytes,
            "format": dataset.format,
        }
    )


def text_words(data: TrainData) -> str:
    """Return a description of a training's data for a sentence."""
    if isinstance(data, UploadedData):
        return f"the uploaded {data.name}"
    if isinstance(data, FileData):
        return f"its file {data.path}"
    if isinstance(data, HostText):
        return "its own text"
    shares = zip(weights_of(data), data.parts, strict=True)
    mixture = " and ".join(f"{percent(share)} {text_words(part.data)}" for share, part in shares)
    moving = f" by weights that move every {data.update_every_steps:,} steps"
    return mixture if data.weights == "fixed" else f"at first {mixture}{moving}"


COMPUTE_DTYPES = ("fp32", "bf16", "fp16", "fp8")
FRESH_ENCODER_RATE = 1e-3
TRAINED_ENCODER_RATE = 5e-5  # the largest of BERT's fine-tuning rates
STATE_PLACES = {"none": "none", "cpu": "cpu", "nvme": "disk"}  # the planner's -> the trainer's


def train_spec(
    values: PretrainWork,
    model: ModelRef,
    best: PlannedStrategy,
    shape: ModelSpec | None = None,
) -> TrainSpec:
    """Return the job spec of a training, without its data.

    Raises:
        DraftProblem: the trainer does not support the document.
    """
    is_classifier = isinstance(values, FinetuneWork) and values.method == CLASSIFICATION
    check_encoder(shape, is_classifier=is_classifier)
    if is_classifier:
        fields = {"model": model, **_train_fields(values, best)}
        is_fresh = isinstance(model, RandomModel)
        rate = FRESH_ENCODER_RATE if is_fresh else TRAINED_ENCODER_RATE
        fields["learning_rate"] = rate
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
    fields = {"model": model, **_train_fields(values, best)}
    fields["layout"] = layout_of(best.strategy, best.memory.per_stage_layers)
    return _validated(fields)


def check_encoder(shape: ModelSpec | None, *, is_classifier: bool) -> None:
    """Refuse classification with a text model, and text training with an encoder.

    Raises:
        DraftProblem: model and method do not match; the message names a remedy.
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


def _validated(fields: dict[str, Any]) -> TrainSpec:
    """Return the validated spec; incompatible options raise a DraftProblem."""
    try:
        return TrainSpec.model_validate(fields)
    except ValidationError as error:
        place = error.errors()[0]["loc"]
        field = str(place[0]) if place else "optimizer"
        message = f"The training cannot run as chosen: {first_message(error)}."
        raise DraftProblem(message, field) from error


def _train_fields(values: PretrainWork, best: PlannedStrategy) -> dict[str, Any]:
    batch = values.global_batch_size
    micro = min(best.strategy.micro_batch_size or batch, batch)
    steps = round(values.tokens / (batch * values.sequence_length)) if values.tokens else None
    compute = best.strategy.compute_dtype
    planned = best.strategy.offload or OffloadSpec()
    return {
        "sequence_length": values.sequence_length,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": max(1, batch // micro),
        "max_steps": max(1, steps) if steps is not None else None,
        "time_budget_seconds": values.time_budget_seconds,
        "compute_dtype": compute if compute in COMPUTE_DTYPES else "bf16",
        "activation_recomputation": best.strategy.activation_recomputation or "none",
        "activation_offload": "cpu" if planned.activations_cpu > 0 else "none",
        "optimizer_offload": STATE_PLACES[planned.optimizer],
        "length_schedule": stages_of(values),
        "on_spike": values.on_spike,
        "early_stop_validations": values.early_stop_validations,
        "text_samples": _text_samples(values),
        "keep_best": values.keep_best,
        "checkpoint_writing": values.checkpoint_writing,
        **chosen_options(values),
    }


def _text_samples(values: PretrainWork) -> TextSamples | None:
    """Return the text-sampling options of a training; None if it samples no text."""
    every = values.text_samples_every_steps
    is_classifier = isinstance(values, FinetuneWork) and values.method == CLASSIFICATION
    if every is None or is_classifier:
        return None
    return TextSamples(every_steps=every, prompts=values.prompt_lines)


def needs_weights(model: ModelRef, verb: str) -> None:
    """Refuse a model without trained weights on the host.

    Raises:
        DraftProblem: the model has no weights on the host; the message names a remedy.
    """
    if isinstance(model, RandomModel | DemoModel):
        raise DraftProblem(
            f"{verb} needs trained weights, and this model has none on the host. Train the demo "
            "model first and choose the result, or name a folder on the host.",
            "source",
        )
