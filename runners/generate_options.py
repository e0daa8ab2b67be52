"""Where a generation's weights are: on the device, brought in every pass, or kept as they fit."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

Source = Literal["disk", "host_memory"]


class Option(BaseModel):
    """The common ground of all options: frozen, and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerStreaming(Option):
    """Keep the first layers on the device and bring each other one there in every pass.

    With ``layers_from`` disk, as many of those as ``layers_in_host`` wait in host memory instead:
    a policy's three places.
    """

    method: Literal["stream"] = "stream"
    layers_resident: NonNegativeInt = 0
    layers_in_host: NonNegativeInt = 0
    layers_from: Source = "disk"
    look_ahead: bool = True  # read the next layer while one computes


class MappedWeights(Option):
    """Let accelerate place what does not fit below a limit on disk."""

    method: Literal["accelerate"] = "accelerate"
    memory_bytes: PositiveInt  # for the weights


class ExpertCache(Option):
    """Keep the last used experts of each layer on the device and bring the others when asked for.

    ``guessed_experts`` of the next layer, at most, are brought while a layer computes: those that
    its router would choose for what this layer sees. They have room of their own.
    """

    method: Literal["experts"] = "experts"
    experts_resident: PositiveInt = 2  # of each layer
    experts_from: Source = "disk"
    guessed_experts: NonNegativeInt = 2  # 0: none is brought before its layer asks


class TensorSplit(Option):
    """Give each rank a share of every matrix: all of them work on every layer together."""

    method: Literal["tensor"] = "tensor"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class ExpertSplit(Option):
    """Give each rank whole experts of every sparse layer, and a share of all other matrices."""

    method: Literal["expert"] = "expert"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class PipelineSplit(Option):
    """Give each rank a run of layers: one works behind the other."""

    method: Literal["pipeline"] = "pipeline"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class StageChain(Option):
    """Let servers compute, each with a run of layers; when one is lost another takes over.

    On one host all of them are started there, and started again; of several hosts each serves.
    """

    method: Literal["chain"] = "chain"
    stages: int = Field(default=2, ge=1, le=1024)
    spares: int = Field(default=0, ge=0, le=64)  # servers that wait, where all are on one host
    restarts: int = Field(default=3, ge=0, le=1000)  # of a host's servers together
    patience_seconds: float = Field(default=120.0, ge=1.0, le=7200.0)  # for another server
    silence_seconds: float = Field(default=120.0, ge=1.0, le=7200.0)  # then one counts as lost


Split = Annotated[
    TensorSplit | ExpertSplit | PipelineSplit | StageChain, Field(discriminator="method")
]
Offload = Annotated[LayerStreaming | MappedWeights | ExpertCache, Field(discriminator="method")]
