"""One small config for each family, in its own spelling, with every part that it can have."""

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
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 40},
    "llama4_text": {
        **SMALL,
        "intermediate_size_mlp": 112,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
    },
}
