"""Fits against data of known factors, and the factor file that they fill."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog.engines import calibration_name, fitted_factors, get_engine
from planner.catalog.reading import data_json
from planner.fitting.decode_fitting import PARTS as STREAM_PARTS
from planner.fitting.decode_fitting import StreamCase, fit_streams, fit_target_chip
from planner.fitting.evidence import digest, model_of, number, table, training_request, usable
from planner.fitting.published_speeds import INPUTS, by_engine, memory_factors
from planner.fitting.step_fitting import (
    CEILINGS,
    FLOORS,
    GIB,
    MEMORY_FACTORS,
    PARTS,
    POOLED,
    TOGETHER,
    Levels,
    MemoryCase,
    StepCase,
    StepFactors,
    descend,
    factors_of,
    fit_levels,
    fit_memory,
    median_error,
    memory_case,
    memory_regret,
    memory_table,
    prior_of,
)
from planner.specs.estimate import EstimateRequest
from planner.workload.costing import estimate_request
from tests.planner.asking import ask

PRIORS = np.array([prior for prior, _ in MEMORY_FACTORS.values()])
ACTIVATIONS = list(MEMORY_FACTORS).index("activation_ratio")
NAMES = list(MEMORY_FACTORS)


def run_of(seconds, measured_s, *, runs_ahead=False, engine="one", source="a", device="h100"):
    parts = np.array([seconds.get(part, 0.0) for part in PARTS])
    return StepCase(
        row_id="row",
        engine=engine,
        architecture="hopper",
        device=device,
        source=source,
        group=f"{source}/model",
        seconds=parts,
        runs_ahead=runs_ahead,
        measured_s=measured_s,
    )


def fit_step(runs):
    """Return the factors of the one engine on the one chip that the runs are of."""
    return fit_levels(runs, TOGETHER).factors("one", "hopper", "h100")


def runs_with(truth, *, count=24, seed=7):
    """Return runs whose parts are drawn at random and whose time is what the truth makes it."""
    draw = np.random.default_rng(seed)
    runs = []
    for _ in range(count):
        seconds = {part: float(draw.uniform(0.1, 2.0)) for part in truth}
        measured = sum(seconds[part] * factor for part, factor in truth.items())
        runs.append(run_of(seconds, measured))
    return runs


def part_of(factors, name):
    return float(factors[PARTS.index(name)])


def test_a_fit_finds_the_factors_that_made_the_runs():
    for truth in [
        {"matmul": 1.3, "exchange": 2.0},
        {"matmul": 0.8, "elementwise": 3.0, "tensor_parallel": 0.4},
        {"matmul": 1.0, "update": 3.0},
    ]:
        found = fit_step(runs_with(truth))
        assert {part: part_of(found, part) for part in truth} == pytest.approx(truth, rel=0.08)

    # A part that no run has keeps its prior.
    found = fit_step(runs_with({"matmul": 1.4, "exchange": 2.0}))
    untouched = [part_of(found, part) for part in PARTS if part not in {"matmul", "exchange"}]
    assert untouched == [1.0] * len(untouched)
    # A fit to exact runs leaves nearly no error.
    runs = runs_with({"matmul": 1.3, "exchange": 2.0, "pipeline": 0.5})
    assert median_error(runs, fit_step(runs)) < 0.01 < median_error(runs, np.ones(len(PARTS)))

    # One wild run does not steer the fit: Errors count as absolute log ratios: a run that is off
    # a hundredfold weighs as log 100.
    truth = {"matmul": 1.3, "exchange": 2.0}
    wild = run_of({"matmul": 1.0, "exchange": 1.0}, 330.0)
    found = fit_step([*runs_with(truth), wild])
    assert {part: part_of(found, part) for part in truth} == pytest.approx(truth, rel=0.1)

    # Without runs a fit is the physics.
    assert list(fit_step([])) == [1.0] * len(PARTS)
    assert fit_levels([], POOLED).effects == {}


def test_a_factor_stops_where_it_no_longer_describes_its_part():
    # No product is fitted to beat its peak: Half the time that the peak allows: the factor stops
    # where a product runs at its peak.
    runs = [run_of({"matmul": seconds}, 0.5 * seconds) for seconds in (1.0, 2.0, 3.0, 5.0)]
    assert part_of(fit_step(runs), "matmul") == FLOORS["matmul"] == 0.7
    for part in ["matmul", "attention", "exchange", "update"]:
        runs = [run_of({part: seconds}, 50.0 * seconds) for seconds in (1.0, 2.0, 3.0, 5.0)]
        assert part_of(fit_step(runs), part) == pytest.approx(CEILINGS[part], rel=1e-3)


def test_ten_runs_move_a_factor_farther_from_the_physics_than_one():
    """Three times the update of 2 % of a step: an error of 4 %, or an unlikely factor."""
    plain = [run_of({"matmul": 1.0}, 1.0)] * 20
    telling = [run_of({"matmul": 1.0, "update": 0.02}, 1.06)]
    few, many = fit_step(plain + telling), fit_step(plain + telling * 10)
    assert part_of(few, "update") < 2.5
    assert part_of(many, "update") == pytest.approx(3.0, abs=0.15)


def test_engines_and_chips_learn_from_each_other():
    # An engine takes to a chip what others show there: Both engines on ampere, the slow one
    # alone on hopper, which is half as fast again there.
    seen = [
        run_of({"exchange": size}, size * factor, engine=engine, device=chip)
        for size in (1.0, 2.0, 3.0, 5.0)
        for engine, chip, factor in (("one", "a", 1.0), ("two", "a", 2.0), ("two", "b", 3.0))
    ]
    levels = fit_levels(seen, TOGETHER)
    known, carried = (
        part_of(levels.factors("one", "hopper", chip), "exchange") for chip in ("a", "b")
    )
    assert known == pytest.approx(1.0, rel=0.1)
    assert carried == pytest.approx(1.5, rel=0.1)

    # An engine without runs takes what all have in common.
    seen = [
        run_of({"exchange": size}, 2 * size, engine=engine)
        for size in (1.0, 2.0, 3.0, 5.0)
        for engine in ("one", "two", "three")
    ]
    steps = StepFactors(seen)
    assert list(steps.of("new", "hopper")) == list(steps.pooled.factors("", "hopper"))
    assert 1.0 < part_of(steps.of("new", "hopper"), "exchange") <= 2.05

    # A level without runs adds nothing.
    levels = Levels({("common",): np.log(np.full(len(PARTS), 1.25))})
    assert levels.factors("any", "family", "chip") == pytest.approx(1.25)


def test_issuing_hides_behind_work_only_where_an_engine_runs_ahead():
    seconds = {"matmul": 3.0, "issue": 2.0, "exchange": 1.0}
    ahead, waiting = (run_of(seconds, 1.0, runs_ahead=flag) for flag in (True, False))
    times = [run.step_s(np.ones(len(PARTS))) for run in (ahead, waiting)]
    assert times == [4.0, 6.0]

    # Issuing that takes longer than the work is what a step waits for.
    run = run_of({"matmul": 1.0, "issue": 5.0, "exchange": 1.0}, 1.0, runs_ahead=True)
    assert run.step_s(np.ones(len(PARTS))) == 6.0


def padded(*first):
    """Return factors of which only the first are not zero."""
    return np.array([*first, *[0.0] * (len(NAMES) - len(first))])


def peak_of(slopes, measured, *, base=8 * GIB, source="a", engine="one", usable=80 * GIB):
    return MemoryCase(
        row_id="row",
        engine=engine,
        source=source,
        group=f"{source}/model",
        base_bytes=np.array([base]),
        slopes=np.array([[slopes.get(name, 0.0) for name in NAMES]]),
        usable_bytes=usable,
        measured_bytes=measured,
    )


def peaks_with(**truth):
    """Return eighteen peaks of random sizes whose overhead and activations obey the truth."""
    draw = np.random.default_rng(3)
    cases = []
    for _ in range(18):
        slopes = {name: float(draw.uniform(1, 30)) * GIB for name in truth}
        if "training_overhead_bytes" in slopes:
            slopes["training_overhead_bytes"] = 1.0
        measured = 8 * GIB + sum(slopes[name] * factor for name, factor in truth.items())
        cases.append(peak_of(slopes, measured))
    return cases


def test_a_fit_finds_the_memory_factors_that_made_the_peaks():
    for truth in [
        {"training_overhead_bytes": 5 * GIB, "activation_ratio": 1.5},
        {"activation_ratio": 0.6, "loss_ratio": 2.0},
        {"training_overhead_bytes": 0.0, "activation_ratio": 2.0},
    ]:
        found = dict(zip(NAMES, fit_memory(peaks_with(**truth)), strict=True))
        for name, value in truth.items():
            tolerance = 0.3 * GIB if name.endswith("_bytes") else 0.05
            assert found[name] == pytest.approx(value, abs=tolerance)

    # A memory factor that no peak tells about keeps its prior.
    found = fit_memory(peaks_with(activation_ratio=1.5))
    assert [found[i] for i in range(len(NAMES)) if i != ACTIVATIONS] == [
        PRIORS[i] for i in range(len(NAMES)) if i != ACTIVATIONS
    ]

    # The highest stage is the peak.
    case = MemoryCase(
        row_id="row",
        engine="one",
        source="a",
        group="a/model",
        base_bytes=np.array([10.0, 30.0, 20.0]),
        slopes=np.array([padded(1.0), padded(), padded(0.0, 2.0)]),
        usable_bytes=100.0,
    )
    heights = [case.peak_bytes(padded(a, b)) for a, b in ((0, 0), (25, 0), (0, 9))]
    assert heights == [30.0, 35.0, 38.0]


def test_a_run_that_ran_bounds_its_memory_from_above():
    """A setting that ran below its predicted peak is a wrong verdict: the fit lowers the peak."""
    ran = [
        peak_of(
            {"activation_ratio": size * GIB},
            0.0,
            base=base * GIB,
            usable=(base + 0.7 * size) * GIB,
        )
        for base, size in ((7, 20), (8, 40), (9, 60))
    ]
    found = fit_memory(ran)
    assert found[ACTIVATIONS] <= 0.7 < PRIORS[ACTIVATIONS]
    assert memory_regret(ran, found) < memory_regret(ran, PRIORS)


def stream_of(
    linear, attention, *, engine="e", family="hopper", width="wide", measured=None, **place
):
    truth = measured if measured is not None else 1.5 * linear + 3.0 * attention + 1e-4
    return StreamCase(
        engine=engine,
        source=place.get("source", "a"),
        device=place.get("device", "d"),
        family=family,
        kernels="gpu",
        kind="gpu",
        level="",
        group="decode",
        width=width,
        linear_s=linear,
        experts_s=0.0,
        attention_s=attention,
        issue_s=place.get("issue", 0.0),
        scores_s=0.0,
        power_s=0.0,
        rest_s=1e-4,
        runs_ahead=False,
        is_replayed=place.get("is_replayed", False),
        measured_s=truth,
    )


def streams(**fields):
    draw = np.random.default_rng(11)
    pairs = draw.uniform(1e-3, 2e-2, (20, 2))
    return [stream_of(float(one), float(two), **fields) for one, two in pairs]


def test_a_fit_finds_what_products_and_caches_of_a_stream_reach():
    found = dict(zip(STREAM_PARTS, fit_streams(streams()), strict=True))
    assert found["linear"] == pytest.approx(1.5, rel=0.05)
    assert found["attention"] == pytest.approx(3.0, rel=0.05)
    assert (found["linear_8bit"], found["linear_4bit"], found["issue"]) == (1.0, 1.0, 1.0)

    # Narrow weights have a factor beside that of wide ones: Wide products take 1.5 times the
    # physics, narrow ones 2.5 times: 5/3 of the wide ones.
    for width, name in [("8bit", "linear_8bit"), ("4bit", "linear_4bit")]:
        seconds = [0.002 * count for count in range(1, 13)]
        wide = [stream_of(each, 0.0) for each in seconds]
        narrow = [stream_of(s, 0.0, width=width, measured=2.5 * s + 1e-4) for s in seconds]
        found = dict(zip(STREAM_PARTS, fit_streams([*wide, *narrow]), strict=True))
        assert found["linear"] == pytest.approx(1.5, rel=0.03)
        assert found[name] == pytest.approx(5 / 3, rel=0.03)

    # A width that one source measured on one device keeps its prior, that of the other widths,
    # where these have more sources; a second source or device moves it.
    wide = [*wide, *(stream_of(s, 0.0, source="b", device="d2") for s in seconds)]
    for places, expected in (
        ([{}], 1.0),
        ([{}, {"source": "b"}], 5 / 3),
        ([{}, {"device": "d2"}], 5 / 3),
    ):
        narrow = [
            stream_of(s, 0.0, width="8bit", measured=2.5 * s + 1e-4, **place)
            for s in seconds
            for place in places
        ]
        found = dict(zip(STREAM_PARTS, fit_streams([*wide, *narrow]), strict=True))
        assert found["linear_8bit"] == pytest.approx(expected, rel=0.05), places

    # Replayed steps tell what is left of the launches, and leave those of other steps alone.
    launched = [
        stream_of(
            s, 0.0, issue=0.003, is_replayed=replays, measured=1.5 * s + 0.006 * share + 1e-4
        )
        for s in seconds
        for replays, share in ((False, 1.0), (True, 0.25))
    ]
    found = dict(zip(STREAM_PARTS, fit_streams(launched), strict=True))
    assert found["issue"] == pytest.approx(2.0, rel=0.05)
    assert found["replay"] == pytest.approx(0.25, rel=0.1)

    # An engine that no stream is of takes what all have in common.
    target = stream_of(0.01, 0.01, engine="unheard of")
    assert list(fit_target_chip(streams(), target)) == list(fit_streams(streams()))
    # A family that no stream is of takes its factors of its engine.
    target = stream_of(0.01, 0.01, family="blackwell")
    assert list(fit_target_chip(streams(), target)) == list(fit_streams(streams()))


@settings(max_examples=25, deadline=None)
@given(
    least=st.lists(st.floats(-3, 3), min_size=2, max_size=4),
    floor=st.floats(-1, 0),
    ceiling=st.floats(0.5, 1.5),
)
def test_a_descent_stays_in_its_bounds_and_ends_no_higher_than_it_began(least, floor, ceiling):
    target = np.array(least)
    start = np.full(len(least), 0.25)

    def height(x):
        return float(np.abs(x - target).sum())

    found = descend(height, start, np.full(len(least), 0.5), floor, ceiling)
    assert np.all((found >= floor) & (found <= ceiling))
    assert found == pytest.approx(np.clip(target, floor, ceiling), abs=0.03)
    assert height(found) <= height(start)


FILE = data_json("factors.json")
FULL = {"kind": "train", "sequence_length": 2048, "global_batch_size": 8, "method": "pretrain"}


def memory_rows(engine):
    return [row for row in usable(table("memory")) if row["engine"] == engine]


@pytest.fixture(scope="module")
def internevo():
    names = ("memory", "memory_fit")
    rows = [r for n in names for r in usable(table(n)) if r["engine"] == "internevo"]
    return [memory_case(row) for row in rows]


def test_the_file_names_what_it_was_fitted_to():
    for name in INPUTS:
        assert FILE["inputs"][f"{name}.csv"] == digest(name)
    # An answer repeats the version of the factors.
    assert calibration_name().startswith(FILE["version"])
    assert ask(workload=FULL, engine="internevo").calibration == calibration_name()
    # The product's own runner carries no fitted factor.
    assert "torch" not in FILE["engines"]
    # What GPUs measured says nothing about other devices.
    for kind in ["cpu", "uma", "accelerator"]:
        assert fitted_factors("megatron", kind, "training") == {}
        assert "training_factors" not in fitted_factors("transformers", kind, "runner")


def test_fitting_an_engine_again_gives_the_factors_of_the_file(internevo):
    again = memory_factors(internevo, "internevo")
    kept = FILE["engines"]["internevo"]
    assert again == {name: kept[name] for name in again}


def test_every_factor_of_the_file_is_a_field_of_its_engine():
    wrong = []
    for engine in (each for each in FILE["engines"] if not each.startswith("common")):
        found = get_engine(engine, "gpu")
        for name, value in FILE["engines"][engine].items():
            kept = getattr(found, name)
            if (list(kept) if isinstance(kept, tuple) else kept) != value:
                wrong.append((engine, name, kept, value))
    assert not wrong, wrong


def test_the_linear_form_equals_the_planners_answer():
    by_engines = {}
    for row in usable(table("memory_fit")):
        by_engines.setdefault(row["engine"], []).append(row)
    for engine, rows in by_engines.items():
        for row in rows[:3]:
            asked = EstimateRequest.model_validate(training_request(row))
            whole = estimate_request(asked, explain=False).memory.per_device_peak_bytes
            factors = factors_of(FILE["engines"][engine])
            assert memory_case(row).peak_bytes(factors) == pytest.approx(whole, rel=1e-6), engine


def test_without_rows_the_fit_is_the_prior():
    assert list(fit_memory([])) == list(prior_of([]))
    # What only peaks can show is nothing without them.
    found = dict(zip(MEMORY_FACTORS, fit_memory([]), strict=True))
    assert (found["update_copies"], found["unfilled_ratio"]) == (0.0, 0.0)
    assert found["activation_ratio"] == 1.0


def test_a_fit_never_regrets_more_than_the_prior(internevo):
    priors = np.array([prior for prior, _ in MEMORY_FACTORS.values()])
    assert memory_regret(internevo, fit_memory(internevo)) < memory_regret(internevo, priors)


def test_measured_points_and_sources_count_once():
    # A point that was measured ten times counts once.
    cases = [memory_case(row) for row in memory_rows("litgpt")[:3]]
    once, often = memory_table(cases), memory_table([*cases, *([cases[0]] * 9)])
    priors = np.array([prior for prior, _ in MEMORY_FACTORS.values()])
    assert often.regret(priors) == pytest.approx(once.regret(priors))

    # Sources of one engine count alike.
    all_cases = [memory_case(row) for row in memory_rows("litgpt")]
    weights = memory_table(all_cases).weights
    shares = {
        source: sum(w for w, case in zip(weights, all_cases, strict=True) if case.source == source)
        for source in {case.source for case in all_cases}
    }
    assert len(shares) == 2
    assert np.ptp(list(shares.values())) == pytest.approx(0, abs=1e-9)

    # Cases are grouped by engine.
    few = [memory_case(row) for row in (*memory_rows("litgpt")[:2], *memory_rows("oneflow")[:1])]
    assert {name: len(found) for name, found in by_engine(few).items()} == {
        "litgpt": 2,
        "oneflow": 1,
    }


def test_descending_finds_the_least_of_a_bowl():
    bowl = descend(
        lambda x: float(np.sum(np.abs(x - np.array([3.0, 0.5])))), np.ones(2), np.ones(2)
    )
    assert bowl == pytest.approx([3.0, 0.5], abs=0.02)


def test_rows_are_told_apart_by_what_they_say():
    # Rows that train embeddings beside adapters are left out.
    kept = {row["row_id"] for row in usable(table("memory"))}
    beside = [row for row in table("memory") if "embedding and output layers" in row["notes"]]
    assert beside
    assert kept.isdisjoint(row["row_id"] for row in beside)

    # A row with dimensions becomes a model of these dimensions.
    row = next(row for row in table("training") if row["model"] == "gpt-alibi-14400x80")
    found = model_of(row)
    assert (found["hidden_size"], found["num_hidden_layers"]) == (14400, 80)
    assert not found["gated_mlp"]

    # A blank cell is the default.
    for cell, value in [("", 7.0), ("2.5", 2.5)]:
        assert number({"x": cell}, "x", 7.0) == value
    # Every row of a validation table names its source.
    for name in ["memory", "memory_fit", "training"]:
        assert all(row["source_id"] and row["source_url_or_repo_path"] for row in table(name))


def test_what_engines_hold_beside_the_known_is_in_their_answers():
    # Logits that every rank gathers weigh the whole vocabulary.
    engines = ("aleph_alpha_scaling", "maxtext")
    strategy = {"tensor_parallel_size": 8, "micro_batch_size": 4}
    held = [
        sum(
            term.value
            for term in ask(devices=8, workload=FULL, strategy=strategy, engine=engine).terms
            if term.name == "Logits in the loss"
        )
        for engine in engines
    ]
    ratio = FILE["engines"]["aleph_alpha_scaling"]["loss_ratio"]
    unfused = (2 + 4 * 4) / (2 + 2 * 4)
    assert held[0] == pytest.approx(8 * ratio * unfused * held[1])

    # States that an engine keeps beside the known ones are counted.
    row = {"workload": {**FULL, "global_batch_size": 8}, "strategy": {"zero_stage": 0}}
    held = [
        ask(engine=engine, **row).memory.breakdown_bytes["optimizer_states"]
        for engine in ("internevo", "torchtitan")
    ]
    extra = FILE["engines"]["internevo"]["extra_state_bytes"]
    assert held[0] / held[1] == pytest.approx((12 + extra) / 12)
