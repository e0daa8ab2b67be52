"""Which published scheme stands for a format, and what follows from its interval."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.quality import (
    combined_quality,
    family_of_model,
    fitted_quality,
    pruning_quality,
    pruning_scheme,
    quality_rows,
    scheme_quality,
    weight_scheme,
)
from planner.specs.estimate import Quality

WEIGHTS = sorted(fitted_quality().kinds["weights"].schemes)
RATIOS = st.tuples(st.floats(0.5, 4), st.floats(0.5, 4), st.floats(0.5, 4))


def test_a_format_has_the_scheme_of_its_bits_its_method_and_its_groups():
    cases = (
        ("bf16", "bf16", None, None, None),
        ("fp16", "bf16", None, 128, None),
        ("int4", "bf16", None, None, "rtn-4g"),
        ("int4", "bf16", None, 64, "gguf:q4_0"),
        ("int4", "bf16", None, 65, "rtn-4g"),
        ("int8", "bf16", None, None, "gguf:q8_0"),
        ("int8", "int8", None, None, "smoothquant"),
        ("int4", "bf16", "gptq", 128, "gptq-4g"),
        ("int4", "bf16", "gptq", 1023, "gptq-4g"),
        ("int4", "bf16", "gptq", 1024, "gptq-4c"),
        ("int8", "bf16", "awq", 128, "awq-8g"),
        ("bf16", "bf16", "GGUF:Q4_K_M", None, "gguf:q4_k_m"),
        ("bf16", "bf16", "sparsegpt", None, "sparsegpt:0.5:unstructured"),
    )
    for weight, activation, method, group, scheme in cases:
        assert weight_scheme(weight, activation, method, group) == scheme


def test_a_llama_of_no_name_is_known_by_its_vocabulary():
    for vocabulary, family in ((128_256, "llama-3"), (32_000, "llama-2")):
        assert family_of_model("custom", "llama", vocabulary) == family, (vocabulary, family)


def test_a_share_of_zeros_is_written_as_short_as_the_tables_write_it():
    assert pruning_scheme("wanda", 0.5, "2:4") == "wanda:0.5:2:4"
    assert pruning_scheme("sparsegpt", 0.70, "unstructured") == "sparsegpt:0.7:unstructured"


def test_no_zeros_lose_nothing():
    for zeros in (None, 0.0):
        found = pruning_quality(
            zeros, method="wanda", pattern="2:4", family="llama-2", billions=7.0
        )
        assert found.perplexity_ratio == (1.0, 1.0, 1.0), zeros


@given(scheme=st.sampled_from(WEIGHTS), billions=st.floats(0.5, 500))
def test_an_interval_is_as_many_times_below_as_above(scheme, billions):
    low, middle, high = (
        math.log(ratio) for ratio in scheme_quality(scheme, "llama-2", billions).perplexity_ratio
    )
    assert 0 <= low <= middle <= high <= 20
    if high < 19.9:
        assert middle / low == pytest.approx(high / middle, rel=1e-3)


def test_most_published_rows_lie_in_their_own_interval():
    rows = [row for row in quality_rows() if row.metric == "perplexity"]
    fitted = fitted_quality()

    inside, known = 0, 0
    for row in rows:
        found = fitted.ratio(row.scheme, row.family, row.billions)
        if found is not None:
            known += 1
            inside += found[0] <= max(row.ratio, 1.0003) <= found[2]

    assert known >= 400
    assert inside / known >= 0.8


def test_each_source_of_a_scheme_is_named_once_and_its_rows_are_counted():
    rows = [r for r in quality_rows() if r.scheme == "gptq-4g" and r.metric == "perplexity"]
    told = scheme_quality("gptq-4g", "llama-2", 7.0).evidence[0]
    assert f"GPTQ-4G, {len(rows)} rows" in told
    for source in {row.source for row in rows}:
        assert told.count(source) >= 1


@given(first=RATIOS, second=RATIOS)
def test_effects_combine_in_any_order(first, second):
    one, other = (Quality(perplexity_ratio=tuple(sorted(ratio))) for ratio in (first, second))
    there, back = combined_quality(one, other), combined_quality(other, one)
    assert there.perplexity_ratio == pytest.approx(back.perplexity_ratio)
    low, middle, high = there.perplexity_ratio
    assert low <= middle <= high


@given(ratio=RATIOS)
def test_what_loses_nothing_changes_nothing(ratio):
    one = Quality(perplexity_ratio=tuple(sorted(ratio)), evidence=("a table",))
    found = combined_quality(one, Quality(perplexity_ratio=(1.0, 1.0, 1.0)))
    assert found == one
