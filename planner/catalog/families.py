"""What a Hugging Face ``model_type`` implies that its ``config.json`` does not say.

One entry per family: which biases and norms exist, and how its config spells the common names.
Every entry is held against the parameter count of the family's own implementation by
``tests/planner/test_parameters.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planner.catalog.config_reader import ConfigReader
from planner.catalog.recurrent import gated_delta_net
from planner.specs.layers import OutputGate, RecurrentLayers

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
    qk_norm_width: Literal["head", "full"] = "head"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    tied_by_default: bool = False
    learned_positions_offset: int | None = None
    default_ffn_multiple: int | None = None
    sparse: bool = False
    may_be_dense: bool = False
    shared_experts: int = 0
    shared_expert_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    output_bias_follows: bool = False
    output_gate: OutputGate = "none"
    sinks: bool = False
    indexed: bool = False
    # Every so many layers one attends to everything, the others are of the rest kind.
    full_every: int = 0
    rest_kind: Literal["sliding", "chunked", "recurrent"] = "sliding"
    recurrent: Callable[[ConfigReader, int], RecurrentLayers] | None = None
    fused_gate_width: bool = False
    names: dict[str, str] = field(default_factory=dict)
    # What the family's own code fills in where a config leaves it out.
    defaults: dict[str, Any] = field(default_factory=dict)


LATENT = Family(sparse=True)
HYBRID_QWEN = Family(
    qk_norm=True,
    output_bias_follows=True,
    output_gate="element",
    recurrent=gated_delta_net,
    full_every=4,
    rest_kind="recurrent",
)

FAMILIES: dict[str, Family] = {
    "llama": Family(output_bias_follows=True),
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
    "qwen3": Family(qk_norm=True, output_bias_follows=True),
    "qwen3_vl_text": Family(qk_norm=True),
    "gemma": Family(tied_by_default=True),
    "gemma2": Family(tied_by_default=True, norms_per_layer=4, full_every=2),
    "mixtral": Family(sparse=True, names={"num_experts": "num_local_experts"}),
    "qwen3_moe": Family(qk_norm=True, sparse=True, output_bias_follows=True),
    "qwen3_vl_moe_text": Family(qk_norm=True, sparse=True),
    "deepseek_v2": LATENT,
    "deepseek_v3": replace(LATENT, router_bias=True),
    "kimi_k2": replace(LATENT, router_bias=True),
    "glm4_moe_lite": replace(LATENT, router_bias=True),
    "deepseek_v32": replace(LATENT, router_bias=True, indexed=True),
    "glm_moe_dsa": replace(LATENT, router_bias=True, indexed=True),
    "gpt_oss": Family(
        attention_bias=True,
        output_bias_follows=True,
        sparse=True,
        expert_bias=True,
        router_bias=True,
        sinks=True,
        full_every=2,
    ),
    "qwen3_next": replace(HYBRID_QWEN, sparse=True, shared_expert_gate=True, shared_experts=1),
    "qwen3_5_text": HYBRID_QWEN,
    "qwen3_5_moe_text": replace(
        HYBRID_QWEN, sparse=True, shared_expert_gate=True, shared_experts=1
    ),
    "llama4_text": Family(
        sparse=True,
        shared_experts=1,
        full_every=4,
        rest_kind="chunked",
        names={
            "intermediate_size": "intermediate_size_mlp",
            "moe_intermediate_size": "intermediate_size",
        },
    ),
    "gemma3_text": Family(
        tied_by_default=True,
        norms_per_layer=4,
        qk_norm=True,
        full_every=6,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
    ),
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
    "deepseek_v4": "latent attention over compressed blocks",
    "kimi_linear": "linear attention",
    "nemotron_h": "state-space layers",
    "nemotron-nas": "a different shape in each layer",
    "gemma4_text": "two attention shapes in one model",
    "minimax_m2": "per-layer query norms beside mixture-of-experts layers",
    "minimax_m3": "a sparse attention index",
    "minimax_m3_vl": "a sparse attention index",
    "mimo_v2_flash": "two attention shapes in one model",
    "step3p7": "two attention shapes in one model",
}
