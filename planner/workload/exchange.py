"""Communication in one pass: all-reduces, expert all-to-alls, pipeline, context ring."""

from planner.cost.columns import any_of, where
from planner.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
)
from planner.cost.experts import dispatch_share
from planner.cost.kv_cache import cache_bytes
from planner.workload.operators import Operation, latency_for, link_for
from planner.workload.setting import Setting


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
