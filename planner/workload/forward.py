"""One forward pass through the whole model: the operators of a prefill or of a decode step.

Each operator class is costed by its roofline, then communication and overheads are added. In a
pipeline, the pass runs through the stages in sequence; ``planner.workload.staged`` covers stages
with different devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.columns import any_of, maximum, where
from planner.cost.equation import Ledger
from planner.cost.roofline import (
    attending_seconds,
    memory_seconds,
    overhead_seconds,
    roofline_seconds,
    scheduling_seconds,
)
from planner.cost.sparsity import GEMM_SPEEDUP
from planner.specs.model import ModelSpec
from planner.workload.attention import attention
from planner.workload.exchange import communication, context_exchange
from planner.workload.linear import dequantise, linear, output_head
from planner.workload.mixture import experts
from planner.workload.offloading import PassTotals, overlap_offload, unpack
from planner.workload.operators import Operation, Part, Pass
from planner.workload.setting import Setting

# Fused operators of a dense layer: two norms, query-key-value, rotation, cache write, attention,
# output, gate and up, activation, down, sums. A mixture adds router, top-k, sorting, combining,
# and gate and up, activation, down of shared experts. Latent attention adds the query's and the
# latent's two projections and norms, and two absorbed products; an index its projections, scores,
# top-k; a recurrence its convolution, gates, state update and norm.
LAYER_OPERATORS = 12
ROUTING_OPERATORS, SHARED_OPERATORS = 4, 3
MIXER_OPERATORS = {"latent": 6, "index": 4, "recurrent": 4}
LINEARS_PER_LAYER = 7  # query, key, value, output and three feed-forward matrices
# Elements per token and layer that operators other than matrix products move: eager kernels write
# every intermediate result, fused ones only block boundaries.
EAGER_HIDDEN_PASSES, EAGER_FFN_PASSES = 24, 5
FUSED_HIDDEN_PASSES, FUSED_FFN_PASSES = 8, 3


@dataclass(frozen=True)
class PassCost:
    """The seconds of one forward pass by operator class.

    ``even_stages`` is the total time divided by that of the slowest stage, for pipelines with
    different stages.
    """

    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float
    total_s: float
    flops: float
    even_stages: float | None = None

    def turns(self, stages: float) -> float:
        """Return the number of passes that the pipeline stages process in parallel."""
        return stages if self.even_stages is None else self.even_stages

    def scaled(self, ratio: float) -> "PassCost":
        """Return the pass multiplied by a ratio."""
        return PassCost(
            compute_s=self.compute_s * ratio,
            memory_s=self.memory_s * ratio,
            communication_s=self.communication_s * ratio,
            overhead_s=self.overhead_s * ratio,
            total_s=self.total_s * ratio,
            flops=self.flops * ratio,
            even_stages=self.even_stages,
        )

    def plus(self, other: "PassCost") -> "PassCost":
        """Return the sum of two passes."""
        return PassCost(
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
            communication_s=self.communication_s + other.communication_s,
            overhead_s=self.overhead_s + other.overhead_s,
            total_s=self.total_s + other.total_s,
            flops=self.flops + other.flops,
            even_stages=self.even_stages,
        )

    @property
    def by_class(self) -> dict[str, float]:
        """Return the seconds by operator class."""
        return {
            "compute": self.compute_s,
            "memory_bandwidth": self.memory_s,
            "communication": self.communication_s,
            "overhead": self.overhead_s,
        }


def whole_pass(setting: Setting, ledger: Ledger, work: Pass) -> PassCost:
    """Return the cost of one forward pass on identical devices, recorded by operator class."""
    run = Operation(setting, setting.rates, ledger, work)
    products = linear(run)
    routed = experts(run)
    head = output_head(run)
    scores = attention(run)
    others = elementwise(run)
    context_s = context_exchange(run)
    if not work.absorbed:
        # Attention on one block of keys overlaps with the transfer of the next.
        context_s = maximum(0.0, context_s - scores.seconds)
    links = communication(run) + context_s
    issue, scheduling = overhead(run)
    parts = [dequantise(run), unpack(run), products, routed, moving(run), head, scores, others]
    seconds = sum(part.seconds for part in parts)
    beyond = excess_over_peaks(run, parts, seconds)
    seconds = seconds + beyond
    if setting.engine.ops_per_layer and setting.device.kind != "cpu":
        # Kernels are issued ahead: only the excess over the device time counts.
        issue = maximum(0.0, issue - seconds)
    compute = sum(where(part.is_compute, part.seconds, 0.0) for part in parts)
    compute = compute + where(compute > seconds / 2, beyond, 0.0)
    device = PassTotals(compute, seconds - compute, links, issue + scheduling)
    whole = overlap_offload(run, device)
    return PassCost(
        compute_s=whole.compute_s,
        memory_s=whole.memory_s,
        communication_s=whole.communication_s,
        overhead_s=whole.overhead_s,
        total_s=seconds + links + (issue + scheduling) if whole is device else whole.total_s,
        flops=work.batches * sum(part.flops for part in parts),
    )


def excess_over_peaks(run: Operation, parts: Sequence[Part], seconds: float) -> float:
    """Return the seconds missing from a pass that would exceed the device's published peaks.

    Factors that were fitted on one device may do so on another.
    """
    setting, rates = run.setting, run.rates
    if setting.is_measured:
        return 0.0
    # GeForce cards double the peak of products that are summed up in 16 bits.
    doubled = setting.device.halves_wide_sums and not setting.engine.sums_in_16_bits
    peak = rates.peak_flops_per_s * (2 if doubled else 1)
    if setting.skips_zeros:
        peak *= GEMM_SPEEDUP
    flops, moved = sum(part.flops for part in parts), sum(part.moved_bytes for part in parts)
    if not any_of(maximum(flops / peak, moved / rates.memory_bytes_per_s) > seconds):
        return 0.0
    least = run.ledger.term(
        roofline_seconds,
        setting.line(run.work.group, "The whole pass at the device's peaks", key="peaks"),
        work_flops=flops,
        peak_flops_per_s=peak,
        compute_efficiency=1.0,
        moved_bytes=moved,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        memory_efficiency=1.0,
    )
    return maximum(0.0, least - seconds)


def elementwise(run: Operation) -> Part:
    """Cost norms, rotary embeddings, activations and residuals, which are memory-bound."""
    name, part = "Norms, activations, residuals", "elementwise"
    seconds = run.ledger.term(
        memory_seconds,
        run.line(name, part, "memory_bandwidth", "elementwise"),
        moved_bytes=elementwise_bytes(run.setting, run.work.new_tokens),
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=run.rates.stream_efficiency,
    )
    return Part(seconds)


def moving(run: Operation) -> Part:
    """Cost sorting tokens by expert and summing the outputs, if fitted on published tables."""
    model, layout = run.setting.model, run.setting.layout
    passes = run.setting.routing_passes(run.work.group)
    if not passes or not model.is_moe:
        return Part(0.0)
    copies = run.work.new_tokens * model.num_moe_layers * model.num_experts_per_tok
    moved = copies * model.hidden_size / layout.tensor * run.setting.activation_element_bytes
    seconds = run.ledger.term(
        memory_seconds,
        run.line("Moving tokens to and from experts", "routing", "memory_bandwidth", "routing"),
        moved_bytes=moved,
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=run.rates.stream_efficiency,
    )
    return Part(seconds)


def overhead(run: Operation) -> tuple[float, float]:
    """Cost kernel launches and the scheduling of the step."""
    engine = run.setting.engine
    unpacking = engine.dequantise_ops.get(run.setting.weight_dtype, 0.0)
    issue = run.ledger.term(
        overhead_seconds,
        run.line("Kernel launches", "issue", "overhead"),
        num_layers=run.setting.model.num_hidden_layers,
        ops_per_layer=engine.ops_per_layer + LINEARS_PER_LAYER * unpacking,
        op_overhead_s=run.rates.op_overhead_s,
        layer_overhead_s=engine.layer_overhead_s,
        passes=run.work.steps,
    )
    issue += _extra_launches(run)
    if not engine.step_overhead_s and not engine.request_overhead_s:
        return issue, 0.0
    scheduling = run.ledger.term(
        scheduling_seconds,
        run.line("Scheduling the step", "scheduling", "overhead"),
        steps=run.work.steps,
        step_overhead_s=engine.step_overhead_s,
    )
    return issue, scheduling + run.ledger.term(
        attending_seconds,
        run.line("Per-request overhead", "requests", "overhead"),
        requests=run.work.sequences,
        request_overhead_s=engine.request_overhead_s,
    )


def _extra_launches(run: Operation) -> float:
    """Cost the launches of operators beyond those of a dense layer."""
    engine = run.setting.engine
    further = further_operators(run.setting.model)
    if not further:
        return 0.0
    return run.ledger.term(
        overhead_seconds,
        run.line("Further kernel launches", "further", "overhead"),
        num_layers=further / LAYER_OPERATORS,
        ops_per_layer=engine.ops_per_layer,
        op_overhead_s=run.rates.op_overhead_s,
        layer_overhead_s=engine.layer_overhead_s,
        passes=run.work.steps,
    )


def further_operators(model: ModelSpec) -> int:
    """Return the number of operators of all layers beyond those of dense ones."""
    mixture = ROUTING_OPERATORS + (SHARED_OPERATORS if model.num_shared_experts else 0)
    mixers = sum(
        group.count * MIXER_OPERATORS.get(group.kind, 0) for group in model.layers_by_attention
    )
    return model.num_moe_layers * mixture + mixers


def elementwise_bytes(setting: Setting, tokens: float, sequence_ranks: float = 1) -> float:
    """Return the bytes that operators other than matrix products move in one forward pass.

    Sequence parallelism splits the residual stream over ``sequence_ranks``.
    """
    model, tensor = setting.model, setting.layout.tensor
    eager = setting.engine.ops_per_layer > 0
    hidden_passes = EAGER_HIDDEN_PASSES if eager else FUSED_HIDDEN_PASSES
    ffn_passes = EAGER_FFN_PASSES if eager else FUSED_FFN_PASSES
    width = model.moe_intermediate_size * model.num_experts_per_tok or model.intermediate_size
    elements = hidden_passes * model.hidden_size / sequence_ranks + ffn_passes * width / tensor
    return tokens * model.num_hidden_layers * elements * setting.activation_element_bytes
