"""A forward pass: the operators of each layer, their arithmetic, bytes and time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import cast

from planner.catalog.engines import routing_evenness
from planner.cost.column import Varying
from planner.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    paced_time,
    pass_time,
    point_to_point_seconds,
    stage_time,
)
from planner.cost.kv_cache import cache_bytes
from planner.cost.quantity import (
    Equation,
    Ledger,
    Line,
    NullLedger,
    Origin,
    P,
    Quantity,
    any_of,
    largest,
    maximum,
    where,
)
from planner.cost.roofline import (
    attending_seconds,
    attention_work,
    dispatch_share,
    expert_visits,
    experts_read,
    matmul_flops,
    memory_seconds,
    overhead_seconds,
    roofline_seconds,
    scheduling_seconds,
)
from planner.cost.weights import (
    GEMM_SPEEDUP,
    WeightFormat,
    key_value_share,
    linear_parameters_per_rank,
)
from planner.specs.model import ModelSpec
from planner.workload.layouts import StagePlace
from planner.workload.offloading import (
    EAGER_KV_PASSES,
    PassTotals,
    overlap_offload,
    separate_dequantisation,
)
from planner.workload.operators import ForwardPass, Operation, OperatorCost, latency_for
from planner.workload.setting import Setting
from planner.workload.topology import chain_link, exchange_link, hand_over_link

# ---------------------------------------------------------------------------
# The operators of a layer in one pass: matrix products, attention, experts, communication.
# ---------------------------------------------------------------------------


# The matrix products of one pass: layers, output head and dequantisation.


def linear_cost(run: Operation) -> OperatorCost:
    """Return the cost of the matrix products of all layers, without routed experts."""
    counts, title = run.setting.counts, "Linear weights that every token visits"
    split = counts.query_output + counts.feed_forward
    used = _dense_per_rank(run, title, "linear_used", split)
    moved = _bytes_read(run, used) * run.work.steps
    return run.matmul("Linear layers", "linear", used, run.work.new_tokens, moved)


def _dense_per_rank(run: Operation, title: str, key: str, split: float) -> float:
    """Return one rank's weights outside routed experts, ``split`` being cut by tensor ranks."""
    setting, counts, layout = run.setting, run.setting.counts, run.setting.layout
    return run.ledger.term(
        linear_parameters_per_rank,
        setting.line(run.work.group, title, key=key),
        split=split,
        key_value=counts.key_value,
        experts=0,
        tensor_parallel_size=layout.tensor,
        kv_share=key_value_share(setting.model, layout.tensor),
        expert_ranks=layout.expert_group,
        replicated=counts.replicated,
    )


def _bytes_read(run: Operation, weights: float) -> float:
    """Return the bytes of the weights that every token uses, each part in its format."""
    setting = run.setting
    attention, dense = setting.format_of("attention"), setting.format_of("feed_forward")
    if attention == dense:
        return weights * read_bytes_per_weight(setting, dense)
    title, split = "Attention weights that the pass reads", setting.counts.query_output
    attention_weights = _dense_per_rank(run, title, "linear_read", split)
    rest = (weights - attention_weights) * read_bytes_per_weight(setting, dense)
    return rest + attention_weights * read_bytes_per_weight(setting, attention)


def read_bytes_per_weight(setting: Setting, stored: WeightFormat) -> float:
    """Return the bytes that a product reads per weight: 16 bits after dequantising."""
    if stored.dtype in setting.engine.dequantise_ops:
        return setting.plain_element_bytes
    return stored.element_bytes


def dequantisation_cost(run: Operation) -> OperatorCost:
    """Return the cost of dequantising weights to 16 bits before each product."""
    setting = run.setting
    if setting.weight_dtype not in setting.engine.dequantise_ops:
        return OperatorCost(0.0)
    each = setting.weight_element_bytes + setting.plain_element_bytes
    seconds = run.ledger.term(
        memory_seconds,
        setting.line(run.work.group, "Dequantising weights", "memory_bandwidth", "dequantise"),
        moved_bytes=setting.counts.layer_linear / setting.layout.tensor * each,
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=run.rates.stream_efficiency,
    )
    return OperatorCost(seconds)


def output_head_cost(run: Operation) -> OperatorCost:
    """Return the cost of the output head for the tokens whose logits are needed."""
    model = run.setting.model
    parameters = model.vocab_size * model.hidden_size / run.setting.layout.tensor
    moved = parameters * run.setting.head_element_bytes
    return run.matmul("Output head", "output_head", parameters, run.work.sampled_tokens, moved)


# The routed experts of one pass, costed on the busiest rank.


def expert_cost(run: Operation) -> OperatorCost:
    """Return the cost of routed experts; the busiest rank limits each layer."""
    setting, model, layout = run.setting, run.setting.model, run.setting.layout
    if not model.is_moe:
        return OperatorCost(0.0)
    group, steps = run.work.group, run.work.steps
    # Ranks that share one set of whole experts split each by columns.
    visited = setting.counts.experts - setting.counts.experts_of_images
    expert_weights = visited / model.num_experts * layout.expert / layout.expert_group
    visits = run.ledger.term(
        expert_visits,
        setting.line(group, "Expert visits of the busiest rank", key="expert_visits"),
        num_experts=model.num_experts,
        experts_per_token=model.num_experts_per_tok,
        num_tokens=run.work.routed_tokens,
        expert_ranks=layout.expert,
        evenness=routing_evenness(),
    )
    read = run.ledger.term(
        experts_read,
        setting.line(group, "Experts that the busiest rank reads", key="experts_read"),
        num_experts=model.num_experts,
        experts_per_token=model.num_experts_per_tok,
        num_tokens=run.work.routed_tokens / steps,
        expert_ranks=layout.expert,
        evenness=routing_evenness(),
    )
    flops = run.ledger.term(
        matmul_flops,
        setting.line(group, "Experts: arithmetic", key="expert_flops"),
        parameters=expert_weights,
        num_tokens=visits,
    )
    moved = (
        expert_weights
        * read
        * steps
        * read_bytes_per_weight(setting, setting.format_of("experts"))
    )
    part = run.roofline(("Experts", "experts", "experts"), flops, moved)
    return replace(part, moved_bytes=0.0)  # what the busiest rank reads is an expectation


# Attention in one pass: scores, weighted sums and KV-cache reads.


FLOPS_PER_WIDTH = 4  # of a pair and head: one multiply-add for the score, one for the sum


def attention_cost(run: Operation) -> OperatorCost:
    """Return the cost of scores, weighted sums and KV-cache reads of attention."""
    setting, model, layout = run.setting, run.setting.model, run.setting.layout
    line = setting.line(run.work.group, "Attention: arithmetic", key="attention_flops")
    flops = attention_work(
        model, run.work.token_pairs, layout.tensor, (run.ledger, line), absorbed=run.work.absorbed
    )
    passes = EAGER_KV_PASSES if setting.engine.ops_per_layer else 1
    reading = setting.line(run.work.group, "KV cache that attention reads", key="kv_read")
    read = passes * cache_bytes(
        model,
        run.work.read_layer_tokens,
        layout.tensor,
        setting.kv_element_bytes,
        (run.ledger, reading),
    )
    fused = run.roofline(("Attention and KV-cache reads", "attention", "attention"), flops, read)
    if not setting.engine.score_bytes or run.work.absorbed:
        return fused
    written = run.ledger.term(
        memory_seconds,
        run.line("Attention scores in memory", "scores", "memory_bandwidth", "scores"),
        moved_bytes=flops / FLOPS_PER_WIDTH / model.head_dim * setting.engine.score_bytes,
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=run.rates.stream_efficiency,
    )
    return replace(fused, seconds=fused.seconds + written)


# Communication in one pass: all-reduces, expert all-to-alls, pipeline, context ring.


def communication_seconds(run: Operation) -> float:
    """Return the seconds of tensor-parallel all-reduces, expert all-to-alls and pipeline sends."""
    setting, layout = run.setting, run.setting.layout
    token_bytes = setting.model.hidden_size * setting.activation_element_bytes
    payload = run.work.new_tokens * token_bytes
    seconds = run.ledger.term(
        all_reduce_seconds,
        run.line("Tensor-parallel all-reduces", "tensor_parallel", "communication"),
        payload_bytes=payload / run.work.steps,
        ranks=layout.tensor,
        link_bytes_per_s=chain_link(setting, run.rates, layout.tensor),
        latency_s=latency_for(run.rates, layout.tensor),
        count=_num_all_reduces(setting) * run.work.steps,
    )
    if any_of(_exchanging_ranks(setting) > 1):
        seconds = seconds + _expert_exchange(run, token_bytes)
    if any_of(layout.pipeline > 1):
        seconds = seconds + run.ledger.term(
            point_to_point_seconds,
            run.line("Pipeline hand-over", "pipeline", "communication"),
            payload_bytes=payload,
            ranks=layout.pipeline,
            link_bytes_per_s=hand_over_link(setting, run.rates),
            latency_s=run.rates.latency_s,
        )
    return seconds


def _exchanging_ranks(setting: Setting) -> float:
    """Return the ranks with different tokens that share one set of experts."""
    layout = setting.layout
    return layout.expert_group / layout.tensor if setting.model.is_moe else 1


def _num_all_reduces(setting: Setting) -> float:
    """Return the all-reduces of a pass; expert all-to-alls replace those of MoE layers."""
    model = setting.model
    blocks = model.num_blocks
    return where(_exchanging_ranks(setting) > 1, blocks - model.num_moe_layers, blocks)


def _expert_exchange(run: Operation, token_bytes: float) -> float:
    """Return the seconds of dispatching tokens to experts and combining the outputs.

    Ranks of one tensor-parallel group hold the same tokens and send nothing to each other.
    """
    setting, layout, model = run.setting, run.setting.layout, run.setting.model
    share = run.ledger.term(
        dispatch_share,
        setting.line(run.work.group, "Tokens that a group of experts sees", key="dispatch_share"),
        expert_ranks=layout.expert,
        experts_per_token=model.num_experts_per_tok,
    )
    return run.ledger.term(
        all_to_all_seconds,
        run.line("Expert all-to-all", "expert_exchange", "communication"),
        payload_bytes=run.work.routed_tokens / run.work.steps * share * token_bytes,
        ranks=_exchanging_ranks(setting),
        link_bytes_per_s=exchange_link(setting, run.rates, layout.expert_group),
        latency_s=latency_for(run.rates, _exchanging_ranks(setting)),
        count=model.num_moe_layers * run.work.steps,
    )


def context_exchange_seconds(run: Operation) -> float:
    """Return the seconds of context parallelism: keys and values in prefill, queries in decode.

    Source: Yang et al. 2024, arXiv:2411.01783 (a ring passes keys and values in prefill and
    queries in decode).
    """
    setting, layout, model = run.setting, run.setting.layout, run.setting.model
    if not any_of(layout.context > 1):
        return 0.0
    layers = model.num_hidden_layers
    line = run.line("Context-parallel exchange", "context_exchange", "communication")
    link = chain_link(setting, run.rates, layout.tensor * layout.context, layout.tensor)
    if run.work.absorbed:
        width = model.num_attention_heads * model.head_dim / layout.tensor
        return run.ledger.term(
            all_to_all_seconds,
            line,
            payload_bytes=run.work.sequences * width * setting.activation_element_bytes,
            ranks=layout.context,
            link_bytes_per_s=link,
            latency_s=run.rates.latency_s,
            count=layers,
        )
    sent = cache_bytes(
        model,
        run.work.read_layer_tokens / run.work.steps,
        layout.tensor,
        setting.activation_element_bytes,
        (run.ledger, setting.line(run.work.group, "Keys and values on the ring", key="ring")),
    )
    return run.ledger.term(
        all_gather_seconds,
        line,
        payload_bytes=sent / layers,
        ranks=layout.context,
        link_bytes_per_s=link,
        latency_s=run.rates.latency_s,
        count=layers * run.work.steps,
    )


# ---------------------------------------------------------------------------
# One forward pass through the whole model, on one kind of device or on unlike stages.
# ---------------------------------------------------------------------------


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

    def concurrent_passes(self, stages: float) -> float:
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


def homogeneous_pass(setting: Setting, ledger: Ledger, work: ForwardPass) -> PassCost:
    """Return the cost of one forward pass on identical devices, recorded by operator class."""
    run = Operation(setting, setting.rates, ledger, work)
    products = linear_cost(run)
    routed = expert_cost(run)
    head = output_head_cost(run)
    scores = attention_cost(run)
    others = elementwise_cost(run)
    context_s = context_exchange_seconds(run)
    if not work.absorbed:
        # Attention on one block of keys overlaps with the transfer of the next.
        context_s = maximum(0.0, context_s - scores.seconds)
    links = communication_seconds(run) + context_s
    issue, scheduling = host_overhead_seconds(run)
    parts = [
        dequantisation_cost(run),
        separate_dequantisation(run),
        products,
        routed,
        expert_routing_cost(run),
        head,
        scores,
        others,
    ]
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


def excess_over_peaks(run: Operation, parts: Sequence[OperatorCost], seconds: float) -> float:
    """Return the seconds missing from a pass that would exceed the device's published peaks.

    Factors that were fitted on one device may do so on another.
    """
    setting, rates = run.setting, run.rates
    if setting.is_measured:
        return 0.0
    # GeForce cards double the peak of products that are summed up in 16 bits.
    doubled = setting.device.halves_wide_sums and not setting.engine.ggml_kernels
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


def elementwise_cost(run: Operation) -> OperatorCost:
    """Return the cost of the memory-bound operators: norms, RoPE, activations, residuals."""
    name, part = "Norms, activations, residuals", "elementwise"
    seconds = run.ledger.term(
        memory_seconds,
        run.line(name, part, "memory_bandwidth", "elementwise"),
        moved_bytes=elementwise_bytes(run.setting, run.work.new_tokens),
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=run.rates.stream_efficiency,
    )
    return OperatorCost(seconds)


def expert_routing_cost(run: Operation) -> OperatorCost:
    """Return the cost of sorting tokens by expert and summing outputs, if it was fitted."""
    model, layout = run.setting.model, run.setting.layout
    passes = run.setting.routing_passes(run.work.group)
    if not passes or not model.is_moe:
        return OperatorCost(0.0)
    copies = run.work.new_tokens * model.num_moe_layers * model.num_experts_per_tok
    moved = copies * model.hidden_size / layout.tensor * run.setting.activation_element_bytes
    seconds = run.ledger.term(
        memory_seconds,
        run.line("Moving tokens to and from experts", "routing", "memory_bandwidth", "routing"),
        moved_bytes=moved,
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=run.rates.stream_efficiency,
    )
    return OperatorCost(seconds)


def host_overhead_seconds(run: Operation) -> tuple[float, float]:
    """Return the host seconds of a pass: kernel launches, and the scheduling of its steps."""
    engine = run.setting.engine
    unpacking = engine.dequantise_ops.get(run.setting.weight_dtype, 0.0)
    share = _issued_share(run)
    issue = run.ledger.term(
        overhead_seconds,
        run.line("Kernel launches", "issue", "overhead"),
        num_layers=run.setting.model.num_hidden_layers,
        ops_per_layer=engine.ops_per_layer + LINEARS_PER_LAYER * unpacking,
        op_overhead_s=run.rates.op_overhead_s * share,
        layer_overhead_s=engine.layer_overhead_s * share,
        passes=run.work.steps,
    )
    issue += _extra_launches(run, share)
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


def _issued_share(run: Operation) -> float:
    """Return the share of a step's launches that remain where a recorded step is replayed.

    Engines that record steps of one token alone issue those of a batch one by one.
    """
    setting = run.setting
    if run.work.group != "decode" or not setting.replays_single_steps:
        return 1.0
    return where(run.work.sequences <= 1, setting.replayed_share, 1.0)


def _extra_launches(run: Operation, share: float) -> float:
    """Return the seconds of the launches of operators beyond those of a dense layer."""
    engine = run.setting.engine
    further = further_operators(run.setting.model)
    if not further:
        return 0.0
    return run.ledger.term(
        overhead_seconds,
        run.line("Further kernel launches", "further", "overhead"),
        num_layers=further / LAYER_OPERATORS,
        ops_per_layer=engine.ops_per_layer,
        op_overhead_s=run.rates.op_overhead_s * share,
        layer_overhead_s=engine.layer_overhead_s * share,
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


# One forward pass on identical devices or on pipeline stages with different devices.
#
# Each stage runs its share of the layers at the speed of its own devices and sends its output over
# the link to the next node. The ledger records the time of all layers per kind of device and the
# resulting time per stage.


STAGE = Origin("modelled", "of one pass: the layers of a stage at its own devices' pace")


class SuffixedLedger(Ledger):
    """A ledger that writes into another one, with a suffix on the group of every line."""

    def __init__(self, ledger: Ledger, where_to: str) -> None:
        super().__init__()
        self.entries, self.where_to = ledger.entries, where_to

    def term(
        self, formula: Equation[P], line: Line, /, *args: P.args, **kwargs: P.kwargs
    ) -> Varying:
        """Return the result of a formula and record it under the suffixed group."""
        suffixed = replace(line, group=f"{line.group} on {self.where_to}")
        return super().term(formula, suffixed, *args, **kwargs)


def suffixed_ledger(ledger: Ledger, where_to: str) -> Ledger:
    """Return a ledger with suffixed groups, or the same one if it does not record."""
    return SuffixedLedger(ledger, where_to) if ledger.records else ledger


@dataclass(frozen=True)
class StagePass:
    """A pass on one stage: all layers on its devices, the output head and the send to the next."""

    layers: PassCost
    head: PassCost
    hop_s: float

    def of(self, stage_layers: Quantity, num_layers: int, *, is_last: bool) -> PassCost:
        """Return the cost of the stage with ``stage_layers`` of ``num_layers`` layers."""
        own = self.layers.scaled(cast("float", stage_layers / num_layers))
        return own.plus(self.head) if is_last else own.plus(_link_cost(self.hop_s))


def forward_pass(
    setting: Setting, ledger: Ledger, work: ForwardPass, second_pass: ForwardPass | None = None
) -> PassCost:
    """Return the cost of one forward pass, plus the attention of a second one if given."""
    if not setting.places:
        return _with_second_pass(setting, ledger, work, second_pass)
    passes = list(stage_passes(setting, ledger, work, second_pass))
    total, last = setting.model.num_hidden_layers, len(passes) - 1
    parts = [
        stage_pass.of(layers, total, is_last=stage == last)
        for stage, (stage_pass, layers) in enumerate(zip(passes, setting.split, strict=True))
    ]
    if ledger.records:
        _record_stages(setting, ledger, work, passes)
    whole = reduce(PassCost.plus, parts)
    slowest = largest(part.total_s for part in parts)
    even = whole.total_s / slowest
    ledger.term(
        pass_time,
        setting.line(work.group, "All stages in sequence", key="stages"),
        slowest_s=slowest,
        even_stages=even,
    )
    return replace(whole, even_stages=even)


def _record_stages(
    setting: Setting, ledger: Ledger, work: ForwardPass, passes: Sequence[StagePass]
) -> None:
    total, last = setting.model.num_hidden_layers, len(passes) - 1
    for stage, (stage_pass, layers) in enumerate(zip(passes, setting.split, strict=True)):
        title = f"Stage {stage + 1}: {layers} layers on {setting.places[stage].device.id}"
        ledger.term(
            stage_time,
            replace(setting.line(work.group, title, key="stage"), origin=STAGE),
            layers=layers,
            layer_s=stage_pass.layers.total_s / total,
            rest_s=stage_pass.head.total_s if stage == last else stage_pass.hop_s,
        )


def stage_passes(
    setting: Setting, ledger: Ledger, work: ForwardPass, second_pass: ForwardPass | None = None
) -> Iterator[StagePass]:
    """Yield the pass of each stage for all layers; identical stages are costed once."""
    costed: list[tuple[StagePlace, PassCost, PassCost]] = []
    for stage, place in enumerate(setting.places):
        stage_setting = single_stage_setting(setting, place)
        cost = next(((whole, head) for other, whole, head in costed if other == place), None)
        if cost is None:
            # The product with the vocabulary, which only the last stage computes.
            alone_run = Operation(stage_setting, stage_setting.rates, NullLedger(), work)
            head = _cost_of_part(output_head_cost(alone_run))
            whole = _with_second_pass(
                stage_setting, suffixed_ledger(ledger, place.device.id), work, second_pass
            )
            cost = whole.plus(head.scaled(-1.0)), head
            costed.append((place, *cost))
        is_last = stage == len(setting.places) - 1
        yield StagePass(
            *cost,
            0.0 if is_last else _stage_send_seconds(stage_setting, ledger, work, place, stage),
        )


def single_stage_setting(setting: Setting, place: StagePlace) -> Setting:
    """Return the setting of a stage's devices as if they ran all layers."""
    layout = replace(setting.layout, pipeline=1)
    own = replace(setting, device=place.device, cluster=place.cluster, layout=layout)
    return replace(own, places=(), split=())


def _with_second_pass(
    setting: Setting, ledger: Ledger, work: ForwardPass, second_pass: ForwardPass | None
) -> PassCost:
    whole = homogeneous_pass(setting, ledger, work)
    if second_pass is None:
        return whole
    run = Operation(setting, setting.rates, ledger, second_pass)
    return whole.plus(_cost_of_part(attention_cost(run)))


def _cost_of_part(part: OperatorCost) -> PassCost:
    computing = where(part.is_compute, part.seconds, 0.0)
    return PassCost(computing, part.seconds - computing, 0.0, 0.0, part.seconds, part.flops)


def _link_cost(seconds: float) -> PassCost:
    return PassCost(0.0, 0.0, seconds, 0.0, seconds, 0.0)


def _stage_send_seconds(
    setting: Setting, ledger: Ledger, work: ForwardPass, place: StagePlace, stage: int
) -> float:
    """Return the seconds to send a stage's output to the next stage."""
    rates = setting.rates
    line = setting.line(work.group, f"Hand-over to stage {stage + 2}", "communication", "pipeline")
    return ledger.term(
        point_to_point_seconds,
        line,
        payload_bytes=work.new_tokens
        * setting.model.hidden_size
        * setting.activation_element_bytes,
        ranks=2,
        link_bytes_per_s=rates.link_bytes_per_s
        if place.inside_domain
        else rates.inter_node_bytes_per_s,
        latency_s=rates.latency_s,
    )


def wait_for_slowest_stage(
    setting: Setting, ledger: Ledger, cost: PassCost, group: str, in_flight: float
) -> PassCost:
    """Return a pass lengthened by waiting for the slowest stage of the pipeline."""
    if cost.even_stages is None:
        return cost
    seconds = ledger.term(
        paced_time,
        setting.line(group, "From one pass to the next", key="paced"),
        pass_s=cost.total_s,
        in_flight=in_flight,
        even_stages=cost.even_stages,
    )
    return cost.scaled(seconds / cost.total_s)
