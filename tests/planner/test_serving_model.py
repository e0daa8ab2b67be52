"""The serving fit from inside: values and their slopes, levels, and what is found again."""

from dataclasses import replace

import numpy as np
import pytest

from planner.catalog.reading import data_json
from planner.cost.queueing import ArrivalHabits, prompt_slot
from planner.serving_factors import serving_cases
from planner.serving_fitting import (
    NAMES,
    ServingFit,
    bounded,
    engine_spreads,
    fit_serving,
    part_of,
    spreads,
    strengths_without,
    weights_of,
)
from planner.serving_model import (
    CENTRES,
    FLOOR,
    HABITS,
    PARTS,
    habits_of,
    natural,
    packed,
    sweep_of,
)
from planner.serving_priors import FIXED, GRID, START, missed

STRENGTHS = strengths_without("")
SOME = serving_cases()[::40]


def made_with(truth, cases):
    """Return points as they would have been measured under these factors and habits."""
    values = np.tile(packed(truth), (len(cases), 1))
    tpot, ttft = sweep_of(cases).predict(values)
    return [
        replace(case, tpot_s=float(a), ttft_s=float(b))
        for case, a, b in zip(cases, tpot, ttft, strict=True)
    ]


def of_engine(engine, step):
    return [case for case in serving_cases() if case.engine == engine][::step]


def test_packing_keeps_every_factor_and_habit():
    told = {"decode_linear": 1.25, "burst_ratio": 0.4, "prompts_ahead": 3.0}
    found = natural(packed(told))

    assert {name: found[name] for name in told} == pytest.approx(told)
    assert found["company_ratio"] == pytest.approx(CENTRES["company_ratio"])


def test_no_factor_comes_back_below_what_is_possible():
    found = natural(packed({"decode_linear": 0.01, "prefill_8bit": 0.5}))

    assert found["decode_linear"] == pytest.approx(0.7)
    assert found["prefill_8bit"] == pytest.approx(1.0)


def test_habits_are_read_from_their_places():
    found = habits_of(packed({"burst_ratio": 0.3, "steps_awaited": 4.0})[None, :])

    assert isinstance(found, ArrivalHabits)
    assert found.burst_ratio == pytest.approx([0.3])
    assert found.steps_awaited == pytest.approx([4.0])


@pytest.mark.parametrize("name", ["decode_experts", "prefill_linear", "prefill_8bit", *HABITS])
def test_slopes_are_what_a_small_step_changes(name):
    sweep, at = sweep_of(SOME), NAMES.index(name)
    values = np.tile(packed({"decode_experts": 1.3, "company_ratio": 0.4}), (len(SOME), 1))
    moved = values.copy()
    moved[:, at] += 1e-4

    found = sweep.slopes(values)[:, :, at]
    assert found == pytest.approx((sweep.wrong(moved) - sweep.wrong(values)) / 1e-4, abs=2e-3)


@pytest.mark.parametrize("part", ["decode_tensor_parallel", "decode_issue", "decode_linear"])
def test_a_slower_part_moves_its_own_factor(part):
    """Its prior holds part of it back: what is found lies on the way to the truth."""
    made = made_with({part: 1.6}, of_engine("tensorrt_llm", 6))
    found = natural(fit_serving(made, STRENGTHS).engine_values("tensorrt_llm"))
    still = natural(fit_serving(made_with({}, of_engine("tensorrt_llm", 6)), STRENGTHS).shared)

    assert found[part] > 1.05
    assert still[part] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("burst_ratio", [0.05, 0.3])
def test_the_habits_of_a_pair_are_found_again(burst_ratio):
    made = made_with({"burst_ratio": burst_ratio}, of_engine("vllm", 2))
    fit = fit_serving(made, STRENGTHS)
    found = {natural(values)["burst_ratio"] for values in fit.values(made)}

    assert max(found) == pytest.approx(burst_ratio, rel=0.4)


def test_without_points_everything_stays_at_its_prior():
    fit = fit_serving([], STRENGTHS)

    assert fit.shared == pytest.approx(packed({}))
    assert fit.engine_values("vllm") == pytest.approx(packed({}))


def test_a_pair_that_no_fit_knows_has_the_values_of_its_engine():
    added = {("vllm", "another"): np.ones(len(NAMES))}
    fit = ServingFit(packed({}), {"vllm": np.full(len(NAMES), 0.1)}, added)
    case = of_engine("vllm", 50)[0]

    assert fit.values([case])[0] == pytest.approx(bounded(packed({}) + 0.1))


def test_the_points_of_a_pair_together_count_as_some():
    first = SOME[0]
    weights = weights_of([first] * 40 + [replace(first, group="other")], 10.0)

    assert weights[:40].sum() == pytest.approx(10.0)
    assert weights[40] == 1.0


def test_engines_differ_less_in_what_is_alike():
    of_engine_, own = engine_spreads(STRENGTHS), spreads(STRENGTHS)
    share = dict(zip(NAMES, of_engine_ / own, strict=True))

    assert share["decode_linear"] < share["decode_issue"]
    assert part_of("prefill_expert_exchange") == "expert_exchange"


def test_a_floor_belongs_to_every_part():
    assert len(FLOOR) == len(PARTS)
    assert np.all(np.exp(FLOOR) <= 1.0 + 1e-12)


@pytest.mark.parametrize(("company", "expected"), [(0.0, 3.0), (1.0, 1.5)])
def test_prompts_that_share_a_pass_share_its_fixed_cost(company, expected):
    """Alone a prompt takes 3 s, beside others 1 s, and four of them have room in a pass."""
    found = prompt_slot(beside_s=1.0, alone_s=3.0, company_ratio=company, prompts_per_pass=4.0)

    assert found == pytest.approx(expected)


def test_the_strengths_of_a_pair_were_chosen_without_it():
    kept = data_json("serving_priors.json")["chosen"]

    assert {case.group for case in serving_cases()} <= set(kept)
    assert strengths_without("nobody's") == kept["none"]


def test_every_chosen_strength_was_one_of_those_tried():
    for found in data_json("serving_priors.json")["chosen"].values():
        assert set(found) == set(START)
        assert all(found[name] in tried for name, tried in GRID.items())
        assert all(found[name] == value for name, value in FIXED.items())


def test_what_is_predicted_exactly_is_not_missed():
    """With nothing to explain, every pair is met from the others."""
    assert missed(made_with({}, serving_cases()[::30]), START).max() < 0.02
