"""What a benchmark under load leaves: one row for each point of the sweep, and how it was taken.

Figures have the planner's names and base units; ``interval`` is the 80 % interval of a mean over
the repetitions, as the planner's own intervals are of 80 %.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

ARTEFACT = "load"
ArrivalKind = Literal["closed", "open", "burst"]
MEANS = ("tokens_per_second", "requests_per_second", "ttft_seconds", "tpot_seconds",
         "latency_seconds")  # fmt: skip
DISTRIBUTED = ("ttft", "tpot", "latency")
PERCENTILES = (50, 90, 99)


class LoadRow(BaseModel):
    """One point: its clients, its rate or its burst, and what came of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point: FiniteFloat
    requests: PositiveInt
    failed: NonNegativeInt
    repetitions: PositiveInt
    duration_seconds: FiniteFloat
    measured: dict[str, FiniteFloat]
    interval: dict[str, tuple[FiniteFloat, FiniteFloat]] = Field(default_factory=dict)
    errors: dict[str, NonNegativeInt] = Field(default_factory=dict)  # in words -> how often
    notes: tuple[str, ...] = ()  # what a reader has to know before he believes the row


class LoadReport(BaseModel):
    """A whole sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrivals: ArrivalKind
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt
    places: PositiveInt  # requests that the endpoint answered together
    seed: int
    rows: tuple[LoadRow, ...] = Field(min_length=1, max_length=64)
