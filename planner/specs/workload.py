"""What the hardware is asked to do: serve, generate offline, train or compress."""

from typing import Annotated, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from planner.specs.base import Ratio, SparseSpec
from planner.specs.spellings import OPTIMIZERS, spelled

SHARE_ROUNDING = 1e-6
TrainMethod = Literal["pretrain", "full", "lora", "qlora", "lomo", "adalomo", "qft", "alphatuning"]
Optimizer = Literal["adamw", "adamw_8bit", "adafactor", "lion", "sgd", "lomo", "adalomo"]
NamedOptimizer = Annotated[Optimizer, BeforeValidator(spelled(get_args(Optimizer), OPTIMIZERS))]
CompressMethod = Literal[
    "int8_weight_only",
    "int8_dynamic",
    "fp8",
    "gguf",
    "int4_weight_only",
    "nf4",
    "gptq",
    "awq",
    "autoround",
    "sparsegpt",
    "fptq",
    "norm_tweaking",
    "finequant",
    "quantease",
    "qmoe",
    "llm_pruner",
    "sheared_llama",
]


class ServeWorkload(SparseSpec):
    """Answer requests as they come: a closed loop, an open loop, or as many as memory allows.

    ``burst_requests`` come all at once and nobody after them.
    """

    kind: Literal["serve"] = "serve"
    input_tokens: PositiveInt
    output_tokens: PositiveInt
    concurrency: PositiveInt | None = None
    request_rate_per_second: PositiveFloat | None = None
    burst_requests: PositiveInt | None = None
    prefix_share_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    ttft_slo_seconds: PositiveFloat | None = None
    tpot_slo_seconds: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one_kind_of_arrival(self) -> Self:
        kinds = (self.concurrency, self.request_rate_per_second, self.burst_requests)
        if sum(kind is not None for kind in kinds) > 1:
            raise ValueError(
                "concurrency (closed loop), request_rate_per_second (open loop) and "
                "burst_requests (all at once) exclude each other: give one, or none to find the "
                "most that memory allows"
            )
        return self


class GenerateWorkload(SparseSpec):
    """Generate offline in one fixed batch."""

    kind: Literal["generate"] = "generate"
    batch_size: PositiveInt
    input_tokens: PositiveInt
    output_tokens: PositiveInt


class TrainWorkload(SparseSpec):
    """Train for ``tokens`` tokens, or cost one step when ``tokens`` is left out.

    ``padding_ratio`` is the share of a padded batch that is no text. ``document_tokens`` is how
    long the document is, on the average, that a token of a packed row is of: where attention goes
    by blocks, those between documents are left out. ``length_schedule`` trains
    shares of the tokens at shorter sequences first, in rows of as many tokens. With a
    ``time_budget_seconds`` the time is given and the tokens are the answer.
    """

    kind: Literal["train"] = "train"
    sequence_length: PositiveInt
    global_batch_size: PositiveInt
    method: TrainMethod = "full"
    lora_rank: PositiveInt | None = None
    lora_targets: Literal["all", "query_value"] | None = None
    optimizer: NamedOptimizer | None = None
    tokens: PositiveInt | None = None
    padding_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    document_tokens: PositiveInt | None = None
    length_schedule: tuple[tuple[PositiveInt, Ratio], ...] | None = None
    time_budget_seconds: PositiveFloat | None = None

    @model_validator(mode="after")
    def _shares_are_a_whole(self) -> Self:
        schedule = self.length_schedule
        if schedule and abs(sum(share for _, share in schedule) - 1.0) > SHARE_ROUNDING:
            total = sum(share for _, share in schedule)
            raise ValueError(f"length_schedule: shares of the tokens add up to {total:g}, not 1")
        if schedule and max(length for length, _ in schedule) > self.sequence_length:
            longest = max(length for length, _ in schedule)
            raise ValueError(
                f"length_schedule reaches {longest} tokens, but sequence_length, the longest, is "
                f"{self.sequence_length}"
            )
        return self

    @property
    def text_ratio(self) -> float:
        """Return the share of a padded batch that is text."""
        return 1.0 - (self.padding_ratio or 0.0)


class CompressWorkload(SparseSpec):
    """Make the weights smaller and write the result."""

    kind: Literal["compress"] = "compress"
    method: CompressMethod
    bits: Annotated[int, Field(ge=1, le=16)] | None = None
    group_size: PositiveInt | None = None
    calibration_tokens: NonNegativeInt | None = None


Workload = Annotated[
    ServeWorkload | GenerateWorkload | TrainWorkload | CompressWorkload,
    Field(discriminator="kind"),
]
