"""What the bench of layouts is asked, and what it answers."""

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

from runners.layout_options import LayoutOptions

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


class Asked(BaseModel):
    """One training and the layouts in which its steps are timed; None is one process alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Mapping[str, Any]
    training: Mapping[str, Any]  # fields of a TrainSpec, without model and layout
    layouts: Mapping[str, LayoutOptions | None]
    ranks: PositiveInt = 4
    rounds: PositiveInt = 5
    final_rounds: NonNegativeInt = 0  # of the first choice and its fastest rival alone, afterwards
    steps: PositiveInt = 3  # whose median is a round's figure
    warm_up_steps: NonNegativeInt = 1
    patience_seconds: PositiveFloat = 2.0  # beyond which one timed step of a round is enough
    first_choice: str | None = None  # the layout whose regret is asked for

    @property
    def always(self) -> frozenset[str]:
        """Return what runs in every round, however slow."""
        return frozenset({self.first_choice} if self.first_choice else ())

    def ranks_of(self, name: str) -> int:
        """Return how many ranks a layout takes."""
        layout = self.layouts[name]
        return 1 if layout is None else layout.world_size


class StepTime(BaseModel):
    """A layout's median step in one round, between ranks that begin and end together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str
    round: NonNegativeInt
    seconds: NonNegativeFloat


class CollectiveTime(BaseModel):
    """What one exchange among the ranks of this machine costs by itself, and for its bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    collective: Collective
    ranks: PositiveInt
    latency_seconds: NonNegativeFloat
    bytes_per_second: PositiveFloat  # of what travels on a ring; of a message, its bytes
