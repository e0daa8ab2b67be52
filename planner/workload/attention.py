"""Attention in one pass: scores and weighted sums, and the reading of the KV cache."""

from planner.cost.compute import attention_work
from planner.cost.kv_cache import cache_bytes
from planner.workload.operators import Operation, Part

# An eager cache is read and written anew when a token is appended, then read by attention.
EAGER_KV_PASSES = 3


def attention(run: Operation) -> Part:
    """Cost scores and weighted sums, and the reading of the KV cache."""
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
    return run.roofline(("Attention and KV-cache reads", "attention", "attention"), flops, read)
