"""Intervals of a host narrow by what was measured there, and by nothing else."""

import pytest

from planner.api import estimate
from planner.specs.estimate import EstimateRequest
from tests.planner.asking import GENERATE, SERVE, TRAIN, document

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


@pytest.mark.parametrize(
    ("workload", "engine"),
    [
        (SERVE, "vllm"),
        (SERVE, "sglang"),
        (SERVE, "llama_cpp"),
        (GENERATE, "vllm"),
        (TRAIN, "torch"),
    ],
)
def test_what_was_not_measured_of_an_estimate_changes_no_interval(workload, engine):
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
