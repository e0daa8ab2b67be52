"""Rows left out: what is left out with what, how wide intervals must be, choices and pictures."""

import math
import xml.etree.ElementTree as ET
from functools import cache

import numpy as np
import pytest

from planner.__main__ import main
from planner.fitting.evidence import table
from planner.fitting.factors import by_engine, memory_cases, spreads, step_cases
from planner.fitting.held_out import groups_of, report, title_of
from planner.fitting.left_out import (
    PEAK,
    STEP,
    LeftOut,
    alike,
    is_covered,
    kept_rows,
    left_out_peaks,
    left_out_steps,
    model_of,
    source_of,
    spread_of,
    written,
)
from planner.fitting.pages.accuracy_sections import bounds, picture, ticks
from planner.fitting.published_speeds import choices
from planner.fitting.serving.factors import SEEN, UNSEEN
from planner.specs.estimate import EstimateRequest
from planner.workload.outcome import confidence_of
from planner.workload.resolve import resolve
from tests.planner.asking import TRAIN, document

MEGATRON = {"narayanan2021-t1", "narayanan2021-t2", "korthikanti2022"}


def row(predicted=1.0, measured=1.0, part="a", engine="megatron", figure=STEP, row_id=""):
    return LeftOut(figure, SEEN, row_id, engine, "source", part, measured, predicted)


@cache
def left_out_megatron():
    """Return the rows of three sources, each predicted from the others."""
    cases = [case for case in step_cases() if case.source in MEGATRON]
    return left_out_steps(cases, source_of, UNSEEN)


def spread_in_estimate(engine, device="a100-sxm-80gb"):
    workload = {**TRAIN, "method": "pretrain"}
    asked = document(workload=workload, engine=engine, device=device)
    return confidence_of(resolve(EstimateRequest.model_validate(asked)))


def test_every_source_is_predicted_from_the_others():
    rows = left_out_megatron()

    assert {source: sum(r.source == source for r in rows) for source in MEGATRON} == {
        "korthikanti2022": 8,
        "narayanan2021-t1": 10,
        "narayanan2021-t2": 12,
    }


def test_a_source_left_out_leaves_other_factors_than_one_kept():
    rows = left_out_megatron()
    kept = [r for r in kept_rows() if r.figure == STEP and r.error_class == UNSEEN]

    assert {r.row_id: r.predicted for r in rows} != {
        r.row_id: r.predicted for r in kept if r.source in MEGATRON
    }


def test_an_engine_of_one_model_says_nothing_about_unseen_models():
    cases = by_engine(memory_cases())["internevo"]

    assert left_out_peaks(cases, model_of, SEEN) == ([], [])
    assert not [r for r in kept_rows() if r.engine == "internevo" and r.error_class == SEEN]


def test_peaks_left_out_give_an_error_for_a_peak_and_a_verdict_for_the_rest():
    cases = by_engine(memory_cases())["internevo"]
    rows, verdicts = left_out_peaks(cases, source_of, UNSEEN)

    assert len(rows) == sum(case.measured_bytes > 0 for case in cases)
    assert len(rows) + len(verdicts) == len(cases)


def test_what_was_written_down_is_what_the_fit_says_of_one_engine():
    cases = by_engine(memory_cases())["oneflow"]
    rows, _ = left_out_peaks(cases, model_of, SEEN)
    kept = {
        r.row_id: r.predicted for r in kept_rows() if (r.figure, r.error_class) == (PEAK, SEEN)
    }

    assert rows
    assert all(kept[r.row_id] == r.predicted for r in rows)


def test_a_row_is_off_alike_above_and_below():
    assert row(predicted=2.0).distance == pytest.approx(row(predicted=0.5).distance)
    assert row(predicted=2.0).error == 1.0


def test_a_spread_covers_four_of_five_rows():
    rows = [row(predicted=math.exp(step / 10)) for step in range(11)]
    reach = 1.2816 * spread_of(rows)

    assert np.mean([r.distance <= reach for r in rows]) == pytest.approx(0.8, abs=0.05)


def test_a_part_has_no_say_in_its_own_interval():
    wild = [row(predicted=10.0, part="wild")] * 20
    calm = [row(predicted=1.01, part="calm")] * 20

    assert not is_covered(wild[0], wild + calm)
    assert is_covered(calm[0], wild + calm)


def test_an_engine_with_few_rows_takes_the_width_of_all():
    few = [row(engine="rare")] * 3
    many = [row()] * 30

    assert len(alike(few[0], few + many)) == 33
    assert len(alike(many[0], few + many)) == 30


def test_spreads_are_kept_by_error_class_and_engine():
    rows = kept_rows()
    own, common = (spreads(rows, STEP, engine) for engine in ("llm_foundry", "nobodys"))

    assert own[SEEN] != common[SEEN]
    assert own[UNSEEN] == common[UNSEEN]


def test_a_chip_that_an_engine_never_ran_on_gets_the_wider_interval():
    near = spread_in_estimate("llm_foundry").time_spread
    far = spread_in_estimate("llm_foundry", "mi300x").time_spread

    assert near < far


def test_rows_survive_being_written_down():
    text = written(kept_rows()[:3])

    assert text.splitlines()[0].startswith("figure,error_class,row_id")
    assert len(text.splitlines()) == 4


def test_titles_say_what_was_left_out():
    assert title_of(row(figure=PEAK)) == "training peak, unseen model"
    assert list(groups_of([row(), row(figure=PEAK)])) == [
        "training step, unseen model",
        "training peak, unseen model",
    ]


def test_a_report_counts_covers_and_judges():
    found = report([row(part=part) for part in "ab"], {"verdicts": [(True, True), (True, False)]})

    assert found["training step, unseen model"]["covered"] == 1.0
    assert (found["verdicts"]["n"], found["verdicts"]["right"]) == (2, 0.5)


def test_a_choice_is_judged_by_what_was_measured():
    rows = [r for r in table("training") if r["source_id"] == "bigscience-tr11"]
    upside_down = [
        row(
            row_id=r["row_id"],
            predicted=1 / float(r["step_seconds"]),
            measured=float(r["step_seconds"]),
        )
        for r in rows
    ]
    perfect = [
        row(
            row_id=r["row_id"],
            predicted=float(r["step_seconds"]),
            measured=float(r["step_seconds"]),
        )
        for r in rows
    ]

    assert all(choice.lost == 0 for choice in choices(perfect))
    assert all(choice.lost > 0 for choice in choices(upside_down))


def test_a_picture_marks_every_row_and_names_itself():
    rows = [row(measured=2.0, predicted=3.0), row(measured=40.0, predicted=30.0)]
    drawn = ET.fromstring(picture("training step", "seconds", rows))  # noqa: S314 - our own text

    marks = next(path for path in drawn if path.get("class") == "meas")
    assert marks.get("d").count("M") == 2
    assert "2 rows" in drawn.get("aria-label")


@pytest.mark.parametrize(
    ("values", "ends"), [([2.0, 40.0], (1.0, 100.0)), ([5.0, 5.0], (3.1623, 10))]
)
def test_axes_span_half_decades(values, ends):
    assert bounds(values) == pytest.approx(ends, rel=1e-3)


def test_ticks_are_powers_of_ten_on_the_axis():
    assert ticks(1.0, 31.6) == [1.0, 10.0]


def test_the_command_line_prints_one_picture_and_refuses_an_unknown_one(capsys):
    assert main(["accuracy", "--picture", "accuracy-training-step-unseen-model"]) == 0
    assert capsys.readouterr().out.startswith("<svg")
    assert main(["accuracy", "--picture", "nothing"]) == 2


def test_choices_may_come_from_a_generator():
    rows = [
        row(row_id=r["row_id"], predicted=1.0, measured=float(r["step_seconds"]))
        for r in table("training")
        if r["source_id"] == "bigscience-tr11"
    ]

    assert choices(iter(rows)) == choices(rows)
    assert choices(rows)
