"""Attention in one pass: scores and weighted sums, and the reading of the KV cache."""

from planner.cost.compute import attention_flops
from planner.cost.kv_cache import kv_cache_bytes
from planner.workload.operators import Operation, Part

# An eager cache is read and written anew when a token is appended, then read by attention.
EAGER_KV_PASSES = 3


def attention(run: Operation) -> Part:
    """Cost scores and weighted sums, and the reading of the KV cache."""
    setting, model, layout = run.setting, run.setting.model, run.setting.layout
    flops = run.ledger.term(
        attention_flops,
        setting.line(run.work.group, "Attention: arithmetic", key="attention_flops"),
        num_heads=model.num_attention_heads / layout.tensor,
        head_dim=model.head_dim,
        num_layers=model.num_hidden_layers,
        token_pairs=run.work.token_pairs / model.num_hidden_layers,
    )
    passes = EAGER_KV_PASSES if setting.engine.ops_per_layer else 1
    read = passes * run.ledger.term(
        kv_cache_bytes,
        setting.line(run.work.group, "KV cache that attention reads", key="kv_read"),
        num_kv_heads=model.num_key_value_heads,
        tensor_parallel_size=layout.tensor,
        head_dim=model.head_dim,
        kv_bytes_per_element=setting.kv_element_bytes,
        num_layers=1,
        num_tokens=run.work.read_layer_tokens,
    )
    return run.roofline(("Attention and KV-cache reads", "attention", "attention"), flops, read)
