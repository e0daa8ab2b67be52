"""The trainer's parallel layout of a planned strategy."""

from pydantic import ValidationError

from planner.specs.workload import Strategy
from runners.jobspec.train import LayoutOptions
from runners.plans.refusals import DraftProblem, first_message
from runners.plans.training_options import LAYOUT_SIZES

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
