"""The report of a load benchmark: one row per point of the sweep.

Figures have the planner's names and base units; ``interval`` is the 80 % confidence interval of
a mean over the repetitions, the level of the planner's intervals.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

from runners.wire import Figure

ARTEFACT = "load"
ArrivalKind = Literal["closed", "open", "burst"]
MEANS = ("tokens_per_second", "requests_per_second", "ttft_seconds", "tpot_seconds",
         "latency_seconds")  # fmt: skip
DISTRIBUTED = ("ttft", "tpot", "latency")
PERCENTILES = (50, 90, 95, 99)


class LoadRow(BaseModel):
    """One point of the sweep (concurrency, rate or burst size) and its measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point: FiniteFloat
    requests: PositiveInt
    failed: NonNegativeInt
    repetitions: PositiveInt
    duration_seconds: FiniteFloat
    measured: dict[str, Figure]
    interval: dict[str, tuple[FiniteFloat, FiniteFloat]] = Field(default_factory=dict)
    errors: dict[str, NonNegativeInt] = Field(default_factory=dict)  # error text -> count
    notes: tuple[str, ...] = ()  # caveats of the row


class LoadReport(BaseModel):
    """A whole sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrivals: ArrivalKind
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt
    places: PositiveInt  # the endpoint's concurrency limit
    seed: int
    rows: tuple[LoadRow, ...] = Field(min_length=1, max_length=64)
