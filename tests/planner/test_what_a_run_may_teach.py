"""What runs teach: hosts of the test's own are found again, one run is weighed as evidence."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.api import estimate
from planner.calibration import calibrate_host, check_measurements, measurements_of
from planner.specs.estimate import EstimateRequest, Measurement
from tests.planner.asking import CPU, TINY, document

RATIOS = st.floats(0.05, 20.0)
MOST_OF_ONE_RUN = 1.37


def run(ratio: float, job: str | None, name: str = "compute") -> Measurement:
    return Measurement(
        metric="tpot_seconds",
        predicted=2.0,
        measured=2.0 * ratio,
        operator_class=name,
        host="box",
        job=job,
    )


def runs(*ratios: float) -> list[Measurement]:
    return [run(ratio, f"job {at}") for at, ratio in enumerate(ratios)]


def factor(measurements) -> float:
    found = calibrate_host(measurements).factors.get("compute")
    return found.factor if found else 1.0


def held_back(measurements) -> list[str]:
    return [each.held_back for each in check_measurements(measurements) if each.held_back]


@settings(max_examples=200, deadline=None)
@given(ratio=st.floats(1e-6, 1e6))
def test_one_run_moves_a_factor_by_a_third_at_most(ratio):
    assert 1 / MOST_OF_ONE_RUN < factor(runs(ratio)) < MOST_OF_ONE_RUN


def test_a_busy_or_poisoned_run_moves_nothing_until_another_agrees():
    # The sample: 0.2 cores were left, and 43.5 tokens a second became 7.55.
    assert factor(runs(43.5 / 7.55)) == 1.0
    assert "5.8 times more than predicted" in held_back(runs(43.5 / 7.55))[0]

    # Ten times fast or slow, beside as many good runs as there are.
    for poison, good in itertools.product(
        (0.1, 10.0), ([], [1.3], [1.3, 1.2], [1.3, 1.2, 1.4], [1.3] * 8)
    ):
        taken = runs(*good, poison)
        assert len(held_back(taken)) == 1, (poison, good)
        assert calibrate_host(taken).factors == calibrate_host(runs(*good)).factors, (poison, good)
        assert calibrate_host(taken).digest == calibrate_host(runs(*good)).digest, (poison, good)

    assert factor(runs(6.0)) == 1.0
    assert factor(runs(6.0, 5.5)) > 3.5
    assert factor(runs(6.0, 5.5, 6.2, 5.8)) > 4.8


def test_figures_of_one_run_are_one_run_and_scatter_is_believed_less():
    once = runs(1.5)
    many = [run(ratio, "job 0") for ratio in (1.4, 1.5, 1.6)]
    assert calibrate_host(many).factors == calibrate_host(once).factors
    assert calibrate_host(many).factors["compute"].n == 1
    # Its figures are many, the run is one.
    assert factor([run(10.0, "one job") for _ in range(5)]) == 1.0
    close, wide = factor(runs(1.9, 2.0, 2.1)), factor(runs(1.0, 2.0, 4.0))
    assert 1.0 < wide < close


@settings(max_examples=200, deadline=None)
@given(ratios=st.lists(RATIOS, min_size=1, max_size=12), order=st.randoms(use_true_random=False))
def test_the_order_of_runs_changes_not_a_bit(ratios, order):
    taken = runs(*ratios)
    shuffled = [*taken]
    order.shuffle(shuffled)
    assert calibrate_host(shuffled) == calibrate_host(taken)


@settings(max_examples=200, deadline=None)
@given(ratios=st.lists(RATIOS, min_size=2, max_size=10), at=st.integers(0, 9))
def test_leaving_a_run_out_and_taking_it_in_again_gives_the_same_bits(ratios, at):
    taken = runs(*ratios)
    without = [one for one in taken if one != taken[at % len(taken)]]
    before, between = calibrate_host(taken), calibrate_host(without)
    assert calibrate_host([*without, taken[at % len(taken)]]) == before
    assert between == calibrate_host(without[::-1])


@settings(max_examples=200, deadline=None)
@given(
    good=st.lists(st.floats(0.8, 1.25), min_size=3, max_size=10),
    poison=st.one_of(st.floats(0.001, 0.1), st.floats(10.0, 1000.0)),
)
def test_whatever_the_good_runs_were_a_tenfold_one_is_held_back(good, poison):
    scaled = [1.5 * each for each in good]
    assert calibrate_host(runs(*scaled, 1.5 * poison)) == calibrate_host(runs(*scaled))


@settings(max_examples=300, deadline=None)
@given(
    ratios=st.lists(st.floats(0.8, 1.25), min_size=3, max_size=10),
    moved=st.floats(0.001, 1000.0),
    at=st.integers(0, 9),
)
def test_whatever_one_of_several_agreeing_runs_says_moves_the_factor_by_a_third(ratios, moved, at):
    changed = [*ratios]
    changed[at % len(ratios)] = moved
    assert abs(math.log(factor(runs(*changed)) / factor(runs(*ratios)))) < math.log(
        MOST_OF_ONE_RUN
    )


def test_nothing_measured_gives_no_factor():
    assert check_measurements(()) == ()
    assert calibrate_host(()).factors == {}


GENERATE = {"kind": "generate", "batch_size": 1, "input_tokens": 512, "output_tokens": 64}
REQUEST = EstimateRequest.model_validate(document(model=TINY, device=CPU, workload=GENERATE))
# More products and less overhead per token, so that another class of operators dominates.
WIDE = {**TINY, "hidden_size": 2048, "intermediate_size": 8192, "num_key_value_heads": 8}
LONG = EstimateRequest.model_validate(document(model=WIDE, device=CPU, workload=GENERATE))


def measurement(ratio, operator_class="compute", predicted=2.0, **fields):
    return Measurement(
        metric="tpot_seconds",
        predicted=predicted,
        measured=predicted * ratio,
        operator_class=operator_class,
        host="h",
        **fields,
    )


def slowed(request, factors, metric, phase):
    """Return what a host would measure on which each class of operators is that much slower."""
    parts = estimate(request).time_breakdown_seconds[phase]
    return {metric: sum(seconds * factors.get(name, 1.0) for name, seconds in parts.items())}


def dominant(request, phase):
    parts = estimate(request).time_breakdown_seconds[phase]
    return max(parts, key=parts.get)


def factor_of(measurements) -> float:
    """The factor of arithmetic, 1 where nothing counts."""
    found = calibrate_host(measurements).factors.get("compute")
    return found.factor if found else 1.0


def on(request, measurements):
    calibration = calibrate_host(measurements)
    return estimate(request.model_copy(update={"host_calibration": calibration}))


def test_the_factor_of_a_class_is_found_again_through_noise():
    for factor, (request_, metric, phase) in itertools.product(
        (0.5, 1.7, 6.0), ((REQUEST, "tpot_seconds", "decode"), (LONG, "ttft_seconds", "prefill"))
    ):
        name = dominant(request_, phase)
        figures = slowed(request_, {name: factor}, metric, phase)
        (one,) = measurements_of(request_, figures, host="h")
        assert one.operator_class == name, (factor, request_, metric, phase)
        assert one.measured / one.predicted == pytest.approx(factor)

    # Thirty-two measurements, each off by about 20 %: their mean is known to 4 %.
    draw = np.random.default_rng(1)
    ratios = 2.5 * np.exp(draw.normal(0.0, 0.2, 32))

    found = calibrate_host([measurement(float(ratio)) for ratio in ratios]).factors["compute"]

    assert found.factor == pytest.approx(2.5, rel=0.1)
    assert found.spread == pytest.approx(0.2, abs=0.06)
    assert found.n == 32


def test_classes_measured_apart_have_factors_and_few_measurements_half_a_word():
    taken = [measurement(2.0, "compute")] * 40 + [measurement(0.5, "overhead")] * 40
    found = calibrate_host(taken).factors
    assert {name: round(one.factor, 1) for name, one in found.items()} == {
        "compute": 2.0,
        "overhead": 0.5,
    }

    # Equal runs: n and the prior's two residuals give the share n (n + 1) / (n (n + 1) + 2).
    for count, share in ((1, 1 / 2), (2, 3 / 4), (4, 10 / 11)):
        found = calibrate_host([measurement(1.5)] * count).factors["compute"]
        assert math.log(found.factor) / math.log(1.5) == pytest.approx(share), (count, share)


@settings(max_examples=100, deadline=None)
@given(ratios=st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=12))
def test_a_factor_lies_between_the_prior_and_what_was_measured(ratios):
    factor = factor_of([measurement(ratio) for ratio in ratios])
    lowest, highest = min(1.0, *ratios), max(1.0, *ratios)
    assert lowest * (1 - 1e-9) <= factor <= highest * (1 + 1e-9)
    assert 1 / 20 <= factor <= 20


@settings(max_examples=60, deadline=None)
@given(ratios=st.lists(st.floats(0.3, 3.0), min_size=1, max_size=8))
def test_faster_and_slower_are_treated_alike(ratios):
    there = calibrate_host([measurement(ratio) for ratio in ratios]).factors["compute"]
    back = calibrate_host([measurement(1 / ratio) for ratio in ratios]).factors["compute"]
    assert there.factor * back.factor == pytest.approx(1.0)
    assert there.spread == pytest.approx(back.spread)


@settings(max_examples=40, deadline=None)
@given(order=st.permutations([0.5, 1.0, 1.5, 2.0, 8.0]))
def test_the_order_of_measurements_changes_nothing(order):
    sorted_first = calibrate_host([measurement(ratio) for ratio in sorted(order)])
    found = calibrate_host([measurement(ratio) for ratio in order])
    assert found.digest == sorted_first.digest
    assert found.factors["compute"].factor == pytest.approx(sorted_first.factors["compute"].factor)


def test_when_and_by_which_job_it_was_measured_is_part_of_the_digest():
    early, late = (measurement(2.0, measured_at=day) for day in ("2026-11-01", "2026-11-02"))
    assert calibrate_host([early]).digest != calibrate_host([late]).digest
    assert calibrate_host([early]).factors == calibrate_host([late]).factors


def test_each_round_of_measuring_brings_the_prediction_closer_to_the_host():
    name = dominant(REQUEST, "decode")
    figures = slowed(REQUEST, {name: 3.0}, "tpot_seconds", "decode")
    taken = measurements_of(REQUEST, figures, host="h")

    errors = [
        abs(on(REQUEST, taken * rounds).performance.tpot_seconds / figures["tpot_seconds"] - 1)
        for rounds in (0, 1, 3, 10, 40)
    ]

    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.3
    assert errors[-1] < 0.02


def test_what_one_workload_taught_carries_over_to_another():
    """A host of slow operators was measured on short prompts; longer ones are slow there too."""
    name = dominant(REQUEST, "decode")
    taken = measurements_of(
        REQUEST, slowed(REQUEST, {name: 3.0}, "tpot_seconds", "decode"), host="h"
    )
    longer = {**GENERATE, "input_tokens": 256, "output_tokens": 32}
    other = REQUEST.model_copy(
        update={"workload": EstimateRequest.model_validate(document(workload=longer)).workload}
    )
    truth = slowed(other, {name: 3.0}, "tpot_seconds", "decode")["tpot_seconds"]

    found = on(other, taken * 40).performance.tpot_seconds

    assert found == pytest.approx(truth, rel=0.03)


def test_what_is_far_below_the_exact_parts_leaves_a_tenth_of_the_rest():
    parts = estimate(REQUEST).time_breakdown_seconds["decode"]
    others = sum(parts.values()) - max(parts.values())
    (one,) = measurements_of(REQUEST, {"tpot_seconds": others / 2}, host="h")
    assert one.measured == pytest.approx(0.1 * others / 2)

    held = estimate(REQUEST).memory.breakdown_bytes
    modelled = held.get("activations", 0) + held.get("runtime_overhead", 0)
    (one,) = measurements_of(REQUEST, {"per_device_peak_bytes": 1.0}, host="h")
    assert one.predicted == modelled
    assert one.measured == pytest.approx(modelled / 10)


def test_figures_that_no_clock_shows_or_of_another_kind_are_no_measurement():
    for value in (0.0, -1.0):
        assert measurements_of(REQUEST, {"tpot_seconds": value}, host="h") == (), value
    assert measurements_of(REQUEST, {"step_seconds": 4.0}, host="h") == ()
