"""The parallel layout of a training over its ranks, in the planner's names.

Every size is in ranks. Rank order, from neighbouring to farthest: tensor parallel, context
parallel, copies that shard their states (ZeRO), whole copies, pipeline stages.
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
GradientCompression = Literal["fp16", "bf16", "int8", "powersgd"]
ContextMethod = Literal["gathered", "ring"]
WOVEN = frozenset({"interleaved", "zero_bubble"})
SHARDED_GRADIENTS, SHARDED_WEIGHTS = 2, 3  # the lowest ZeRO stages that shard them
SIZES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)


class LayoutOptions(BaseModel):
    """Parallel sizes and methods of a training; experts are divided among data ranks.

    ``zero_shard_size``: the number of copies that shard their states, by default all; several
    such groups are replicas (hybrid sharding). ``pipeline_layers``: the layers of each stage, from
    the first; by default even.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_parallel_size: PositiveInt = 1
    zero_stage: int = Field(default=0, ge=0, le=3)
    zero_shard_size: PositiveInt | None = None
    tensor_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    context_parallel_size: PositiveInt = 1
    context_method: ContextMethod = "gathered"
    pipeline_parallel_size: PositiveInt = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_pipeline_size: PositiveInt = 1
    pipeline_layers: tuple[PositiveInt, ...] | None = None
    expert_parallel_size: PositiveInt = 1
    gradient_compression: GradientCompression | None = None
    powersgd_rank: PositiveInt = 4
    synchronization_interval_steps: PositiveInt = 1

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the layout."""
        return math.prod(getattr(self, name) for name in SIZES)

    @property
    def shard_copies(self) -> int:
        """Return the number of copies that shard their states."""
        if not self.zero_stage:
            return 1
        return self.zero_shard_size or self.data_parallel_size

    @property
    def num_stages(self) -> int:
        """Return the total number of (virtual) pipeline stages."""
        return self.pipeline_parallel_size * self.virtual_pipeline_size

    @property
    def is_whole_copies(self) -> bool:
        """Return whether every rank holds the whole model and all its states."""
        return not (self.divides_the_model or self.zero_stage)

    @property
    def divides_the_model(self) -> bool:
        """Return whether layers, sequences or experts are divided; ZeRO does not divide them."""
        return self.world_size != self.data_parallel_size or self.expert_parallel_size > 1

    @property
    def is_pipeline_alone(self) -> bool:
        """Return whether the layout is a pipeline only, with one stage per rank."""
        return self.world_size == self.pipeline_parallel_size == self.num_stages > 1

    def restaged(self, count: int) -> "LayoutOptions":
        """Return the same pipeline over ``count`` ranks, with its layers divided evenly.

        Source: Ryabinin et al. 2023 (SWARM), arXiv:2301.11913, section 3.2.
        """
        if count == self.world_size or not self.is_pipeline_alone:
            return self
        return self.model_copy(update={"pipeline_parallel_size": count, "pipeline_layers": None})

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for why in chain(_copies(self), _divisions(self), _exchanges(self)):
            raise ValueError(why)
        return self


def _copies(layout: LayoutOptions) -> Iterator[str]:
    """Yield conflicts of data parallel size with ZeRO, experts and pipelines."""
    copies, experts = layout.data_parallel_size, layout.expert_parallel_size
    if copies % layout.shard_copies:
        yield (
            f"zero_shard_size is {layout.shard_copies}: it must divide data_parallel_size, which "
            f"is {copies}"
        )
    if copies % experts:
        yield (
            f"expert_parallel_size is {experts}: it must divide data_parallel_size, which is "
            f"{copies}"
        )
    if experts > 1 and layout.zero_stage:
        yield (
            f"expert_parallel_size is {experts} and zero_stage {layout.zero_stage}: experts are "
            "divided whole; take zero_stage 0"
        )
    if experts > 1 and layout.tensor_parallel_size > 1:
        yield (
            f"expert_parallel_size is {experts} and tensor_parallel_size "
            f"{layout.tensor_parallel_size}: experts are divided whole; take one of them"
        )
    if layout.zero_stage == SHARDED_GRADIENTS and layout.pipeline_parallel_size > 1:
        yield (
            f"zero_stage is 2 and pipeline_parallel_size {layout.pipeline_parallel_size}: a stage "
            "sums its gradients over all micro-batches first; take zero_stage 1"
        )


def _divisions(layout: LayoutOptions) -> Iterator[str]:
    """Yield conflicts between sequence, context and pipeline options."""
    layers = layout.pipeline_layers or ()
    if layout.sequence_parallel and layout.tensor_parallel_size == 1:
        yield (
            "sequence_parallel divides what tensor parallel leaves whole; take a "
            "tensor_parallel_size above 1, or leave it out"
        )
    if layout.sequence_parallel and layout.context_parallel_size > 1:
        yield "sequence_parallel and context_parallel_size both divide the sequence; take one"
    if layout.virtual_pipeline_size > 1 and layout.pipeline_schedule not in WOVEN:
        yield (
            f"virtual_pipeline_size is {layout.virtual_pipeline_size}, which schedule "
            f"{layout.pipeline_schedule} does not weave; take interleaved or zero_bubble"
        )
    if layout.virtual_pipeline_size > 1 and layout.pipeline_parallel_size == 1:
        yield (
            f"virtual_pipeline_size is {layout.virtual_pipeline_size} on one rank; take a "
            "pipeline_parallel_size above 1, or leave it out"
        )
    if layers and len(layers) != layout.num_stages:
        yield f"pipeline_layers names {len(layers)} stages, but there are {layout.num_stages}"


def _exchanges(layout: LayoutOptions) -> Iterator[str]:
    """Yield conflicts of gradient compression and local steps with the layout."""
    method, interval = layout.gradient_compression, layout.synchronization_interval_steps
    if method is not None and not layout.is_whole_copies:
        yield (
            f"gradient_compression is {method}: it compresses what whole copies exchange; leave "
            "ZeRO, tensor, pipeline, context and expert parallel out"
        )
    if interval > 1 and not layout.is_whole_copies:
        yield (
            f"synchronization_interval_steps is {interval}: whole copies alone may part; leave "
            "ZeRO and the other parallel sizes out"
        )
    if interval > 1 and method is not None:
        yield (
            f"synchronization_interval_steps is {interval}: weights are exchanged and no "
            f"gradients that {method} could compress; leave gradient_compression out"
        )
