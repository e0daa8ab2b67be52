"""A training's plan as the layout of its ranks, in the trainer's terms."""

from pydantic import ValidationError

from planner.specs.strategy import Strategy
from runners.layout_options import SIZES, LayoutOptions
from webapp.plans.errors import DraftProblem

WAYS = (*SIZES, "zero_stage", "expert_parallel_size")
WITH_ZERO = ("zero_stage", "zero_shard_size")
WITH_PIPELINE = ("pipeline_schedule", "virtual_pipeline_size")
# What a ratio of compression says of the type: gradients are exchanged in 32 bits otherwise.
NARROWER = {2.0: "bf16", 4.0: "int8"}


def layout_of(
    strategy: Strategy, stage_layers: tuple[int, ...] | None = None
) -> LayoutOptions | None:
    """Return how a training's ranks share the work; None where each has a whole copy.

    ``stage_layers``: how many layers the plan has on each stage, unlike on unlike devices.

    Raises:
        DraftProblem: the trainer does not run it so, with the field.
    """
    fields = {name: value for name in WAYS if (value := getattr(strategy, name))}
    interval = strategy.synchronization_interval_steps or 1
    if fields.get("tensor_parallel_size", 1) > 1 and strategy.sequence_parallel:
        fields["sequence_parallel"] = True
    if fields.get("data_parallel_size", 1) == 1:
        fields.pop("zero_stage", None)  # nobody to share states with
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
    is_plain = options.is_whole_copies and interval == 1 and ratio == 1.0
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
        said = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        field = next((name for name in fields if said.startswith(name)), "tensor_parallel_size")
        raise DraftProblem(f"The trainer does not run this layout: {said}.", field) from error
