"""Runners-up, the frontier's drawing, who lost and why, offered changes, equations, what binds."""

import functools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import api
from planner.specs.estimate import EstimateRequest, Objective, PlanAnswer, PlanRequest, Rejection
from planner.specs.workload import Strategy
from tests.webapp.plans.test_verdict_words import CARD, NODE, SERVE, WORK, answer_of, document_of
from webapp.core.display import DASH, NBSP, THIN, TIMES
from webapp.plans import alternatives
from webapp.plans.alternatives import (
    Point,
    _steps,
    columns_for,
    comparison,
    draw_frontier,
    front,
    frontier_of,
    inapplicable,
    offers_of,
    rejections,
    suggestion_effect,
)
from webapp.plans.explanation import (
    OTHERS,
    PHASES,
    SPENT_TWICE,
    TIMELINE,
    _in_unit_of_total,
    explain,
    phases_of,
    strategy_words,
    with_unit,
)
from webapp.plans.side_by_side import _settings
from webapp.plans.verdict import GOAL_FIGURES, figure_values
from webapp.wizard.drafts import serve_document

# Runners-up, the frontier's drawing, who lost and why, and equations


def spaced(words: str) -> str:
    return words.replace("_", THIN).replace("~", NBSP).replace("*", TIMES)


@pytest.fixture(scope="module")
def answer():
    """Sixteen people at an 8B model on eight cards, with targets that some strategies miss."""
    work = SERVE | {"ttft_slo_seconds": 1.0, "tpot_slo_seconds": 0.05}
    request = {"model": "meta-llama/Llama-3.1-70B", "cluster": NODE, "workload": work}
    request["engine"] = "vllm"  # as the wizard asks about catalog hardware
    return api.plan(PlanRequest.model_validate(request))


@pytest.fixture
def draft():
    return serve_document(None)


def test_every_row_has_a_cell_for_each_column_and_the_chosen_one_is_first(answer, draft):
    rows = comparison(answer, draft)
    assert [row.is_chosen for row in rows] == [True] + [False] * (len(rows) - 1)
    columns = columns_for(answer, draft)
    assert 1 <= len(columns) <= 3
    assert {len(row.cells) for row in comparison(answer, draft)} == {len(columns)}


def test_every_row_says_how_it_differs_from_the_chosen_one(answer, draft):
    [chosen, *others] = comparison(answer, draft)

    assert chosen.why == "Best of those that start the checkpoint as it is stored"
    assert others
    for row in others:
        assert row.why[:1].isupper() or row.why[:1].isdigit()
        assert "Fits: " not in row.why
        assert "first plan" not in row.why


def without_reasons(answer, rate: float):
    """Return the answer with one runner-up, so much as fast as the chosen one."""
    best = answer.plans[0].model_copy(update={"reasons": ()})
    tpot = best.performance.tpot_seconds / rate
    speed = best.performance.model_copy(update={"tpot_seconds": tpot})
    other = best.model_copy(update={"performance": speed})
    return answer.model_copy(update={"plans": (best, other)})


def test_without_a_reason_of_the_search_the_figures_are_compared(answer, draft):
    for rate, why in [
        (1.0, "Per request: the same"),
        (1.0002, "Per request: the same"),
        (0.8, "Per request: 20 % less"),
        (1.25, "Per request: 25 % more, ranked lower overall"),
    ]:
        rows = comparison(without_reasons(answer, rate), draft)
        assert [row.why for row in rows] == ["Best for this goal", why], rate


def test_two_points_or_none_or_a_compression_have_no_frontier(answer, draft):
    empty = answer.model_copy(update={"plans": (), "pareto": ()})
    assert comparison(empty, draft) == []
    assert frontier_of(empty, draft) is None

    few = answer.model_copy(update={"plans": answer.plans[:1], "pareto": answer.pareto[:1]})
    assert frontier_of(few, draft) is None
    assert frontier_of(answer, document_of("compress")) is None


# Who lost


def lost(**fields) -> alternatives.RejectedFamily:
    base = {"family": "some", "constraint": "memory", "reason": "needs more", "unit": "B"}
    one = Rejection.model_validate({**base, **fields})
    return alternatives._rejected_family("some family", one)


def test_a_miss_says_both_numbers_or_a_dash_without_its_fields_name():
    for constraint, reason in [
        ("ttft_seconds", "The first token takes 1.1~h, the target is 1.0~s"),
        ("tpot_seconds", "Each further token takes 1.1~h, the target is 1.0~s"),
        ("devices", "Needs more"),
    ]:
        found = lost(constraint=constraint, required=4072.0, limit=1.0, unit="s")
        assert found.reason == spaced(reason), constraint

    found = lost(required=15.7487 * 1024**3, limit=14.4 * 1024**3)
    assert (found.required, found.limit) == (f"15.7{NBSP}GiB", f"14.4{NBSP}GiB")
    assert (lost().required, lost().limit) == (DASH, DASH)


def test_a_family_and_its_weights_are_named_as_the_strategies_above_it():
    for family, words in [
        ("bf16 weights, llama_cpp", "llama.cpp · BF16 weights"),
        (
            "gguf:q6_k weights, tensor parallel 2, llama_cpp",
            "llama.cpp · GGUF Q6_K weights · tensor parallel 2",
        ),
        ("fp32 weights, full recomputation", "FP32 weights · full recomputation"),
        ("some", "some"),
    ]:
        assert lost(family=family).family == words
    packed = {"weight_dtype": "int8", "quantization": "gguf:q6_k"}
    assert strategy_words(Strategy.model_validate(packed)) == "GGUF Q6_K weights"


def test_each_rejection_is_shown_once_the_nearest_first_and_alike_ones_share_a_row(answer):
    named = [title for each in inapplicable(answer) for title in each.titles.split(" · ")]
    assert len(rejections(answer)) + len(named) == len(answer.rejected)
    assert [one.reason for one in rejections(answer) if "_seconds" in one.reason] == []
    entries = sorted(
        answer.rejected.values(), key=lambda one: alternatives._required_to_limit(("", one))
    )
    ratios = [one.required / one.limit for one in entries if one.required and one.limit]
    assert ratios == sorted(ratios)

    needs = {"constraint": "applicability", "reason": "needs at least 2 devices"}
    keys = ("tensor_parallelism", "zero_1", "unknown_to_all")
    rejected = {key: Rejection.model_validate({"family": key, **needs}) for key in keys}
    searched = {"strategies": 0, "seconds": 0.0}
    empty = {"plans": (), "pareto": (), "suggestions": (), "searched": searched}
    answer = PlanAnswer.model_validate({**empty, "rejected": rejected, "calibration": "none"})
    (row,) = inapplicable(answer)
    assert row.reason == "Needs at least 2 devices"
    assert row.titles.endswith(" · unknown_to_all")
    assert rejections(answer) == []


XS, YS = (3, 1, 4, 1, 5, 9, 2, 6), (5, 3, 5, 8, 9, 7, 9, 3)


# The frontier


@given(st.floats(1e-6, 1e12))
def test_any_axis_has_round_steps_from_zero_within_its_length(top):
    steps = _steps(top)
    assert steps[0] == 0
    assert 2 <= len(steps) <= 5
    assert steps[-1] <= top * (1 + 1e-9)


def test_an_axis_near_a_power_of_ten_has_steps():
    for top in [0.41, 0.4, 0.42, 4.1, 0.0405, 41, 1.0, 10.0, 99.9, 100, 0.1]:
        assert len(_steps(top)) >= 2, top


def test_the_frontier_stays_within_its_drawing_and_its_path_goes_through_its_dots(answer, draft):
    frontier = frontier_of(answer, draft)
    for dot in (*frontier.dots, frontier.chosen):
        assert alternatives.LEFT <= dot.x <= alternatives.RIGHT
        assert alternatives.TOP <= dot.y <= alternatives.BOTTOM

    frontier = frontier_of(answer, draft)
    assert frontier.path.startswith("M")
    assert frontier.path.count("L") == len(frontier.dots) - 1
    assert [dot.x for dot in frontier.dots] == sorted(dot.x for dot in frontier.dots)

    frontier = frontier_of(answer, draft)
    drawn = len(frontier.dots) + len(frontier.rest)
    assert f": {drawn} of " in frontier.words
    assert f"nothing beats {len(frontier.dots)} of them in both" in frontier.words
    assert frontier.x_name in frontier.words

    frontier = frontier_of(answer, draft)
    assert frontier.x_name.startswith("seconds to the first token")
    assert len(frontier.dots) > 1  # else nothing was to choose


def test_nothing_that_is_drawn_lies_beyond_the_front(answer, draft):
    frontier = frontier_of(answer, draft)

    for dot in (*frontier.rest, *frontier.dots):
        beaten = [
            one for one in frontier.dots
            if one.x <= dot.x and one.y <= dot.y and (one.x, one.y) != (dot.x, dot.y)
        ]  # fmt: skip
        assert bool(beaten) is (dot in frontier.rest) or (dot.x, dot.y) in {
            (one.x, one.y) for one in frontier.dots
        }


@pytest.mark.parametrize("less_is_more", [False, True])
def test_a_front_is_what_a_comparison_of_all_pairs_finds(less_is_more):
    points = [Point(float(x), float(y), "", 0.0) for x, y in zip(XS, YS, strict=True)]
    sign = -1 if less_is_more else 1

    def beats(one, other):
        ahead = (sign * one.x >= sign * other.x, one.y >= other.y)
        return all(ahead) and one[:2] != other[:2]

    expected = {one for one in points if not any(beats(other, one) for other in points)}
    assert set(front(points, less_is_more=less_is_more)) == expected


def test_a_chosen_one_below_the_front_says_what_else_decided():
    for loss, where, decided in [
        (0.0, "below it", "which the axes do not show."),
        (0.05, "on the front of its quality", "give up quality."),
    ]:
        points = [
            Point(1.0, 1.0, "a", 0.0),
            Point(2.0, 2.0, "b", loss),
            Point(3.0, 1.5, "c", loss),
        ]
        frontier = draw_frontier(points, ("x", "y"), 3, less_is_more=False)
        assert frontier.words.endswith(f"the chosen one lies {where}"), loss
        assert frontier.decided.endswith(decided), loss
        assert bool(frontier.good_path) is (loss > 0), loss


def test_every_objective_has_words_for_what_the_frontier_does_not_show(answer, draft):
    for objective in get_args(Objective):
        draft.objective = objective
        assert "{" not in frontier_of(answer, draft).decided, objective
        assert alternatives.LOOKED_FOR[objective], objective


# Equations


def test_a_value_of_an_equation_is_said_in_its_unit():
    for value, unit, words in [
        (14.3e12, "FLOP", "14.3~TFLOP"),
        (8.03e9, "parameters", "8.03~B"),
        (13 * 1024**3, "B", "13.0~GiB"),
        (0.826, "s", "826~ms"),
        (12e9, "B/s", "12.0~GB/s"),
        (32.0, "", "32"),
        (131_072, "tokens", "131_072 tokens"),
        (0.8, "", "0.8"),
        (0.8033, "", "0.8033"),
        (1.5, "bytes", "1.5 bytes"),
        (3e9, "", "3e+09"),
        (6.711e10, "", "6.711e+10"),
        (5e20, "tokens", "5e+20 tokens"),
        (-2.5e12, "", "-2.5e+12"),
        (0.0, "", "0"),
    ]:
        assert with_unit(value, unit) == spaced(words), (value, unit)


def test_every_term_of_an_estimate_is_explained_once(answer):
    best = answer.plans[0]
    lines = [line for group in explain(best) for line in group.lines]
    assert len(lines) == len(best.terms)
    assert all(line.provenance and line.value for line in lines)


# Changes that are offered: what each brings and costs, and what it is for


def test_a_suggestion_says_what_it_brings_under_its_own_number():
    answer = answer_of("meta-llama/Llama-3.1-70B")
    for suggestion in answer.suggestions:
        assert suggestion_effect(suggestion).startswith("fits, ")

    answer = answer_of("meta-llama/Llama-3.1-70B")
    assert [chip.at for chip in chips_of(answer, document_of())] == list(
        range(len(answer.suggestions))
    )


def chips_of(answer, draft):
    return [chip for group in offers_of(answer, draft) for chip in group.chips]


def test_fine_tuning_and_not_pre_training_is_offered_another_method():
    answer = answer_of("meta-llama/Llama-3.1-8B", workload=WORK["pretrain"])
    methods = [one.changes.get("workload", {}).get("method") for one in answer.suggestions]
    assert "lora" not in methods
    assert "adalomo" in methods
    offered = [chip.at for chip in chips_of(answer, document_of("pretrain"))]
    assert methods.index("adalomo") not in offered

    work = WORK["pretrain"] | {"method": "full"}
    answer = answer_of("meta-llama/Llama-3.1-8B", workload=work)
    assert len(chips_of(answer, document_of("finetune"))) == len(answer.suggestions)

    answer = answer_of("meta-llama/Llama-3.1-8B", workload=WORK["pretrain"] | {"method": "full"})
    other = answer.suggestions[0].model_copy(update={"changes": {"workload": {"method": "lora"}}})
    draft = document_of("finetune", method="full")
    [chip] = chips_of(answer.model_copy(update={"suggestions": (other,)}), draft)
    assert chip.title == "LoRA instead of all weights"


def test_headings_say_whether_a_change_is_for_the_fit_or_for_the_target():
    target = SERVE | {"ttft_slo_seconds": 1.0, "tpot_slo_seconds": 0.05}
    answer = answer_of(
        "meta-llama/Llama-3.1-70B", workload=target, engine="vllm", pins={"weight_dtype": "bf16"}
    )

    fit, meets = offers_of(answer, document_of())

    assert fit.heading.endswith("make it fit")
    assert fit.chips[0].title == "7 devices instead of 1"
    assert meets.heading.endswith("meet the target")
    assert all(chip.effect.startswith("meets it, ") for chip in meets.chips)


def test_lifting_a_target_is_not_offered_as_a_way_to_meet_it():
    target = SERVE | {"ttft_slo_seconds": 1.0}
    card, bounds = {"device": "a100-sxm4-80gb"}, {"ttft_p95_seconds": {"max": 1.0}}
    answer = answer_of("Qwen/Qwen3-32B", card, target, engine="vllm", constraints=bounds)
    lifted = [at for at, one in enumerate(answer.suggestions) if "constraints" in one.changes]
    assert lifted

    assert not {chip.at for chip in chips_of(answer, document_of())} & set(lifted)


def test_a_change_of_hardware_says_what_all_of_it_costs_an_hour():
    answer = answer_of("meta-llama/Llama-3.1-70B", engine="vllm", pins={"weight_dtype": "bf16"})
    [seven, *_] = chips_of(answer, document_of())
    assert seven.effect.endswith("$3.26/h in total")


def test_a_smaller_workload_is_named_as_the_form_names_it_with_what_it_is_now():
    work = SERVE | {"input_tokens": 4096, "concurrency": 64}
    target = work | {"ttft_slo_seconds": 0.5, "tpot_slo_seconds": 0.03}
    node = {"device": "a100-sxm4-80gb", "devices_per_node": 4}
    answer = answer_of("meta-llama/Llama-3.1-70B", node, target, engine="vllm")
    draft = document_of(target="code", input_tokens=4096, concurrency=64)
    sizes = [one for one in answer.suggestions if "workload" in one.changes]

    titles = [chip.title for chip in chips_of(answer, draft)]

    assert sizes
    assert all(" instead of " in title for title in titles)
    assert not [title for title in titles if "tokens" in title]


# What binds: phases apart, one operator once, and parts that add up to their headline


LLAMA = "meta-llama/Llama-3.1-8B"
SMALL = "HuggingFaceTB/SmolLM2-135M"
CASES = {
    "serve": (LLAMA, CARD, SERVE, {"engine": "vllm"}),
    "serve on eight": ("meta-llama/Llama-3.1-70B", NODE, SERVE, {"engine": "vllm"}),
    "alone": (LLAMA, CARD, {**SERVE, "concurrency": 1}, {"engine": "vllm"}),
    "generate": (SMALL, CARD, WORK["generate"], {}),
    "finetune": (SMALL, CARD, WORK["finetune"], {}),
    "a pipeline": (
        LLAMA,
        NODE,
        WORK["pretrain"] | {"global_batch_size": 32},
        {"pins": {"pipeline_parallel_size": 4}},
    ),
    "compress": (SMALL, CARD, WORK["compress"], {}),
}


@functools.cache
def best_of(case):
    model, cluster, work, more = CASES[case]
    return answer_of(model, cluster, work, **more).plans[0]


def test_the_parts_of_a_phase_add_up_to_its_headline_the_largest_first():
    for case in CASES:
        best = best_of(case)
        phases = phases_of(best)
        assert phases, case
        for phase in phases:
            seconds = [part.seconds for part in phase.parts]
            assert sum(seconds) == pytest.approx(phase.seconds, rel=1e-9), (case, phase)
            figure = next(figure for name, figure, _ in PHASES.values() if name == phase.name)
            assert phase.seconds == getattr(best.performance, figure), (case, phase)

            names = [part.name for part in phase.parts]
            assert len(set(names)) == len(names), (case, names)
            assert OTHERS not in names[:-1], (case, names)  # what is gathered stands last
            named = [part.seconds for part in phase.parts if part.name != OTHERS]
            assert named == sorted(named, reverse=True), (case, phase)


def test_a_step_with_completions_of_its_own_is_a_timeline_that_adds_up_to_it():
    work = {"kind": "train", "objective": "grpo", "sequence_length": 1024, "global_batch_size": 64}
    for apart, ending in (({}, []), ({"devices": 4}, [SPENT_TWICE])):
        request = {
            "model": "meta-llama/Llama-3.1-8B",
            "cluster": NODE,
            "engine": "nemo_rl",
            "workload": {**work, "staleness": int(bool(apart))},
            "strategy": {"rollout": {"sleep": "none" if apart else "both", **apart}},
        }
        (phase,) = phases_of(api.estimate(EstimateRequest.model_validate(request)))
        assert sum(part.seconds for part in phase.parts) == pytest.approx(phase.seconds)
        names = [part.name for part in phase.parts]
        own = [name for name in TIMELINE.values() if name in names]
        assert names == own + ending
        assert {"Completions", "Log-probabilities", "Updates"} < set(own)


def test_where_completions_are_generated_is_said_in_words_and_compared_field_by_field():
    work = {"kind": "train", "objective": "grpo", "sequence_length": 1024, "global_batch_size": 64}
    asked = {"model": "meta-llama/Llama-3.1-8B", "cluster": NODE, "engine": "nemo_rl"}
    plans = [
        api.plan(
            PlanRequest.model_validate(
                {**asked, "workload": {**work, "generator": kind}, "top": 1, "objective": "cost"}
            )
        ).plans[0]
        for kind in ("separate", "colocated")
    ]
    apart, together = (strategy_words(plan.strategy) for plan in plans)
    count = plans[0].strategy.rollout.devices
    assert f"{count} device" in apart
    assert "all devices generate in turn" in together
    rows = dict(_settings(plans))
    assert rows["Rollout: devices"] == (str(count), "0")
    assert not any("RolloutSpec" in cell for row in rows.values() for cell in row)
    shares = {name for name, *_ in GOAL_FIGURES["finetune"]}
    assert {"rollout_idle_ratio", "trainer_idle_ratio"} < shares
    assert figure_values(plans[0], "trainer_idle_ratio")[0] > 0
    assert figure_values(plans[1], "trainer_idle_ratio") is None


def test_a_part_has_the_unit_and_the_decimals_of_its_total():
    for seconds, total, words in [
        (0.0929, 0.114, "93~ms"),
        (0.000658, 0.114, "1~ms"),
        (0.0000386, 0.00682, "0.04~ms"),
        (4.03, 5.11, "4.03~s"),
        (0.0474, 5.11, "0.05~s"),
        (0.001, 5.11, "< 0.01~s"),
        (816.0, 1249.0, "13.6~min"),
        (-0.2, 5.11, "\N{MINUS SIGN}0.20~s"),
        (400_000.0, 1_400_000.0, "4.6~days"),
    ]:
        assert _in_unit_of_total(seconds, total) == words.replace("~", NBSP), (seconds, total)


def test_reading_a_prompt_and_writing_a_token_are_two_phases_named_as_the_figures():
    phases = phases_of(best_of("generate"), is_batch=True)
    assert phases[0].name in [label for _, label, _ in GOAL_FIGURES["generate"]]
    assert [phase.name for phase in phases] == ["Prefill", "Each further token"]

    phases = phases_of(best_of("serve"))
    assert [phase.name for phase in phases] == ["First token, mean", "Each further token, mean"]
    assert phases[0].parts[0].name == "Linear layers" or "Queueing" in phases[0].parts[0].name
    assert "Linear layers" in [part.name for part in phases[1].parts]


def test_a_phases_bar_is_whole_and_in_the_order_and_colours_of_its_table(answer):
    for phase in phases_of(answer.plans[0]):
        bar = phase.bar
        assert [each.time for each in bar] == list(phase.parts)
        assert sum(each.width for each in bar) == pytest.approx(100, abs=0.1)
        assert [each.start for each in bar] == sorted(each.start for each in bar)
        assert [each.ink for each in bar] == [min(at + 1, 5) for at in range(len(bar))]
