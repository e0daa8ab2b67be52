"""The operators of a layer in one pass: matrix products, attention, experts, communication."""

from dataclasses import replace

from planner.catalog.engines import routing_evenness
from planner.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
)
from planner.cost.kv_cache import cache_bytes
from planner.cost.quantity import any_of, where
from planner.cost.roofline import (
    attention_work,
    dispatch_share,
    expert_visits,
    experts_read,
    matmul_flops,
    memory_seconds,
)
from planner.cost.weights import WeightFormat, key_value_share, linear_parameters_per_rank
from planner.workload.offloading import EAGER_KV_PASSES
from planner.workload.operators import Operation, Part, latency_for, link_for
from planner.workload.setting import Setting

# The matrix products of one pass: layers, output head and dequantisation.


def linear(run: Operation) -> Part:
    """Cost the matrix products of all layers, without routed experts."""
    setting, counts, layout = run.setting, run.setting.counts, run.setting.layout
    used = run.ledger.term(
        linear_parameters_per_rank,
        setting.line(run.work.group, "Linear weights that every token visits", key="linear_used"),
        split=counts.query_output + counts.feed_forward,
        key_value=counts.key_value,
        experts=0,
        tensor_parallel_size=layout.tensor,
        kv_share=key_value_share(setting.model, layout.tensor),
        expert_ranks=layout.expert_group,
        replicated=counts.replicated,
    )
    moved = _bytes_read(run, used) * run.work.steps
    return run.matmul("Linear layers", "linear", used, run.work.new_tokens, moved)


def _bytes_read(run: Operation, used: float) -> float:
    """Return the bytes of the weights that every token uses, each part in its format."""
    setting, counts, layout = run.setting, run.setting.counts, run.setting.layout
    attention, dense = setting.format_of("attention"), setting.format_of("feed_forward")
    if attention == dense:
        return used * read_bytes_per_weight(setting, dense)
    attention_weights = run.ledger.term(
        linear_parameters_per_rank,
        setting.line(run.work.group, "Attention weights that the pass reads", key="linear_read"),
        split=counts.query_output,
        key_value=counts.key_value,
        experts=0,
        tensor_parallel_size=layout.tensor,
        kv_share=key_value_share(setting.model, layout.tensor),
        expert_ranks=layout.expert_group,
        replicated=counts.replicated,
    )
    rest = (used - attention_weights) * read_bytes_per_weight(setting, dense)
    return rest + attention_weights * read_bytes_per_weight(setting, attention)


def read_bytes_per_weight(setting: Setting, stored: WeightFormat) -> float:
    """Return the bytes that a product reads per weight: 16 bits after dequantising."""
    if stored.dtype in setting.engine.dequantise_ops:
        return setting.plain_element_bytes
    return stored.element_bytes


def dequantise(run: Operation) -> Part:
    """Cost reading quantised weights and writing them in 16 bits before each product."""
    setting = run.setting
    if setting.weight_dtype not in setting.engine.dequantise_ops:
        return Part(0.0)
    each = setting.weight_element_bytes + setting.plain_element_bytes
    seconds = run.ledger.term(
        memory_seconds,
        setting.line(run.work.group, "Dequantising weights", "memory_bandwidth", "dequantise"),
        moved_bytes=setting.counts.layer_linear / setting.layout.tensor * each,
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=run.rates.stream_efficiency,
    )
    return Part(seconds)


def output_head(run: Operation) -> Part:
    """Cost the output head for the tokens whose logits are needed."""
    model = run.setting.model
    parameters = model.vocab_size * model.hidden_size / run.setting.layout.tensor
    moved = parameters * run.setting.head_element_bytes
    return run.matmul("Output head", "output_head", parameters, run.work.sampled_tokens, moved)


# The routed experts of one pass, costed on the busiest rank.


def experts(run: Operation) -> Part:
    """Cost the products of the routed experts; the busiest rank limits each layer."""
    setting, model, layout = run.setting, run.setting.model, run.setting.layout
    if not model.is_moe:
        return Part(0.0)
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


def attention(run: Operation) -> Part:
    """Cost scores, weighted sums and KV-cache reads."""
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


def communication(run: Operation) -> float:
    """Cost tensor-parallel all-reduces, expert all-to-alls and pipeline sends."""
    setting, layout = run.setting, run.setting.layout
    token_bytes = setting.model.hidden_size * setting.activation_element_bytes
    payload = run.work.new_tokens * token_bytes
    seconds = run.ledger.term(
        all_reduce_seconds,
        run.line("Tensor-parallel all-reduces", "tensor_parallel", "communication"),
        payload_bytes=payload / run.work.steps,
        ranks=layout.tensor,
        link_bytes_per_s=link_for(setting, run.rates, layout.tensor),
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
            link_bytes_per_s=link_for(setting, run.rates, layout.tensor * layout.pipeline),
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
    """Cost dispatching tokens to the ranks of their experts and combining the outputs.

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
        link_bytes_per_s=link_for(setting, run.rates, layout.expert_group),
        latency_s=latency_for(run.rates, _exchanging_ranks(setting)),
        count=model.num_moe_layers * run.work.steps,
    )


def context_exchange(run: Operation) -> float:
    """Cost context-parallel communication: keys and values in prefill, queries in decode.

    Source: Yang et al. 2024, arXiv:2411.01783 (a ring passes keys and values in prefill and
    queries in decode).
    """
    setting, layout, model = run.setting, run.setting.layout, run.setting.model
    if not any_of(layout.context > 1):
        return 0.0
    layers = model.num_hidden_layers
    line = run.line("Context-parallel exchange", "context_exchange", "communication")
    link = link_for(setting, run.rates, layout.tensor * layout.context)
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
