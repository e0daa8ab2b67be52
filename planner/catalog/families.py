"""Structure that a Hugging Face ``model_type`` implies without a field in ``config.json``.

One entry per family: its biases and norms, and its names of the common fields.
``tests/planner/test_parameters.py`` compares every entry with the parameter count of the family's
own implementation.
"""

from planner.catalog.dense_families import DENSE
from planner.catalog.family import Family
from planner.catalog.sparse_families import SPARSE

__all__ = ["FAMILIES", "NOT_COVERED", "Family"]

FAMILIES: dict[str, Family] = {**DENSE, **SPARSE}

# Known families without formulas: requests for them are rejected with this reason.
NOT_COVERED: dict[str, str] = {
    "bailing_hybrid": "linear attention with group norms beside latent attention",
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
    "zamba": "state-space layers of the first generation",
}
