"""One small config for each family, in its own spelling, with every part that it can have.

``PUBLISHED`` are published configs, trimmed, of models that the catalog does not have. Their
billions of parameters, in all and per token, are those of model cards, papers or checkpoints.
"""

import json
from pathlib import Path
from typing import Any

TOKENS = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
GPT = {**TOKENS, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
PLAIN = {name: SMALL[name] for name in SMALL if name not in {"head_dim", "num_key_value_heads"}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DENSE_LATENT = {
    name: value
    for name, value in LATENT.items()
    if "expert" not in name
    and "group" not in name
    and name not in {"moe_intermediate_size", "first_k_dense_replace", "head_dim"}
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
DELTA_NET = {
    **SMALL,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
ROUTED = {name: LATENT[name] for name in LATENT if "lora" not in name and "qk_" not in name}
ROUTED.pop("v_head_dim")
NEMOTRON = {
    **{name: SMALL[name] for name in SMALL if name != "num_hidden_layers"},
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 24,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "distilbert": {
        "dim": 64,
        "hidden_dim": 160,
        "n_layers": 3,
        "n_heads": 4,
        "vocab_size": 500,
        "max_position_embeddings": 128,
        "id2label": {0: "a", 1: "b", 2: "c"},
    },
    "gpt2": GPT,
    "gpt_neox": PLAIN,
    "gptj": {**GPT, "rotary_dim": 8},
    "phi": {**SMALL, "num_key_value_heads": 4},
    "opt": {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": {**TOKENS, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**SMALL, **EXPERTS},
    "gemma2": {**SMALL, "sliding_window": 64},
    "gemma3_text": {**SMALL, "sliding_window": 64, "num_hidden_layers": 7},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "mistral4": LATENT,
    "glm4_moe_lite": LATENT,
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "full", "full", "shared"]},
    "gpt_oss": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        **DELTA_NET,
        **EXPERTS,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "bloom": {**TOKENS, "hidden_size": 64, "n_layer": 4, "n_head": 4},
    "gpt_bigcode": GPT,
    "codegen": {**GPT, "rotary_dim": 8},
    "cohere": {**SMALL, "use_qk_norm": True},
    "stablelm": {**SMALL, "use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": SMALL,
    "qwen2_moe": {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 40},
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        **SMALL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
    },
    "phimoe": {
        **SMALL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "dots1": ROUTED,
    "glm4_moe": {**ROUTED, "use_qk_norm": True, "attention_bias": True},
    "exaone_moe": {**SMALL, **EXPERTS, "num_shared_experts": 2},
    "ernie4_5_moe": {
        **SMALL,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
    },
    "hunyuan_v1_moe": {**SMALL, "num_experts": 4, "moe_topk": 2},
    "minimax_m2": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "afmoe": {**SMALL, **EXPERTS, "num_shared_experts": 2, "num_dense_layers": 1},
    "nemotron_h": NEMOTRON,
    "deepseek_v4": {
        **SMALL,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 24,
        "o_lora_rank": 20,
        "o_groups": 2,
        "qk_rope_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "num_hash_layers": 1,
        "hc_mult": 2,
        "compress_ratios": [0, 4, 128, 4],
    },
    "gemma4_text": {
        **SMALL,
        "num_hidden_layers": 12,
        "num_kv_shared_layers": 6,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
        "global_head_dim": 32,
    },
    "gemma4_unified_text": {**SMALL, "num_hidden_layers": 12, "global_head_dim": 32},
    "kimi_linear": {
        **LATENT,
        "q_lora_rank": None,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
    },
    "minimax_m3_vl_text": {
        **SMALL,
        "dense_intermediate_size": 112,
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1, 1],
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 8,
            "sparse_topk_blocks": 2,
        },
    },
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 40},
    "llama4_text": {
        **SMALL,
        "intermediate_size_mlp": 112,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
    },
    "laguna": {
        **SMALL,
        **EXPERTS,
        "shared_expert_intermediate_size": 40,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_attention_heads_per_layer": [4, 6] * 2,
        "gating": "per-element",
    },
    "hy_v3": {**SMALL, **EXPERTS, "num_shared_experts": 1},
    "mellum": {
        **SMALL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "bailing_hybrid": {
        **{name: value for name, value in LATENT.items() if name != "n_routed_experts"},
        "q_lora_rank": None,
        "num_local_experts": 8,
        "layer_group_size": 3,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {
        **INDEXED,
        "n_shared_experts": 1,
        "shared_experts_intermediate_size": 32,
        "sliding_window": 8,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "inkling_text": {
        **SMALL,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "sliding_window_size": 8,
        "d_rel": 4,
        "rel_extent": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "lfm2": {
        **SMALL,
        "num_hidden_layers": 5,
        "full_attn_idxs": [1, 4],
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.5,
        "conv_bias": True,
    },
    "lfm2_moe": {
        **SMALL,
        **EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "granitemoehybrid": {
        **SMALL,
        **MAMBA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "bamba": {**SMALL, **MAMBA, "attn_layer_indices": [1]},
    "minicpm3": DENSE_LATENT,
    "youtu": DENSE_LATENT,
    # The implementation holds unused weights for zero-computation experts.
    "longcat_flash": {
        **DENSE_LATENT,
        "num_layers": 3,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 8,
        "moe_topk": 3,
        "zero_expert_num": 0,
    },
}
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text()
)
