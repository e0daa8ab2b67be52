"""The accuracy page says what the rows give, and the published examples come out as published."""

from pathlib import Path

import pytest

from planner.accuracy import accuracy_page, bits_example, lora_example, zero_example
from planner.catalog.reading import data_json
from planner.factors import by_engine, memory_cases, step_cases
from planner.held_out import source_of, summary, unseen_memory, unseen_sources

PAGE = Path("templates/docs/accuracy.md")
HELD_OUT = data_json("factors.json")["held_out"]


def test_the_page_is_what_the_rows_give_today():
    assert PAGE.read_text(encoding="utf-8") == accuracy_page()


def test_zero_divides_the_states_of_7_5_billion_parameters_as_published():
    """arXiv:1910.02054, figure 1."""
    assert [round(value / 1e9, 1) for value in zero_example()] == [120.0, 31.4, 16.6, 1.9]


def test_lora_trains_ten_thousand_times_fewer_parameters_in_a_third_of_the_memory():
    """arXiv:2106.09685, abstract, GPT-3 175B."""
    fewer, smaller = lora_example()

    assert fewer == pytest.approx(10_000, rel=0.08)
    assert smaller == pytest.approx(3.0, rel=0.01)


def test_narrow_weights_save_a_half_three_quarters_and_seven_eighths():
    assert bits_example() == (0.5, 0.75, 0.875)


@pytest.mark.parametrize(
    ("what", "figure", "bound"),
    [
        ("training step, unseen model", "median", 0.065),
        ("training step, unseen source", "median", 0.10),
        ("time per output token, unseen sweep", "mean", 0.095),
        ("time to first token, unseen sweep", "mean", 0.40),
        ("training peak, unseen model", "median", 0.10),
    ],
)
def test_what_was_left_out_is_met_within(what, figure, bound):
    assert HELD_OUT[what][figure] < bound


def test_nineteen_verdicts_of_twenty_are_right_on_models_left_out():
    assert HELD_OUT["training verdict, unseen model"]["right"] >= 0.95


def test_a_summary_counts_absolute_errors():
    assert summary([-0.2, 0.1, 0.3]) == {"n": 3, "mean": 0.2, "median": 0.2, "p90": 0.28}


def test_an_unseen_source_is_predicted_from_the_others():
    cases = [
        case
        for case in step_cases()
        if case.source in {"narayanan2021-t1", "narayanan2021-t2", "korthikanti2022"}
    ]
    found = unseen_sources(cases)

    assert {name: len(errors) for name, errors in found.items()} == {
        "korthikanti2022": 8,
        "narayanan2021-t1": 10,
        "narayanan2021-t2": 12,
    }


def test_an_engine_of_one_model_says_nothing_about_unseen_models():
    cases = by_engine(memory_cases())["internevo"]

    assert unseen_memory(cases) == ([], [])


def test_unseen_sources_give_an_error_for_a_peak_and_a_verdict_for_the_rest():
    cases = by_engine(memory_cases())["internevo"]
    errors, verdicts = unseen_memory(cases, source_of)

    assert len(errors) == sum(case.measured_bytes > 0 for case in cases)
    assert len(errors) + len(verdicts) == len(cases)
