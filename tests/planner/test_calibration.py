"""The loop from plan over measurement to calibration and back closes and converges."""

import pytest

from planner.api import estimate
from planner.calibration import calibrate_host, measurements_of
from planner.specs.estimate import EstimateRequest, Measurement
from tests.planner.asking import CPU, GENERATE, TINY, TRAIN, document

REQUEST = EstimateRequest.model_validate(document(model=TINY, device=CPU, workload=GENERATE))


def measured(ratio: float, *, n: int = 1, metric: str = "tpot_seconds"):
    predicted = getattr(estimate(REQUEST).performance, metric)
    return measurements_of(REQUEST, {metric: predicted * ratio}, host="h") * n


def recalibrated(measurements):
    calibration = calibrate_host(measurements)
    return estimate(REQUEST.model_copy(update={"host_calibration": calibration}))


def test_without_measurements_nothing_changes():
    assert calibrate_host(()).factors == {}


def test_what_was_right_stays_as_it_is():
    again = recalibrated(measured(1.0, n=4))

    expected = estimate(REQUEST).performance.tpot_seconds
    assert again.performance.tpot_seconds == pytest.approx(expected)


@pytest.mark.parametrize("ratio", [0.7, 1.5, 3.0])
def test_many_equal_measurements_bring_the_prediction_to_them(ratio):
    target = estimate(REQUEST).performance.tpot_seconds * ratio

    found = recalibrated(measured(ratio, n=40)).performance.tpot_seconds

    assert found == pytest.approx(target, rel=0.03)


def test_a_single_measurement_is_believed_in_part():
    before = estimate(REQUEST).performance.tpot_seconds
    after = recalibrated(measured(2.0)).performance.tpot_seconds

    assert before < after < 2 * before


def test_three_measurements_make_it_calibrated_on_this_host():
    assert recalibrated(measured(1.5, n=2)).error_class == "same family"
    assert recalibrated(measured(1.5, n=3)).error_class == "calibrated on this host"


def test_a_calibrated_host_has_narrower_intervals():
    low, high = estimate(REQUEST).interval["tpot_seconds"]
    closer, near = recalibrated(measured(1.2, n=10)).interval["tpot_seconds"]

    assert near / closer < high / low


def test_measurements_that_disagree_keep_the_interval_wide():
    agreeing = recalibrated(measured(1.5, n=6)).interval["tpot_seconds"]
    apart = recalibrated(measured(1.0, n=3) + measured(2.2, n=3)).interval["tpot_seconds"]

    assert apart[1] / apart[0] > agreeing[1] / agreeing[0]


def test_the_error_goes_to_the_class_that_dominates():
    (one,) = measured(1.5)

    assert one.operator_class == "overhead"
    assert one.measured / one.predicted > 1.5


def test_a_peak_calibrates_what_is_modelled_of_the_memory_only():
    peak = estimate(REQUEST).memory.per_device_peak_bytes
    (one,) = measurements_of(REQUEST, {"per_device_peak_bytes": peak * 1.2}, host="h")

    calibration = calibrate_host([one] * 30)
    again = estimate(REQUEST.model_copy(update={"host_calibration": calibration}))

    assert one.operator_class == "memory"
    assert again.memory.per_device_peak_bytes == pytest.approx(peak * 1.2, rel=0.02)
    before = estimate(REQUEST).memory.breakdown_bytes["weights"]
    assert again.memory.breakdown_bytes["weights"] == before


def test_figures_that_were_not_predicted_are_left_out():
    assert measurements_of(REQUEST, {"happiness": 3.0, "tpot_seconds": 0.0}, host="h") == ()


def test_factors_never_compound():
    first = calibrate_host(measured(2.0, n=10))
    calibrated = REQUEST.model_copy(update={"host_calibration": first})
    prior = estimate(REQUEST).performance.tpot_seconds

    again = measurements_of(calibrated, {"tpot_seconds": prior * 2.0}, host="h")

    assert again == measured(2.0)


def test_a_training_step_calibrates_too():
    workload = {**TRAIN, "sequence_length": 256}
    request = EstimateRequest.model_validate(document(model=TINY, device=CPU, workload=workload))
    target = estimate(request).performance.step_seconds * 1.4

    taken = measurements_of(request, {"step_seconds": target}, host="h") * 40
    again = request.model_copy(update={"host_calibration": calibrate_host(taken)})

    assert estimate(again).performance.step_seconds == pytest.approx(target, rel=0.03)


def test_one_absurd_measurement_cannot_turn_everything_upside_down():
    absurd = Measurement(
        metric="tpot_seconds", predicted=1e-3, measured=1e6, operator_class="compute", host="h"
    )

    assert calibrate_host([absurd]).factors == {}
    assert calibrate_host([absurd] * 9).factors["compute"].factor <= 20


def test_the_answer_names_the_calibration_that_it_used():
    calibration = calibrate_host(measured(1.5, n=3))
    found = estimate(REQUEST.model_copy(update={"host_calibration": calibration}))

    assert found.calibration.endswith(f"+h:{calibration.digest}")


def test_the_digest_depends_on_the_measurements_and_not_on_their_order():
    taken = measured(1.0) + measured(2.0)

    assert calibrate_host(taken).digest == calibrate_host(taken[::-1]).digest
    assert calibrate_host(taken).digest != calibrate_host(taken[:1]).digest
