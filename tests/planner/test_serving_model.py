"""The serving fit from inside: values and their slopes, levels, and what is found again."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.catalog.reading import data_json
from planner.cost.queueing import ArrivalHabits, prompt_slot
from planner.fitting.serving.factors import (
    FIXED,
    GRID,
    LAYOUT_GRID,
    LAYOUTS,
    START,
    fold_of,
    missed,
    serving_cases,
)
from planner.fitting.serving.fitting import (
    NAMES,
    ServingFit,
    bounded,
    engine_spreads,
    family_of,
    fit_serving,
    part_of,
    spreads,
    strengths_without,
    weights_of,
)
from planner.fitting.serving.model import (
    CENTRES,
    DECODE,
    FLOOR,
    HABITS,
    PARTS,
    habits_of,
    natural,
    packed,
    sweep_of,
)

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


@cache
def unmoved():
    """Return the factors found where nothing was slower than predicted."""
    made = made_with({}, of_engine("tensorrt_llm", 6))
    return natural(fit_serving(made, STRENGTHS).shared)


@pytest.mark.parametrize("part", ["decode_tensor_parallel", "decode_issue", "decode_linear"])
def test_a_slower_part_moves_its_own_factor(part):
    """Its prior holds part of it back: what is found lies on the way to the truth."""
    made = made_with({part: 1.6}, of_engine("tensorrt_llm", 6))
    found = natural(fit_serving(made, STRENGTHS).engine_values("tensorrt_llm", "hopper"))

    assert found[part] > 1.025
    assert unmoved()[part] == pytest.approx(1.0, abs=0.02)


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
    fit = ServingFit(packed({}), {"vllm": np.full(len(NAMES), 0.1)}, pairs=added)
    case = of_engine("vllm", 50)[0]

    assert fit.values([case])[0] == pytest.approx(bounded(packed({}) + 0.1))


def test_values_add_up_over_engine_family_pair_and_layout():
    case = of_engine("vllm", 50)[0]
    steps = [np.full(len(NAMES), size) for size in (0.1, 0.2, 0.3, 0.4)]
    known = ({case.engine: steps[0]}, {family_of(case.group): steps[1]}, {case.pair: steps[2]})
    fit = ServingFit(packed({}), *known, {(case.engine, case.layout): steps[3]})

    assert fit.values([case])[0] == pytest.approx(bounded(packed({}) + 1.0))
    other = fit.values([replace(case, layout="another")])[0]
    assert other == pytest.approx(bounded(packed({}) + 0.6))


@pytest.mark.parametrize("times", [1.3, 0.8])
def test_a_layout_that_runs_otherwise_is_found_beside_its_pair(times):
    cases = [case for case in of_engine("tensorrt_llm", 1) if case.group.startswith("64x5120")]
    odd = cases[0].layout
    made = made_with({}, cases)
    made = [
        replace(c, tpot_s=c.tpot_s * times, ttft_s=c.ttft_s * times) if c.layout == odd else c
        for c in made
    ]
    fit = fit_serving(made, STRENGTHS, {cases[0].pair})

    ratios = np.exp(sweep_of(made).wrong(fit.values(made)))[:, 0]
    of_odd = np.array([case.layout == odd for case in made])
    assert ratios[of_odd].mean() == pytest.approx(1.0, abs=0.06)
    assert ratios[~of_odd].mean() == pytest.approx(1.0, abs=0.03)


def test_a_point_ten_times_off_hardly_moves_its_layout():
    cases = [case for case in of_engine("tensorrt_llm", 2) if case.group.startswith("64x5120")]
    made = made_with({}, cases)
    gross = [replace(made[0], tpot_s=10 * made[0].tpot_s), *made[1:]]
    fits = [fit_serving(points, STRENGTHS, {made[0].pair}) for points in (made, gross)]

    usual, moved = (sweep_of(made).predict(fit.values(made))[0] for fit in fits)
    assert moved == pytest.approx(usual, rel=0.05)


def test_pairs_that_nobody_asks_for_are_not_fitted():
    fit = fit_serving(SOME, STRENGTHS, {SOME[0].pair, ("vllm", "another")})

    assert set(fit.pairs) == {SOME[0].pair}
    assert {layout for _, layout in fit.layouts} == {
        case.layout for case in SOME if case.pair == SOME[0].pair
    }


def test_a_family_of_chips_shifts_what_it_decodes_alone():
    made = [
        replace(case, tpot_s=case.tpot_s * (1.3 if family_of(case.group) == "blackwell" else 1.0))
        for case in made_with({}, of_engine("sglang", 4))
    ]
    fit = fit_serving(made, STRENGTHS, ())
    shifted = fit.engine_values("sglang", "blackwell") - fit.engine_values("sglang", "hopper")

    assert shifted[DECODE].sum() > 0.05
    assert shifted[DECODE.stop :] == pytest.approx(0.0)


def test_the_points_of_a_pair_together_count_as_some():
    first = SOME[0]
    weights = weights_of([first] * 40 + [replace(first, group="other")], 10.0)

    assert weights[:40].sum() == pytest.approx(10.0)
    assert weights[40] == 1.0


def test_one_mixture_does_not_speak_for_its_engine():
    """vLLM is measured with one mixture; its slow experts are not those of every other model."""
    cases = [case for case in serving_cases() if case.is_sparse][::4]
    slow = [case for case in cases if case.engine == "vllm"]
    made = made_with({"decode_further": 2.0}, [case for case in cases if case not in slow])
    made += made_with({"decode_further": 20.0}, slow)
    fit = fit_serving(made, STRENGTHS, {slow[0].pair})
    of_engine_ = natural(fit.engine_values("vllm"))["decode_further"]
    of_pair = natural(fit.place_values(*slow[0].pair))["decode_further"]

    assert of_engine_ < 5
    assert of_pair > 10


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
    assert strengths_without("nobody's").items() >= kept["none"].items()


def test_how_freely_layouts_differ_was_chosen_without_each_fold():
    kept = data_json("serving_priors.json")["layouts"]

    assert {fold_of(case) for case in serving_cases()} | {"none"} == set(kept)
    assert all(one["layout"] in LAYOUT_GRID["layout"] for one in kept.values())
    assert strengths_without("3")["layout"] == kept["3"]["layout"]


def test_every_chosen_strength_was_one_of_those_tried():
    for found in data_json("serving_priors.json")["chosen"].values():
        assert set(found) == set(START)
        assert all(found[name] in tried for name, tried in GRID.items())
        assert all(found[name] == value for name, value in FIXED.items())


def test_what_is_predicted_exactly_is_not_missed():
    """With nothing to explain, every pair is met from the others."""
    assert missed(made_with({}, serving_cases()[::30]), START).max() < 0.02


def test_sweeps_that_are_predicted_exactly_are_not_missed():
    made = made_with({}, serving_cases()[::30])

    assert missed(made, {**START, "layout": 1.0}, LAYOUTS).max() < 0.02
