"""Families by ``model_type``: dense blocks, experts, latent attention, states, mixes."""

from dataclasses import replace
from typing import Any

from planner.catalog.hybrid_layers import (
    bailing_hybrid,
    dots3_note,
    dots3_note_extras,
    gated_delta_net,
    inkling,
    inkling_extras,
    inkling_widths,
    laguna,
    lightning_attention,
    mamba2,
    short_convolution,
    step3p5,
    step3p5_experts,
)
from planner.catalog.layer_groups import ConfigReader, Family
from planner.catalog.special_layers import (
    arctic_residual,
    deepseek_v4,
    deepseek_v4_extras,
    diffusion_gemma_extras,
    ernie_text_experts,
    ernie_vision_experts,
    gemma4,
    gemma4_extras,
    granite_hybrid,
    grok_experts,
    kimi_linear,
    lfm2_width,
    longcat_experts,
    longcat_sublayers,
    mamba_heads,
    minimax_m3,
    nemotron_nas,
    nemotron_nas_extras,
    openelm_extras,
    openelm_layers,
    openelm_shape,
    plamo2_layers,
    step3_experts,
    step3_layers,
)

# Families whose layers all have one dense feed-forward block and plain attention.


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
        BIASED_LAYERNORM,
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


# Families with experts, latent attention or recurrent states: properties not in their configs.


LATENT = Family(sparse=True)
HYBRID_QWEN = Family(
    qk_norm=True,
    output_bias_follows=True,
    output_gate="element",
    recurrent=gated_delta_net,
    full_every=4,
    rest_kind="recurrent",
)
ROUTED = Family(sparse=True, qk_norm=True, router_bias=True)
BAILING = Family(
    sparse=True,
    output_bias_follows=True,
    qk_norm_switch="use_qk_norm",
    router_bias_switch="moe_router_enable_expert_bias",
    names={"attention_output_bias": "use_bias", "mlp_bias": "use_bias"},
)

SPARSE: dict[str, Family] = {
    "arctic": Family(
        sparse=True,
        extras=arctic_residual,
        names={"decoder_sparse_step": "moe_layer_frequency"},
    ),
    "bailing_moe": replace(BAILING, names={**BAILING.names, "attention_bias": "use_qkv_bias"}),
    "mixtral": Family(sparse=True, names={"num_experts": "num_local_experts"}),
    "qwen3_moe": Family(qk_norm=True, sparse=True, output_bias_follows=True),
    "qwen3_vl_moe_text": Family(qk_norm=True, sparse=True),
    "qwen3_omni_moe_text": Family(qk_norm=True, sparse=True),
    "deepseek_v2": LATENT,
    "deepseek_v3": replace(LATENT, router_bias=True),
    "mistral4": LATENT,
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
    "qwen2_moe": Family(
        sparse=True,
        attention_bias=True,
        shared_experts=1,
        shared_expert_gate=True,
        names={"attention_bias": "qkv_bias"},
    ),
    "dbrx": Family(
        sparse=True,
        norm="layernorm",
        nested=("attn_config", "ffn_config"),
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "kv_n_heads",
            "max_position_embeddings": "max_seq_len",
            "moe_intermediate_size": "ffn_hidden_size",
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_top_k",
        },
    ),
    "olmoe": Family(sparse=True, qk_norm=True, qk_norm_width="full", output_bias_follows=True),
    "flex_olmo": Family(sparse=True, qk_norm=True, qk_norm_width="full", output_bias_follows=True),
    "granitemoe": Family(sparse=True, output_bias_follows=True),
    "granitemoehybrid": Family(
        sparse=True,
        may_be_dense=True,
        shared_experts=1,
        output_bias_follows=True,
        recurrent=mamba2,
        derives=granite_hybrid,
        names=MAMBA_NAMES,
    ),
    "granitemoeshared": Family(sparse=True, shared_experts=1, output_bias_follows=True),
    "phimoe": Family(sparse=True, norm="layernorm", norm_bias=True, output_bias_follows=True),
    "dots1": ROUTED,
    "glm4v_moe_text": replace(ROUTED, qk_norm=False, attention_bias=True),
    "glm4_moe": replace(ROUTED, qk_norm=False, qk_norm_switch="use_qk_norm"),
    "ernie4_5_moe": Family(
        sparse=True,
        router_bias=True,
        tied_by_default=True,
        output_bias_follows=True,
        names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    "grok-1": Family(
        sparse=True,
        norms_per_layer=4,
        extras=grok_experts,
        ignores=("sliding_window_size", "global_attn_every_n_layers"),
    ),
    "hunyuan_v1_moe": Family(
        sparse=True, qk_norm=True, shared_experts=1, output_bias_follows=True
    ),
    "exaone_moe": replace(ROUTED, full_every=4),
    "lfm2_moe": Family(
        sparse=True,
        qk_norm=True,
        tied_by_default=True,
        router_bias=True,
        router_bias_switch="use_expert_bias",
        recurrent=short_convolution,
        names={"tie_word_embeddings": "tie_embedding"},
    ),
    "longcat_flash": replace(
        LATENT,
        router_bias=True,
        derives=longcat_sublayers,
        extras=longcat_experts,
        names={
            "intermediate_size": "ffn_hidden_size",
            "moe_intermediate_size": "expert_ffn_hidden_size",
        },
    ),
    "minimax_m2": replace(ROUTED, qk_norm_width="full"),
    "minimax": Family(
        sparse=True, recurrent=lightning_attention, full_every=2, rest_kind="recurrent"
    ),
    "mimo_v2_flash": Family(sparse=True, router_bias=True, sliding_sinks=True),
    "afmoe": replace(ROUTED, norms_per_layer=4, output_gate="element", full_every=4),
    "minimax_m3": replace(
        ROUTED,
        layers=minimax_m3,
        shared_experts=1,
        names={
            "intermediate_size": "dense_intermediate_size",
            "moe_intermediate_size": "intermediate_size",
        },
    ),
    "kimi_linear": replace(
        LATENT,
        router_bias=True,
        layers=kimi_linear,
        unconfirmed=(
            "attn_res_block_size",
            "attention between the residuals of distant layers is not counted",
        ),
    ),
    "deepseek_v4": replace(
        LATENT, router_bias=True, layers=deepseek_v4, extras=deepseek_v4_extras
    ),
    "gemma4_text": Family(
        sparse=True,
        may_be_dense=True,
        tied_by_default=True,
        norms_per_layer=4,
        qk_norm=True,
        layers=gemma4,
        extras=gemma4_extras,
    ),
    "nemotron-nas": Family(
        layers=nemotron_nas, extras=nemotron_nas_extras, defaults={"intermediate_size": 0}
    ),
    "step3_text": Family(
        sparse=True,
        shared_experts=1,
        derives=step3_experts,
        layers=step3_layers,
        names={
            "num_key_value_heads": "num_attention_groups",
            "num_experts_per_tok": "moe_top_k",
            "max_position_embeddings": "max_position_embedding",
        },
    ),
    "nemotron_h": Family(
        sparse=True,
        may_be_dense=True,
        gated_mlp=False,
        norms_per_layer=1,
        router_bias=True,
        recurrent=mamba2,
    ),
}
SPARSE["minimax_m3_vl"] = SPARSE["minimax_m3_vl_text"] = SPARSE["minimax_m3"]
SPARSE["step3"] = SPARSE["step3_vl"] = SPARSE["step3_text"]
SPARSE["ernie4_5_moe_vl"] = SPARSE["ernie4_5_vl_moe_text"] = replace(
    SPARSE["ernie4_5_moe"],
    derives=ernie_text_experts,
    extras=ernie_vision_experts,
)
SPARSE["bailing_moe_v2"] = replace(
    SPARSE["bailing_moe"],
    router_bias=True,
    defaults={"use_qk_norm": True},
)
SPARSE["deepseek_ref"] = SPARSE["deepseek_v4"]
SPARSE["gemma4_unified_text"] = SPARSE["gemma4_text"]
SPARSE["diffusion_gemma_text"] = replace(
    SPARSE["gemma4_text"],
    extras=diffusion_gemma_extras,
    unconfirmed=(
        "layer_types",
        "it writes a block of tokens in several passes; times are those of one token in each pass",
    ),
)


# Families of 2026 that mix windowed, latent, linear and full attention.


STEP = replace(
    ROUTED,
    shared_experts=1,
    derives=step3p5_experts,
    layers=step3p5,
    names={"num_key_value_heads": "num_attention_groups", "num_experts_per_tok": "moe_top_k"},
)
WINDOWED_LATENT = (
    "the cache of the layers that see a window is counted over the whole context, as an engine "
    "without a window of latent attention keeps it"
)
SHORT_CONVOLUTIONS = "the last inputs of its short convolutions are not counted"

HYBRID: dict[str, Family] = {
    "bailing_hybrid": replace(
        BAILING, router_bias=True, router_bias_switch=None, layers=bailing_hybrid
    ),
    "dots3_note_text": replace(
        LATENT,
        router_bias=True,
        layers=dots3_note,
        extras=dots3_note_extras,
        unconfirmed=("sliding_window", WINDOWED_LATENT),
    ),
    "hy_v3": replace(ROUTED, shared_experts=1),
    "inkling_text": replace(
        ROUTED,
        derives=inkling_widths,
        layers=inkling,
        extras=inkling_extras,
        unconfirmed=("d_rel", SHORT_CONVOLUTIONS),
    ),
    "laguna": replace(ROUTED, shared_experts=1, layers=laguna),
    "mellum": Family(qk_norm=True, sparse=True),
    "mimo_v2": SPARSE["mimo_v2_flash"],
    "muse_glimmer_text": Family(norms_per_layer=4, output_gate="element"),
    "step3p5": STEP,
    "step3p7": STEP,
}


__all__ = ["FAMILIES", "NESTED_DEFAULTS", "NOT_COVERED", "Family"]

NESTED_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
FAMILIES: dict[str, Family] = {**DENSE, **SPARSE, **HYBRID}

# Fields that composite configs leave out of their language model where they equal the defaults of
# its implementation in transformers.
NESTED_DEFAULTS: dict[str, dict[str, int]] = {
    model_type: dict(zip(NESTED_FIELDS, values, strict=True))
    for model_type, values in {
        "llama": (4096, 11008, 32, 32, 32, 32000, 2048),
        "mistral": (4096, 14336, 32, 32, 8, 32000, 131072),
        "mixtral": (4096, 14336, 32, 32, 8, 32000, 131072),
        "qwen2": (4096, 22016, 32, 32, 32, 151936, 32768),
        "qwen3": (4096, 22016, 32, 32, 32, 151936, 32768),
        "gemma": (3072, 24576, 28, 16, 16, 256000, 8192),
        "gemma2": (2304, 9216, 26, 8, 4, 256000, 8192),
        "phi3": (3072, 8192, 32, 32, 32, 32064, 4096),
    }.items()
}
NESTED_DEFAULTS["gemma"] |= {"head_dim": 256}
NESTED_DEFAULTS["gemma2"] |= {"head_dim": 256, "sliding_window": 4096}
NESTED_DEFAULTS["qwen3"] |= {"head_dim": 128}
ENCODER = "an encoder alone, which generates no text"
ENCODER_DECODER = "an encoder, and attention of the decoder to its outputs"
# Known families without formulas: requests for them are rejected with this reason.
NOT_COVERED: dict[str, str] = {
    "bailing_moe_linear": "linear attention with group norms beside attention",
    "blt": "patches of bytes instead of tokens",
    "emu3": "a vision tokeniser inside the language model",
    "falcon_h1": "state-space and attention heads side by side in one layer",
    "falcon_mamba": "state-space layers of the first generation",
    "gemma3n_text": "alternating updates of parallel streams",
    "jetmoe": "experts of query and output projections, of which each token uses some",
    "longcat_flash_ngram": "embeddings of groups of tokens",
    "jamba": "state-space layers of the first generation",
    "mamba": "state-space layers of the first generation",
    "phi4_multimodal": "adapters for images and speech in every layer",
    "recurrent_gemma": "gated linear recurrences",
    "rwkv": "recurrence without attention",
    "xlstm": "recurrence without attention",
    "mllama": "layers with attention to images",
    "mllama_text_model": "layers with attention to images",
    "zamba": "state-space layers of the first generation",
}
NOT_COVERED |= dict.fromkeys(
    (
        "albert",
        "bert",
        "camembert",
        "clip",
        "clip_text_model",
        "clip_vision_model",
        "deberta",
        "deberta-v2",
        "dinov2",
        "electra",
        "eurobert",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "siglip",
        "siglip2",
        "siglip_text_model",
        "siglip_vision_model",
        "vit",
        "wav2vec2",
        "xlm-roberta",
    ),
    ENCODER,
)
NOT_COVERED |= dict.fromkeys(
    (
        "bart",
        "m2m_100",
        "marian",
        "mbart",
        "mt5",
        "pegasus",
        "t5",
        "t5gemma",
        "umt5",
        "whisper",
    ),
    ENCODER_DECODER,
)
