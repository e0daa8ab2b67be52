"""Quality: published tables, the fit to them, the page, and a word where there is no table."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.__main__ import main
from planner.catalog.quality import (
    TAIL,
    QualityRow,
    combined_quality,
    family_of,
    family_of_model,
    fitted_quality,
    kind_of,
    kv_cache_quality,
    pruning_quality,
    pruning_scheme,
    quality_rows,
    scheme_quality,
    weight_quality,
    weight_scheme,
)
from planner.catalog.reading import data_json, data_text
from planner.fitting.quality_fit import (
    HELD_OUT,
    MODELS,
    SHOWN,
    build_quality,
    fit_quality,
    held_out_quality,
    quality_page,
)
from planner.search.question import figure
from planner.search.rank import UNKNOWN_PERPLEXITY_RATIO, perplexity_ratio
from planner.specs.estimate import Quality
from tests.planner.asking import LLAMA_8B, LLAMA_70B, TRAIN, ask, search

SCHEMES = sorted(name for kind in fitted_quality().kinds.values() for name in kind.schemes)
FEWER_BITS = ["gguf:q8_0", "gguf:q6_k", "gguf:q5_k_m", "gguf:q4_k_m", "gguf:q3_k_m", "gguf:q2_k"]


def middle(scheme, family="llama-2", billions=7.0):
    return scheme_quality(scheme, family, billions).perplexity_ratio[1]


def test_weights_as_they_are_and_no_zeros_lose_nothing():
    assert weight_quality("bf16", "bf16", None).perplexity_ratio == (1.0, 1.0, 1.0)
    for zeros in (None, 0.0):
        found = pruning_quality(
            zeros, method="wanda", pattern="2:4", family="llama-2", billions=7.0
        )
        assert found.perplexity_ratio == (1.0, 1.0, 1.0), zeros


def test_a_table_gives_low_middle_high_with_its_source_or_says_that_there_is_none():
    for dtype in ("int8", "int4", "nf4"):
        quality = weight_quality(dtype, "bf16", None)
        assert list(quality.perplexity_ratio) == sorted(quality.perplexity_ratio), dtype
        assert "rows: " in quality.evidence[0], dtype
    for scheme in ("ternary", "quantease", "exl2:4.25", "kv:ternary"):
        quality = scheme_quality(scheme, "llama-2", 7.0)
        assert quality.perplexity_ratio is quality.score_ratio is None, scheme
        assert "no published table of" in quality.evidence[0], scheme


def test_fewer_bits_smaller_models_and_llama_3_lose_more():
    for fewer, more in zip(FEWER_BITS[1:], FEWER_BITS, strict=False):
        assert middle(fewer) > middle(more), (fewer, more)

    # wanda-readme: 2:4 zeros cost Llama-2 7B 2.2 times its perplexity, 70B 1.6 times.
    wrong = [
        scheme
        for scheme in SCHEMES
        if not middle(scheme, billions=70.0) <= middle(scheme, billions=7.0)
    ]
    assert not wrong, wrong

    # EfficientQAT's and llama.cpp's tables: q2_K costs 56 % against 11 %.
    for scheme in ("gguf:q4_k_m", "gguf:q2_k", "gptq-4g", "smoothquant"):
        assert middle(scheme, "llama-3", 8.0) > 1 + 1.5 * (middle(scheme, "llama-2", 7.0) - 1)


def test_a_borrowed_family_is_said_to_be_and_gets_a_wider_interval():
    kinds = fitted_quality().kinds.values()
    for scheme in SCHEMES:
        kind = next(kind for kind in kinds if scheme in kind.schemes)
        low, mid, high = fitted_quality().ratio(scheme, "never-seen", 7.0)
        assert low <= mid <= high, scheme
        assert math.log(mid) / math.log(low) > math.exp(TAIL * kind.spread), scheme

    own, borrowed = (
        scheme_quality("gguf:q4_k_m", family, 7.0).evidence for family in ("llama-2", "qwen")
    )
    assert len(own) == 1
    assert "none is of qwen: borrowed from llama-" in borrowed[1]


def test_task_scores_stand_in_and_eight_bit_floats_lose_less_than_four():
    for dtype in ("fp8", "nvfp4", "mxfp4"):
        quality = weight_quality(dtype, dtype, None, family="llama-3", billions=8.0)
        assert quality.perplexity_ratio is None, dtype
        assert 0.85 < quality.score_ratio[1] <= 1.0, dtype
        assert "task scores" in quality.evidence[0], dtype

    fp8, nvfp4, mxfp4 = (
        weight_quality(name, name, None).loss_ratio for name in ("fp8", "nvfp4", "mxfp4")
    )
    assert fp8 < nvfp4 < mxfp4


def test_a_format_has_the_scheme_of_its_bits_its_method_and_its_groups():
    for weight, activation, method, group, scheme in (
        ("bf16", "bf16", None, None, None),
        ("fp16", "bf16", None, 128, None),
        ("int4", "bf16", None, None, "rtn-4g"),
        ("int4", "bf16", None, 32, "gguf:q4_0"),
        ("int4", "bf16", None, 64, "gguf:q4_0"),
        ("int4", "bf16", None, 65, "rtn-4g"),
        ("int4", "bf16", None, 128, "rtn-4g"),
        ("int4", "bf16", "gptq", 128, "gptq-4g"),
        ("int4", "bf16", "gptq", 1023, "gptq-4g"),
        ("int4", "bf16", "gptq", 1024, "gptq-4c"),
        ("int4", "bf16", "gptq", 4096, "gptq-4c"),
        ("int4", "bf16", "awq", None, "awq-4g"),
        ("int4", "int8", "w4a8", 128, "rptq:w4a8kv8"),
        ("int8", "int8", None, None, "smoothquant"),
        ("int8", "bf16", None, None, "gguf:q8_0"),
        ("int8", "bf16", "awq", 128, "awq-8g"),
        ("bf16", "bf16", "sparsegpt", None, "sparsegpt:0.5:unstructured"),
        ("int4", "bf16", "gguf:Q4_K_M", None, "gguf:q4_k_m"),
        ("bf16", "bf16", "GGUF:Q4_K_M", None, "gguf:q4_k_m"),
    ):
        assert weight_scheme(weight, activation, method, group) == scheme


def test_a_models_family_is_read_from_its_name_its_config_or_its_vocabulary():
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


def test_zeros_in_pairs_and_narrow_caches_lose_more_and_shares_without_a_table_are_unknown():
    anywhere, pairs = (
        pruning_quality(0.5, method="wanda", pattern=how, family="llama-2", billions=7.0)
        for how in ("unstructured", "2:4")
    )
    assert 1.1 < anywhere.perplexity_ratio[1] < pairs.perplexity_ratio[1]

    odd = pruning_quality(0.33, method="wanda", pattern="2:4", family="opt", billions=7.0)
    assert odd.loss_ratio is None
    assert pruning_quality(0.0, method="wanda", pattern="2:4", family="opt", billions=7.0)

    eight, four = (kv_cache_quality(name).perplexity_ratio for name in ("int8", "int4"))
    assert eight[1] < four[1]
    assert eight[2] <= four[1]
    assert pruning_scheme("wanda", 0.5, "2:4") == "wanda:0.5:2:4"
    assert pruning_scheme("sparsegpt", 0.70, "unstructured") == "sparsegpt:0.7:unstructured"


def test_effects_multiply_combine_as_scores_or_are_unknown_together():
    weights, cache = weight_quality("int8", "bf16", None), kv_cache_quality("int8")
    both = combined_quality(weights, cache)
    expected = weights.perplexity_ratio[1] * cache.perplexity_ratio[1]
    assert both.perplexity_ratio[1] == pytest.approx(expected)

    scored = weight_quality("fp8", "fp8", None)
    both = combined_quality(scored, kv_cache_quality("int8"))
    assert both.perplexity_ratio is None
    assert both.score_ratio[1] < scored.score_ratio[1]

    both = combined_quality(weight_quality("ternary", "bf16", None), kv_cache_quality("fp8"))
    assert both.loss_ratio is None
    assert len(both.evidence) == 2


@given(low=st.floats(1.0, 1.5), more=st.floats(0.0, 0.5), most=st.floats(0.0, 0.5))
def test_a_ratio_as_a_score_is_its_inverse(low, more, most):
    ratio = (low, low + more, low + more + most)
    score = Quality(perplexity_ratio=ratio).as_score
    assert list(score) == sorted(score)
    assert score[1] * ratio[1] == pytest.approx(1.0)


def test_an_unknown_quality_ranks_lower_and_family_size_and_training_count():
    found = ask(strategy={"weight_dtype": "ternary"}, engine="vllm")
    assert perplexity_ratio(found) == UNKNOWN_PERPLEXITY_RATIO > perplexity_ratio(ask())

    strategy = {"quantization": "gguf:q4_k_m"}
    small, older = (
        ask(model=name, strategy=strategy, engine="llama_cpp").quality.perplexity_ratio[1]
        for name in (LLAMA_8B, "meta-llama/Llama-2-7b")
    )
    assert small > older
    assert figure(ask(workload=TRAIN), "quality_loss_ratio") == 0.0


def test_a_limit_on_the_loss_of_quality_leaves_what_keeps_it():
    limits = {"quality_loss_ratio": {"max": 0.005}}
    answer = search(model=LLAMA_70B, devices=8, engine="vllm", constraints=limits, top=50)
    assert answer.plans
    assert all(figure(plan, "quality_loss_ratio") <= 0.005 for plan in answer.plans)
    assert not any(plan.strategy.weight_dtype == "int4" for plan in answer.plans)


def test_a_release_in_a_narrow_format_loses_nothing_and_others_are_relative_to_it():
    for model, devices, engine, strategy, loses in (
        ("openai/gpt-oss-120b", 1, "vllm", {}, False),
        ("openai/gpt-oss-20b", 1, "llama_cpp", {"quantization": "gguf:mxfp4_moe"}, False),
        ("openai/gpt-oss-20b", 1, "llama_cpp", {"weight_dtype": "int8"}, True),
        ("deepseek-ai/DeepSeek-V3", 16, "vllm", {}, False),
        ("deepseek-ai/DeepSeek-V3", 8, "vllm", {"quantization": "awq"}, True),
        ("unsloth/DeepSeek-R1-BF16", 32, "vllm", {}, False),
        ("Qwen/Qwen3-32B-FP8", 1, "vllm", {}, True),
        ("moonshotai/Kimi-K2-Thinking", 16, "vllm", {}, False),
    ):
        found = ask(model=model, devices=devices, engine=engine, strategy=strategy)
        assert (found.quality.loss_ratio > 0) is loses, model

    strict = {"quality_loss_ratio": {"max": 0.0}}
    answer = search(
        model="openai/gpt-oss-20b", device="strix-halo-395", engine="llama_cpp", constraints=strict
    )
    assert [plan.strategy.weight_dtype for plan in answer.plans] == ["mxfp4"]


def test_a_loss_says_its_measure_and_no_interval_is_narrower_than_its_rounding():
    for name, measure in (("awq", "perplexity"), ("fp8", "task scores")):
        kind, (low, middle, high) = ask(strategy={"quantization": name}).quality.losses
        assert kind == measure
        assert low < middle < high, name


WEIGHTS = sorted(fitted_quality().kinds["weights"].schemes)
RATIOS = st.tuples(st.floats(0.5, 4), st.floats(0.5, 4), st.floats(0.5, 4))


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


def row(scheme, model, ratio, billions=7.0, source="a"):
    return QualityRow(source, model, billions, scheme, "perplexity", ratio)


def planted(schemes, families, slope, sizes=(7.0, 13.0, 70.0)):
    """Rows whose effects are known."""
    return [
        row(scheme, family, math.exp(math.exp(a + b + slope * math.log(size / 7))), size, source)
        for scheme, a in schemes.items()
        for family, b in families.items()
        for size in sizes
        for source in "xy"
    ]


def test_the_shipped_fit_is_what_the_rows_give_each_with_a_source():
    shipped, built = data_json("quality_factors.json"), json.loads(json.dumps(build_quality()))
    assert shipped["held_out"] == built["held_out"]
    for kind, fields in built["kinds"].items():
        assert shipped["kinds"][kind]["pairs"] == fields["pairs"]
        for name in ("schemes", "families"):
            assert shipped["kinds"][kind][name] == pytest.approx(fields[name], abs=1e-3)

    sources = {line.split(",")[0] for line in data_text("quality_sources.csv").splitlines()[1:]}
    assert {one.source for one in quality_rows()} == sources
    assert all("https://" in line for line in data_text("quality_sources.csv").splitlines()[1:])
    assert all(0.4 < one.ratio < math.inf for one in quality_rows())
    schemes = {name for kind in fitted_quality().kinds.values() for name in kind.schemes}
    assert {one.source for one in quality_rows()} >= HELD_OUT
    assert not any(name.startswith(("efficientqat", "flatquant")) for name in schemes)


def test_planted_effects_are_found_again_whatever_one_row_or_size_says():
    rows = planted({"gguf:a": -3.0, "gguf:b": -5.0}, {"llama-2": 0.0, "llama-3": 0.8}, -0.2)
    fit = fit_quality(rows).kinds["weights"]
    assert fit.schemes["gguf:a"] - fit.schemes["gguf:b"] == pytest.approx(2.0, abs=0.05)
    assert fit.families["llama-3"] - fit.families["llama-2"] == pytest.approx(0.8, abs=0.1)
    assert fit.slope == pytest.approx(-0.2, abs=0.02)

    clean = planted({"gguf:a": -3.0, "gguf:b": -5.0}, {"llama-2": 0.0, "opt": 0.2}, -0.1)
    broken = [*clean, row("gguf:a", "llama-2", 35714.0, source="x")]
    before, after = (fit_quality(rows).kinds["weights"] for rows in (clean, broken))
    assert after.schemes["gguf:a"] == pytest.approx(before.schemes["gguf:a"], abs=0.1)

    schemes, families = {"gguf:a": -3.0, "gguf:b": -5.0}, {"llama-2": 0.0, "opt": 0.2}
    rows = planted(schemes, families, +0.5, sizes=(1.0, 7.0, 13.0, 70.0, 175.0))
    assert fit_quality(rows).kinds["weights"].slope == 0.0
    assert fitted_quality().ratio("gguf:q17", "llama-2", 7.0) is None
    assert row("gguf:a", "opt", 0.9958).log_loss == row("gguf:a", "opt", 1.0).log_loss


def test_a_scheme_and_a_name_tell_their_kind_and_family():
    for scheme, kind in (
        ("gguf:q4_k_m", "weights"), ("gptq-4g", "weights"), ("quarot:w4a16kv16", "weights"),
        ("quarot:w4a4kv4", "activations"), ("smoothquant", "activations"), ("kv:int4", "kv_cache"),
        ("sparsegpt:0.5:2:4", "pruning"), ("llm_pruner:0.177:structured", "pruning"),
    ):  # fmt: skip
        assert kind_of(scheme) == kind, (scheme, kind)

    for name, family in (
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3"),
        ("huggyllama/llama-65b", "llama-1"),
        ("mistralai/Mixtral-8x7B-v0.1", "mistral"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen"),
        ("something-else", "something-else"),
    ):
        assert family_of(name) == family, (name, family)


def test_held_out_sources_are_foreseen_or_said_to_be_unknown():
    """What the fit says of whole sources that it never saw; the accuracy page shows it."""
    found = {one.source: one for one in held_out_quality()}
    assert found["llamacpp-l3-70b-dranger003"].median_error < 0.12
    assert found["llamacpp-l3-70b-dranger003"].covered > 0.7
    assert found["flatquant-readme"].covered > 0.7
    assert found["efficientqat-readme"].unknown == found["efficientqat-readme"].rows


PAGE = Path("templates/docs/quality.md")


def test_the_page_is_what_the_rows_give_with_every_source_scheme_and_model():
    assert PAGE.read_text(encoding="utf-8") == quality_page()
    assert all(f"| {source} |" in quality_page() for source in HELD_OUT)
    lines = [line for line in quality_page().splitlines() if line.startswith("| ")]
    rows = [line for line in lines if line.split(" | ")[0].removeprefix("| ") in SHOWN]
    assert len(rows) == len(SHOWN)
    assert all(line.count(" / ") == 2 * len(MODELS) for line in rows)


def test_the_command_prints_the_page(capsys):
    assert main(["quality"]) == 0
    assert capsys.readouterr().out == quality_page()
