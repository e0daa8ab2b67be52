"""What published tables say about the quality of a compressed model; what they do not, is said."""

from planner.catalog.reading import data_toml
from planner.cost.dtypes import WIDE
from planner.specs.base import Dtype
from planner.specs.estimate import Quality

UNKNOWN = "no published perplexity table for {what} in the catalog: measure it on this model"
UNTOUCHED = (1.0, 1.0, 1.0)


def _row(section: str, key: str) -> Quality:
    found = data_toml("quality.toml").get(section, {}).get(key)
    if found is None:
        return Quality(evidence=(UNKNOWN.format(what=f"{section} {key}".replace("_", " ")),))
    low, middle, high = found["perplexity_ratio"]
    return Quality(perplexity_ratio=(low, middle, high), evidence=tuple(found["evidence"]))


def weight_quality(weight: Dtype, activation: Dtype, method: str | None) -> Quality:
    """Return the perplexity ratio to expect of weights quantised by a method or by rounding."""
    if method and method in data_toml("quality.toml")["methods"]:
        return _row("methods", method)
    if weight in WIDE:
        return Quality(perplexity_ratio=UNTOUCHED, evidence=("weights are not quantised",))
    key = "int8_activations" if weight == activation == "int8" else weight
    return _row("weights", key)


def kv_cache_quality(kv_cache: Dtype | None) -> Quality:
    """Return the perplexity ratio to expect of a quantised KV cache."""
    if kv_cache is None or kv_cache in WIDE:
        return Quality(perplexity_ratio=UNTOUCHED)
    return _row("kv_cache", kv_cache)


def combined_quality(weights: Quality, kv_cache: Quality) -> Quality:
    """Return both effects together: ratios multiply, and one unknown makes the whole unknown."""
    evidence = (*weights.evidence, *kv_cache.evidence)
    if weights.perplexity_ratio is None or kv_cache.perplexity_ratio is None:
        return Quality(evidence=evidence)
    low, middle, high = (
        left * right
        for left, right in zip(weights.perplexity_ratio, kv_cache.perplexity_ratio, strict=True)
    )
    return Quality(perplexity_ratio=(low, middle, high), evidence=evidence)
