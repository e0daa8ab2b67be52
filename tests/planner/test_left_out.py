"""Rows left out: with what, without a say of their own, and the figures made of them."""

import csv
import io
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.__main__ import main
from planner.fitting.accuracy import HEIGHT, WIDTH, bounds, picture, share, ticks
from planner.fitting.decode_fitting import COVERED, StreamCase
from planner.fitting.decode_fitting import left_out as left_out_streams
from planner.fitting.decode_fitting import spread_of as spread_of_errors
from planner.fitting.evidence import round_factor, table
from planner.fitting.left_out import (
    NEW_ENGINE,
    NEW_FAMILY,
    PEAK,
    STEP,
    TPOT,
    TTFT,
    Z_80,
    LeftOut,
    engine_spread,
    is_covered,
    kept_rows,
    left_out_peaks,
    left_out_steps,
    model_of,
    source_of,
    spread_of,
    to_csv,
)
from planner.fitting.published_speeds import (
    LAYOUT,
    SAME,
    by_engine,
    choices,
    coverage,
    groups_of,
    memory_cases,
    report,
    rightness,
    spreads,
    step_cases,
    summary,
    title_of,
)
from planner.fitting.serving_factors import (
    SEEN,
    UNSEEN,
    fold_of,
    group_of,
    held_out,
    interval_spread,
)
from planner.fitting.serving_model import PASS_PARTS, ServingCase
from planner.fitting.step_fitting import (
    GIB,
    MEMORY_FACTORS,
    PARTS,
    MemoryCase,
    StepCase,
    fit_pooled,
)
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

    # A source left out leaves other factors than one kept.
    kept = [r for r in kept_rows() if r.figure == STEP and r.error_class == UNSEEN]
    assert {r.row_id: r.predicted for r in rows} != {
        r.row_id: r.predicted for r in kept if r.source in MEGATRON
    }


def test_peaks_left_out_give_an_error_for_a_peak_and_a_verdict_for_the_rest():
    # An engine of one model says nothing about unseen models.
    cases = by_engine(memory_cases())["internevo"]
    assert left_out_peaks(cases, model_of, SEEN) == ([], [])
    assert not [r for r in kept_rows() if r.engine == "internevo" and r.error_class == SEEN]

    rows, verdicts = left_out_peaks(cases, source_of, UNSEEN)
    assert len(rows) == sum(case.measured_bytes > 0 for case in cases)
    assert len(rows) + len(verdicts) == len(cases)


@pytest.mark.slow
def test_what_was_written_down_is_what_the_fit_says_of_one_engine():
    cases = by_engine(memory_cases())["oneflow"]
    rows, _ = left_out_peaks(cases, model_of, SEEN)
    kept = {
        r.row_id: r.predicted for r in kept_rows() if (r.figure, r.error_class) == (PEAK, SEEN)
    }
    assert rows
    assert all(kept[r.row_id] == r.predicted for r in rows)


def test_a_spread_covers_four_of_five_rows_and_never_its_own_part():
    # A row is off alike above and below.
    assert row(predicted=2.0).distance == pytest.approx(row(predicted=0.5).distance)
    assert row(predicted=2.0).error == 1.0
    # A spread covers four of five rows.
    steps = [row(predicted=math.exp(step / 10)) for step in range(11)]
    reach = 1.2816 * spread_of(steps)
    assert np.mean([r.distance <= reach for r in steps]) == pytest.approx(0.8, abs=0.05)

    # A part has no say in its own interval.
    wild = [row(predicted=10.0, part="wild")] * 20
    calm = [row(predicted=1.01, part="calm")] * 20
    assert not is_covered(wild[0], wild + calm)
    assert is_covered(calm[0], wild + calm)

    # Calm rows of an engine do not narrow its width below that of all; restless ones widen it.
    rows = kept_rows()
    calm, restless, none = (
        spreads(rows, STEP, engine) for engine in ("llm_foundry", "transformers", "nobodys")
    )
    assert calm == none
    assert restless[SEEN] > none[SEEN]
    # The less the fit has seen, the wider: chips of an engine, then the engine itself.
    assert none[SEEN] < none[UNSEEN] < spreads(rows, STEP, "")[UNSEEN]
    assert restless[SEEN] <= restless[UNSEEN]

    # A chip that an engine never ran on gets the wider interval.
    near = spread_in_estimate("llm_foundry").time_spread
    far = spread_in_estimate("llm_foundry", "mi300x").time_spread
    assert near < far


def test_reports_say_what_was_left_out_and_how_often_it_was_covered():
    # Rows survive being written down.
    text = to_csv(kept_rows()[:3])
    assert text.splitlines()[0].startswith("figure,error_class,row_id")
    assert len(text.splitlines()) == 4

    # Titles say what was left out.
    assert title_of(row(figure=PEAK)) == "training peak, unseen model"
    assert list(groups_of([row(), row(figure=PEAK)])) == [
        "training step, unseen model",
        "training peak, unseen model",
    ]

    # A report counts covers and judges.
    found = report([row(part=part) for part in "ab"], {"verdicts": [(True, True), (True, False)]})
    assert found["training step, unseen model"]["covered"] == 1.0
    assert (found["verdicts"]["n"], found["verdicts"]["right"]) == (2, 0.5)


def test_a_choice_is_judged_by_what_was_measured():
    rows = [r for r in table("training") if r["source_id"] == "bigscience-tr11"]
    taken = [(float(r["step_seconds"]), r["row_id"]) for r in rows]
    upside_down = [row(1 / seconds, seconds, row_id=name) for seconds, name in taken]
    perfect = [row(seconds, seconds, row_id=name) for seconds, name in taken]
    assert all(choice.lost == 0 for choice in choices(perfect))
    assert all(choice.lost > 0 for choice in choices(upside_down))

    # Choices may come from a generator.
    even = [row(1.0, seconds, row_id=name) for seconds, name in taken]
    assert choices(iter(even)) == choices(even)
    assert choices(even)


def test_a_picture_marks_every_row_between_half_decades(capsys):
    # A picture marks every row and names itself.
    rows = [row(measured=2.0, predicted=3.0), row(measured=40.0, predicted=30.0)]
    drawn = ET.fromstring(picture("training step", "seconds", rows))  # noqa: S314 - our own text
    marks = next(path for path in drawn if path.get("class") == "meas")
    assert marks.get("d").count("M") == 2
    assert "2 rows" in drawn.get("aria-label")

    # Axes span half decades.
    for values, ends in [([2.0, 40.0], (1.0, 100.0)), ([5.0, 5.0], (3.1623, 10))]:
        assert bounds(values) == pytest.approx(ends, rel=1e-3)
    # Ticks are powers of ten on the axis.
    assert ticks(1.0, 31.6) == [1.0, 10.0]
    # The command line prints one picture and refuses an unknown one.
    assert main(["accuracy", "--picture", "accuracy-training-step-unseen-model"]) == 0
    assert capsys.readouterr().out.startswith("<svg")
    assert main(["accuracy", "--picture", "nothing"]) == 2


NAMES = list(MEMORY_FACTORS)
MATMUL, EXCHANGE = PARTS.index("matmul"), PARTS.index("exchange")


def run_of(name, source, model, matmul, factor=1.4, engine="one", **fields):
    seconds = np.zeros(len(PARTS))
    seconds[MATMUL], seconds[EXCHANGE] = matmul, 0.1
    told = {"architecture": "hopper", "device": "h100", "runs_ahead": False, **fields}
    return StepCase(
        row_id=name,
        engine=engine,
        source=source,
        group=f"{source}/{model}",
        seconds=seconds,
        measured_s=factor * matmul + 0.1,
        **told,
    )


def runs():
    """Return three sources of two models each, each slower than the physics in its own way."""
    return [
        run_of(f"{source}{model}{size}", source, model, size, factor)
        for source, factor in (("a", 1.2), ("b", 1.5), ("c", 2.0))
        for model in ("small", "large")
        for size in (1.0, 2.0, 4.0)
    ]


def predicted(rows, part):
    return {row.row_id: row.predicted for row in rows if row.part == part}


def test_a_run_left_out_is_predicted_alike_whatever_it_measured():
    cases = runs()
    for part_of, error_class, part in [(source_of, UNSEEN, "c"), (model_of, SEEN, "a/small")]:
        before = left_out_steps(cases, part_of, error_class)
        for times in [0.01, 100.0]:
            changed = [
                replace(c, measured_s=c.measured_s * times) if part_of(c) == part else c
                for c in cases
            ]
            after = left_out_steps(changed, part_of, error_class)
            assert predicted(before, part) == predicted(after, part) != {}
            assert [row.measured for row in after] == [
                next(c for c in changed if c.row_id == row.row_id).measured_s for row in after
            ]

    # A run that is kept does have a say in the others.
    slower = [replace(c, measured_s=c.measured_s * 1.5) if c.source == "a" else c for c in cases]
    before, after = (left_out_steps(which, source_of, UNSEEN) for which in (cases, slower))
    assert predicted(before, "c") != predicted(after, "c")


def test_every_run_is_left_out_once_and_lonely_ones_are_no_unseen_model():
    # Every run is left out once.
    for part_of in (source_of, model_of):
        rows = left_out_steps(runs(), part_of, UNSEEN)
        assert sorted(row.row_id for row in rows) == sorted(case.row_id for case in runs())

    # An engine of one source is an unseen engine and no unseen model.
    cases = [*runs(), run_of("lonely", "d", "small", 2.0, engine="other")]
    unseen, seen = (left_out_steps(cases, source_of, one) for one in (UNSEEN, SEEN))
    assert "lonely" in {row.row_id for row in unseen}
    assert "lonely" not in {row.row_id for row in seen}

    # Engines that run ahead are no part of what all have in common.
    ahead = [run_of(str(n), "z", "m", n, 2.4, runs_ahead=True) for n in (1.0, 2.0, 3.0)]
    both, alone = (
        fit_pooled(which).factors("", "hopper") for which in ([*runs(), *ahead], runs())
    )
    assert list(both) == list(alone)


def peaks():
    draw = np.random.default_rng(5)
    found = []
    for source, factor in (("a", 1.2), ("b", 1.6), ("c", 0.7)):
        for model in ("small", "large"):
            slopes = np.zeros((1, len(NAMES)))
            slopes[0, NAMES.index("activation_ratio")] = size = float(draw.uniform(10, 40)) * GIB
            found.append(
                MemoryCase(
                    row_id=source + model,
                    engine="one",
                    source=source,
                    group=f"{source}/{model}",
                    base_bytes=np.array([10 * GIB]),
                    slopes=slopes,
                    usable_bytes=80 * GIB,
                    measured_bytes=10 * GIB + factor * size,
                )
            )
    return found


def test_a_peak_left_out_is_predicted_alike_whatever_it_measured():
    def told(times):
        cases = [
            replace(c, measured_bytes=c.measured_bytes * times) if c.source == "b" else c
            for c in peaks()
        ]
        return left_out_peaks(cases, source_of, UNSEEN)[0]

    before = told(1)
    for times in [0.1, 10.0]:
        assert predicted(before, "b") == predicted(told(times), "b") != {}
    # A peak that is kept does have a say in the others.
    assert predicted(before, "a") != predicted(told(0.5), "a")


def test_a_verdict_is_right_when_what_ran_fits_and_what_failed_does_not():
    """Without evidence the peak is the prior's: 10 + 20 GiB of activations, 1 GiB of overhead."""
    slopes = np.zeros((1, len(NAMES)))
    slopes[0, NAMES.index("activation_ratio")] = 20 * GIB
    one = MemoryCase("r", "one", "a", "a/m", np.array([10 * GIB]), slopes, 0.0)
    told = [
        replace(one, usable_bytes=usable * GIB, ran=ran)
        for usable, ran in ((31, True), (31, False), (29, True), (29, False))
    ]
    rows, verdicts = left_out_peaks(told, source_of, UNSEEN)
    assert rows == []
    assert [said == was for said, was in verdicts] == [True, False, False, True]
    assert [said for said, _ in verdicts] == [True, True, False, False]


def stream_of(device, linear, factor):
    return StreamCase(
        engine="e",
        source="a",
        device=device,
        family="hopper",
        kernels="gpu",
        kind="gpu",
        level="",
        group="decode",
        width="wide",
        linear_s=linear,
        experts_s=0.0,
        attention_s=0.0,
        issue_s=0.0,
        scores_s=0.0,
        power_s=0.0,
        rest_s=1e-4,
        runs_ahead=False,
        is_replayed=False,
        measured_s=factor * linear,
    )


def test_a_card_left_out_is_predicted_alike_whatever_it_measured():
    for times in [0.5, 20.0]:
        cases = [
            stream_of(card, linear, factor)
            for card, factor in (("x", 1.2), ("y", 1.6), ("z", 2.0))
            for linear in (0.01, 0.02, 0.03)
        ]
        changed = [
            replace(c, measured_s=c.measured_s * times) if c.device == "y" else c for c in cases
        ]

        seconds = [
            [c.measured_s / (1 + e) for c, e in left_out_streams(which, lambda c: c.device)]
            for which in (cases, changed)
        ]

        assert seconds[0][3:6] == pytest.approx(seconds[1][3:6])
        assert seconds[0][:3] != pytest.approx(seconds[1][:3])


def serving_points():
    draw = np.random.default_rng(9)
    points = []
    for group, factor in (("small/hopper", 1.1), ("large/hopper", 1.4), ("small/ampere", 1.8)):
        for running in (1.0, 8.0, 64.0):
            decode, prefill = draw.uniform(1e-4, 1e-2, (2, len(PASS_PARTS)))
            sparse = group.startswith("large")
            tpot = factor * float(decode.sum() + running / 200 * prefill.sum())
            points.append(
                ServingCase(
                    engine="vllm",
                    device=group.split("/")[1],
                    row_id=f"{group}/{int(running)}",
                    group=group,
                    layout=f"{group}/chip/bf16/1-1-1",
                    release="",
                    sweep=f"{group}/{int(running)}",
                    is_sparse=sparse,
                    width="8bit" if sparse else "wide",
                    gap_s=np.concatenate([decode, running / 400 * prefill]),
                    first_s=np.concatenate([0 * decode, prefill]),
                    step_s=np.concatenate([decode, 0 * prefill]),
                    awaited_steps=min(running - 1, 1.0),
                    launch_steps=0.0,
                    queued_tokens=0.0,
                    intake_s=0.001,
                    tpot_s=tpot,
                    ttft_s=factor * float(prefill.sum()) * 2,
                    counts_ttft=1.0,
                )
            )
    return tuple(points)


def test_a_serving_point_left_out_is_predicted_alike_whatever_it_measured():
    for part_of in [group_of, fold_of]:
        cases = serving_points()
        part = part_of(cases[0])
        changed = tuple(
            replace(c, tpot_s=c.tpot_s * 5, ttft_s=c.ttft_s / 5) if part_of(c) == part else c
            for c in cases
        )

        found = []
        for which in (cases, changed):
            tpots, ttfts, order = held_out(which, part_of)
            kept = [part_of(case) == part for case in order]
            gaps = (1 + tpots) * np.array([case.tpot_s for case in order])
            firsts = (1 + ttfts) * np.array([case.ttft_s for case in order])
            found.append((gaps[kept], firsts[kept]))

        assert found[0][0] == pytest.approx(found[1][0])
        assert found[0][1] == pytest.approx(found[1][1])


def test_the_interval_around_a_part_is_as_wide_as_the_others_say():
    """Ten parts, each off by as much as 10 %: a part off by more lies outside, however far."""
    for wild in [1.1, 3.0, 1000.0]:
        others = [row(predicted=1 + n / 100, part=str(n)) for n in range(1, 11)]
        own = [row(predicted=wild, part="own")] * 5
        covered = is_covered(own[0], [*others, *own])
        assert covered == (np.log(wild) <= Z_80 * spread_of(others))
        assert not covered


def sweep_of_layouts():
    """Return rows of one published sweep, each of another layout."""
    sweeps = {}
    for one in table("training"):
        layouts = sweeps.setdefault(tuple(one[name] for name in SAME), {})
        layouts.setdefault(tuple(one[name] for name in LAYOUT), one)
    return next(list(layouts.values()) for layouts in sweeps.values() if len(layouts) >= 4)


def test_a_choice_loses_what_its_layout_took_longer_than_the_fastest():
    rows = sweep_of_layouts()[:4]
    seconds = [(1.0, 12.0), (2.0, 10.0), (3.0, 11.0), (4.0, 20.0)]  # predicted, measured
    known = [row(*pair, row_id=r["row_id"]) for r, pair in zip(rows, seconds, strict=True)]
    (choice,) = choices(known)
    assert choice.runs == 4
    assert choice.lost == pytest.approx(0.2)  # 12 seconds where 10 were possible
    assert not choice.is_close

    # Three runs are no sweep.
    rows = sweep_of_layouts()[:3]
    assert choices([row(row_id=one["row_id"]) for one in rows]) == []


def test_a_picture_has_its_mean_in_the_middle_and_slow_predictions_above():
    # A logarithmic axis has its mean in the middle.
    for value, place in [(1.0, 0.0), (10.0, 0.5), (100.0, 1.0)]:
        assert share(value, 1.0, 100.0) == pytest.approx(place)

    # A mark above the diagonal was predicted too slow.
    drawn = picture("steps", "seconds", [row(1.0, 1.0), row(90.0, 10.0), row(100.0, 100.0)])
    marks = drawn.split('class="meas" d="M')[1].split('"')[0].split("M")
    places = [tuple(map(int, mark.split("h")[0].split())) for mark in marks]
    (low_x, low_y), (mid_x, mid_y), (high_x, high_y) = places
    diagonal_y = low_y + (high_y - low_y) * (mid_x - low_x) / (high_x - low_x)
    assert mid_y < diagonal_y  # SVG counts downwards
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)


RATIOS = st.floats(0.05, 20.0)


def off_by(
    ratio, *, figure=STEP, error_class=SEEN, engine="one", source="s", part="a", measured=2.0
):
    return LeftOut(figure, error_class, "r", engine, source, part, measured, ratio * measured)


def test_errors_and_verdicts_are_counted_as_by_hand():
    # A summary of ten errors has their mean median and ninetieth percentile.
    errors = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9, -1.0]
    found = summary(errors)
    # Between the ninth and the tenth of ten sorted values: 0.9 + 0.1 x (1.0 - 0.9).
    assert found == {"n": 10, "mean": 0.55, "median": 0.55, "p90": 0.91}
    # Three right verdicts of four are three quarters.
    found = rightness([(True, True), (True, True), (False, True), (False, False)])
    assert (found["n"], found["right"]) == (4, 0.75)
    # The costly wrong verdict is counted apart from the cheap one.
    found = rightness([(True, False), (True, False), (False, True)])
    assert (found["said_fits_ran_out"], found["refused_ran"]) == (2, 1)


@settings(max_examples=60, deadline=None)
@given(errors=st.lists(st.floats(-1, 5), min_size=1, max_size=20))
def test_the_sign_of_an_error_is_not_part_of_its_summary(errors):
    assert summary(errors) == summary([-error for error in errors])


def test_rows_of_one_figure_and_one_class_are_reported_together():
    # A title says which part the fit never saw.
    for figure, error_class, words in [
        (STEP, SEEN, "training step, unseen model"),
        (PEAK, UNSEEN, "training peak, unseen source"),
        (TPOT, SEEN, "time per output token, unseen sweep"),
        (TTFT, UNSEEN, "time to first token, unseen pair"),
    ]:
        assert title_of(off_by(1.0, figure=figure, error_class=error_class)) == words
    rows = [off_by(1.0), off_by(2.0, figure=PEAK), off_by(3.0), off_by(4.0, error_class=UNSEEN)]
    assert [len(group) for group in groups_of(rows).values()] == [2, 1, 1]


@settings(max_examples=60, deadline=None)
@given(ratios=st.lists(RATIOS, min_size=5, max_size=30))
def test_at_least_four_of_five_rows_lie_within_a_spread(ratios):
    """The quantile lies between two rows, so that at most one row less than 80 % is inside."""
    rows = [off_by(ratio) for ratio in ratios]
    reach = Z_80 * spread_of(rows) * (1 + 1e-9)
    inside = sum(abs(math.log(ratio)) <= reach for ratio in ratios)
    assert inside >= math.floor(0.8 * (len(ratios) - 1)) + 1


@settings(max_examples=40, deadline=None)
@given(ratios=st.lists(RATIOS, min_size=2, max_size=12))
def test_a_spread_is_the_same_for_rows_that_are_off_the_other_way(ratios):
    there = spread_of([off_by(ratio) for ratio in ratios])
    back = spread_of([off_by(1 / ratio) for ratio in ratios])
    assert there == pytest.approx(back)


@settings(max_examples=40, deadline=None)
@given(ratios=st.lists(RATIOS, min_size=2, max_size=12))
def test_training_serving_and_streams_know_one_spread(ratios):
    errors = [ratio - 1 for ratio in ratios]
    expected = spread_of([off_by(ratio, figure=TPOT) for ratio in ratios])
    assert interval_spread(np.array(errors)) == pytest.approx(expected, rel=1e-3, abs=1e-6)

    # Streams weigh rows by their sources; those of one source weigh the same.
    found = spread_of_errors([(stream_of("x", 0.01, 1.0), error) for error in errors])
    distances = np.abs(np.log(ratios)) / Z_80
    low, high = (np.quantile(distances, COVERED, method=side) for side in ("lower", "higher"))
    assert low * (1 - 1e-3) <= found <= high * (1 + 1e-3)


def test_a_source_of_many_rows_sets_the_width_of_streams_less_than_by_its_rows():
    small = [(replace(stream_of("x", 0.01, 1.0), source=name), 1.0) for name in "bcd"]
    large = [(stream_of("x", 0.01, 1.0), 0.1)] * 20
    assert spread_of_errors(large) < spread_of_errors([*large, *small])
    by_rows = np.quantile([0.1] * 20 + [1.0] * 3, COVERED)
    assert by_rows == pytest.approx(0.1)


def test_ten_rows_of_its_own_may_widen_an_interval():
    for own, is_wider in [(9, False), (10, True), (11, True)]:
        mine = [off_by(1.5, source="mine")] * own
        others = [off_by(1.2, engine="two", source=name) for name in "abcdefghij"]
        found = engine_spread([*mine, *others], "one")
        assert (found == pytest.approx(math.log(1.5) / Z_80)) == is_wider, own
        # However calm they are, they do not narrow it.
        mine = [off_by(1.01, source="mine")] * own
        assert engine_spread([*mine, *others], "one") == pytest.approx(math.log(1.2) / Z_80)


def test_a_source_counts_once_and_a_further_one_is_reckoned_with():
    """Of four sources each is a quarter: the level is 1, of nine it is 8 / 9."""
    for num_sources, level in [(4, 4), (9, 8), (19, 16)]:
        ratios = [1 + n / 100 for n in range(1, num_sources + 1)]
        rows = [
            off_by(ratio, error_class=NEW_ENGINE, source=str(ratio))
            for number, ratio in enumerate(ratios)
            for _ in range(1 + 30 * (number == 0))
        ]
        assert spread_of(rows) == pytest.approx(math.log(ratios[level - 1]) / Z_80), num_sources


def test_the_width_of_a_step_depends_on_what_the_fit_has_seen():
    rows = [
        off_by(ratio, error_class=novelty, source=name)
        for novelty, ratio in [(SEEN, 1.1), (UNSEEN, 9.0), (NEW_FAMILY, 1.3), (NEW_ENGINE, 1.6)]
        for name in "abcd"
    ]
    for engine, error_class, ratio in [
        ("one", SEEN, 1.1), ("one", UNSEEN, 1.3), ("", UNSEEN, 1.6)
    ]:  # fmt: skip
        found = spreads(rows, STEP, engine)[error_class]
        assert found == pytest.approx(math.log(ratio) / Z_80, rel=1e-3), (engine, error_class)
    # Other figures have no say.
    peaks = [off_by(9.0, figure=PEAK, source=name) for name in "abcd"]
    assert spreads([*rows, *peaks], STEP, "one") == spreads(rows, STEP, "one")


def test_coverage_counts_the_rows_inside_of_what_the_other_parts_allow():
    """Alone, a calm part allows the other its eight closest of ten; a wild one allows all ten."""
    ratios = [1.1] * 7 + [1.29, 1.3, 1.31]
    calm = [off_by(ratio, part=part) for part in ("a", "b") for ratio in ratios]
    wild = [off_by(5.0, part="c")] * 5
    assert coverage(calm) == pytest.approx(16 / 20)
    assert coverage([*calm, *wild]) == pytest.approx(20 / 25)


@settings(max_examples=60, deadline=None)
@given(value=st.floats(1e-9, 1e12))
def test_a_rounded_factor_is_close_and_stays_as_it_is_when_rounded_again(value):
    assert round_factor(value) == pytest.approx(value, rel=0.01)
    assert round_factor(round_factor(value)) == round_factor(value)


def test_written_rows_are_read_back_by_any_reader_of_tables():
    told = LeftOut(STEP, SEEN, "r,1", 'an "engine"', "line\nend", "part", 1.5, 2.25)
    (read,) = csv.DictReader(io.StringIO(to_csv([told]), newline=""))
    assert (read["row_id"], read["engine"], read["source"]) == ("r,1", 'an "engine"', "line\nend")
    assert (float(read["measured"]), float(read["predicted"])) == (1.5, 2.25)
