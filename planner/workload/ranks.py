"""How the work is laid out over devices: one layout, or columns of them."""

from dataclasses import dataclass
from functools import cached_property

from planner.cost.columns import maximum, where
from planner.specs.cluster import ClusterSpec, DeviceSpec


@dataclass(frozen=True)
class Layout:
    """How the work is laid out: groups of ranks, micro-batches, what is split over whom.

    Every field may be a column with one value per strategy of a block, ``pipeline`` only of
    inference; the sizes of data, tensor, pipeline, context and attention data multiply to the
    number of devices in use. Inside a replica ``attention_data`` ranks hold attention whole for
    requests of their own and share the experts; ``batch_tokens`` limits a serving step, and
    prompts that are ``chunked`` are cut to it. ``cache_element_bytes`` is 0 where all strategies
    keep their cache in the one format that the strategy says.
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
        """Return how many devices the layout takes."""
        return self.data * self.tensor * self.pipeline * self.context * self.attention_data

    @property
    def expert_group(self) -> float:
        """Return the ranks that hold all experts once: by whole experts, the rest by columns."""
        return maximum(self.tensor * self.attention_data, self.expert)

    @property
    def expert_ranks(self) -> float:
        """Return the ranks that split the experts of a layer in training, or their columns."""
        return maximum(self.tensor, self.expert)

    @property
    def state_ranks(self) -> int:
        """Return the ranks that hold the same weights: they can split the training states."""
        return self.data * self.context * self.attention_data

    @cached_property
    def shard_ranks(self) -> float:
        """Return the ranks that split one copy of the states: all of them unless told."""
        return where(self.shard > 0, self.shard, self.state_ranks)

    @property
    def replicas(self) -> float:
        """Return how many copies of sharded states there are (HSDP); one unless told."""
        return self.state_ranks / self.shard_ranks

    @property
    def sequence_ranks(self) -> float:
        """Return the ranks that split the residual stream between them."""
        return where(self.sequence_parallel, self.tensor, 1)


@dataclass(frozen=True)
class StagePlace:
    """Where a pipeline stage of unlike devices runs, and its link to the next stage.

    ``cluster`` is the stage's devices by themselves: its ranks share a node if they do there.
    """

    device: DeviceSpec
    cluster: ClusterSpec
    inside_node: bool
