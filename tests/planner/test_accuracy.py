"""The accuracy page says what the rows give, and the published examples come out as published."""

from pathlib import Path

import pytest

from planner.catalog.reading import data_json
from planner.fitting.held_out import classes_of, coverage, summary
from planner.fitting.left_out import kept_rows
from planner.fitting.pages.accuracy import accuracy_page, bits_example, lora_example, zero_example
from planner.fitting.pages.accuracy_sections import (
    goals,
    layout_choices,
    megatron_points,
    pictures,
)

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
        ("time per output token, unseen sweep, dense", "mean", 0.07),
        ("time to first token, unseen sweep, dense", "mean", 0.25),
        ("time per output token, unseen pair, dense", "mean", 0.15),
        ("time to first token, unseen pair, dense", "mean", 0.40),
        ("time per output token, unseen sweep", "mean", 0.11),
        ("time to first token, unseen sweep", "mean", 0.32),
        ("time per output token, unseen pair", "mean", 0.18),
        ("time to first token, unseen pair", "mean", 0.40),
        ("training peak, unseen model", "median", 0.10),
    ],
)
def test_what_was_left_out_is_met_within(what, figure, bound):
    assert HELD_OUT[what][figure] < bound


def test_nineteen_verdicts_of_twenty_are_right_on_models_left_out():
    assert HELD_OUT["training verdict, unseen model"]["right"] >= 0.95


def test_a_summary_counts_absolute_errors():
    assert summary([-0.2, 0.1, 0.3]) == {"n": 3, "mean": 0.2, "median": 0.2, "p90": 0.28}


def test_each_picture_is_what_the_rows_give_today():
    for name, drawn in pictures().items():
        kept = (PAGE.parent / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == drawn, name


def test_four_of_five_rows_left_out_lie_inside_their_intervals():
    for title, rows in classes_of(kept_rows()).items():
        found = HELD_OUT[title]["covered"]

        assert 0.72 <= found <= 0.85, title
        if HELD_OUT[title]["n"] < 300:
            assert found == coverage(rows), title


def test_our_first_layout_is_within_three_per_cent_in_nearly_every_published_sweep():
    found = layout_choices()

    assert len(found) >= 25
    assert sum(choice.is_close for choice in found) >= len(found) - 1


def test_the_eight_megatron_runs_are_met_closer_than_calculon_meets_them():
    """Calculon's mean on them is 3.65 %, fitted; here their model is left out."""
    assert megatron_points() < 0.035


def test_a_missed_goal_says_so():
    assert "| missed |" in goals()
    assert "| met |" in goals()
