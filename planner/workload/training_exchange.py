"""Kernels and exchanges of a training step."""

from dataclasses import dataclass, replace

from planner.cost.communication import (
    Pace,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    pace_of,
    point_to_point_seconds,
    ring_seconds,
)
from planner.cost.quantity import (
    Ledger,
    Line,
    PerLayerGroup,
    Quantity,
    any_of,
    maximum,
    minimum,
    where,
)
from planner.cost.roofline import (
    attention_work,
    block_pairs,
    compute_seconds,
    matmul_flops,
    memory_seconds,
    pairs_by_layer_group,
)
from planner.cost.training import (
    every_second_product_share,
    exposed_seconds,
    lora_widths,
    operand_elements_per_token,
    rounds_seconds,
    score_bytes,
    tax_seconds,
)
from planner.cost.weights import WIDE, element_bytes
from planner.specs.base import OperatorClass
from planner.specs.model import LayerGroup, RecurrentLayers
from planner.specs.workload import TrainWorkload
from planner.workload.forward import elementwise_bytes
from planner.workload.preference import NO_FORWARDS, Forwards
from planner.workload.setting import Rates, Setting, compute_dtype_of, emulates_narrow_products
from planner.workload.topology import (
    chain_link,
    devices_in_domain,
    exchange_link,
    hand_over_link,
    lies_in_domain,
    ring_link,
)
from planner.workload.torchao_casts import (
    cast_seconds,
    casts_by_torchao,
    keeps_codes,
    narrow_share,
    recomputed_products,
)
from planner.workload.training_memory import ADAPTER_METHODS, adapts_every_matrix, rows_per_record

# ---------------------------------------------------------------------------
# Communication of a training step: within each micro-batch and once per step.
# ---------------------------------------------------------------------------


# Communication of the runner's data-parallel copies that share one processor's cores.
#
# Collectives through shared memory use the cores of the computation, so they do not overlap with
# it, and each collective waits until every rank has run on a core.


# Passes around the ring per step: 2 for all-reduce, 1 for all-gather. The gloo backend reduces
# whole gradients even if each rank keeps only its shard.
# Source: torch 2.13, ProcessGroupGloo; runners/jobs/train/layout_states.py.
SUM_PASSES, GATHER_PASSES = 2, 1
BUCKET_BYTES = 32 * 2**20  # of Slipway's runner; DistributedDataParallel's default is 25 MiB
# Sharded weights are gathered for the forward and again for the backward pass.
GATHERS = 2


def replica_exchange_seconds(
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
# The ring sends keys and values forward, and these and their gradients backward.
RING_PASSES = 3
SENDS = 2  # of a pipeline stage: activations forward, gradients backward
# The slowdown of computation that overlaps communication, as a share of the communication.
PROCESSOR_TAX = 0.05


def step_line(
    setting: Setting, name: str, part: str, operator_class: OperatorClass, key: str = ""
) -> Line:
    """Return the ledger line of a term, with the factor fitted on published runs."""
    line = setting.line(GROUP, name, operator_class, key)
    return replace(line, factor=line.factor * setting.training_factor(part))


@dataclass(frozen=True)
class ShardTraffic:
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
        forwards: int = 0,
    ) -> None:
        """Take the tokens of a micro-batch; ``forwards`` gather sharded weights once more each."""
        self.forwards = forwards
        self.setting, self.rates, self.ledger, self.tokens = setting, rates, ledger, tokens
        # The number of equal parts of the layers of which a stage has one.
        self.parts = setting.layout.pipeline if parts is None else parts

    def micro_batch_seconds(self, attention_s: float, recomputed: float) -> float:
        """Return the communication seconds of a micro-batch, forward and backward, on one device.

        They are those of tensor, expert, context and pipeline parallelism. The context-parallel
        ring overlaps with ``attention_s``; each of the ``recomputed`` forward passes repeats
        the communication of the first.
        """
        setting, layout = self.setting, self.setting.layout
        payload = self.tokens * setting.model.hidden_size * setting.activation_element_bytes
        seconds = self._tensor_parallel(payload, REDUCES_PER_BLOCK + recomputed)
        if any_of(layout.expert > 1):
            seconds = seconds + self._experts(payload, EXPERT_EXCHANGES + recomputed)
        if any_of(layout.context > 1):
            seconds = seconds + self._ring(attention_s)
        if layout.pipeline > 1:
            seconds = seconds + self._pipeline_sends(payload)
        return seconds

    def forward_seconds(self, attention_s: float, forwards: int) -> float:
        """Return the communication seconds of the forwards without gradients of a micro-batch."""
        setting, layout = self.setting, self.setting.layout
        payload = self.tokens * setting.model.hidden_size * setting.activation_element_bytes
        seconds = self._tensor_parallel(payload, forwards)
        if any_of(layout.expert > 1):
            seconds = seconds + self._experts(payload, forwards)
        if any_of(layout.context > 1):
            seconds = seconds + self._ring(attention_s, forwards)
        if layout.pipeline > 1:
            seconds = seconds + self._pipeline_sends(payload, forwards)
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
        """Return the seconds of the expert all-to-alls, forward and backward."""
        setting, layout, model = self.setting, self.setting.layout, self.setting.model
        return self.ledger.term(
            all_to_all_seconds,
            step_line(setting, "Expert all-to-all", "expert_exchange", "communication"),
            payload_bytes=payload_bytes * model.num_experts_per_tok / layout.tensor,
            ranks=layout.expert,
            link_bytes_per_s=exchange_link(setting, self.rates, layout.expert),
            latency_s=self.rates.latency_s,
            count=passes * model.num_moe_layers / self.parts,
        )

    def _ring(self, attention_s: float, passes: int = RING_PASSES) -> float:
        """Return the seconds of the context-parallel ring that does not overlap with attention."""
        setting, layout, model = self.setting, self.setting.layout, self.setting.model
        heads = maximum(model.num_key_value_heads / layout.tensor, 1.0)
        links = self.ledger.term(
            point_to_point_seconds,
            setting.line(GROUP, "Keys and values around the ring", "communication"),
            payload_bytes=2 * heads * model.head_dim * self.tokens * element_bytes("bf16"),
            ranks=layout.context,
            link_bytes_per_s=chain_link(
                setting, self.rates, layout.tensor * layout.context, layout.tensor
            ),
            latency_s=self.rates.latency_s,
            count=passes * model.num_hidden_layers / self.parts,
        )
        return self.ledger.term(
            exposed_seconds,
            step_line(setting, "Exposed ring communication", "exchange", "communication"),
            links_s=links,
            window_s=attention_s,
            tax_ratio=PROCESSOR_TAX,
        )

    def _pipeline_sends(self, payload_bytes: float, passes: int = SENDS) -> float:
        """Return the seconds of pipeline sends of activations and gradients, once per chunk."""
        setting, layout = self.setting, self.setting.layout
        return self.ledger.term(
            point_to_point_seconds,
            step_line(setting, "Pipeline hand-over", "pipeline", "communication"),
            payload_bytes=payload_bytes,
            ranks=2,
            link_bytes_per_s=hand_over_link(setting, self.rates),
            latency_s=self.rates.hop_latency_s,
            count=passes * layout.chunks,
        )

    def step_seconds(self, dense: ShardTraffic, experts: ShardTraffic, window_s: float) -> float:
        """Return the seconds of gradient and weight-shard communication per step.

        Only what ``window_s`` of computation cannot hide counts. ``dense`` and ``experts`` are the
        bytes of the two groups of ranks, which shard them differently.
        """
        layout = self.setting.layout
        if self.setting.on_shared_processor:
            line = step_line(self.setting, "Exchange between copies", "exchange", "communication")
            shared = dense.gradient_bytes + experts.gradient_bytes
            return replica_exchange_seconds(self.setting, self.rates, self.ledger, line, shared)
        # Without replicas of shards (HSDP), the group spans all ranks of a stage.
        span = where(layout.shard > 0, layout.tensor * layout.shard_ranks, layout.devices)
        stride = layout.tensor * layout.context
        links = self._group_seconds(dense, layout.shard_ranks, span, stride)
        rounds = self._rounds(dense, layout.shard_ranks, span)
        if any_of(experts.weight_bytes > 0):
            ranks = maximum(1.0, layout.devices / layout.pipeline / layout.expert_ranks)
            strides = layout.expert_ranks
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
        rounds = self.ledger.term(
            rounds_seconds,
            step_line(self.setting, "Rounds of rings", "rounds", "communication"),
            rounds_s=rounds,
        )
        return rounds + self._exposed(links, OVERLAP * BACKWARD_SHARE * window_s)

    def _group_seconds(
        self, shards: ShardTraffic, ranks: float, span: float, stride: float
    ) -> float:
        """Return the seconds of gradient reduction and weight gathering in a group of ranks."""
        layout = self.setting.layout
        link = ring_link(self.setting, self.rates, span, stride, layout.pipeline)
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
                count=(GATHERS + self.forwards) * layout.micro_batches,
            )
        return links

    def _rounds(self, shards: ShardTraffic, ranks: float, span: float) -> float:
        """Return the latency seconds of the ring steps of all buckets.

        Whole gradients are reduced over trees, in few rounds.
        """
        layout, inside = self.setting.layout, devices_in_domain(self.setting)
        is_inside = lies_in_domain(self.setting, span)
        nodes = where(is_inside, 1.0, minimum(ranks, span / inside))
        hops = (
            2 * (ranks - nodes) * HOP_INSIDE_S + 2 * where(nodes > 1, nodes, 0.0) * HOP_BETWEEN_S
        )
        sharded = layout.zero_stage >= SHARDED_GRADIENTS
        engine = self.setting.engine
        filled = maximum(engine.bucket_bytes, engine.bucket_bytes_per_rank * ranks)
        bucket = where(sharded, LAYER_BYTES, filled)
        buckets = maximum(1.0, shards.gradient_bytes / bucket)
        return where(ranks > 1, hops, 0.0) * where(layout.zero_stage > 0, buckets, 1.0)

    def gathered_forward_seconds(
        self, forwards: Forwards, weight_bytes: float, window_s: float
    ) -> float:
        """Return the seconds of gathering sharded weights in a micro-batch's forward passes.

        ``weight_bytes`` are the whole weights of a device's stage, ``window_s`` the computation
        of these passes.
        """
        layout = self.setting.layout
        gathered = layout.zero_stage >= FULL_SHARDING
        if not any_of(gathered):
            return 0.0
        span = where(layout.shard > 0, layout.tensor * layout.shard_ranks, layout.devices)
        name = f"{forwards.title}: gathering weight shards"
        links = self.ledger.term(
            all_gather_seconds,
            self.setting.line(GROUP, name, "communication"),
            payload_bytes=weight_bytes,
            ranks=where(gathered, layout.shard_ranks, 1),
            link_bytes_per_s=ring_link(
                self.setting, self.rates, span, layout.tensor * layout.context
            ),
            latency_s=self.rates.latency_s,
            count=forwards.number,
        )
        title = f"{forwards.title}: gathering that work does not hide"
        return self.ledger.term(
            exposed_seconds,
            step_line(self.setting, title, "exchange", "communication"),
            links_s=links,
            window_s=OVERLAP * window_s,
            tax_ratio=PROCESSOR_TAX,
        )

    def _exposed(self, links_s: float, window_s: float) -> float:
        """Return the seconds of exposed communication and of slowed overlapping computation."""
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
        """Return the seconds of reducing gradients in a shard group, then between replicas."""
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
                    setting,
                    self.rates,
                    layout.devices,
                    layout.tensor * layout.shard_ranks,
                    layout.pipeline,
                ),
                latency_s=self.rates.latency_s,
            )
        return seconds


# ---------------------------------------------------------------------------
# The kernels of one training micro-batch on one device: matrix products, attention, others.
# ---------------------------------------------------------------------------


# One forward pass and two backward passes, for input and weight gradients; frozen weights need
# only the input gradients.
FULL_PASSES, ADAPTER_PASSES = 3, 2
# Softmax writes its result and reads it again; as single operators it also masks, casts to fp32
# and back.
SCORE_TRIPS, SINGLE_SCORE_TRIPS = 2, 4
# FlashAttention-2 trains about 1.7 times as fast as the first version on an A100.
# Source: Dao 2023, arXiv:2307.08691, figure 4.
FLASH_1_SLOWDOWN = 1.7
# FlexAttention's default mask has blocks of 128 queries and 128 keys.
FLEX_BLOCK_TOKENS = 128
# A norm in single fp32 operators copies, squares, averages, scales, casts and multiplies, with 2
# or 4 bytes each way.
WRITTEN_OUT_NORM_BYTES = 32
# 16-bit tensor cores load 16 bytes at a time; without them products run at about an eighth.
# Source: NVIDIA, matrix multiplication background user's guide, "tensor core requirements".
TENSOR_CORE_ELEMENTS = 8
MISALIGNED_SLOWDOWN = 8.0
# A narrow product reads 16 bits and writes its format, plain and transposed for the backward pass.
CAST_BYTES = 4
# Bytes per element of an emulated operand in nine operators: magnitudes written (2 + 2) and read
# (2), cast up (2 + 4), scaled (8), clipped (8), cast down (5), and for the product cast up (5) and
# scaled back (8); the same for the weights' four bytes. A product's result is cast down again,
# half of it per operand (6 / 2).
# Source: torchao 0.18, float8_training_tensor.py, float8_utils.py, float8_ops.py.
ROUNDING_BYTES = 49
ROUNDINGS = 2
# On two cores with 66 GB/s, the operators take 2.5 ns per element, 1.7 of it for casting e4m3 up;
# 49 bytes alone would take 0.74. The demo's step is predicted at 2.3 times that of bf16. On two
# cores of an AMD EPYC it measured 2.3 times, and 2.5 times with other load on the host.
ROUNDING_EFFICIENCY = 0.3
# Sorting tokens by expert copies them to the experts and back, in both directions.
SORTING_TRIPS = 4
# An adapter applies dropout, reads its input, writes its output and adds it to the product.
# Without dropout: 2 bytes of the input, 8 of the output, which are about as wide.
ADAPTER_BYTES, PLAIN_ADAPTER_BYTES = 8, 5
ALL_PASSES = ": forward, backward, recomputation"


@dataclass(frozen=True)
class Arithmetic:
    """Calibrated seconds, uncalibrated seconds, and FLOP without recomputation."""

    seconds: float
    window_s: float
    model_flops: float


class Kernels:
    """The kernels of one micro-batch on one device, recorded in the ledger."""

    def __init__(
        self,
        setting: Setting,
        workload: TrainWorkload,
        ledger: Ledger,
        rates: Rates,
        pace: Pace | None = None,
        forwards: Forwards = NO_FORWARDS,
    ) -> None:
        """Take the work of a micro-batch, or with ``forwards`` that of these passes alone."""
        self.setting, self.workload, self.ledger, self.rates = setting, workload, ledger, rates
        self.forwards, self._title = forwards
        layout = setting.layout
        self.rows = layout.micro_batch * rows_per_record(setting, workload)
        self.tokens = self.rows * workload.sequence_length / layout.context
        model, counts = setting.model, setting.counts
        self.dense = counts.attention_weights + counts.feed_forward
        linear = self.dense + counts.experts_active
        self.head = model.output_width * model.hidden_size
        layers = model.num_hidden_layers
        self.pace = pace or pace_of(
            layers, layout.pipeline, linear / layers, self.head, layout.chunks
        )
        self.layer_share = self.pace.layers / layers

    @property
    def passes(self) -> int:
        """Return the passes of matrix products per micro-batch, without recomputation."""
        if self.forwards:
            return self.forwards
        return ADAPTER_PASSES if self.workload.method in ADAPTER_METHODS else FULL_PASSES

    @property
    def recomputed(self) -> float:
        """Return the number of recomputed forward passes of the layers' products."""
        if self.forwards:
            return 0
        how = self.setting.strategy.activation_recomputation
        if how == "selective" and self.setting.keeps_every_second_product:
            return every_second_product_share(self.setting.model)
        return 1 if how == "full" else 0

    @property
    def narrow_recomputed(self) -> float:
        """Return the recomputed forward passes of the products that run in a narrow format."""
        if self.forwards or not self.recomputed or not keeps_codes(self.setting):
            return self.recomputed
        is_selective = self.setting.strategy.activation_recomputation == "selective"
        return recomputed_products(self.setting.model) if is_selective else self.recomputed

    @property
    def _recomputed_elementwise(self) -> int:
        """Return the number of recomputed passes of operators other than matrix products."""
        if self.forwards:
            return 0
        how = self.setting.strategy.activation_recomputation
        engine = self.setting.engine
        keeps_products = engine.counted_by_operator or self.setting.keeps_every_second_product
        return 1 if how == "full" or (how == "selective" and keeps_products) else 0

    @property
    def is_narrow(self) -> bool:
        """Return whether the products of the layers run in eight bits or fewer."""
        return compute_dtype_of(self.setting) not in WIDE

    def products(self) -> Arithmetic:
        """Return the cost of matrix products: layers, routed experts and output head.

        Narrow formats apply to the layers, but for the last ones of some engines; the output head
        keeps 16 bits. TorchAO calls cuBLAS for narrow products as PyTorch does for wide ones, and
        its documentation says up to twice the speed: they reach the same share of the chip's rate.
        """
        rates, passes = self.rates, self.passes + self.recomputed
        share = narrow_share(self.setting) if self.is_narrow else 1.0
        experts = self.setting.counts.experts_active * self.layer_share
        part, routed = "matmul", "experts"
        if self.is_narrow and not casts_by_torchao(self.setting):
            routed = "experts_narrow"
            is_byte = element_bytes(compute_dtype_of(self.setting)) >= 1
            part = "matmul_8bit" if is_byte else "matmul_4bit"
        head = self.head * self.pace.heads
        tiled = any(self.setting.engine.logprob_tile) and self.workload.objective != "orpo"
        again = 1 if tiled and not self.forwards else 0  # of each tile, in the backward pass
        narrow = (rates.peak_flops_per_s, rates.compute_efficiency)
        wide = (rates.wide_peak_flops_per_s, rates.wide_efficiency)
        dense, first = self.dense * self.layer_share, self.passes + self.narrow_recomputed
        work = [
            ("Matrix products", part, dense * share, first, narrow),
            ("Products of experts", routed, experts * share, first, narrow),
            ("Matrix products of the last layers", "matmul", dense * (1 - share), passes, wide),
            ("Products of the last experts", "experts", experts * (1 - share), passes, wide),
            ("Products with the vocabulary", "matmul", head, self.passes + again, wide),
        ]
        seconds = window_s = model_flops = 0.0
        for name, own, weights, count, rate in work:
            if not any_of(weights != 0):
                continue
            flops = self.ledger.term(
                matmul_flops,
                self._line(f"{name}: forward", "matmul_flops"),
                parameters=weights / self.setting.layout.tensor,
                num_tokens=self.tokens,
            )
            seconds = seconds + self._compute(name, own, flops * count, rate)
            window_s = window_s + flops * count / (rate[0] * rate[1])
            model_flops = model_flops + flops * self.passes
        return Arithmetic(seconds, window_s, model_flops)

    def attention_flops(self) -> Arithmetic:
        """Return the cost of 16-bit attention; unfused kernels compute non-causal pairs too."""
        setting, model, layout = self.setting, self.setting.model, self.setting.layout
        pairs = self.rows * self._row_pairs()
        pairs = pairs * self.layer_share / layout.context
        unfused = setting.strategy.attention == "eager"
        if unfused and setting.engine.role == "training":
            pairs = pairs * 2
        line = self._line("Attention: forward", "attention_flops")
        flops = attention_work(model, pairs, layout.tensor, (self.ledger, line))
        how = setting.strategy.activation_recomputation
        keeps_core = how == "selective" and setting.keeps_every_second_product
        again = 0 if how == "none" or keeps_core or self.forwards else 1
        rate = (self.rates.wide_peak_flops_per_s, self.rates.wide_efficiency)
        count = self.passes + again
        part = "attention_unfused" if unfused else "attention"
        seconds = self._compute("Attention", part, flops * count * self._attention_slowdown, rate)
        return Arithmetic(seconds, flops * count / (rate[0] * rate[1]), flops * self.passes)

    def _row_pairs(self) -> PerLayerGroup:
        """Return the token pairs of one row: all causal ones, or those in unmasked blocks.

        Sliding-window layers compute the window, rounded up to a block on either side.
        """
        setting, row = self.setting, self.workload.sequence_length
        plain = pairs_by_layer_group(setting.model, row)
        if setting.strategy.attention != "flex":
            return plain
        documents = self.workload.document_tokens if setting.strategy.packed else None
        needed = self.ledger.term(
            block_pairs,
            setting.line(GROUP, "Pairs in the blocks of a row", key="block_pairs"),
            row_tokens=row,
            document_tokens=minimum(documents or row, row),
            block_tokens=FLEX_BLOCK_TOKENS,
        )
        groups = zip(setting.model.layers_by_attention, plain.values, strict=True)
        return PerLayerGroup(
            tuple(_in_blocks(group, pairs, needed, row) for group, pairs in groups)
        )

    @property
    def _attention_slowdown(self) -> float:
        """Return the slowdown of attention relative to the engine's current kernel.

        Tensor cores need aligned head sizes; fused kernels pad them.
        """
        strategy = self.setting.strategy
        if strategy.attention_kernel == "flash_1":
            return FLASH_1_SLOWDOWN
        aligned = self.setting.model.head_dim % TENSOR_CORE_ELEMENTS == 0
        return 1.0 if aligned or strategy.attention != "eager" else MISALIGNED_SLOWDOWN

    def _line(self, name: str, key: str) -> Line:
        return self.setting.line(GROUP, self._named(name), key=key)

    def _named(self, name: str) -> str:
        """Return the name of a term, with the pass that it is of if that is not the policy's."""
        return f"{self._title}: {name}" if self.forwards else name

    def _compute(self, name: str, part: str, flops: float, rate: tuple[float, float]) -> float:
        name = self._named(name) if self.forwards else f"{name}{ALL_PASSES}"
        return self.ledger.term(
            compute_seconds,
            step_line(self.setting, name, part, "compute", "compute"),
            work_flops=flops,
            peak_flops_per_s=rate[0],
            compute_efficiency=rate[1],
        )

    def _memory(self, name: str, part: str, moved_bytes: Quantity, share: float = 1.0) -> float:
        return self.ledger.term(
            memory_seconds,
            step_line(self.setting, self._named(name), part, "memory_bandwidth", part),
            moved_bytes=moved_bytes,
            memory_bytes_per_s=self.rates.memory_bytes_per_s,
            memory_efficiency=self.rates.stream_efficiency * share,
        )

    def elementwise_seconds(self) -> float:
        """Return the seconds of norms, activations, residuals, loss, adapters, expert sorting."""
        setting, layout = self.setting, self.setting.layout
        passes = self._all_passes + self._recomputed_elementwise
        moved = elementwise_bytes(setting, self.tokens, layout.sequence_ranks)
        moved = moved + self._unfused_norm_bytes() + self._adapter_bytes()
        layers = (moved * self.layer_share + self._dequantised_bytes()) * passes
        logits = self.tokens * setting.model.output_width * self.pace.heads / layout.tensor
        logits = logits * 2 * element_bytes("fp32") * self._all_passes
        seconds = self._memory(
            "Norms, activations, residuals, loss",
            "elementwise",
            layers + logits,
            setting.engine.training_elementwise_efficiency,
        )
        return seconds + self._sorting_seconds()

    @property
    def _all_passes(self) -> int:
        """Return the passes of operators that train no weights, without recomputation."""
        return self.forwards or FULL_PASSES

    def _unfused_norm_bytes(self) -> float:
        """Return the extra bytes that norms as single fp32 operators move per forward pass."""
        setting, model = self.setting, self.setting.model
        if setting.strategy.fused_norms or setting.engine.role != "training":
            return 0.0
        elements = self.tokens * model.hidden_size / setting.layout.sequence_ranks
        norms = model.norms_per_layer * model.num_hidden_layers
        return WRITTEN_OUT_NORM_BYTES * norms * elements

    def _adapter_bytes(self) -> float:
        """Return the bytes that adapters move in one forward pass."""
        setting, model = self.setting, self.setting.model
        if self.workload.method not in {"lora", "qlora"} or self.forwards:
            return 0.0  # a reference has the adapters switched off
        widths = lora_widths(model, every=adapts_every_matrix(setting, self.workload))
        layers = model.num_hidden_layers
        each = ADAPTER_BYTES if setting.engine.adapter_dropout else PLAIN_ADAPTER_BYTES
        return each * self.tokens * widths * layers / setting.layout.tensor

    def _sorting_seconds(self) -> float:
        """Return the seconds of copying the tokens in expert order and back."""
        model, layout = self.setting.model, self.setting.layout
        if not model.is_moe:
            return 0.0
        each = model.num_experts_per_tok * model.hidden_size * element_bytes("bf16")
        layers = model.num_moe_layers * self.layer_share
        trips = self.forwards * SORTING_TRIPS / 2 or SORTING_TRIPS
        copied = 2 * trips * self.tokens * each * layers / layout.tensor
        return self._memory("Sorting tokens by expert", "sorting", copied)

    def operand_seconds(self) -> float:
        """Return the seconds of the memory traffic of the operands of matrix products."""
        setting, model = self.setting, self.setting.model
        if setting.engine.role != "training":
            return 0.0
        tensor, passes = setting.layout.tensor, self.passes + self.recomputed
        widths = operand_elements_per_token(model, tensor) * self.pace.layers
        head = (model.hidden_size + model.output_width / tensor) * self.pace.heads
        dense_weights = self.dense * self.layer_share + self.head * self.pace.heads
        experts = setting.counts.experts * self.layer_share / setting.layout.expert_ranks
        moved = dense_weights / tensor + experts + self.tokens * (widths + head)
        return self._memory(
            "Operands of products", "operands", moved * element_bytes("bf16") * passes
        )

    def cast_seconds(self) -> float:
        """Return the seconds of casting the operands of narrow products, plain and transposed."""
        if not self.is_narrow or self.setting.engine.role != "training":
            return 0.0
        if casts_by_torchao(self.setting) and not self.forwards:
            share, tensor = narrow_share(self.setting), self.setting.layout.tensor
            return cast_seconds(
                self.setting,
                self.ledger,
                self.tokens * self.pace.layers * share,
                self.dense * self.layer_share * share / tensor,
                self.narrow_recomputed,
            )
        widths = (
            operand_elements_per_token(self.setting.model, self.setting.layout.tensor)
            * self.pace.layers
        )
        passes = self.forwards / 2 or 1 + self.recomputed / 2
        moved = CAST_BYTES * self.tokens * widths * passes
        return self._memory("Casting to narrow formats", "casts", moved)

    def rounding_seconds(self) -> float:
        """Return the seconds of rounding the operands of emulated 8-bit products.

        Inputs, weights and output gradients are each rounded in two of the three products of a
        matrix; recomputation rounds inputs and weights once more.
        """
        setting = self.setting
        computed = compute_dtype_of(setting)
        if not emulates_narrow_products(setting.engine, setting.device, computed):
            return 0.0
        widths = lora_widths(setting.model) * self.pace.layers
        operands = self.tokens * widths + self.dense * self.layer_share
        passes = self.forwards / 3 or 1 + self.recomputed / 3
        moved = ROUNDING_BYTES * ROUNDINGS * operands * passes
        name = "Rounding operands to 8-bit floats"
        return self._memory(name, "rounding", moved, ROUNDING_EFFICIENCY)

    def score_seconds(self) -> float:
        """Return the seconds of moving scores and probabilities in unfused attention."""
        setting = self.setting
        if setting.strategy.attention != "eager" or setting.engine.role != "training":
            return 0.0
        written = score_bytes(
            num_heads=setting.model.num_attention_heads,
            tensor_parallel_size=setting.layout.tensor,
            num_tokens=self.tokens,
            sequence_length=self.workload.sequence_length,
            bytes_per_element=setting.activation_element_bytes,
        )
        keeps = self.forwards or setting.strategy.activation_recomputation == "none"
        again = 0 if keeps else 1
        single = setting.strategy.attention_kernel == "single_operators"
        trips = (SINGLE_SCORE_TRIPS if single else SCORE_TRIPS) * (self._all_passes + again)
        return self._memory("Scores through memory", "scores", trips * written * self.pace.layers)

    def _dequantised_bytes(self) -> float:
        """Return the bytes to read weights and write them in the format of the products.

        Quantised base weights are dequantised; quantisation-aware training rounds wide ones.
        """
        setting = self.setting
        if setting.weight_dtype in WIDE and setting.strategy.quantization != "qat":
            return 0.0
        each = setting.weight_element_bytes + setting.plain_element_bytes
        layout = setting.layout
        return setting.counts.layer_linear / (layout.tensor * layout.pipeline) * each


def _in_blocks(
    group: LayerGroup, pairs: Quantity, block_pairs_of_row: Quantity, row: Quantity
) -> Quantity:
    """Return the token pairs of a layer group in blocks within its mask and window."""
    if isinstance(group, RecurrentLayers):
        return pairs
    return minimum(
        group.count * block_pairs_of_row, pairs + group.count * 2 * FLEX_BLOCK_TOKENS * row
    )
