"""One training step: forward, backward, recomputation, bubble, exposed communication, update."""

from dataclasses import dataclass, replace

from planner.cost.activations import operand_width, score_bytes
from planner.cost.columns import maximum, where
from planner.cost.compute import attention_work, layer_pairs, matmul_flops
from planner.cost.dtypes import WIDE, element_bytes
from planner.cost.equation import Ledger
from planner.cost.roofline import compute_seconds, memory_seconds, overhead_seconds
from planner.cost.stages import pace_of
from planner.cost.training_states import STATE_BYTES, zero_shards
from planner.cost.training_step import step_seconds, zero_bubble_divisor
from planner.specs.workload import TrainWorkload
from planner.workload.forward import elementwise_bytes
from planner.workload.outcome import Outcome, performance_of
from planner.workload.setting import Rates, Setting, rates_of
from planner.workload.training_exchange import FULL_SHARDING, GROUP, Exchange, step_line
from planner.workload.training_memory import filled_ratio, micro_batch_bytes, training_memory
from planner.workload.training_methods import (
    ADAPTER_METHODS,
    optimizer_of,
    state_bytes_each,
    trained_parameters,
)
from planner.workload.training_tiers import Traffic, TrainingTiers, anything_away

# Forward is one pass over the weights; backward is one for the inputs and one for the weights,
# of which frozen weights need only the first.
FULL_PASSES, ADAPTER_PASSES = 3, 2
# Softmax and dropout each write their result and read it again.
SCORE_TRIPS = 2
# A norm in single fp32 operators copies, squares, averages, scales, casts and weighs, with 2 or
# 4 bytes each way.
WRITTEN_OUT_NORM_BYTES = 32
# 16-bit tensor cores load 16 bytes at a time; without them products run at about an eighth.
# Source: NVIDIA, matrix multiplication background user's guide, "tensor core requirements".
TENSOR_CORE_ELEMENTS = 8
MISALIGNED_SLOWDOWN = 8.0
SHARDED_GRADIENTS = 2  # the ZeRO stage from which on every micro-batch reduces its gradients
# An eager backward pass issues about twice the operators of the forward pass.
ISSUE_PASSES = 3
# The optimiser reads weight, gradient and states and writes weight and states.
UPDATE_READS_AND_WRITES = 2


@dataclass(frozen=True)
class _MicroBatch:
    """The seconds and FLOP of one micro-batch on one stage, forward and backward."""

    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float
    model_flops: float
    window_s: float  # of arithmetic before any factor: what an exchange can hide behind

    @property
    def total_s(self) -> float:
        return self.compute_s + self.memory_s + self.communication_s + self.overhead_s


def train(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return what one training step costs, and the whole run when its length is given."""
    step = _Step(setting, workload, ledger)
    memory = training_memory(setting, ledger, workload)
    micro = step.beside_tiers(step.micro_batch())
    exposed, update = step.exchange(micro), step.update()
    layout = setting.layout
    count, chunks = layout.micro_batches, step.bubble_chunks
    seconds = ledger.term(
        step_seconds,
        setting.line(GROUP, "Training step", key="step"),
        micro_batches=count,
        stages=step.pace.even_stages,
        micro_batch_s=micro.total_s,
        exposed_s=exposed,
        update_s=update,
        chunks=chunks,
    )
    tokens = workload.global_batch_size * workload.sequence_length * workload.text_ratio
    per_device = micro.model_flops * count / seconds
    by_class = {
        "compute": count * micro.compute_s,
        "memory_bandwidth": count * micro.memory_s + update,
        "communication": count * micro.communication_s + exposed,
        "overhead": count * micro.overhead_s,
    }
    return Outcome(
        memory=memory,
        fits=memory.fits,
        seconds_by_class=by_class,
        phases={GROUP: by_class},
        energy_tokens_per_second=tokens / seconds,
        performance=performance_of(
            tokens_per_second=tokens / seconds,
            tokens_per_second_per_device=tokens / seconds / layout.devices,
            step_seconds=seconds,
            samples_per_second=workload.global_batch_size / seconds,
            model_flops_per_second_per_device=per_device,
            mfu=per_device / step.rates.peak_flops_per_s,
            bubble_ratio=(layout.pipeline - 1) / chunks * micro.total_s * step.evenness / seconds,
            communication_ratio=by_class["communication"] / seconds,
            duration_seconds=workload.tokens / tokens * seconds if workload.tokens else None,
        ),
    )


class _Step:
    """The parts of one step on one device."""

    def __init__(self, setting: Setting, workload: TrainWorkload, ledger: Ledger) -> None:
        self.setting, self.workload, self.ledger = setting, workload, ledger
        self.rates: Rates = rates_of(setting)
        layout = setting.layout
        self.rows = layout.micro_batch * filled_ratio(setting, workload)
        self.tokens = self.rows * workload.sequence_length / layout.context
        # One device does its share of a replica's work: 1 / (tensor x pipeline).
        self.share = layout.tensor * layout.pipeline
        model, counts = setting.model, setting.counts
        self.linear = counts.attention + counts.feed_forward + counts.experts_active
        self.head = model.vocab_size * model.hidden_size
        layers = model.num_hidden_layers
        self.pace = pace_of(layers, layout.pipeline, self.linear / layers, self.head)
        self.layer_share = self.pace.layers / layers
        self.links = Exchange(setting, self.rates, ledger, self.tokens)
        self.tiers = TrainingTiers(setting, ledger)

    @property
    def evenness(self) -> float:
        """Return the mean stage's work as a share of the busiest one's."""
        return self.pace.even_stages / self.setting.layout.pipeline

    @property
    def passes(self) -> int:
        """Return how often the products run per micro-batch, forward and backward."""
        return ADAPTER_PASSES if self.workload.method in ADAPTER_METHODS else FULL_PASSES

    @property
    def recomputed(self) -> int:
        """Return how often the forward pass runs again."""
        return 1 if self.setting.strategy.activation_recomputation == "full" else 0

    @property
    def bubble_chunks(self) -> float:
        """Return by what the schedule divides the pipeline's bubble."""
        if self.setting.strategy.pipeline_schedule != "zero_bubble":
            return self.setting.layout.chunks
        weight_passes = self.passes - ADAPTER_PASSES
        return zero_bubble_divisor(self.passes + self.recomputed, weight_passes)

    def micro_batch(self) -> _MicroBatch:
        """Cost forward and backward of one micro-batch on one device."""
        matmul, attention = self._matmul_flops(), self._attention_flops()
        passes, recomputed = self.passes, self.recomputed
        recomputation = self.setting.strategy.activation_recomputation
        again = 1 if recomputation == "selective" else recomputed
        name = "Forward, backward, recomputation"
        compute = self._compute(name, "matmul", matmul * (passes + recomputed))
        compute = compute + self._compute(
            f"Attention: {name.lower()}",
            "attention",
            attention * (passes + again) * self._misalignment,
        )
        rate = self.rates.peak_flops_per_s * self.rates.compute_efficiency
        work = matmul * (passes + recomputed) + attention * (passes + again)
        memory = self._elementwise(FULL_PASSES + recomputed)
        memory = memory + self._operands(passes + recomputed)
        memory = memory + self._scores(FULL_PASSES + again)
        overhead = self._overhead(compute + memory)
        return _MicroBatch(
            compute,
            memory,
            self.links.micro_batch(attention * (passes + again) / rate),
            overhead,
            (matmul + attention) * passes * self.evenness,
            work / rate,
        )

    def beside_tiers(self, micro: _MicroBatch) -> _MicroBatch:
        """Return a micro-batch with what fetching and storing off the device add to it."""
        setting, layout = self.setting, self.setting.layout
        if not anything_away(setting.offload):
            return micro
        dtype = setting.strategy.gradient_dtype or "bf16"
        gathered = zero_shards(layout.zero_stage, FULL_SHARDING, layout.shard_ranks)
        reduced = zero_shards(layout.zero_stage, SHARDED_GRADIENTS, layout.shard_ranks)
        whole = Traffic(
            weights=setting.counts.total / self.share * setting.weight_element_bytes / gathered,
            gradients=self._trained_per_device() * element_bytes(dtype) / reduced,
            activations=micro_batch_bytes(setting, self.workload),
        )
        forward = 1 / (self.passes + self.recomputed)
        added = self.tiers.micro_batch(micro.total_s, forward, whole)
        return replace(micro, communication_s=micro.communication_s + added)

    @property
    def _misalignment(self) -> float:
        """Return how much slower unfused attention is whose heads tensor cores cannot load.

        Fused kernels pad such heads.
        """
        aligned = self.setting.model.head_dim % TENSOR_CORE_ELEMENTS == 0
        fused = self.setting.strategy.attention != "eager"
        return 1.0 if aligned or fused else MISALIGNED_SLOWDOWN

    def _compute(self, name: str, part: str, flops: float) -> float:
        return self.ledger.term(
            compute_seconds,
            step_line(self.setting, name, part, "compute", "compute"),
            work_flops=flops,
            peak_flops_per_s=self.rates.peak_flops_per_s,
            compute_efficiency=self.rates.compute_efficiency,
        )

    def _matmul_flops(self) -> float:
        """Return the forward FLOP of the matrix products of one micro-batch on one device."""
        held = self.linear * self.layer_share + self.head * self.pace.heads
        return self.ledger.term(
            matmul_flops,
            self.setting.line(GROUP, "Matrix products: forward", key="matmul_flops"),
            parameters=held / self.setting.layout.tensor,
            num_tokens=self.tokens,
        )

    def _attention_flops(self) -> float:
        """Return the forward FLOP of attention; unfused scores are computed for all pairs."""
        model = self.setting.model
        layout = self.setting.layout
        pairs = self.rows * layer_pairs(model, self.workload.sequence_length)
        pairs = pairs * self.layer_share / layout.context
        if self.setting.strategy.attention == "eager" and self.setting.engine.role == "training":
            pairs = pairs * 2
        line = self.setting.line(GROUP, "Attention: forward", key="attention_flops")
        return attention_work(model, pairs, layout.tensor, (self.ledger, line))

    def _elementwise(self, passes: int) -> float:
        layout = self.setting.layout
        moved = elementwise_bytes(self.setting, self.tokens, layout.sequence_ranks)
        moved = (moved + self._written_out_norms()) * self.layer_share
        logits = self.tokens * self.setting.model.vocab_size * self.pace.heads / layout.tensor
        return self.ledger.term(
            memory_seconds,
            step_line(
                self.setting,
                "Norms, activations, residuals, loss",
                "elementwise",
                "memory_bandwidth",
                "elementwise",
            ),
            moved_bytes=(moved + logits * 2 * element_bytes("fp32") + self._unpacked()) * passes,
            memory_bytes_per_s=self.rates.memory_bytes_per_s,
            memory_efficiency=self.rates.stream_efficiency
            * self.setting.engine.training_elementwise_efficiency,
        )

    def _written_out_norms(self) -> float:
        """Return the bytes that norms in single fp32 operators move beyond a fused kernel."""
        setting, model = self.setting, self.setting.model
        if setting.strategy.fused_norms or setting.engine.role != "training":
            return 0.0
        elements = self.tokens * model.hidden_size / setting.layout.sequence_ranks
        norms = model.norms_per_layer * model.num_hidden_layers
        return WRITTEN_OUT_NORM_BYTES * norms * elements

    def _operands(self, passes: int) -> float:
        """Cost what products read and write beside computing: more, the narrower they are."""
        setting, model = self.setting, self.setting.model
        if setting.engine.role != "training":
            return 0.0
        tensor = setting.layout.tensor
        widths = operand_width(model, tensor) * self.pace.layers
        widths = widths + (model.hidden_size + model.vocab_size / tensor) * self.pace.heads
        held = self.linear * self.layer_share + self.head * self.pace.heads
        return self.ledger.term(
            memory_seconds,
            step_line(setting, "Operands of products", "operands", "memory_bandwidth"),
            moved_bytes=(held / tensor + self.tokens * widths) * element_bytes("bf16") * passes,
            memory_bytes_per_s=self.rates.memory_bytes_per_s,
            memory_efficiency=self.rates.stream_efficiency,
        )

    def _scores(self, passes: int) -> float:
        """Cost the scores and probabilities that unfused attention writes and reads again."""
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
        layers = self.pace.layers
        return self.ledger.term(
            memory_seconds,
            step_line(self.setting, "Scores through memory", "scores", "memory_bandwidth"),
            moved_bytes=SCORE_TRIPS * written * layers * passes,
            memory_bytes_per_s=self.rates.memory_bytes_per_s,
            memory_efficiency=self.rates.stream_efficiency,
        )

    def _unpacked(self) -> float:
        """Return the bytes of reading weights and writing them as the products take them.

        Quantised base weights are unpacked; quantisation-aware training rounds wide ones.
        """
        setting = self.setting
        if setting.weight_dtype in WIDE and setting.strategy.quantization != "qat":
            return 0.0
        each = setting.weight_element_bytes + setting.plain_element_bytes
        return setting.counts.layer_linear / self.share * each

    def _overhead(self, work_s: float) -> float:
        engine = self.setting.engine
        issue = self.ledger.term(
            overhead_seconds,
            step_line(self.setting, "Issuing operators", "issue", "overhead"),
            num_layers=self.pace.layers,
            ops_per_layer=engine.ops_per_layer,
            op_overhead_s=self.rates.op_overhead_s,
            layer_overhead_s=engine.layer_overhead_s,
            passes=ISSUE_PASSES,
        )
        runs_ahead = engine.role == "runner" and self.setting.device.kind != "cpu"
        return maximum(0.0, issue - work_s) if runs_ahead else issue

    def _trained_per_device(self) -> float:
        return trained_parameters(self.setting, self.workload) / self.share

    def exchange(self, micro: _MicroBatch) -> float:
        """Cost the exchange of gradients and shards that the backward pass does not hide."""
        setting, layout = self.setting, self.setting.layout
        dtype = setting.strategy.gradient_dtype or "bf16"
        # Whole gradients are reduced once, beside the last micro-batch; shards after each.
        windows = where(layout.zero_stage >= SHARDED_GRADIENTS, layout.micro_batches, 1)
        return self.links.step(
            gradient_bytes=self._trained_per_device() * element_bytes(dtype) / self._rarer,
            weight_bytes=setting.counts.total / self.share * setting.weight_element_bytes,
            window_s=micro.window_s * windows,
        )

    @property
    def _rarer(self) -> float:
        """Return how many times fewer bytes of gradients a compressor and an interval send."""
        strategy = self.setting.strategy
        interval = strategy.synchronization_interval_steps or 1
        return interval * (strategy.gradient_compression_ratio or 1.0)

    def update(self) -> float:
        """Cost the optimiser's reading and writing of weights, gradients and states."""
        setting = self.setting
        shards = zero_shards(setting.layout.zero_stage, 1, setting.layout.shard_ranks)
        parameters = self._trained_per_device() / shards
        gradient = element_bytes(setting.strategy.gradient_dtype or "bf16")
        states = STATE_BYTES[optimizer_of(self.workload)]
        each = UPDATE_READS_AND_WRITES * (states + setting.plain_element_bytes) + gradient
        if setting.offload.optimizer != "none":
            return self.tiers.update(parameters, state_bytes_each(setting, self.workload))
        return self.ledger.term(
            memory_seconds,
            step_line(self.setting, "Optimiser update", "update", "memory_bandwidth", "update"),
            moved_bytes=parameters * each,
            memory_bytes_per_s=self.rates.memory_bytes_per_s,
            memory_efficiency=self.rates.stream_efficiency,
        )
