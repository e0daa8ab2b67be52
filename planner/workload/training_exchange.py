"""Communication of a training step: within each micro-batch and once per step."""

from dataclasses import dataclass, replace

from planner.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
    ring_seconds,
)
from planner.cost.quantity import Ledger, Line, any_of, maximum, minimum, where
from planner.cost.training import exposed_seconds, rounds_seconds, tax_seconds
from planner.cost.weights import element_bytes
from planner.specs.base import OperatorClass
from planner.workload.operators import link_for
from planner.workload.rates import Rates
from planner.workload.setting import Setting

# Communication of the runner's data-parallel copies that share one processor's cores.
#
# Collectives through shared memory use the cores of the computation, so they do not overlap with
# it, and each collective waits until every rank has run on a core.


# Passes around the ring per step: 2 for all-reduce, 1 for all-gather. The gloo backend reduces
# whole gradients even if each rank keeps only its shard.
# Source: torch 2.13, ProcessGroupGloo; runners/jobs/train/layouts/states.py.
SUM_PASSES, GATHER_PASSES = 2, 1
BUCKET_BYTES = 32 * 2**20  # of Slipway's runner; DistributedDataParallel's default is 25 MiB
GATHERS = 2  # of sharded weights: forward and backward


def copies_seconds(
    setting: Setting, rates: Rates, ledger: Ledger, line: Line, gradient_bytes: float
) -> float:
    """Return the seconds to reduce gradients and gather weights between copies of a model.

    Assumes fp32 weights as wide as their gradients, and replicas of shards as one ring.
    """
    layout = setting.layout
    stage, micro_batches = layout.zero_stage, layout.micro_batches
    buckets = maximum(1.0, gradient_bytes / BUCKET_BYTES)
    layers = (
        setting.model.num_hidden_layers / layout.pipeline + 1
    )  # plus weights outside the layers
    once = where(stage >= SHARDED_GRADIENTS, micro_batches, 1.0)
    gathered = where(stage >= FULL_SHARDING, GATHERS * micro_batches, where(stage > 0, 1.0, 0.0))
    groups = where(stage >= FULL_SHARDING, layers, buckets)
    return ledger.term(
        ring_seconds,
        line,
        payload_bytes=gradient_bytes,
        ranks=layout.state_ranks,
        link_bytes_per_s=rates.link_bytes_per_s,
        latency_s=rates.latency_s,
        ring_passes=SUM_PASSES * once + GATHER_PASSES * gathered,
        starts=groups * (once + gathered),
    )


GROUP = "train_step"
# All-reduces of tensor parallelism per block: one forward and one backward.
REDUCES_PER_BLOCK = 2
# The share of a data-parallel exchange that the backward pass hides.
OVERLAP = 0.8
BACKWARD_SHARE = 2 / 3
# Shards travel layer by layer, whole gradients in the buckets of the engine.
LAYER_BYTES = 200e6
# Latency of one step of a ring over NVLink and over a network.
# Source: NCCL 2.x src/graph/tuning.cc, hwLat of rings with the simple protocol.
HOP_INSIDE_S, HOP_BETWEEN_S = 4e-6, 14e-6
SHARDED_GRADIENTS = 2  # from this ZeRO stage, every micro-batch reduces its gradients
FULL_SHARDING = 3  # the ZeRO stage that also shards the weights
# Dispatch and combine, once forward and once backward.
EXPERT_EXCHANGES = 2
# Sharded weights are gathered for the forward and again for the backward pass.
GATHERS = 2
# The ring sends keys and values forward, and these and their gradients backward.
RING_PASSES = 3
# The slowdown of computation that overlaps communication, as a share of the communication.
PROCESSOR_TAX = 0.05


def step_line(
    setting: Setting, name: str, part: str, operator_class: OperatorClass, key: str = ""
) -> Line:
    """Return the ledger line of a term, with the factor fitted on published runs."""
    line = setting.line(GROUP, name, operator_class, key)
    return replace(line, factor=line.factor * setting.training_factor(part))


def ring_link(setting: Setting, rates: Rates, span: float, stride: float) -> float:
    """Return the bandwidth of a ring over every ``stride``-th of ``span`` devices.

    A ring enters and leaves a node once, over the network ports of all its members there.
    """
    per_node = setting.cluster.devices_per_node
    members = maximum(1.0, per_node / stride)
    across = minimum(rates.link_bytes_per_s, rates.inter_node_bytes_per_s * members)
    return where(span <= per_node, rates.link_bytes_per_s, across)


@dataclass(frozen=True)
class Shards:
    """Bytes per step of a group of ranks: gradients to reduce and weights to gather."""

    gradient_bytes: float
    weight_bytes: float


class Exchange:
    """The communication of one step on one device, recorded in the ledger."""

    def __init__(
        self,
        setting: Setting,
        rates: Rates,
        ledger: Ledger,
        tokens: float,
        parts: float | None = None,
    ) -> None:
        self.setting, self.rates, self.ledger, self.tokens = setting, rates, ledger, tokens
        # The number of equal parts of the layers of which a stage has one.
        self.parts = setting.layout.pipeline if parts is None else parts

    def micro_batch(self, attention_s: float, recomputed: float) -> float:
        """Cost the communication of one micro-batch; the ring overlaps with ``attention_s``.

        Recomputed layers repeat the communication of their forward pass.
        """
        setting, layout = self.setting, self.setting.layout
        payload = self.tokens * setting.model.hidden_size * setting.activation_element_bytes
        seconds = self._tensor_parallel(payload, REDUCES_PER_BLOCK + recomputed)
        if any_of(layout.expert > 1):
            seconds = seconds + self._experts(payload, EXPERT_EXCHANGES + recomputed)
        if any_of(layout.context > 1):
            seconds = seconds + self._ring(attention_s)
        if layout.pipeline > 1:
            seconds = seconds + self._hand_over(payload)
        return seconds

    def _tensor_parallel(self, payload_bytes: float, passes: float) -> float:
        setting, layout = self.setting, self.setting.layout
        return self.ledger.term(
            all_reduce_seconds,
            step_line(setting, "Tensor-parallel all-reduces", "tensor_parallel", "communication"),
            payload_bytes=payload_bytes,
            ranks=layout.tensor,
            link_bytes_per_s=ring_link(setting, self.rates, layout.tensor, 1.0),
            latency_s=self.rates.latency_s,
            count=passes * setting.model.num_blocks / self.parts,
        )

    def _experts(self, payload_bytes: float, passes: float) -> float:
        """Cost the expert all-to-alls, forward and backward."""
        setting, layout, model = self.setting, self.setting.layout, self.setting.model
        return self.ledger.term(
            all_to_all_seconds,
            step_line(setting, "Expert all-to-all", "expert_exchange", "communication"),
            payload_bytes=payload_bytes * model.num_experts_per_tok / layout.tensor,
            ranks=layout.expert,
            link_bytes_per_s=link_for(setting, self.rates, layout.expert),
            latency_s=self.rates.latency_s,
            count=passes * model.num_moe_layers / self.parts,
        )

    def _ring(self, attention_s: float) -> float:
        """Cost the context-parallel ring that does not overlap with attention."""
        setting, layout, model = self.setting, self.setting.layout, self.setting.model
        heads = maximum(model.num_key_value_heads / layout.tensor, 1.0)
        links = self.ledger.term(
            point_to_point_seconds,
            setting.line(GROUP, "Keys and values around the ring", "communication"),
            payload_bytes=2 * heads * model.head_dim * self.tokens * element_bytes("bf16"),
            ranks=layout.context,
            link_bytes_per_s=link_for(setting, self.rates, layout.tensor * layout.context),
            latency_s=self.rates.latency_s,
            count=RING_PASSES * model.num_hidden_layers / self.parts,
        )
        return self.ledger.term(
            exposed_seconds,
            step_line(setting, "Exposed ring communication", "exchange", "communication"),
            links_s=links,
            window_s=attention_s,
            tax_ratio=PROCESSOR_TAX,
        )

    def _hand_over(self, payload_bytes: float) -> float:
        """Cost the pipeline sends of activations and gradients, once per chunk of a stage."""
        setting, layout = self.setting, self.setting.layout
        return self.ledger.term(
            point_to_point_seconds,
            step_line(setting, "Pipeline hand-over", "pipeline", "communication"),
            payload_bytes=payload_bytes,
            ranks=2,
            link_bytes_per_s=link_for(setting, self.rates, layout.tensor * layout.pipeline),
            latency_s=self.rates.hop_latency_s,
            count=2 * layout.chunks,
        )

    def step(self, dense: Shards, experts: Shards, window_s: float) -> float:
        """Cost the gradient and shard communication that does not overlap with ``window_s``."""
        layout = self.setting.layout
        if self.setting.on_shared_processor:
            line = step_line(self.setting, "Exchange between copies", "exchange", "communication")
            shared = dense.gradient_bytes + experts.gradient_bytes
            return copies_seconds(self.setting, self.rates, self.ledger, line, shared)
        # Without replicas of shards (HSDP), the group spans all ranks of a stage.
        span = where(layout.shard > 0, layout.tensor * layout.shard_ranks, layout.devices)
        stride = layout.tensor * layout.context
        links = self._group_seconds(dense, layout.shard_ranks, span, stride)
        rounds = self._rounds(dense, layout.shard_ranks, span)
        if any_of(experts.weight_bytes > 0):
            ranks = maximum(1.0, layout.devices / layout.pipeline / layout.expert_ranks)
            strides = self.setting.layout.expert_ranks
            links = links + self._group_seconds(experts, ranks, layout.devices, strides)
            rounds = rounds + self._rounds(experts, ranks, layout.devices)
        if not any_of(links > 0):
            return 0.0
        # Shards exchanged in every micro-batch overlap with its computation, layer by layer.
        overlaps = layout.zero_stage >= SHARDED_GRADIENTS
        links = links + where(overlaps, rounds, 0.0)
        rounds = where(overlaps, 0.0, rounds)
        # A pipeline reduces whole gradients after its last micro-batch.
        window_s = window_s if layout.pipeline == 1 else where(overlaps, window_s, 0.0)
        return self._ring_rounds(rounds) + self._exposed(
            links, OVERLAP * BACKWARD_SHARE * window_s
        )

    def _group_seconds(self, shards: Shards, ranks: float, span: float, stride: float) -> float:
        """Cost the gradient reduction and weight gathering of a group of ranks."""
        layout = self.setting.layout
        link = ring_link(self.setting, self.rates, span, stride)
        links = self._gradients(shards.gradient_bytes, ranks, link)
        gathered = layout.zero_stage >= FULL_SHARDING
        if any_of(gathered):
            links = links + self.ledger.term(
                all_gather_seconds,
                self.setting.line(GROUP, "Gathering weight shards", "communication"),
                payload_bytes=shards.weight_bytes,
                ranks=where(gathered, ranks, 1),
                link_bytes_per_s=link,
                latency_s=self.rates.latency_s,
                count=GATHERS * layout.micro_batches,
            )
        return links

    def _rounds(self, shards: Shards, ranks: float, span: float) -> float:
        """Return the latency seconds of the ring steps of all buckets.

        Whole gradients are reduced over trees, in few rounds.
        """
        layout, per_node = self.setting.layout, self.setting.cluster.devices_per_node
        nodes = where(span <= per_node, 1.0, minimum(ranks, span / per_node))
        hops = (
            2 * (ranks - nodes) * HOP_INSIDE_S + 2 * where(nodes > 1, nodes, 0.0) * HOP_BETWEEN_S
        )
        sharded = layout.zero_stage >= SHARDED_GRADIENTS
        engine = self.setting.engine
        filled = maximum(engine.bucket_bytes, engine.bucket_bytes_per_rank * ranks)
        bucket = where(sharded, LAYER_BYTES, filled)
        buckets = maximum(1.0, shards.gradient_bytes / bucket)
        return where(ranks > 1, hops, 0.0) * where(layout.zero_stage > 0, buckets, 1.0)

    def _ring_rounds(self, rounds_s: float) -> float:
        """Cost the ring steps of whole gradients, after the last micro-batch."""
        return self.ledger.term(
            rounds_seconds,
            step_line(self.setting, "Rounds of rings", "rounds", "communication"),
            rounds_s=rounds_s,
        )

    def _exposed(self, links_s: float, window_s: float) -> float:
        """Cost the exposed part of an exchange and the slowdown of overlapping computation."""
        line = step_line(
            self.setting, "Exchange that work does not hide", "exchange", "communication"
        )
        exposed = self.ledger.term(
            exposed_seconds, line, links_s=links_s, window_s=window_s, tax_ratio=0.0
        )
        return exposed + self.ledger.term(
            tax_seconds,
            step_line(self.setting, "Work that an exchange slows", "hidden", "communication"),
            links_s=links_s,
            window_s=window_s,
            tax_ratio=PROCESSOR_TAX,
        )

    def _gradients(self, gradient_bytes: float, ranks: float, link: float) -> float:
        """Cost the gradient reduction within a shard group, then between replicas."""
        setting, layout = self.setting, self.setting.layout
        seconds = self.ledger.term(
            all_reduce_seconds,
            setting.line(GROUP, "Data-parallel communication", "communication"),
            payload_bytes=gradient_bytes,
            ranks=ranks,
            link_bytes_per_s=link,
            latency_s=self.rates.latency_s,
        )
        if any_of(layout.replicas > 1):
            seconds = seconds + self.ledger.term(
                all_reduce_seconds,
                setting.line(GROUP, "Exchange between replicas", "communication"),
                payload_bytes=gradient_bytes / layout.shard_ranks,
                ranks=layout.replicas,
                link_bytes_per_s=ring_link(
                    setting, self.rates, layout.devices, layout.tensor * layout.shard_ranks
                ),
                latency_s=self.rates.latency_s,
            )
        return seconds
