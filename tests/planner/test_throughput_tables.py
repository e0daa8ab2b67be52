"""Published throughput tables: how rows are asked, what is fitted, what sweeps say of a place."""

from dataclasses import replace

import numpy as np
import pytest

from planner.api import estimate
from planner.catalog.engines import get_engine
from planner.catalog.reading import data_json
from planner.fitting.accuracy import predicted
from planner.fitting.serving_throughput import (
    LOWER_BOUNDS,
    PARTS,
    PRIOR,
    REQUESTS,
    UPPER_BOUNDS,
    FullBatch,
    factors_by_name,
    fit_full,
    fitted_for,
    full_batch,
    kind_of_row,
    layouts_of,
    left_out_full,
    measured_of,
    model_of,
    throughput_request,
    throughput_rows,
)
from planner.specs.estimate import EstimateRequest
from planner.workload.layouts import Layout
from planner.workload.setting import SweepFactors


def rows_of(source, kind=None):
    found = [row for row in throughput_rows() if row["source_id"].startswith(source)]
    return [row for row in found if kind is None or kind_of_row(row) == kind]


def case(model="m", engine="e", architecture="a", seconds=None, measured_s=1.0):
    parts = np.zeros(len(PARTS)) if seconds is None else seconds
    return FullBatch(engine, "s", model, "d", architecture, parts, measured_s)


def simulated(factors, count=40, seed=3, **fields):
    """Rows whose times are exactly those of known factors."""
    random = np.random.default_rng(seed)
    parts = random.uniform(0.1, 1.0, (count, len(PARTS)))
    return [case(seconds=one, measured_s=float(one @ factors), **fields) for one in parts]


def test_as_many_rows_are_asked_as_say_enough_and_the_unstated_are_left_out():
    for source, count in (
        ("trtllm", 170), ("mlperf", 40), ("dstack-405b", 66), ("dstack-r1", 87), ("modelopt", 12),
    ):  # fmt: skip
        assert len(rows_of(source)) == count, (source, count)

    models = {row["model"] for row in rows_of("mlperf")}
    assert models == {"meta-llama/Llama-2-70b"}
    assert not any("shared-prefix" in row["mode"] for row in rows_of("dstack-r1"))
    pairs = {(int(row["input_len"]), int(row["output_len"])) for row in rows_of("trtllm")}
    assert pairs == set(REQUESTS)


def test_layouts_are_asked_as_notes_and_tables_state_them_inside_a_node():
    row = next(r for r in rows_of("trtllm") if r["model"].startswith("Qwen/Qwen3-235B"))
    strategy = throughput_request(row)["strategy"]
    assert strategy["attention_data_parallel_size"] == strategy["expert_parallel_size"] == 8
    assert strategy["tensor_parallel_size"] == 1

    row = next(r for r in rows_of("trtllm") if "405B" in r["model"] and r["tp"] == "8")
    assert throughput_request(row)["strategy"]["tensor_parallel_size"] == 8

    row = next(r for r in rows_of("mlperf") if r["num_gpus"] == "8")
    tensor = [one["strategy"]["tensor_parallel_size"] for one in layouts_of(row)]
    assert tensor == [1, 2, 4, 8]

    row = next(r for r in rows_of("mlperf") if r["num_gpus"] == "32")
    asked = list(layouts_of(row))
    assert {one["cluster"]["nodes"] for one in asked} == {4}
    assert max(one["strategy"]["tensor_parallel_size"] for one in asked) == 8


def test_gaps_between_tokens_and_seconds_of_a_batch_are_compared_as_rates():
    row = rows_of("openvino")[0]
    assert measured_of(row) == pytest.approx(1 / float(row["value"]))
    row = next(r for r in rows_of("dstack-405b") if r["metric"] == "batch_latency")
    tokens = float(row["batch_or_concurrency"]) * float(row["output_len"])
    assert measured_of(row) == pytest.approx(tokens / float(row["value"]))


def test_factors_are_found_again_within_bounds_and_stay_at_the_prior_without_rows():
    assert fit_full([]) == pytest.approx(PRIOR)

    truth = np.clip(1.3 * PRIOR, LOWER_BOUNDS, UPPER_BOUNDS)
    cases = simulated(truth)
    errors = [one.error(fit_full(cases)) for one in cases]
    assert np.abs(errors).max() < 0.1
    assert np.abs(errors).mean() < np.abs([one.error(PRIOR) for one in cases]).mean() / 3

    found = fit_full(simulated(100 * PRIOR))
    assert (found >= LOWER_BOUNDS - 1e-9).all()
    assert (found <= UPPER_BOUNDS + 1e-9).all()


def test_what_has_no_rows_takes_its_engines_or_all_factors_and_a_left_out_model_is_unseen():
    cases = simulated(1.2 * PRIOR, architecture="one")
    target = replace(cases[0], architecture="other")
    assert fitted_for(cases, target) == pytest.approx(fit_full(cases))

    cases = simulated(1.2 * PRIOR, engine="one")
    target = replace(cases[0], engine="other")
    assert fitted_for(cases, target) == pytest.approx(fit_full(cases))

    seen = simulated(PRIOR, model="seen")
    odd = [replace(one, model="odd", measured_s=50.0) for one in seen[:5]]
    errors = dict(left_out_full([*seen, *odd], model_of))
    assert all(errors[one] == pytest.approx(one.error(PRIOR), abs=1e-6) for one in odd)


def test_an_estimate_asks_for_the_written_names_and_the_fitted_parts_add_up_to_it():
    names = factors_by_name(PRIOR)
    assert names["mixed_linear"] == 1.0
    assert names["mixed_routing"] == names["packed_routing"] == 10.0

    row = next(r for r in rows_of("trtllm") if "3.1-8B" in r["model"])
    found = full_batch(row)
    places = data_json("factors.json")["engines"]["tensorrt_llm"]["full_factors"]
    kept = places[found.architecture]
    factors = [kept.get(part, kept.get(f"mixed_{part}")) for part in PARTS]
    answer = estimate(EstimateRequest.model_validate(throughput_request(row)))
    said = found.measured_s / float(found.seconds @ np.array(factors)) * measured_of(row)
    assert answer.performance.output_tokens_per_second == pytest.approx(said, rel=1e-6)

    row = rows_of("dstack-r1", "closed loop")[0]
    with pytest.raises(TypeError, match="only bursts"):
        full_batch(row)


def test_the_fastest_layout_is_the_one_that_counts():
    row = next(r for r in rows_of("mlperf") if r["num_gpus"] == "8" and "h200" in r["gpu_slug"])
    rates = [
        estimate(EstimateRequest.model_validate(one)).performance.output_tokens_per_second
        for one in layouts_of(row)
    ]
    assert predicted(row) == pytest.approx(max(rates))


def test_the_factor_file_says_how_far_unseen_tables_are_off():
    for what in (
        "throughput of full batches, unseen device",
        "throughput of full batches, unseen model",
    ):
        found = data_json("factors.json")["held_out"][what]
        assert found["n"] == 287, what
        assert found["median"] <= found["mean"] <= found["p90"], what


PAIR = "64x5120x0/hopper"
CHIP = f"{PAIR}/h100/fp8"
PLACES = {
    "any": {"decode_linear": 1.0, "decode_issue": 5.0},
    "hopper": {"decode_linear": 2.0},
    PAIR: {"decode_linear": 3.0},
    f"{CHIP}/4-1-1": {"decode_linear": 4.0},
    f"{CHIP}/1-8-8": {"decode_linear": 8.0},
}


def swept(layout, pair=PAIR, chip=CHIP):
    engine = get_engine("vllm", "gpu").model_copy(update={"serving_factors": PLACES})
    return SweepFactors(engine, pair, chip, layout)


def test_a_measured_layout_has_its_own_and_others_have_their_pairs():
    for layout, factor in (
        (Layout(tensor=4), 4.0),
        (Layout(tensor=4, data=2), 4.0),
        (Layout(expert=8, attention_data=8), 8.0),
        (Layout(tensor=2), 3.0),
        (Layout(tensor=4, pipeline=2), 3.0),
        (Layout(tensor=4, context=2), 3.0),
        (Layout(tensor=4, expert=4), 3.0),
    ):
        assert swept(layout).factor("decode_linear") == factor, (layout, factor)


def test_without_a_layout_pair_family_then_any_tells_and_parts_take_what_they_are_like():
    for pair, factor in (("1x1x0/hopper", 2.0), ("1x1x0/ampere", 1.0), (PAIR, 3.0)):
        found = swept(Layout(tensor=4), pair=pair, chip=f"{pair}/another/bf16")
        assert found.factor("decode_linear") == factor, (pair, factor)
    found = swept(Layout(), pair="1x1x0/ampere", chip="1x1x0/ampere/a100/bf16")
    assert found.factor("decode_experts") == 1.0
    assert found.factor("decode_further") == 5.0
    assert found.factor("decode_scheduling") == 1.0


def test_columns_of_layouts_take_the_factors_of_each_row():
    tensors, attention = np.array([[1], [2], [4]]), np.array([1, 8])
    found = swept(Layout(tensor=tensors, expert=attention, attention_data=attention))
    alone = [
        [swept(Layout(tensor=int(t), expert=int(a), attention_data=int(a))) for a in attention]
        for t in tensors[:, 0]
    ]

    assert found.factor("decode_linear").tolist() == [
        [one.factor("decode_linear") for one in row] for row in alone
    ]


def test_a_layout_is_found_under_its_own_name():
    for layout in (Layout(tensor=4), Layout(expert=8, attention_data=8)):
        assert swept(layout).layout_name in PLACES, layout
