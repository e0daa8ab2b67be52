"""What an adapter may be told: LoRA as peft has it, and what becomes of it in the end."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

LoraTargets = Literal["all", "query_value"]


class LoraOptions(BaseModel):
    """Train low-rank matrices beside frozen weights: W + (alpha / rank) * B A.

    ``targets`` "all" are all linear layers but the output, "query_value" those that the paper
    adapts. With ``is_merged`` the job also leaves the whole model with the adapter in it.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: PositiveInt = Field(default=8, le=1024)
    alpha: PositiveInt = Field(default=16, le=65_536)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: LoraTargets = "all"
    is_merged: bool = True
