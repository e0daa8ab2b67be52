"""Offload and split options of a generation."""

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
    """The base of all options: frozen; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerStreaming(Option):
    """Keep the first layers on the device and load each other layer in every pass.

    With ``layers_from`` disk, ``layers_in_host`` of the others are kept in host memory.
    """

    method: Literal["stream"] = "stream"
    layers_resident: NonNegativeInt = 0
    layers_in_host: NonNegativeInt = 0
    layers_from: Source = "disk"
    look_ahead: bool = True  # prefetch the next layer during computation


class MappedWeights(Option):
    """Offload weights above a memory limit to disk with accelerate."""

    method: Literal["accelerate"] = "accelerate"
    memory_bytes: PositiveInt  # for the weights


class ExpertCache(Option):
    """Cache the most recently used experts per layer on the device; load others on demand.

    At most ``guessed_experts`` of the next layer are prefetched while a layer computes: those that
    its router selects for this layer's inputs. They have separate memory.
    """

    method: Literal["experts"] = "experts"
    experts_resident: PositiveInt = 2  # of each layer
    experts_from: Source = "disk"
    guessed_experts: NonNegativeInt = 2  # 0: no prefetch


class PolicyOffload(Option):
    """Offload the planned shares of weights, KV cache and activations (FlexGen).

    A batch is a block of micro-batches: a layer's weights are loaded once for all of them
    (FlexGen's zig-zag schedule). With ``weight_dtype`` int4 the layers' matrices have a scale and
    an offset per ``group_size`` values of a row; the cache has the ``kv_cache`` dtype.

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
    """Tensor parallelism: each rank has a shard of every matrix."""

    method: Literal["tensor"] = "tensor"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class ExpertSplit(Option):
    """Expert parallelism: each rank has whole experts, and a shard of all other matrices."""

    method: Literal["expert"] = "expert"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class PipelineSplit(Option):
    """Pipeline parallelism: each rank has consecutive layers."""

    method: Literal["pipeline"] = "pipeline"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class StageChain(Option):
    """A chain of stage servers with consecutive layers each; spares replace lost servers.

    A job on one host starts and restarts all of them; of several hosts each runs one server.
    """

    method: Literal["chain"] = "chain"
    stages: int = Field(default=2, ge=1, le=1024)
    spares: int = Field(default=0, ge=0, le=64)  # standby servers, on a single host
    restarts: int = Field(default=3, ge=0, le=1000)  # total per host
    patience_seconds: float = Field(
        default=120.0, ge=1.0, le=7200.0
    )  # timeout for a replacement server
    silence_seconds: float = Field(
        default=120.0, ge=1.0, le=7200.0
    )  # a silent server then counts as lost


Split = Annotated[
    TensorSplit | ExpertSplit | PipelineSplit | StageChain, Field(discriminator="method")
]
Offload = Annotated[
    LayerStreaming | MappedWeights | ExpertCache | PolicyOffload, Field(discriminator="method")
]
