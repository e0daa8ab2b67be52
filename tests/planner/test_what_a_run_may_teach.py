"""One run moves a factor no further than it is evidence; a poisoned one is caught by name."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.calibration import calibrate_host, check_measurements
from planner.specs.estimate import Measurement

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


def test_the_run_on_a_busy_host_moves_nothing():
    """The sample: 0.2 cores were left, and 43.5 tokens a second became 7.55."""
    assert factor(runs(43.5 / 7.55)) == 1.0
    assert "5.8 times more than predicted" in held_back(runs(43.5 / 7.55))[0]


@pytest.mark.parametrize("poison", [0.1, 10.0])
@pytest.mark.parametrize("good", [[], [1.3], [1.3, 1.2], [1.3, 1.2, 1.4], [1.3] * 8])
def test_a_poisoned_run_is_caught_and_changes_not_a_bit(poison, good):
    """Ten times fast or slow, beside as many good runs as there are."""
    taken = runs(*good, poison)

    assert len(held_back(taken)) == 1
    assert calibrate_host(taken).factors == calibrate_host(runs(*good)).factors
    assert calibrate_host(taken).digest == calibrate_host(runs(*good)).digest


def test_a_host_that_is_slow_indeed_is_believed_once_another_run_agrees():
    assert factor(runs(6.0)) == 1.0
    assert factor(runs(6.0, 5.5)) > 3.5
    assert factor(runs(6.0, 5.5, 6.2, 5.8)) > 4.8


def test_several_figures_of_one_run_are_one_run():
    once = runs(1.5)
    many = [run(ratio, "job 0") for ratio in (1.4, 1.5, 1.6)]

    assert calibrate_host(many).factors == calibrate_host(once).factors
    assert calibrate_host(many).factors["compute"].n == 1


def test_a_poisoned_run_cannot_confirm_itself():
    """Its figures are many, the run is one."""
    assert factor([run(10.0, "one job") for _ in range(5)]) == 1.0


def test_runs_that_scatter_are_believed_less():
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
