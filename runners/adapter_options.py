"""Adapter options: LoRA as in peft, merging, and quantised training."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

LoraTargets = Literal["all", "query_value"]
BaseDtype = Literal["compute", "nf4"]


class LoraOptions(BaseModel):
    """Train low-rank matrices on top of frozen weights: W + (alpha / rank) * B A.

    ``targets`` "all" are all linear layers except the output, "query_value" those of the paper.
    With ``is_merged`` the job also saves the whole model with the merged adapter. ``base_dtype``
    "nf4" stores the frozen weights in 4 bits (QLoRA); the adapter is merged into the full-width
    weights. ``is_dora`` also trains the magnitude of each weight row (DoRA).

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
    """Train with quantised weights: "alphatuning" only the scales, "qat" the rounded weights.

    ``group_size`` weights of a row share one scale.

    Source: Kwon et al. 2022, arXiv:2210.03858; Jacob et al. 2017, arXiv:1712.05877.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["alphatuning", "qat"]
    bits: Literal[4, 8] = 4
    group_size: PositiveInt = Field(default=32, multiple_of=2, le=4096)
