"""What was left out has no say: its own measured value may be anything."""

from dataclasses import replace

import numpy as np
import pytest

from planner.fitting.decode_fitting import StreamCase
from planner.fitting.decode_fitting import left_out as left_out_streams
from planner.fitting.evidence import table
from planner.fitting.left_out import (
    STEP,
    Z_80,
    LeftOut,
    is_covered,
    left_out_peaks,
    left_out_steps,
    model_of,
    source_of,
    spread_of,
)
from planner.fitting.pages.accuracy_sections import HEIGHT, WIDTH, picture, share
from planner.fitting.published_speeds import LAYOUT, SAME, choices
from planner.fitting.robust_fit import GIB, MEMORY_FACTORS, MemoryCase
from planner.fitting.serving.factors import SEEN, UNSEEN, fold_of, group_of, held_out
from planner.fitting.serving.model import PASS_PARTS, ServingCase
from planner.fitting.step_fitting import PARTS, StepCase, pooled

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


@pytest.mark.parametrize(
    ("part_of", "error_class", "part"), [(source_of, UNSEEN, "c"), (model_of, SEEN, "a/small")]
)
@pytest.mark.parametrize("times", [0.01, 100.0])
def test_a_run_left_out_is_predicted_alike_whatever_it_measured(part_of, error_class, part, times):
    cases = runs()
    changed = [
        replace(case, measured_s=case.measured_s * times) if part_of(case) == part else case
        for case in cases
    ]

    before, after = (left_out_steps(which, part_of, error_class) for which in (cases, changed))

    assert predicted(before, part) == predicted(after, part) != {}
    assert [row.measured for row in after] == [
        next(c for c in changed if c.row_id == row.row_id).measured_s for row in after
    ]


def test_a_run_that_is_kept_does_have_a_say_in_the_others():
    cases = runs()
    slower = [
        replace(case, measured_s=case.measured_s * 1.5) if case.source == "a" else case
        for case in cases
    ]

    before, after = (left_out_steps(which, source_of, UNSEEN) for which in (cases, slower))

    assert predicted(before, "c") != predicted(after, "c")


def test_every_run_is_left_out_once():
    for part_of in (source_of, model_of):
        rows = left_out_steps(runs(), part_of, UNSEEN)

        assert sorted(row.row_id for row in rows) == sorted(case.row_id for case in runs())


def test_an_engine_of_one_source_is_an_unseen_engine_and_no_unseen_model():
    cases = [*runs(), run_of("lonely", "d", "small", 2.0, engine="other")]

    unseen, seen = (left_out_steps(cases, source_of, one) for one in (UNSEEN, SEEN))

    assert "lonely" in {row.row_id for row in unseen}
    assert "lonely" not in {row.row_id for row in seen}


def test_engines_that_run_ahead_are_no_part_of_what_all_have_in_common():
    ahead = [run_of(str(n), "z", "m", n, 2.4, runs_ahead=True) for n in (1.0, 2.0, 3.0)]

    both, alone = (pooled(which).factors("", "hopper") for which in ([*runs(), *ahead], runs()))
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


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_a_peak_left_out_is_predicted_alike_whatever_it_measured(times):
    cases = peaks()
    changed = [
        replace(case, measured_bytes=case.measured_bytes * times) if case.source == "b" else case
        for case in cases
    ]

    before, after = (left_out_peaks(c, source_of, UNSEEN)[0] for c in (cases, changed))

    assert predicted(before, "b") == predicted(after, "b") != {}


def test_a_peak_that_is_kept_does_have_a_say_in_the_others():
    cases = peaks()
    smaller = [
        replace(case, measured_bytes=case.measured_bytes / 2) if case.source == "b" else case
        for case in cases
    ]

    before, after = (left_out_peaks(c, source_of, UNSEEN)[0] for c in (cases, smaller))

    assert predicted(before, "a") != predicted(after, "a")


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
        kind="gpu",
        group="decode",
        width="wide",
        linear_s=linear,
        attention_s=0.0,
        issue_s=0.0,
        scores_s=0.0,
        power_s=0.0,
        rest_s=1e-4,
        runs_ahead=False,
        measured_s=factor * linear,
    )


@pytest.mark.parametrize("times", [0.5, 20.0])
def test_a_card_left_out_is_predicted_alike_whatever_it_measured(times):
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
                    decode_s=decode,
                    prefill_s=prefill,
                    beside_s=prefill / 2,
                    lanes=1.0,
                    prompts_per_pass=4.0,
                    offered=running,
                    running=running,
                    output_tokens=200.0,
                    intake_s=0.001,
                    tpot_s=tpot,
                    ttft_s=factor * float(prefill.sum()) * 2,
                )
            )
    return tuple(points)


@pytest.mark.parametrize("part_of", [group_of, fold_of])
def test_a_serving_point_left_out_is_predicted_alike_whatever_it_measured(part_of):
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


def row(predicted=1.0, measured=1.0, part="a", row_id=""):
    return LeftOut(STEP, SEEN, row_id, "megatron", "source", part, measured, predicted)


@pytest.mark.parametrize("wild", [1.1, 3.0, 1000.0])
def test_the_interval_around_a_part_is_as_wide_as_the_others_say(wild):
    """Ten parts, each off by as much as 10 %: a part off by more lies outside, however far."""
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


def test_three_runs_are_no_sweep():
    rows = sweep_of_layouts()[:3]

    assert choices([row(row_id=one["row_id"]) for one in rows]) == []


@pytest.mark.parametrize(("value", "place"), [(1.0, 0.0), (10.0, 0.5), (100.0, 1.0)])
def test_a_logarithmic_axis_has_its_mean_in_the_middle(value, place):
    assert share(value, 1.0, 100.0) == pytest.approx(place)


def test_a_mark_above_the_diagonal_was_predicted_too_slow():
    drawn = picture("steps", "seconds", [row(1.0, 1.0), row(90.0, 10.0), row(100.0, 100.0)])

    marks = drawn.split('class="meas" d="M')[1].split('"')[0].split("M")
    places = [tuple(map(int, mark.split("h")[0].split())) for mark in marks]
    (low_x, low_y), (mid_x, mid_y), (high_x, high_y) = places
    diagonal_y = low_y + (high_y - low_y) * (mid_x - low_x) / (high_x - low_x)
    assert mid_y < diagonal_y  # SVG counts downwards
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)
