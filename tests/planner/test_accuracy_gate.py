"""The gate on accuracy: what it fails on, by hand and with planted faults, and that it passes."""

import json

import pytest

from planner.fitting import accuracy_gate, answered_rows, unfitted
from planner.fitting.accuracy_gate import baseline, errors_today, to_json, worsened
from planner.fitting.evidence import table
from planner.specs.base import BadRequestError
from planner.workload.setting import SweepFactors

TPOT = "time per output token, in no fit"


def test_a_class_fails_by_two_points_and_a_tenth_on_the_rows_that_both_have():
    for before, after, is_worse in [
        ({"a": 0.10}, {"a": 0.119}, False),  # less than two points
        ({"a": 0.10}, {"a": -0.121}, True),  # the sign of an error does not matter
        ({"a": 0.40}, {"a": 0.43}, False),  # three points, but less than a tenth
        ({"a": 0.40}, {"a": 0.45}, True),
        ({"a": 0.40}, {"a": 0.10}, False),
        ({"a": 0.1, "b": 0.1}, {"a": 0.12, "b": 0.11}, False),  # by the mean, not by row
        ({"a": 0.10}, {"a": 0.10, "new": 0.90}, False),  # new rows are no one's loss
    ]:
        assert bool(worsened({"steps": before}, {"steps": after})) == is_worse, (before, after)


def test_an_answer_that_is_lost_fails_by_name():
    assert worsened({"steps": {"a": 0.1, "b": 0.1}}, {"steps": {"b": 0.1}}) == [
        "steps: no answer any more: a"
    ]
    many = {f"r{number}": 0.1 for number in range(7)}
    assert worsened({"steps": many}, {}) == [
        "steps: no answer any more: r0, r1, r2, r3, r4 and 2 more"
    ]


def test_a_baseline_is_read_back_as_it_was_written():
    errors = {"steps": {"a": 0.1, 'b "2"': -0.25}, "peaks": {}}
    assert json.loads(to_json(errors)) == errors


def test_planted_faults_are_found_and_the_code_as_it_is_has_none(monkeypatch):
    """Rows of sweeps that no fit has seen: as they are, by slow kernels, and with a refusal."""
    serving = {"unfitted_serving": unfitted.READERS["unfitted_serving"]}
    monkeypatch.setattr(unfitted, "READERS", serving)
    rows = table("unfitted_serving")[::4]
    monkeypatch.setattr(answered_rows, "table", lambda _: rows)
    names = {row["row_id"] for row in rows}

    def asked():
        return accuracy_gate.by_class(
            (f"{figure.lower()}, in no fit", row["row_id"], found.error)
            for row, figure, _, found in unfitted.comparisons(accuracy_gate.AnsweredRows())
        )

    before = {
        title: {row: error for row, error in baseline()[title].items() if row in names}
        for title in (TPOT, "time to first token, in no fit")
    }
    assert worsened(before, asked()) == []

    with monkeypatch.context() as planted:
        factor = SweepFactors.factor
        planted.setattr(SweepFactors, "factor", lambda self, part: 1.15 * factor(self, part))
        (found,) = (line for line in worsened(before, asked()) if line.startswith(TPOT))
        assert "mean error" in found

    request_of, *others = serving["unfitted_serving"]
    refused = min(before[TPOT])

    def refusing(row):
        if row["row_id"] == refused:
            raise BadRequestError("no", "model")
        return request_of(row)

    monkeypatch.setitem(unfitted.READERS, "unfitted_serving", (refusing, *others))
    assert f"{TPOT}: no answer any more: {refused}" in worsened(before, asked())


@pytest.mark.slow
def test_no_class_of_rows_is_less_accurate_than_was_accepted():
    assert worsened(baseline(), errors_today()) == []
