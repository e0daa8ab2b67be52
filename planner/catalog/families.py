"""What a Hugging Face ``model_type`` implies that its ``config.json`` does not say.

One entry per family: which biases and norms exist, and how its config spells the common names.
Every entry is held against the parameter count of the family's own implementation by
``tests/planner/test_parameters.py``.
"""

from dataclasses import dataclass, field
from typing import Literal

GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True)
class Family:
    """The structure that all models of one ``model_type`` share."""

    gated_mlp: bool = True
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    tied_by_default: bool = False
    learned_positions_offset: int | None = None
    default_ffn_multiple: int | None = None
    sparse: bool = False
    alternate_sliding: bool = False
    fused_gate_width: bool = False
    names: dict[str, str] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "baichuan": Family(),
    "phi3": Family(),
    # Its config counts gate and up as one width; only the projections into attention have biases.
    "qwen": Family(attention_bias=True, fused_gate_width=True),
    "chatglm": Family(
        attention_bias=True,
        names={
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
            "vocab_size": "padded_vocab_size",
            "max_position_embeddings": "seq_length",
        },
    ),
    "qwen2": Family(attention_bias=True),
    "mimo": Family(attention_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_vl_text": Family(qk_norm=True),
    "gemma": Family(tied_by_default=True),
    "gemma2": Family(tied_by_default=True, norms_per_layer=4, alternate_sliding=True),
    "mixtral": Family(sparse=True, names={"num_experts": "num_local_experts"}),
    "qwen3_moe": Family(qk_norm=True, sparse=True),
    "qwen3_vl_moe_text": Family(qk_norm=True, sparse=True),
    "gpt2": Family(
        norm="layernorm",
        norm_bias=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        tied_by_default=True,
        learned_positions_offset=0,
        default_ffn_multiple=4,
        names=GPT2_NAMES,
    ),
    "gptj": Family(
        norm="layernorm",
        norm_bias=True,
        norms_per_layer=1,
        mlp_bias=True,
        lm_head_bias=True,
        gated_mlp=False,
        default_ffn_multiple=4,
        names=GPT2_NAMES,
    ),
    "gpt_neox": Family(
        norm="layernorm",
        norm_bias=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
    ),
    "phi": Family(
        norm="layernorm",
        norm_bias=True,
        norms_per_layer=1,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
        gated_mlp=False,
    ),
    "opt": Family(
        norm="layernorm",
        norm_bias=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        tied_by_default=True,
        learned_positions_offset=2,
        names={"intermediate_size": "ffn_dim"},
    ),
    "falcon": Family(
        norm="layernorm",
        norm_bias=True,
        gated_mlp=False,
        tied_by_default=True,
        default_ffn_multiple=4,
        names={"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
    ),
    "mpt": Family(
        norm="layernorm",
        gated_mlp=False,
        tied_by_default=True,
        default_ffn_multiple=4,
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
    ),
}

# Families that are asked for by name and refused by name: they need formulas of their own.
NOT_COVERED: dict[str, str] = {
    "deepseek_v3": "multi-head latent attention",
    "deepseek_v32": "multi-head latent attention with a sparse index",
    "deepseek_v4": "multi-head latent attention with a sparse index",
    "kimi_k2": "multi-head latent attention",
    "kimi_linear": "linear attention",
    "glm_moe_dsa": "multi-head latent attention with a sparse index",
    "qwen3_5_text": "linear-attention layers",
    "qwen3_5_moe_text": "linear-attention layers",
    "nemotron_h": "state-space layers",
    "nemotron-nas": "a different shape in each layer",
    "llama4_text": "chunked attention beside mixture-of-experts layers",
    "gemma4_text": "two attention shapes in one model",
    "gpt_oss": "attention sinks and biased experts",
    "minimax_m2": "per-layer query norms beside mixture-of-experts layers",
    "minimax_m3": "a sparse attention index",
    "minimax_m3_vl": "a sparse attention index",
    "mimo_v2_flash": "two attention shapes in one model",
    "step3p7": "two attention shapes in one model",
}
