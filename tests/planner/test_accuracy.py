"""The accuracy page, its published examples, and the rows that it is made of."""

import json
import math
from pathlib import Path

import pytest

from planner.catalog.engines import factor_of, published_times, spread_of
from planner.catalog.reading import data_json
from planner.cost.weights import RECIPES, column_seconds, tuning_seconds
from planner.fitting import accuracy, long_runs, on_policy, tails, unfitted
from planner.fitting.accuracy import (
    accuracy_page,
    bits_example,
    errors,
    goals,
    layout_choices,
    layouts,
    lora_example,
    megatron_points,
    picture_section,
    pictures,
    throughput_section,
    zero_example,
)
from planner.fitting.evidence import model_named, model_of, number, table, usable
from planner.fitting.generation_peaks import contradictions, rows_over_device_memory, section
from planner.fitting.left_out import kept_rows
from planner.fitting.offload_examples import flexgen_table, training_offload_table
from planner.fitting.published_speeds import classes_of, coverage, published_section
from planner.fitting.quality_fit import (
    AT_MOST,
    build_compression,
    cases,
    compression_section,
    has_supported_method,
    kinds,
    left_out,
    log_factor,
    weighted_median,
)
from planner.workload.resolve import resolve_model
from tests.plugins.extent import sample

PAGE = Path("templates/docs/accuracy.md")
HELD_OUT = data_json("factors.json")["held_out"]


SECTIONS = (
    goals, errors, layouts, picture_section, throughput_section, published_section, flexgen_table,
    training_offload_table, compression_section, section, unfitted.section, tails.section,
    on_policy.section,
    long_runs.section,
)  # fmt: skip
FITTED = {
    "Training step, fitted": lambda: accuracy._errors(table("training"), "step_seconds"),
    "Training peak memory, fitted": lambda: accuracy._errors(table("memory"), "peak_memory_bytes"),
    "Serving, fitted": accuracy._serving_errors,
}


@pytest.mark.slow
def test_the_whole_page_is_what_the_rows_give_today():
    assert PAGE.read_text(encoding="utf-8") == accuracy_page()


def test_sections_and_pictures_are_what_the_rows_give_today():
    page = PAGE.read_text(encoding="utf-8")
    for one in sample(SECTIONS, share=0.4):
        assert one().strip() in page, one
    for title, errors_of in sample(FITTED.items()):
        assert accuracy._table(title, errors_of()).strip() in page, title
    for name, drawn in sample(pictures().items()):
        kept = (PAGE.parent / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == drawn, name

    # A missed goal says so.
    assert "| missed |" in goals()
    assert "| met |" in goals()


def test_the_published_examples_come_out_as_published():
    # ZeRO divides the states of 7.5 billion parameters as published: arXiv:1910.02054, figure 1.
    assert [round(value / 1e9, 1) for value in zero_example()] == [120.0, 31.4, 16.6, 1.9]
    # LoRA trains ten thousand times fewer parameters in a third of the memory: arXiv:2106.09685,
    # abstract, GPT-3 175B.
    fewer, smaller = lora_example()
    assert fewer == pytest.approx(10_000, rel=0.08)
    assert smaller == pytest.approx(3.0, rel=0.01)
    # Narrow weights save a half three quarters and seven eighths.
    assert bits_example() == (0.5, 0.75, 0.875)


def test_what_was_left_out_is_met_within_its_bounds():
    for what, figure, bound in [
        ("training step, unseen model", "median", 0.065),
        ("training step, unseen source", "median", 0.10),
        ("time per output token, unseen sweep, dense", "mean", 0.07),
        ("time to first token, unseen sweep, dense", "mean", 0.31),
        ("time per output token, unseen pair, dense", "mean", 0.15),
        ("time to first token, unseen pair, dense", "mean", 0.40),
        ("time per output token, unseen sweep", "mean", 0.11),
        ("time to first token, unseen sweep", "mean", 0.32),
        ("time per output token, unseen pair", "mean", 0.18),
        ("time to first token, unseen pair", "mean", 0.40),
        ("training peak, unseen model", "median", 0.10),
    ]:
        assert HELD_OUT[what][figure] < bound

    # Nineteen verdicts of twenty are right on models left out.
    assert HELD_OUT["training verdict, unseen model"]["right"] >= 0.95
    # The eight Megatron runs are met closer than calculon meets them: Calculon's mean on them is
    # 3.65 %, fitted; here their model is left out.
    assert megatron_points() < 0.035


def test_four_of_five_rows_left_out_lie_inside_their_intervals():
    for title, rows in classes_of(kept_rows()).items():
        found = HELD_OUT[title]["covered"]
        assert 0.72 <= found <= 0.93, title
        if HELD_OUT[title]["n"] < 300:
            assert found == coverage(rows), title


def test_our_first_layout_is_within_three_per_cent_in_nearly_every_published_sweep():
    found = layout_choices()
    assert len(found) >= 25
    assert sum(choice.is_close for choice in found) >= len(found) - 1


# Pictures go through a tower of their own before these models' text is costed.
WITH_PICTURES = ("VILA", "NVILA")


def test_every_model_of_a_table_resolves():
    for name in ["memory", "memory_fit", "training"]:
        models = [model_of(row) for row in table(name)]
        for model in {model for model in models if isinstance(model, str)}:
            assert resolve_model(model).num_hidden_layers > 0, model

    # Every language model of other inference rows resolves.
    names = {row["model"] for row in table("inference_other")}
    for name in sorted(names):
        if not name.startswith(WITH_PICTURES):
            assert resolve_model(model_named(name)).num_hidden_layers > 0, name


ROWS = table("compression")


def of(source):
    return [case for case in cases() if case.source == source]


def test_the_shipped_factors_are_what_the_rows_give_today():
    shipped = data_json("compression_factors.json")
    assert shipped == json.loads(json.dumps(build_compression()))


def test_every_row_names_its_source_and_what_it_may_be_compared_with():
    # Every row names its source and no row twice.
    assert len({row["row_id"] for row in ROWS}) == len(ROWS)
    assert all(row["source"] and row["source_path"] and row["notes"] for row in ROWS)
    # Rows of other recipes are told apart with the reason.
    others = [row for row in ROWS if not has_supported_method(row)]
    assert len(others) == 8
    assert all("not compared: " in row["notes"] for row in others)

    # Bounds take no part in the fit and stand on the page.
    bounds = [row for row in ROWS if row["relation"] == AT_MOST]
    assert bounds
    assert not {row["row_id"] for row in bounds} & {case.row["row_id"] for case in cases()}
    assert compression_section() in PAGE.read_text(encoding="utf-8")
    assert "published as under 4.5 h" in compression_section()


def test_published_times_come_out_of_the_physics():
    # GPTQ's own table comes out of the physics alone: arXiv:2210.17323, table 2: 10 minutes to
    # 4.2 hours on one A100.
    own, tuned = of("gptq-paper"), of("auto-round-cost")
    assert len(own) >= 6
    assert len(tuned) >= 10
    for case in own:
        assert abs(case.log_ratio) < math.log(1.25)
    # Tuning comes out within a half.
    for case in tuned:
        assert abs(case.log_ratio) < math.log(1.85)

    # Peaks of device memory come out within a quarter.
    told = [one for one in cases() if one.row["peak_memory_bytes"]]
    errors = [
        one.estimate.memory.per_device_peak_bytes / number(one.row, "peak_memory_bytes") - 1
        for one in told
    ]
    assert len(errors) == 16
    assert max(map(abs, errors)) < 0.25


def test_times_of_rows_left_out_lie_inside_the_interval():
    found = left_out(kinds()["second_order"])
    errors = {other.row["row_id"]: error for other, error in found}
    # The GPTQ of another source comes out without having been seen.
    cases_of_another = of("llm-compressor-ddp")
    assert len(cases_of_another) >= 6
    for case in cases_of_another:
        assert abs(errors[case.row["row_id"]]) < math.log(1.5)

    # Four fifths of left out rows lie inside the interval.
    inside = [abs(error) <= 1.2816 * spread_of("second_order") for _, error in found]
    assert 0.75 <= sum(inside) / len(inside) <= 0.9


def test_factors_weigh_their_sources():
    # A vague source counts a quarter.
    exact, vague = of("gptq-paper")[0], of("taiwan-llama-gptq")[0]
    assert (exact.weight, vague.weight) == (1.0, 0.25)
    assert abs(log_factor([exact, vague]) - 0.8 * exact.log_ratio) < abs(vague.log_ratio) / 2
    # Nothing to fit is the physics.
    assert log_factor([]) == 0.0
    assert factor_of("qmoe") == 1.0
    assert published_times("qmoe") == 0

    # A weighted median has half the weight on either side.
    for told, middle in [
        ([(3.0, 1.0)], 3.0),
        ([(1.0, 1.0), (2.0, 1.0)], 1.5),
        ([(1.0, 0.25), (5.0, 1.0), (9.0, 0.25)], 5.0),
    ]:
        assert weighted_median(told) == middle

    # Every kind of method with times is one that a recipe names.
    assert set(data_json("compression_factors.json")["methods"]) <= {
        recipe.method_group for recipe in RECIPES.values()
    }
    # Columns and steps wait for each other.
    assert column_seconds(columns=1000, passes=2, column_s=1e-3) == pytest.approx(2.0)
    assert tuning_seconds(num_layers=10, steps=200, step_s=1e-3) == pytest.approx(2.0)


def row(peak, micro="1", length="512", **fields):
    """Return a row of the memory table, empty but for its work and its peak."""
    empty = dict.fromkeys(table("memory")[0], "")
    told = {"source_id": "s", "gpu": "A100-SXM-80GB", "micro_batch_size": micro}
    return {**empty, **told, "sequence_length": length, "peak_memory_bytes": str(peak), **fields}


def test_more_tokens_in_less_memory_contradict_each_other_and_nothing_else_does():
    (pair,) = contradictions([row(20e9), row(10e9, length="1024")])
    assert pair.gap == pytest.approx(1.0)
    assert pair.more["sequence_length"] == "1024"
    # Of one setting measured twice the higher row contradicts the lower.
    (pair,) = contradictions([row(20e9), row(15e9)])
    assert pair.gap == pytest.approx(1 / 3)

    # More tokens in more memory do not.
    assert not list(contradictions([row(10e9), row(20e9, length="1024")]))
    # A difference within the printed digits is none.
    assert not list(contradictions([row(10.1e9), row(10e9, length="1024")]))
    # Other settings are not compared.
    assert not list(contradictions([row(20e9), row(10e9, length="1024", method="lora")]))
    # A longer sequence in a smaller batch is no more work.
    assert not list(contradictions([row(20e9, micro="4"), row(10e9, length="1024")]))


def test_contradictions_are_named_and_take_part_in_the_fit():
    # A peak above the memory of the card is named.
    found = list(rows_over_device_memory([row(90e9), row(80e9)]))
    assert [(one["peak_memory_bytes"], has) for one, has in found] == [
        ("90000000000.0", 80 * 2**30)
    ]

    # What contradicts itself takes part in the fit.
    kept = {one["row_id"] for one in usable(table("memory"))}
    trained = [p for p in contradictions(table("memory")) if p.less["kind"] == "train"]
    assert trained
    assert {pair.less["row_id"] for pair in trained} <= kept

    # The page names them.
    assert section() in PAGE.read_text(encoding="utf-8")
