"""Quality: published tables with their source, and an honest word where there is none."""

import pytest

from planner.catalog.quality import combined_quality, kv_cache_quality, weight_quality
from planner.search.rank import UNKNOWN_PERPLEXITY_RATIO, perplexity_ratio
from tests.planner.asking import ask


def test_weights_that_are_not_quantised_lose_nothing():
    assert weight_quality("bf16", "bf16", None).perplexity_ratio == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("dtype", ["int8", "int4", "nf4"])
def test_a_table_gives_low_middle_high_and_its_source(dtype):
    quality = weight_quality(dtype, "bf16", None)

    assert list(quality.perplexity_ratio) == sorted(quality.perplexity_ratio)
    assert quality.evidence


def test_fewer_bits_lose_more():
    losses = [
        weight_quality(dtype, "bf16", None).perplexity_ratio[1] for dtype in ("int8", "int4")
    ]

    assert losses[0] < losses[1]


def test_a_pair_without_a_table_says_so():
    quality = weight_quality("nvfp4", "nvfp4", None)

    assert quality.perplexity_ratio is None
    assert "no published perplexity table" in quality.evidence[0]


def test_effects_of_weights_and_cache_multiply():
    weights, cache = weight_quality("int8", "bf16", None), kv_cache_quality("int8")
    both = combined_quality(weights, cache)

    expected = weights.perplexity_ratio[1] * cache.perplexity_ratio[1]
    assert both.perplexity_ratio[1] == pytest.approx(expected)


def test_one_unknown_effect_makes_the_whole_unknown():
    both = combined_quality(weight_quality("int8", "bf16", None), kv_cache_quality("fp8"))

    assert both.perplexity_ratio is None


def test_an_unknown_quality_ranks_a_little_below_an_untouched_one():
    found = ask(strategy={"weight_dtype": "fp8"}, engine="vllm")

    assert perplexity_ratio(found) == UNKNOWN_PERPLEXITY_RATIO > perplexity_ratio(ask())
