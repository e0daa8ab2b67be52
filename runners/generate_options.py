"""Where a generation's weights are: on the device, brought in every pass, or kept as they fit."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Source = Literal["disk", "host_memory"]
ROUNDING = 1e-9


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


class PolicyOffload(Option):
    """Keep the planner's shares of weights, cache and waiting activations off the device.

    A batch is a block that is worked on in micro-batches: a layer's weights come once for all of
    them (FlexGen's zig-zag schedule). With ``weight_dtype`` int4 the layers' matrices have a scale
    and an offset for each ``group_size`` values of a row; the cache is what ``kv_cache`` says.

    Source: Sheng et al. 2023 (FlexGen), arXiv:2303.06865, sections 4.1 and 5.
    """

    method: Literal["policy"] = "policy"
    weights_cpu: Share = 0.0
    weights_disk: Share = 0.0
    kv_cpu: Share = 0.0
    kv_disk: Share = 0.0
    activations_cpu: Share = 0.0
    micro_batch_size: PositiveInt | None = None  # None: the whole block at once
    group_size: PositiveInt = 64

    @model_validator(mode="after")
    def _shares_of_a_whole(self) -> Self:
        for host, disk in (("weights_cpu", "weights_disk"), ("kv_cpu", "kv_disk")):
            together = getattr(self, host) + getattr(self, disk)
            if together > 1.0 + ROUNDING:
                msg = f"{host} and {disk} are {together:g} together; shares of a whole end at 1"
                raise ValueError(msg)
        return self


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
Offload = Annotated[
    LayerStreaming | MappedWeights | ExpertCache | PolicyOffload, Field(discriminator="method")
]
