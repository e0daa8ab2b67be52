"""Attention in one pass: scores, weighted sums and KV-cache reads."""

from dataclasses import replace

from planner.cost.compute import attention_work
from planner.cost.kv_cache import cache_bytes
from planner.cost.roofline import memory_seconds
from planner.workload.offloading import EAGER_KV_PASSES
from planner.workload.operators import Operation, Part

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
