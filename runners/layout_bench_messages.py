"""Request and results of the layout benchmark."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from runners.jobspec.train import LayoutOptions

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


class LayoutBenchRequest(BaseModel):
    """A training and the layouts to time it in; None is a single process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Mapping[str, Any]
    training: Mapping[str, Any]  # fields of a TrainSpec, without model and layout
    layouts: Mapping[str, LayoutOptions | None]
    ranks: PositiveInt = 4
    rounds: PositiveInt = 5
    final_rounds: NonNegativeInt = (
        0  # additional rounds of the first choice and the fastest other layout
    )
    steps: PositiveInt = 3  # a round's time is their median
    warm_up_steps: NonNegativeInt = 1
    patience_seconds: PositiveFloat = 2.0  # a slower step is timed once per round
    first_choice: str | None = None  # the layout whose regret is measured

    @property
    def always(self) -> frozenset[str]:
        """Return the layouts that run in every round, however slow."""
        return frozenset({self.first_choice} if self.first_choice else ())

    def ranks_of(self, name: str) -> int:
        """Return the number of ranks of a layout."""
        layout = self.layouts[name]
        return 1 if layout is None else layout.world_size


class StepTime(BaseModel):
    """A layout's median step time in one round, with synchronised ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str
    round: NonNegativeInt
    seconds: NonNegativeFloat


class CollectiveTime(BaseModel):
    """Latency and bandwidth of one collective among the ranks of this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    collective: Collective
    ranks: PositiveInt
    latency_seconds: NonNegativeFloat
    bytes_per_second: PositiveFloat  # bytes sent over the ring; for send, the message's bytes
