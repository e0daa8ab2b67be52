"""Runners-up, the frontier's drawing, who lost and why; drafts and strategies in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import api
from planner.specs.plan import PlanAnswer, PlanRequest, Rejection
from planner.specs.strategy import Strategy
from webapp.core.units import DASH, NBSP, THIN, TIMES
from webapp.core.wording import capitalised
from webapp.plans import alternatives
from webapp.plans.alternatives import (
    _steps,
    columns_for,
    comparison,
    frontier_of,
    inapplicable,
    rejections,
)
from webapp.plans.explanation import explain, main_lines, with_unit
from webapp.plans.words import (
    device_words,
    dtype_words,
    hardware_words,
    model_words,
    plan_title,
    strategy_words,
    workload_words,
)
from webapp.wizard.defaults import GOALS, serve_draft

SERVE = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 16}
NODE = {"device": "h100-sxm5-80gb", "devices_per_node": 8}


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
    return serve_draft(None)


def test_the_chosen_strategy_comes_first_and_is_the_only_one_chosen(answer, draft):
    rows = comparison(answer, draft)

    assert [row.is_chosen for row in rows] == [True] + [False] * (len(rows) - 1)


def test_every_row_has_a_cell_for_each_column(answer, draft):
    columns = columns_for(answer, draft)

    assert 1 <= len(columns) <= 3
    assert {len(row.cells) for row in comparison(answer, draft)} == {len(columns)}


def test_every_row_says_what_decided(answer, draft):
    assert all(row.why[:1].isupper() for row in comparison(answer, draft))


def without_reasons(answer, rate: float):
    """Return the answer with one runner-up, so much as fast as the chosen one."""
    best = answer.plans[0].model_copy(update={"reasons": ()})
    tpot = best.performance.tpot_seconds / rate
    speed = best.performance.model_copy(update={"tpot_seconds": tpot})
    other = best.model_copy(update={"performance": speed})
    return answer.model_copy(update={"plans": (best, other)})


@pytest.mark.parametrize(
    ("rate", "why"),
    [
        (1.0, "Per person: the same"),
        (1.0002, "Per person: the same"),
        (0.8, "Per person: 20 % less"),
        (1.25, "Per person: 25 % more, but costs elsewhere"),
    ],
)
def test_without_a_reason_of_the_search_the_figures_are_compared(answer, draft, rate, why):
    rows = comparison(without_reasons(answer, rate), draft)

    assert [row.why for row in rows] == ["Best for this goal", why]


def test_an_answer_without_plans_compares_nothing(answer, draft):
    empty = answer.model_copy(update={"plans": (), "pareto": ()})

    assert comparison(empty, draft) == []
    assert frontier_of(empty, draft) is None


# Who lost


def lost(**fields) -> alternatives.Lost:
    base = {"family": "some", "constraint": "memory", "reason": "needs more", "unit": "B"}
    one = Rejection.model_validate({**base, **fields})
    return alternatives._lost("some family", one)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ("ttft_seconds", "The first token takes 1.1~h, the target is 1.0~s"),
        ("tpot_seconds", "Each further token takes 1.1~h, the target is 1.0~s"),
        ("devices", "Needs more"),
    ],
)
def test_a_missed_target_is_said_without_its_fields_name(constraint, reason):
    found = lost(constraint=constraint, required=4072.0, limit=1.0, unit="s")

    assert found.reason == spaced(reason)


def test_no_reason_of_a_real_search_shows_the_name_of_a_field(answer):
    assert [one.reason for one in rejections(answer) if "_seconds" in one.reason] == []


def test_a_memory_miss_says_both_numbers():
    found = lost(required=15.7487 * 1024**3, limit=14.4 * 1024**3)

    assert (found.required, found.limit) == (f"15.7{NBSP}GiB", f"14.4{NBSP}GiB")


def test_what_has_no_number_has_a_dash():
    assert (lost().required, lost().limit) == (DASH, DASH)


def test_the_nearest_misses_come_first(answer):
    entries = sorted(answer.rejected.values(), key=lambda one: alternatives._miss(("", one)))
    ratios = [one.required / one.limit for one in entries if one.required and one.limit]

    assert ratios == sorted(ratios)


def test_each_rejection_is_shown_once_as_a_number_or_as_a_reason(answer):
    named = [title for each in inapplicable(answer) for title in each.titles.split(" · ")]

    assert len(rejections(answer)) + len(named) == len(answer.rejected)


def test_techniques_that_lack_the_same_thing_share_a_row():
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


# The frontier


@given(st.floats(1e-6, 1e12))
def test_any_axis_has_round_steps_from_zero_within_its_length(top):
    steps = _steps(top)

    assert steps[0] == 0
    assert 2 <= len(steps) <= 5
    assert steps[-1] <= top * (1 + 1e-9)


@pytest.mark.parametrize("top", [0.41, 0.4, 0.42, 4.1, 0.0405, 41, 1.0, 10.0, 99.9, 100, 0.1])
def test_an_axis_near_a_power_of_ten_has_steps(top):
    assert len(_steps(top)) >= 2


def test_the_frontier_stays_within_its_drawing(answer, draft):
    frontier = frontier_of(answer, draft)

    for dot in (*frontier.dots, frontier.chosen):
        assert alternatives.LEFT <= dot.x <= alternatives.RIGHT
        assert alternatives.TOP <= dot.y <= alternatives.BOTTOM


def test_the_frontiers_path_goes_through_its_dots_from_left_to_right(answer, draft):
    frontier = frontier_of(answer, draft)

    assert frontier.path.startswith("M")
    assert frontier.path.count("L") == len(frontier.dots) - 1
    assert [dot.x for dot in frontier.dots] == sorted(dot.x for dot in frontier.dots)


def test_the_drawing_says_in_words_what_it_shows(answer, draft):
    frontier = frontier_of(answer, draft)

    assert f"{len(frontier.dots)} strategies" in frontier.words
    assert frontier.x_name in frontier.words


def test_two_points_are_no_frontier(answer, draft):
    few = answer.model_copy(update={"pareto": answer.pareto[:1]})

    assert frontier_of(few, draft) is None


def test_a_compression_has_no_frontier(answer, draft):
    draft["goal"]["goal"] = "compress"

    assert frontier_of(answer, draft) is None


# Words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weight_dtype": "bf16"}, "BF16 weights"),
        ({"weight_dtype": "int4"}, "4-bit weights"),
        ({"weight_dtype": "int8", "kv_cache_dtype": "fp8"}, "8-bit weights · FP8 KV cache"),
        (
            {"weight_dtype": "bf16", "kv_cache_dtype": "bf16", "activation_dtype": "bf16"},
            "BF16 weights",
        ),
        ({"weight_dtype": "bf16", "tensor_parallel_size": 1}, "BF16 weights"),
        (
            {"weight_dtype": "fp8", "tensor_parallel_size": 8, "pipeline_parallel_size": 2},
            "FP8 weights · tensor parallel * 8 · pipeline parallel * 2",
        ),
        ({"weight_dtype": "bf16", "zero_stage": 3}, "BF16 weights · ZeRO-3"),
        ({"weight_dtype": "bf16", "zero_stage": 0}, "BF16 weights"),
        (
            {"weight_dtype": "bf16", "gradient_accumulation_steps": 16},
            "BF16 weights · 16 accumulation steps",
        ),
        (
            {"weight_dtype": "fp32", "activation_recomputation": "full"},
            "FP32 weights · full recomputation",
        ),
        ({"weight_dtype": "fp32", "activation_recomputation": "none"}, "FP32 weights"),
        (
            {"weight_dtype": "bf16", "offload": {"optimizer": "nvme", "weights_disk": 1.0}},
            "BF16 weights · 100% of weights on disk · optimiser on disk",
        ),
        (
            {"weight_dtype": "bf16", "offload": {"optimizer": "cpu", "activations_cpu": 0.5}},
            "BF16 weights · 50% of activations in host memory · optimiser in host memory",
        ),
        (
            {"weight_dtype": "int4", "offload": {"kv_disk": 0.25, "weights_cpu": 1.0}},
            "4-bit weights · 100% of weights in host memory · 25% of KV cache on disk",
        ),
    ],
)
def test_a_strategy_is_said_by_what_is_special_about_it(fields, words):
    assert strategy_words(Strategy.model_validate(fields)) == spaced(words)


@pytest.mark.parametrize(
    ("goal", "changes", "words"),
    [
        ("serve", {"concurrency": 1}, "1 person · 1_280 tokens each"),
        ("serve", {"concurrency": 16, "input_tokens": 131_072}, "16 people · 131_328 tokens each"),
        ("generate", {"batch_size": 32}, "batch of 32"),
        ("pretrain", {"time_budget_minutes": 2.0}, "2 * 256 tokens · 2 min"),
        ("pretrain", {"time_budget_minutes": 40 / 60}, "2 * 256 tokens · 40 s"),
        ("pretrain", {"time_budget_minutes": 90.5}, "2 * 256 tokens · 1 h 30 min"),
        ("pretrain", {"time_budget_minutes": 4000}, "2 * 256 tokens · 2 d 18 h"),
        ("finetune", {"million_tokens": 10.0}, "16 * 2048 tokens · 10.0~M tokens"),
        ("finetune", {"million_tokens": 1e6}, "16 * 2048 tokens · 1.00~T tokens"),
        ("finetune", {"million_tokens": 0.2048}, "16 * 2048 tokens · 205~k tokens"),
        ("compress", {"method": "awq"}, "AWQ"),
        ("compress", {"method": "int4_weight_only"}, "4-bit weights"),
    ],
)
def test_a_workload_is_said_in_a_few_words(draft, goal, changes, words):
    draft["goal"]["goal"] = goal
    draft["workload"][goal] |= changes

    assert workload_words(draft) == spaced(words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"source": "demo"}, "Slipway demo"),
        ({"source": "catalog", "catalog_id": "meta-llama/Llama-3.1-8B"}, "Llama 3.1 8B"),
        ({"source": "folder", "path": "models/tiny/"}, "tiny"),
        ({"source": "folder", "path": ""}, "folder"),
        ({"source": "config", "config": {"model_type": "llama"}}, "llama"),
        ({"source": "config", "config": {"_name_or_path": "org/x", "model_type": "l"}}, "org/x"),
        ({"source": "config", "config": {}}, "pasted config"),
        ({"source": "team", "team_model": "1"}, "a model of the team"),
    ],
)
def test_a_model_is_called_by_its_short_name(draft, model, words):
    draft["model"] = model

    assert model_words(draft) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "rtx-4090"}, "RTX 4090"),
        ({"device": "h100-sxm5-80gb", "devices_per_node": 8}, "8 * H100 SXM5 80GB"),
        ({"device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 2}, "16 * H100 SXM5 80GB"),
        ({"device": "a-card-that-left-the-catalog"}, "a-card-that-left-the-catalog"),
    ],
)
def test_hardware_is_said_by_number_and_name(draft, changes, words):
    draft["hardware"] |= changes

    assert hardware_words(draft) == spaced(words)


def test_a_host_is_said_by_its_own_name(draft):
    assert hardware_words(draft, "Box") == "Box"


@pytest.mark.parametrize("goal", GOALS)
def test_a_plans_own_name_fits_its_column(draft, goal):
    draft["goal"]["goal"] = goal

    assert len(plan_title(draft, "m" * 200, "h" * 200)) == 120


@pytest.mark.parametrize(
    ("dtype", "words"), [("bf16", "BF16"), ("int4", "4-bit"), ("mxfp4", "MXFP4"), (None, "")]
)
def test_a_dtype_is_said_as_people_say_it(dtype, words):
    assert dtype_words(dtype) == words


def test_only_the_first_letter_becomes_a_capital():
    assert capitalised("vLLM is needed") == "VLLM is needed"
    assert capitalised("") == ""


def test_a_device_leaves_its_makers_name_out():
    assert device_words("rtx-4090") == "RTX 4090"


# Equations


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
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
        (3e9, "", "3.000e+09"),
        (0.0, "", "0"),
    ],
)
def test_a_value_of_an_equation_is_said_in_its_unit(value, unit, words):
    assert with_unit(value, unit) == spaced(words)


def test_every_term_of_an_estimate_is_explained_once(answer):
    best = answer.plans[0]

    lines = [line for group in explain(best) for line in group.lines]

    assert len(lines) == len(best.terms)
    assert all(line.provenance and line.value for line in lines)


def test_what_sets_the_pace_is_shown_largest_first(answer):
    best = answer.plans[0]
    names = {line.name for line in main_lines(best)}

    assert 1 <= len(main_lines(best)) <= 3
    assert names <= {term.name for term in best.terms if term.operator_class == best.bound_by}
