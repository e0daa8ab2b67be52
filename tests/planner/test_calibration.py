"""The loop from plan over measurement to calibration, and the intervals of a host."""

import pytest

from planner.api import estimate
from planner.calibration import calibrate_host, measurements_of
from planner.specs.estimate import EstimateRequest, Measurement
from tests.planner.asking import CPU, GENERATE, SERVE, TINY, TRAIN, document

REQUEST = EstimateRequest.model_validate(document(model=TINY, device=CPU, workload=GENERATE))


def measured(ratio: float, *, n: int = 1, metric: str = "tpot_seconds"):
    predicted = getattr(estimate(REQUEST).performance, metric)
    return measurements_of(REQUEST, {metric: predicted * ratio}, host="h") * n


def recalibrated(measurements):
    calibration = calibrate_host(measurements)
    return estimate(REQUEST.model_copy(update={"host_calibration": calibration}))


def test_equal_measurements_bring_the_prediction_to_them():
    # Without measurements nothing changes.
    assert calibrate_host(()).factors == {}
    # What was right stays as it is.
    again = recalibrated(measured(1.0, n=4))
    expected = estimate(REQUEST).performance.tpot_seconds
    assert again.performance.tpot_seconds == pytest.approx(expected)

    # Many equal measurements bring the prediction to them.
    for ratio in [0.7, 1.5, 3.0]:
        target = estimate(REQUEST).performance.tpot_seconds * ratio
        found = recalibrated(measured(ratio, n=40)).performance.tpot_seconds
        assert found == pytest.approx(target, rel=0.03)

    # A single measurement is believed in part.
    before = estimate(REQUEST).performance.tpot_seconds
    after = recalibrated(measured(2.0)).performance.tpot_seconds
    assert before < after < 2 * before

    # A training step calibrates too.
    workload = {**TRAIN, "sequence_length": 256}
    request = EstimateRequest.model_validate(document(model=TINY, device=CPU, workload=workload))
    target = estimate(request).performance.step_seconds * 1.4
    taken = measurements_of(request, {"step_seconds": target}, host="h") * 40
    again = request.model_copy(update={"host_calibration": calibrate_host(taken)})
    assert estimate(again).performance.step_seconds == pytest.approx(target, rel=0.03)


def test_a_calibrated_host_is_surer_as_far_as_its_measurements_agree():
    # Three measurements make it calibrated on this host.
    assert recalibrated(measured(1.5, n=2)).error_class == "same family"
    assert recalibrated(measured(1.5, n=3)).error_class == "calibrated on this host"
    # A calibrated host has narrower intervals.
    low, high = estimate(REQUEST).interval["tpot_seconds"]
    closer, near = recalibrated(measured(1.2, n=10)).interval["tpot_seconds"]
    assert near / closer < high / low
    # Measurements that disagree keep the interval wide.
    agreeing = recalibrated(measured(1.5, n=6)).interval["tpot_seconds"]
    apart = recalibrated(measured(1.0, n=3) + measured(2.2, n=3)).interval["tpot_seconds"]
    assert apart[1] / apart[0] > agreeing[1] / agreeing[0]


def test_the_error_goes_to_the_class_that_dominates_and_never_compounds():
    # The error goes to the class that dominates.
    (one,) = measured(1.5)
    assert one.operator_class == "overhead"
    assert one.measured / one.predicted > 1.5
    # Figures that were not predicted are left out.
    assert measurements_of(REQUEST, {"happiness": 3.0, "tpot_seconds": 0.0}, host="h") == ()

    # Factors never compound.
    first = calibrate_host(measured(2.0, n=10))
    calibrated = REQUEST.model_copy(update={"host_calibration": first})
    prior = estimate(REQUEST).performance.tpot_seconds
    again = measurements_of(calibrated, {"tpot_seconds": prior * 2.0}, host="h")
    assert again == measured(2.0)

    # One absurd measurement cannot turn everything upside down.
    absurd = Measurement(
        metric="tpot_seconds", predicted=1e-3, measured=1e6, operator_class="compute", host="h"
    )
    assert calibrate_host([absurd]).factors == {}
    assert calibrate_host([absurd] * 9).factors["compute"].factor <= 20


def test_a_peak_calibrates_what_is_modelled_of_the_memory_only():
    peak = estimate(REQUEST).memory.per_device_peak_bytes
    (one,) = measurements_of(REQUEST, {"per_device_peak_bytes": peak * 1.2}, host="h")
    calibration = calibrate_host([one] * 30)
    again = estimate(REQUEST.model_copy(update={"host_calibration": calibration}))
    assert one.operator_class == "memory"
    assert again.memory.per_device_peak_bytes == pytest.approx(peak * 1.2, rel=0.02)
    before = estimate(REQUEST).memory.breakdown_bytes["weights"]
    assert again.memory.breakdown_bytes["weights"] == before


def test_the_answer_names_the_digest_of_its_measurements():
    # The answer names the calibration that it used.
    calibration = calibrate_host(measured(1.5, n=3))
    found = estimate(REQUEST.model_copy(update={"host_calibration": calibration}))
    assert found.calibration.endswith(f"+h:{calibration.digest}")
    # The digest depends on the measurements and not on their order.
    taken = measured(1.0) + measured(2.0)
    assert calibrate_host(taken).digest == calibrate_host(taken[::-1]).digest
    assert calibrate_host(taken).digest != calibrate_host(taken[:1]).digest


BOUND_BY = {"prefill": "compute", "decode": "memory_bandwidth"}  # the questions below
WIDEST_MEASURED = 1.3  # high over low
# Published rates, or the same rates from a micro-benchmark on the host.
CARD = {
    "id": "this-host",
    "memory_bytes": 80 * 1024**3,
    "memory_bandwidth_bytes_per_second": 3.35e12,
    "peak_flops_per_second": {"bf16": 9.9e14},
}
IRRELEVANT = {
    "empty": {},
    "no exchange on one device": {"communication": 9},
    "host work is in the shadow of kernels": {"overhead": 9},
    "memory takes no time": {"memory": 9},
}


def factors(**runs):
    return {name: {"factor": 1.0, "n": n, "spread": 0.01} for name, n in runs.items()}


def answer(measured=None, *, workload=SERVE, engine="vllm", provenance="published"):
    host = {"host": "h", "factors": factors(**measured)} if measured is not None else None
    asked = document(
        device={**CARD, "provenance": provenance},
        workload=workload,
        engine=engine,
        host_calibration=host,
    )
    return estimate(EstimateRequest.model_validate(asked))


def width(found, name):
    low, high = found.interval[name]
    return high / low


def test_what_was_not_measured_of_an_estimate_changes_no_interval():
    for workload, engine in [
        (SERVE, "vllm"),
        (SERVE, "sglang"),
        (SERVE, "llama_cpp"),
        (GENERATE, "vllm"),
        (TRAIN, "torch"),
    ]:
        before = answer(workload=workload, engine=engine)
        for why, measured in IRRELEVANT.items():
            after = answer(measured, workload=workload, engine=engine)
            assert after.interval == before.interval, why
            assert after.error_class == before.error_class, why


def test_the_errors_of_an_engine_stay_until_each_phase_was_measured_three_times():
    before = answer()
    kept = [
        answer(provenance="measured"),
        answer({}, provenance="measured"),
        answer({"memory_bandwidth": 2, "compute": 2}),
        answer({"memory_bandwidth": 9}),
        answer({"compute": 9}),
    ]
    measured = answer({"memory_bandwidth": 3, "compute": 3})

    for found in (before, *kept):
        breakdown = found.time_breakdown_seconds
        assert {phase: max(own, key=own.get) for phase, own in breakdown.items()} == BOUND_BY
    for found in kept:
        for name in ("tpot_seconds", "ttft_seconds"):
            assert width(found, name) == pytest.approx(width(before, name))
    assert width(measured, "tpot_seconds") < WIDEST_MEASURED < width(before, "tpot_seconds") / 1.5
