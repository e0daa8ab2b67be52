"""What a Hugging Face ``model_type`` implies that its ``config.json`` does not say.

One entry per family: which biases and norms exist, and how its config spells the common names.
Every entry is held against the parameter count of the family's own implementation by
``tests/planner/test_parameters.py``.
"""

from planner.catalog.dense_families import DENSE
from planner.catalog.family import Family
from planner.catalog.sparse_families import SPARSE

__all__ = ["FAMILIES", "NOT_COVERED", "Family"]

FAMILIES: dict[str, Family] = {**DENSE, **SPARSE}

# Families that are asked for by name and refused by name: they need formulas of their own.
NOT_COVERED: dict[str, str] = {
    "gemma3n_text": "alternating updates of parallel streams",
    "jamba": "state-space layers of the first generation",
    "recurrent_gemma": "gated linear recurrences",
    "rwkv": "recurrence without attention",
}
