"""Convert a model's shape to Megatron-LM arguments: widths, attention, experts."""

from planner.exports.export import Notes
from planner.specs.layers import LatentLayers
from planner.specs.model import ModelSpec


def pairs(*flags: tuple[str, object]) -> list[str]:
    """Return flags with a value as words; None values are skipped."""
    return [word for flag, value in flags if value is not None for word in (flag, str(value))]


def shape_arguments(shape: ModelSpec, sequence_length: int) -> list[str]:
    """Return the model's shape; the vocabulary comes from the tokenizer.

    Megatron-LM rejects sequences longer than its position limit even for rotary embeddings, so the
    limit is raised to the sequence length.
    """
    return [
        *_widths(shape, sequence_length),
        *_attention(shape),
        *_blocks(shape),
        *_experts(shape),
    ]


def _widths(shape: ModelSpec, sequence_length: int) -> list[str]:
    positions = shape.learned_positions or shape.max_position_embeddings
    return pairs(
        ("--num-layers", shape.num_hidden_layers),
        ("--hidden-size", shape.hidden_size),
        ("--ffn-hidden-size", shape.intermediate_size or shape.moe_intermediate_size),
        ("--num-attention-heads", shape.num_attention_heads),
        ("--max-position-embeddings", max(positions, sequence_length)),
        ("--normalization", "RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm"),
        ("--position-embedding-type", "learned_absolute" if shape.learned_positions else "rope"),
    )


def _blocks(shape: ModelSpec) -> list[str]:
    flags = {
        "--swiglu": shape.gated_mlp,
        "--untie-embeddings-and-output-weights": not shape.tie_word_embeddings,
        "--disable-bias-linear": not shape.mlp_bias,
    }
    return [flag for flag, applies in flags.items() if applies]


def _latent(shape: ModelSpec) -> LatentLayers | None:
    """Return the layers of a model that uses latent attention in every layer, or None."""
    groups = [group for group in shape.layers_by_attention if group.kind != "index"]
    first = groups[0]
    return first if len(groups) == 1 and isinstance(first, LatentLayers) else None


def _attention(shape: ModelSpec) -> list[str]:
    """Return the attention arguments; latent attention has its own widths and latent norms.

    Source: Megatron-LM d98e8a6, megatron/training/arguments.py (``_add_mla_args``).
    """
    latent = _latent(shape)
    if latent:
        return [
            "--multi-latent-attention",
            *pairs(
                ("--q-lora-rank", latent.q_lora_rank),
                ("--kv-lora-rank", latent.kv_lora_rank),
                ("--qk-head-dim", latent.qk_nope_head_dim),
                ("--qk-pos-emb-head-dim", latent.qk_rope_head_dim),
                ("--v-head-dim", latent.v_head_dim),
            ),
            "--qk-layernorm",
        ]
    flags = pairs(("--kv-channels", shape.head_dim))
    if shape.num_key_value_heads != shape.num_attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(shape.num_key_value_heads)]
    flags += ["--add-qkv-bias"] if shape.attention_bias and not shape.mlp_bias else []
    return [*flags, *(["--qk-layernorm"] if shape.qk_norm else [])]


def _experts(shape: ModelSpec) -> list[str]:
    if not shape.is_moe:
        return []
    flags = pairs(
        ("--num-experts", shape.num_experts),
        ("--moe-router-topk", shape.num_experts_per_tok),
        ("--moe-ffn-hidden-size", shape.moe_intermediate_size),
        ("--moe-token-dispatcher-type", "alltoall"),
    )
    if shape.num_dense_layers:  # in published mixtures the dense layers come first
        flags += ["--moe-layer-freq", f"([0]*{shape.num_dense_layers}+[1]*{shape.num_moe_layers})"]
    if shape.num_shared_experts:
        width = str(shape.shared_intermediate_size)
        flags += ["--moe-shared-expert-intermediate-size", width]
        flags += ["--moe-shared-expert-gate"] if shape.shared_expert_gate else []
    return [*flags, "--moe-grouped-gemm"]


def shape_notes(shape: ModelSpec) -> Notes:
    """Return the parts of the model's attention that have no argument."""
    kinds = {group.kind for group in shape.layers_by_attention}
    if kinds <= {"full"} or (_latent(shape) and "index" not in kinds):
        return ()
    return (f"attention layers ({', '.join(sorted(kinds))}) are written as full attention",)
