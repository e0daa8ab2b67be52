"""What the laws are tried on: model shapes, layouts, batches, drawn at random."""

from hypothesis import settings
from hypothesis import strategies as st

few = settings(max_examples=25, deadline=None)
TOKENS = st.integers(16, 8000)
COUNTS = st.sampled_from([1, 2, 4, 8])
SEQUENCES = st.sampled_from([1, 3, 8, 17, 64])
DTYPES = st.sampled_from(["fp32", "bf16", "int8", "int4"])
GENERATE = {"kind": "generate", "batch_size": 2, "input_tokens": 64, "output_tokens": 8}


@st.composite
def configs(draw):
    """A dense config of a covered family, of any width, depth and grouping of heads."""
    heads = draw(st.sampled_from([4, 8, 16]))
    groups = draw(st.sampled_from([1, 2, 4]))
    return {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        "hidden_size": heads * draw(st.sampled_from([32, 64, 128])),
        "intermediate_size": draw(st.integers(64, 4096)),
        "num_hidden_layers": draw(st.integers(1, 48)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups,
        "vocab_size": draw(st.integers(256, 100_000)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def sparse_configs(draw):
    """A mixture of experts, of which each token visits a few."""
    base = draw(configs())
    experts = draw(st.sampled_from([8, 16, 64]))
    return {
        **base,
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": draw(st.sampled_from([1, 2, 4])),
        "moe_intermediate_size": draw(st.integers(64, 1024)),
    }


@st.composite
def latent_models(draw):
    """The explicit fields of a model that caches latents (multi-head latent attention)."""
    heads, layers = draw(st.sampled_from([16, 32, 64])), draw(st.integers(2, 40))
    rank, rope = draw(st.sampled_from([256, 512])), draw(st.sampled_from([32, 64]))
    latent = {
        "kind": "latent",
        "count": layers,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": draw(st.sampled_from([None, 1536])),
    }
    return {
        "id": "drawn",
        "model_type": "deepseek_v3",
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "attention_layers": [latent],
    }
