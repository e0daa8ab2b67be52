"""What an adapter may be told: LoRA as peft has it, what becomes of it; training by integers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

LoraTargets = Literal["all", "query_value"]
BaseDtype = Literal["compute", "nf4"]


class LoraOptions(BaseModel):
    """Train low-rank matrices beside frozen weights: W + (alpha / rank) * B A.

    ``targets`` "all" are all linear layers but the output, "query_value" those that the paper
    adapts. With ``is_merged`` the job also leaves the whole model with the adapter in it.
    ``base_dtype`` "nf4" holds the frozen weights in 4 bits (QLoRA); they are merged into those of
    the full width. ``is_dora`` also trains the length of each row's weights (DoRA).

    Source: Hu et al. 2021, arXiv:2106.09685, section 4; Dettmers et al. 2023, arXiv:2305.14314;
    Liu et al. 2024, arXiv:2402.09353.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: PositiveInt = Field(default=8, le=1024)
    alpha: PositiveInt = Field(default=16, le=65_536)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: LoraTargets = "all"
    is_merged: bool = True
    base_dtype: BaseDtype = "compute"
    is_dora: bool = False


class QuantizedTraining(BaseModel):
    """Train through integers: "alphatuning" the scales alone, "qat" weights that are rounded.

    ``group_size`` weights of a row share one scale.

    Source: Kwon et al. 2022, arXiv:2210.03858; Jacob et al. 2017, arXiv:1712.05877.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["alphatuning", "qat"]
    bits: Literal[4, 8] = 4
    group_size: PositiveInt = Field(default=32, multiple_of=2, le=4096)
