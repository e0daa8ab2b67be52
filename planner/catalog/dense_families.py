"""Families whose layers all have one dense feed-forward block and plain attention."""

from dataclasses import replace
from typing import Any

from planner.catalog.config_reader import ConfigReader
from planner.catalog.hybrid_layers import mamba2, short_convolution
from planner.catalog.layer_groups import Family
from planner.catalog.special_layers import (
    lfm2_width,
    mamba_heads,
    openelm_extras,
    openelm_layers,
    openelm_shape,
    plamo2_layers,
)

GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
DEFAULT_LABELS = 2  # default of transformers


def _classification_head(reader: ConfigReader) -> dict[str, Any]:
    """Return the parameters of a two-matrix classification head; no output embedding."""
    hidden, named = reader.integer("hidden_size"), reader.get("id2label")
    default = len(named) if isinstance(named, dict) and named else DEFAULT_LABELS
    labels = reader.positive("num_labels", default)
    head = hidden * hidden + hidden + hidden * labels + labels
    return {"num_labels": labels, "extra_parameters": head, "tie_word_embeddings": True}


PLAIN_LAYERNORM = Family(norm="layernorm", norm_bias=True, gated_mlp=False)
# Every matrix has a bias.
BIASED_LAYERNORM = replace(
    PLAIN_LAYERNORM, attention_bias=True, attention_output_bias=True, mlp_bias=True
)
GPT2 = replace(
    BIASED_LAYERNORM,
    tied_by_default=True,
    learned_positions_offset=0,
    default_ffn_multiple=4,
    names=GPT2_NAMES,
)
# Parallel attention and feed-forward blocks with one norm.
GPTJ = replace(
    PLAIN_LAYERNORM,
    norms_per_layer=1,
    mlp_bias=True,
    lm_head_bias=True,
    default_ffn_multiple=4,
    names=GPT2_NAMES,
)
# Names of state-space fields in Bamba and Granite.
MAMBA_NAMES = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
DECOMPRESSED = (
    "the cache is counted as latents, as transformers and SGLang store them; vLLM stores the keys "
    "and values of every head of MiniCPM3, which take many times as much"
)
# Latent attention without experts.
DENSE_LATENT = Family(
    tied_by_default=True,
    unconfirmed=("kv_lora_rank", DECOMPRESSED),
)

DENSE: dict[str, Family] = {
    "llama": Family(output_bias_follows=True),
    "mistral": Family(),
    "baichuan": Family(),
    "phi3": Family(),
    # Its config counts gate and up as one width; only the QKV projections have biases.
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
    "qwen2_5_omni_text": Family(attention_bias=True),
    "gemma": Family(tied_by_default=True),
    "gemma2": Family(tied_by_default=True, norms_per_layer=4, full_every=2),
    "gpt2": GPT2,
    "distilbert": replace(
        GPT2,
        extras=_classification_head,
        names={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
        },
    ),
    "gptj": GPTJ,
    "gpt_neox": BIASED_LAYERNORM,
    "phi": replace(BIASED_LAYERNORM, norms_per_layer=1, lm_head_bias=True),
    "opt": replace(
        BIASED_LAYERNORM,
        tied_by_default=True,
        learned_positions_offset=2,
        names={"intermediate_size": "ffn_dim"},
    ),
    "falcon": replace(
        PLAIN_LAYERNORM,
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
    "codegen": GPTJ,
    "gpt_bigcode": replace(GPT2, defaults={"num_key_value_heads": 1}),
    "qwen2_vl": Family(attention_bias=True),
    "qwen2_vl_text": Family(attention_bias=True),
    "qwen2_5_vl": Family(attention_bias=True),
    "qwen2_5_vl_text": Family(attention_bias=True),
    "bloom": replace(
        PLAIN_LAYERNORM,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tied_by_default=True,
        default_ffn_multiple=4,
        extra_hidden_vectors=2,
        ignores=("intermediate_size",),
    ),
    "nemotron": replace(PLAIN_LAYERNORM, output_bias_follows=True),
    "starcoder2": replace(
        PLAIN_LAYERNORM,
        attention_bias=True,
        output_bias_follows=True,
        mlp_bias=True,
        tied_by_default=True,
        names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    "stablelm": Family(
        norm="layernorm",
        norm_bias=True,
        qk_norm_switch="qk_layernorm",
        qk_norm_width="full",
        names={"attention_bias": "use_qkv_bias"},
    ),
    "cohere": Family(
        norm="layernorm",
        norms_per_layer=1,
        tied_by_default=True,
        output_bias_follows=True,
        qk_norm_switch="use_qk_norm",
        qk_norm_width="full",
    ),
    "cohere2": Family(
        norm="layernorm",
        norms_per_layer=1,
        tied_by_default=True,
        output_bias_follows=True,
        full_every=4,
    ),
    "arcee": Family(gated_mlp=False, output_bias_follows=True),
    "apertus": Family(gated_mlp=False, qk_norm=True, output_bias_follows=True, extra_per_layer=2),
    "ernie4_5": Family(
        tied_by_default=True,
        output_bias_follows=True,
        names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    "bamba": Family(
        output_bias_follows=True, recurrent=mamba2, names=MAMBA_NAMES, derives=mamba_heads
    ),
    "exaone": Family(),
    "exaone4": Family(qk_norm=True, full_every=4),
    "gemma3_text": Family(
        tied_by_default=True,
        states_extended_length=True,
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
    "glm": Family(attention_bias=True),
    "glm4": Family(attention_bias=True, norms_per_layer=4),
    "glm4v_text": Family(attention_bias=True, norms_per_layer=4),
    "granite": Family(output_bias_follows=True),
    "helium": Family(),
    "hunyuan_v1_dense": Family(qk_norm=True, output_bias_follows=True),
    "internlm": Family(
        attention_bias=True, output_bias_follows=True, names={"attention_bias": "bias"}
    ),
    "internlm2": Family(output_bias_follows=True, names={"attention_bias": "bias"}),
    "internlm3": Family(names={"attention_bias": "qkv_bias"}),
    "lfm2": Family(
        qk_norm=True,
        tied_by_default=True,
        recurrent=short_convolution,
        derives=lfm2_width,
        names={"tie_word_embeddings": "tie_embedding"},
    ),
    "minicpm3": replace(DENSE_LATENT, defaults={"v_head_dim": 64}),
    "ministral": Family(),
    "ministral3": Family(),
    "mistral3": Family(),
    "olmo": Family(norms_per_layer=0, output_bias_follows=True),
    "olmo2": Family(qk_norm=True, qk_norm_width="full", output_bias_follows=True),
    "olmo3": Family(qk_norm=True, qk_norm_width="full", output_bias_follows=True, full_every=4),
    "openelm": Family(
        qk_norm_switch="normalize_qk_projections",
        tied_by_default=True,
        derives=openelm_shape,
        layers=openelm_layers,
        extras=openelm_extras,
        names={
            "hidden_size": "model_dim",
            "num_hidden_layers": "num_transformer_layers",
            "max_position_embeddings": "max_context_length",
            "tie_word_embeddings": "share_input_output_layers",
        },
    ),
    "plamo2": Family(
        norms_per_layer=4,
        qk_norm=True,
        qk_norm_width="full",
        tied_by_default=True,
        layers=plamo2_layers,
        names={"head_dim": "hidden_size_per_head"},
    ),
    "seed_oss": Family(attention_bias=True),
    "nanochat": Family(gated_mlp=False, norms_per_layer=0),
    "smollm3": Family(tied_by_default=True, output_bias_follows=True),
    "youtu": DENSE_LATENT,
    "youtu_llm": DENSE_LATENT,
}
