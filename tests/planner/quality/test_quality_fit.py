"""The fit of quality: from the published rows alone, without the sources that are held out."""

import json
import math

import pytest

from planner.catalog.quality import QualityRow, family_of, fitted_quality, kind_of, quality_rows
from planner.catalog.reading import data_json, data_text
from planner.fitting.quality_fit import HELD_OUT, build_quality, fit_quality, held_out_quality


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


def test_the_shipped_fit_is_what_the_rows_give():
    shipped, built = data_json("quality_factors.json"), json.loads(json.dumps(build_quality()))
    assert shipped["held_out"] == built["held_out"]
    for kind, fields in built["kinds"].items():
        assert shipped["kinds"][kind]["pairs"] == fields["pairs"]
        for name in ("schemes", "families"):
            assert shipped["kinds"][kind][name] == pytest.approx(fields[name], abs=1e-3)


def test_every_row_names_a_source_that_has_an_address():
    sources = {line.split(",")[0] for line in data_text("quality_sources.csv").splitlines()[1:]}
    assert {one.source for one in quality_rows()} == sources
    assert all("https://" in line for line in data_text("quality_sources.csv").splitlines()[1:])


def test_every_ratio_is_a_number_over_the_rows_own_baseline():
    assert all(0.4 < one.ratio < math.inf for one in quality_rows())


def test_held_out_sources_take_no_part_in_the_fit():
    schemes = {name for kind in fitted_quality().kinds.values() for name in kind.schemes}
    assert {one.source for one in quality_rows()} >= HELD_OUT
    assert not any(name.startswith(("efficientqat", "flatquant")) for name in schemes)


def test_planted_effects_are_found_again():
    rows = planted({"gguf:a": -3.0, "gguf:b": -5.0}, {"llama-2": 0.0, "llama-3": 0.8}, -0.2)
    fit = fit_quality(rows).kinds["weights"]
    assert fit.schemes["gguf:a"] - fit.schemes["gguf:b"] == pytest.approx(2.0, abs=0.05)
    assert fit.families["llama-3"] - fit.families["llama-2"] == pytest.approx(0.8, abs=0.1)
    assert fit.slope == pytest.approx(-0.2, abs=0.02)


def test_one_broken_row_hardly_moves_the_fit():
    clean = planted({"gguf:a": -3.0, "gguf:b": -5.0}, {"llama-2": 0.0, "opt": 0.2}, -0.1)
    broken = [*clean, row("gguf:a", "llama-2", 35714.0, source="x")]
    before, after = (fit_quality(rows).kinds["weights"] for rows in (clean, broken))
    assert after.schemes["gguf:a"] == pytest.approx(before.schemes["gguf:a"], abs=0.1)


def test_a_size_that_seems_to_hurt_is_taken_for_no_effect():
    schemes, families = {"gguf:a": -3.0, "gguf:b": -5.0}, {"llama-2": 0.0, "opt": 0.2}
    rows = planted(schemes, families, +0.5, sizes=(1.0, 7.0, 13.0, 70.0, 175.0))
    assert fit_quality(rows).kinds["weights"].slope == 0.0


def test_a_scheme_without_rows_has_no_ratio():
    assert fitted_quality().ratio("gguf:q17", "llama-2", 7.0) is None


def test_a_ratio_that_no_digits_show_still_has_a_logarithm():
    assert row("gguf:a", "opt", 0.9958).log_loss == row("gguf:a", "opt", 1.0).log_loss


def test_a_scheme_is_of_the_kind_of_what_it_takes_away():
    for scheme, kind in (
        ("gguf:q4_k_m", "weights"),
        ("gptq-4g", "weights"),
        ("quarot:w4a16kv16", "weights"),
        ("quarot:w4a4kv4", "activations"),
        ("smoothquant", "activations"),
        ("kv:int4", "kv_cache"),
        ("sparsegpt:0.5:2:4", "pruning"),
        ("llm_pruner:0.177:structured", "pruning"),
    ):
        assert kind_of(scheme) == kind, (scheme, kind)


def test_a_name_tells_the_family():
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
