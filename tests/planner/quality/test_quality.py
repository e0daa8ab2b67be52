"""Quality: published tables with their source, and an honest word where there is none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.quality import (
    TAIL,
    combined_quality,
    family_of_model,
    fitted_quality,
    kv_cache_quality,
    pruning_quality,
    scheme_quality,
    weight_quality,
    weight_scheme,
)
from planner.search.question import figure
from planner.search.rank import UNKNOWN_PERPLEXITY_RATIO, perplexity_ratio
from planner.specs.estimate import Quality
from tests.planner.asking import LLAMA_8B, LLAMA_70B, TRAIN, ask, search

SCHEMES = sorted(name for kind in fitted_quality().kinds.values() for name in kind.schemes)
FEWER_BITS = ["gguf:q8_0", "gguf:q6_k", "gguf:q5_k_m", "gguf:q4_k_m", "gguf:q3_k_m", "gguf:q2_k"]


def middle(scheme, family="llama-2", billions=7.0):
    return scheme_quality(scheme, family, billions).perplexity_ratio[1]


def test_weights_that_are_not_quantised_lose_nothing():
    assert weight_quality("bf16", "bf16", None).perplexity_ratio == (1.0, 1.0, 1.0)


def test_a_table_gives_low_middle_high_and_its_source():
    for dtype in ("int8", "int4", "nf4"):
        quality = weight_quality(dtype, "bf16", None)
        assert list(quality.perplexity_ratio) == sorted(quality.perplexity_ratio), dtype
        assert "rows: " in quality.evidence[0], dtype


def test_fewer_bits_lose_more():
    for fewer, more in zip(FEWER_BITS[1:], FEWER_BITS, strict=False):
        assert middle(fewer) > middle(more), (fewer, more)


def test_a_larger_model_never_loses_more():
    """wanda-readme: 2:4 zeros cost Llama-2 7B 2.2 times its perplexity, 70B 1.6 times."""
    wrong = [
        scheme
        for scheme in SCHEMES
        if not middle(scheme, billions=70.0) <= middle(scheme, billions=7.0)
    ]
    assert not wrong, wrong


def test_llama_3_loses_more_than_llama_2():
    """EfficientQAT's and llama.cpp's tables: q2_K costs 56 % against 11 %."""
    for scheme in ("gguf:q4_k_m", "gguf:q2_k", "gptq-4g", "smoothquant"):
        assert middle(scheme, "llama-3", 8.0) > 1 + 1.5 * (middle(scheme, "llama-2", 7.0) - 1)


def test_a_borrowed_family_gets_a_wider_interval():
    kinds = fitted_quality().kinds.values()
    for scheme in SCHEMES:
        kind = next(kind for kind in kinds if scheme in kind.schemes)
        low, mid, high = fitted_quality().ratio(scheme, "never-seen", 7.0)
        assert low <= mid <= high, scheme
        assert math.log(mid) / math.log(low) > math.exp(TAIL * kind.spread), scheme


def test_a_borrowed_family_is_said_to_be_borrowed():
    own, borrowed = (
        scheme_quality("gguf:q4_k_m", family, 7.0).evidence for family in ("llama-2", "qwen")
    )
    assert len(own) == 1
    assert "none is of qwen: borrowed from llama-" in borrowed[1]


def test_a_scheme_without_a_table_says_so():
    for scheme in ("ternary", "quantease", "exl2:4.25", "kv:ternary"):
        quality = scheme_quality(scheme, "llama-2", 7.0)
        assert quality.perplexity_ratio is quality.score_ratio is None, scheme
        assert "no published table of" in quality.evidence[0], scheme


def test_task_scores_stand_in_where_no_perplexities_are():
    for dtype in ("fp8", "nvfp4", "mxfp4"):
        quality = weight_quality(dtype, dtype, None, family="llama-3", billions=8.0)
        assert quality.perplexity_ratio is None, dtype
        assert 0.85 < quality.score_ratio[1] <= 1.0, dtype
        assert "task scores" in quality.evidence[0], dtype


def test_eight_bit_floats_lose_less_than_four():
    fp8, nvfp4, mxfp4 = (
        weight_quality(name, name, None).loss_ratio for name in ("fp8", "nvfp4", "mxfp4")
    )
    assert fp8 < nvfp4 < mxfp4


def test_a_format_is_held_against_the_table_of_its_own_kind():
    for weight, activation, method, group, scheme in (
        ("int4", "bf16", "gptq", 128, "gptq-4g"),
        ("int4", "bf16", "gptq", 4096, "gptq-4c"),
        ("int4", "bf16", "awq", None, "awq-4g"),
        ("int4", "bf16", None, 32, "gguf:q4_0"),
        ("int4", "bf16", None, 128, "rtn-4g"),
        ("int4", "int8", "w4a8", 128, "rptq:w4a8kv8"),
        ("int8", "int8", None, None, "smoothquant"),
        ("int8", "bf16", None, None, "gguf:q8_0"),
        ("bf16", "bf16", "sparsegpt", None, "sparsegpt:0.5:unstructured"),
        ("int4", "bf16", "gguf:Q4_K_M", None, "gguf:q4_k_m"),
        ("bf16", "bf16", None, None, None),
    ):
        assert weight_scheme(weight, activation, method, group) == scheme


def test_a_models_family_is_read_from_its_name_or_its_config():
    for name, model_type, vocabulary, family in (
        ("meta-llama/Llama-3.1-8B", "llama", 128256, "llama-3"),
        ("meta-llama/Llama-2-7b", "llama", 32000, "llama-2"),
        ("huggyllama/llama-7b", "llama", 32000, "llama-1"),
        ("facebook/opt-6.7b", "opt", 50272, "opt"),
        ("custom", "llama", 128256, "llama-3"),
        ("custom", "llama", 32000, "llama-2"),
        ("custom", "qwen3", 151936, "qwen"),
        ("custom", "mamba", 50280, "mamba"),
    ):
        assert family_of_model(name, model_type, vocabulary) == family


def test_zeros_in_pairs_of_four_lose_more_than_zeros_anywhere():
    anywhere, pairs = (
        pruning_quality(0.5, method="wanda", pattern=how, family="llama-2", billions=7.0)
        for how in ("unstructured", "2:4")
    )
    assert 1.1 < anywhere.perplexity_ratio[1] < pairs.perplexity_ratio[1]


def test_a_share_of_zeros_without_a_table_is_unknown():
    odd = pruning_quality(0.33, method="wanda", pattern="2:4", family="opt", billions=7.0)
    assert odd.loss_ratio is None
    assert pruning_quality(0.0, method="wanda", pattern="2:4", family="opt", billions=7.0)


def test_an_integer_cache_of_eight_bits_loses_less_than_one_of_four():
    eight, four = (kv_cache_quality(name).perplexity_ratio for name in ("int8", "int4"))
    assert eight[1] < four[1]
    assert eight[2] <= four[1]


def test_effects_of_weights_and_cache_multiply():
    weights, cache = weight_quality("int8", "bf16", None), kv_cache_quality("int8")
    both = combined_quality(weights, cache)
    expected = weights.perplexity_ratio[1] * cache.perplexity_ratio[1]
    assert both.perplexity_ratio[1] == pytest.approx(expected)


def test_scores_and_perplexities_combine_as_scores():
    scored = weight_quality("fp8", "fp8", None)
    both = combined_quality(scored, kv_cache_quality("int8"))
    assert both.perplexity_ratio is None
    assert both.score_ratio[1] < scored.score_ratio[1]


def test_one_unknown_effect_makes_the_whole_unknown():
    both = combined_quality(weight_quality("ternary", "bf16", None), kv_cache_quality("fp8"))
    assert both.loss_ratio is None
    assert len(both.evidence) == 2


@given(low=st.floats(1.0, 1.5), more=st.floats(0.0, 0.5), most=st.floats(0.0, 0.5))
def test_a_ratio_as_a_score_is_its_inverse(low, more, most):
    ratio = (low, low + more, low + more + most)
    score = Quality(perplexity_ratio=ratio).as_score
    assert list(score) == sorted(score)
    assert score[1] * ratio[1] == pytest.approx(1.0)


def test_an_unknown_quality_ranks_a_little_below_an_untouched_one():
    found = ask(strategy={"weight_dtype": "ternary"}, engine="vllm")
    assert perplexity_ratio(found) == UNKNOWN_PERPLEXITY_RATIO > perplexity_ratio(ask())


def test_an_estimate_knows_the_family_and_the_size_of_its_model():
    strategy = {"quantization": "gguf:q4_k_m"}
    small, older = (
        ask(model=name, strategy=strategy, engine="llama_cpp").quality.perplexity_ratio[1]
        for name in (LLAMA_8B, "meta-llama/Llama-2-7b")
    )
    assert small > older


def test_a_limit_on_the_loss_of_quality_leaves_what_keeps_it():
    limits = {"quality_loss_ratio": {"max": 0.005}}
    answer = search(model=LLAMA_70B, devices=8, engine="vllm", constraints=limits, top=50)
    assert answer.plans
    assert all(figure(plan, "quality_loss_ratio") <= 0.005 for plan in answer.plans)
    assert not any(plan.strategy.weight_dtype == "int4" for plan in answer.plans)


def test_training_loses_no_quality_to_compression():
    assert figure(ask(workload=TRAIN), "quality_loss_ratio") == 0.0
