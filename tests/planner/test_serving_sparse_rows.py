"""Every published row of mixtures of experts, on one pool of devices, is answered, and sanely."""

import statistics

import pytest

from planner.api import estimate
from planner.fitting.evidence import serving_request, table
from planner.fitting.serving.factors import serving_cases
from planner.specs.estimate import EstimateRequest
from planner.workload.resolve import resolve

TABLE = "serving_sparse"
KNOWN = {case.row_id for case in serving_cases() if case.is_sparse}


def request_for(row):
    return EstimateRequest.model_validate(serving_request(row))


@pytest.fixture(scope="module")
def answered():
    return [(row, estimate(request_for(row))) for row in table(TABLE)[::4]]


def test_there_are_the_648_rows_each_with_its_source():
    assert len(table(TABLE)) == 648
    assert all("silicon_sample.csv row" in row["source_id"] for row in table(TABLE))
    assert len({row["row_id"] for row in table(TABLE)}) == 648


def test_no_row_of_a_dense_model_is_among_them():
    assert not {row["row_id"] for row in table(TABLE)} & {
        row["row_id"] for row in table("serving_dense")
    }
    assert all(resolve(request_for(row)).model.is_moe for row in table(TABLE)[::60])


def test_a_layout_is_asked_as_its_row_says():
    row = next(row for row in table(TABLE) if row["attention_dp"] == "8")
    layout = resolve(request_for(row)).layout

    assert (layout.tensor, layout.attention_data, layout.expert) == (1, 8, 8)
    assert layout.devices == int(row["num_gpus"])


def test_every_row_fits_as_it_did_when_it_was_measured(answered):
    assert all(found.fits for _, found in answered)


def test_every_figure_is_positive_finite_and_inside_its_interval(answered):
    for _, found in answered:
        for name in ("ttft_seconds", "tpot_seconds"):
            low, high = found.interval[name]
            assert 0 < low < getattr(found.performance, name) < high < 1e6


@pytest.mark.parametrize(
    ("metric", "column", "bound"),
    [("tpot_seconds", "tpot_ms", 0.12), ("ttft_seconds", "ttft_ms", 0.3)],
)
def test_the_median_error_is_bounded(answered, metric, column, bound):
    errors = [
        abs(getattr(found.performance, metric) * 1e3 / float(row[column]) - 1)
        for row, found in answered
        if row["row_id"] in KNOWN
    ]

    assert statistics.median(errors) < bound


def test_requests_that_ran_beside_tight_weights_do_not_wait_for_lives(answered):
    """DeepSeek-R1 in fp8 on four B200 held 32 requests: weights take nine tenths of the memory."""
    row = next(
        row
        for row in table(TABLE)
        if (row["num_gpus"], row["weight_dtype"], row["concurrency"]) == ("4", "fp8", "32")
        and "DeepSeek" in row["model"]
        and row["engine"] == "sglang"
    )
    found = estimate(request_for(row)).performance

    assert found.ttft_seconds < 5 * float(row["ttft_ms"]) / 1e3


@pytest.mark.parametrize(("device", "cache"), [("b200-sxm", "fp8"), ("h200-sxm-141gb", "bf16")])
def test_the_cache_of_narrow_weights_is_narrow_where_deployments_keep_it_so(device, cache):
    row = {**table(TABLE)[0], "gpu_slug": device, "engine": "sglang", "weight_dtype": "fp8"}

    assert resolve(request_for(row)).strategy.kv_cache_dtype == cache


def places_of(engine, output):
    document = {
        "model": "meta-llama/Llama-3.1-8B",
        "cluster": {"device": "h100-sxm-80gb"},
        "workload": {
            "kind": "serve",
            "input_tokens": 1024,
            "output_tokens": output,
            "concurrency": 4096,
        },
        "engine": engine,
    }
    found = estimate(EstimateRequest.model_validate(document))
    running = next(
        one.value
        for term in found.terms
        if term.key == "tpot"
        for one in term.inputs
        if one.name == "running"
    )
    return running / found.performance.max_concurrency


def test_engines_that_grow_caches_hold_requests_of_half_an_answer():
    assert places_of("vllm", 1024) == pytest.approx(2048 / 1536, rel=0.02)


def test_engines_that_reserve_whole_requests_hold_whole_ones():
    assert places_of("tensorrt_llm", 1024) == 1.0
