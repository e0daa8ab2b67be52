"""Parallel layouts: one layout, or columns of them."""

from dataclasses import dataclass
from functools import cached_property

from planner.cost.quantity import maximum, where
from planner.specs.cluster import ClusterSpec, DeviceSpec


@dataclass(frozen=True)
class Layout:
    """The parallel sizes, micro-batches and sharding of a strategy.

    Every field may be a column with one value per strategy of a block, ``pipeline`` only for
    inference. The product of data, tensor, pipeline, context and attention data sizes is the
    number of devices in use. In a replica, ``attention_data`` ranks run attention for different
    requests and share the experts. ``batch_tokens`` limits a serving step; ``chunked`` prompts are
    split to it. ``cache_element_bytes`` is 0 if the KV cache has the format of the strategy.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    chunks: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    attention_data: int = 1
    batch_tokens: int = 0
    chunked: bool = False
    cache_element_bytes: float = 0.0
    shard: int = 0

    @property
    def devices(self) -> int:
        """Return the number of devices of the layout."""
        return self.data * self.tensor * self.pipeline * self.context * self.attention_data

    @property
    def expert_group(self) -> float:
        """Return the ranks that hold all experts once, split by expert and then by column."""
        return maximum(self.tensor * self.attention_data, self.expert)

    @property
    def expert_ranks(self) -> float:
        """Return the ranks that split the experts of a layer in training."""
        return maximum(self.tensor, self.expert)

    @property
    def state_ranks(self) -> int:
        """Return the ranks with the same weights, which can shard the training states."""
        return self.data * self.context * self.attention_data

    @cached_property
    def shard_ranks(self) -> float:
        """Return the ranks that shard one copy of the states, by default all state ranks."""
        return where(self.shard > 0, self.shard, self.state_ranks)

    @property
    def replicas(self) -> float:
        """Return the number of copies of the sharded states (HSDP), by default 1."""
        return self.state_ranks / self.shard_ranks

    @property
    def sequence_ranks(self) -> float:
        """Return the number of ranks that split the residual stream."""
        return where(self.sequence_parallel, self.tensor, 1)


@dataclass(frozen=True)
class StagePlace:
    """The device of one stage of a heterogeneous pipeline and its link to the next stage.

    ``cluster`` contains only the stage's devices and states whether they share a node.
    """

    device: DeviceSpec
    cluster: ClusterSpec
    inside_node: bool
