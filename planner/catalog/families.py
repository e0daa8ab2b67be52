"""Structure that a Hugging Face ``model_type`` implies without a field in ``config.json``.

One entry per family: its biases and norms, and its names of the common fields.
``tests/planner/test_parameters.py`` compares every entry with the parameter count of the family's
own implementation.
"""

from planner.catalog.dense_families import DENSE
from planner.catalog.family import Family
from planner.catalog.hybrid_families import HYBRID
from planner.catalog.sparse_families import SPARSE

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
