"""The search answers what brute force answers, quickly, and refuses what no device reaches."""

import contextlib
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner import api
from planner.api import plan
from planner.search import engine
from planner.search.bounds import (
    exceeds_peak,
    least_latency_seconds,
    least_seconds_of_callers,
    most_tokens_per_second,
    throughput_bound,
)
from planner.search.engine import best_of, explore
from planner.search.question import constraints_of, first_violation, questions, strategy_family_of
from planner.search.rank import criteria, frontier, order_of
from planner.search.scoring import ESTIMATES
from planner.search.select import Table, frontier_rows, pareto_rows
from planner.specs.base import PlannerError
from planner.specs.estimate import APPLICABILITY, Bound, PlanRequest
from planner.workload import generate
from planner.workload.costing import estimate_request
from tests.planner.asking import (
    CPU,
    GENERATE,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    SERVE,
    TINY,
    TRAIN,
    document,
    stored_first,
)
from tests.plugins.extent import first, sample

SMALL_BATCH = {**TRAIN, "global_batch_size": 4}
LORA = {**SMALL_BATCH, "method": "lora"}
PRICED = {"device": "h100-sxm-80gb", "devices_per_node": 4}
PAIR = {"device": "h200-sxm-141gb", "devices_per_node": 2}
HOST = {"device": CPU, "devices_per_node": 1}
QUICK = {"step_seconds": {"max": 30.0}}
TIGHT = {"per_device_peak_bytes": {"max": 6e10}}
VLLM = {"engine": "vllm"}
SHORT = {**SMALL_BATCH, "sequence_length": 256}
GROWING = {**SMALL_BATCH, "length_schedule": [[512, 0.5], [2048, 0.5]], "tokens": 10**9}
TWO = {**TRAIN, "global_batch_size": 2}
REWARDED = {**SHORT, "objective": "grpo", "global_batch_size": 32, "max_completion_length": 192}
FULL_8B = (LLAMA_8B, {**PRICED, "devices_per_node": 2}, SMALL_BATCH)
TWO_NODES = {"device": "a100-sxm-80gb", "devices_per_node": 2, "nodes": 2}


def pinned(**fields):
    return {"pins": fields}


def load(**fields):
    return {**SERVE, "concurrency": None, **fields}


OPEN = load(request_rate_per_second=6.0, input_tokens=2048)
BURST = load(burst_requests=64, input_tokens=2048)
# Each space: the model, the cluster, the workload, the objective and what else is asked.
SPACES = {
    "8b full fast": (*FULL_8B, "throughput", {}),
    "8b full small": (*FULL_8B, "memory", {}),
    "8b full balanced": (*FULL_8B, "balanced", {}),
    "8b full cheap": (*FULL_8B, "cost", {}),
    "8b full frugal": (*FULL_8B, "energy", {}),
    "8b full short step": (*FULL_8B, "latency", {}),
    "8b full best": (*FULL_8B, "quality", {}),
    "8b within a limit": (*FULL_8B, "throughput", {"constraints": TIGHT}),
    "8b lora on one": (LLAMA_8B, {"device": "rtx-4090"}, LORA, "throughput", {}),
    "8b pinned tensor": (*FULL_8B, "memory", pinned(tensor_parallel_size=2)),
    "8b pinned data": (*FULL_8B, "throughput", pinned(data_parallel_size=2)),
    "8b pinned steps": (*FULL_8B, "throughput", pinned(gradient_accumulation_steps=2)),
    "8b pinned offload": (*FULL_8B, "balanced", pinned(offload={"optimizer": "cpu"})),
    "8b pinned schedule": (*FULL_8B, "latency", pinned(pipeline_schedule="gpipe")),
    "tiny by rewards": (TINY, PRICED, REWARDED, "throughput", {"engine": "trl"}),
    "tiny by rewards, small": (TINY, PRICED, REWARDED, "memory", {"engine": "trl"}),
    "8b in growing lengths": (LLAMA_8B, PAIR, GROWING, "throughput", {}),
    "70b lora": (LLAMA_70B, PAIR, LORA, "throughput", {}),
    "70b does not fit": (LLAMA_70B, PAIR, SMALL_BATCH, "throughput", {}),
    "70b too slow": (LLAMA_70B, PAIR, LORA, "memory", {"constraints": QUICK}),
    "mixtral lora": (MIXTRAL, PAIR, LORA, "throughput", {}),
    "two nodes": (LLAMA_8B, TWO_NODES, TWO, "throughput", {}),
    "own host": (TINY, HOST, SHORT, "balanced", {}),
    "own host pretrain": (TINY, HOST, {**SHORT, "method": "pretrain"}, "memory", {}),
    "generate on a host": (TINY, HOST, GENERATE, "balanced", {}),
    "serve on four": (LLAMA_8B, PRICED, SERVE, "latency", VLLM),
    "serve an open loop": (LLAMA_8B, PRICED, OPEN, "throughput", VLLM),
    "serve a burst": (LLAMA_70B, PAIR, BURST, "balanced", VLLM),
    "serve experts in an open loop": (
        MIXTRAL,
        PAIR,
        load(request_rate_per_second=3.0),
        "latency",
        VLLM,
    ),
    "serve beyond saturation": (
        LLAMA_70B,
        PAIR,
        load(request_rate_per_second=100.0),
        "cost",
        VLLM,
    ),
    "serve within a limit": (LLAMA_70B, PRICED, {**SERVE, "tpot_slo_seconds": 0.03}, "cost", VLLM),
}


def asked(name):
    model, cluster, workload, objective, other = SPACES[name]
    fields = {"engine": "megatron" if workload["kind"] == "train" else "torch", **other}
    if cluster is HOST:
        fields["engine"] = "torch"
    return PlanRequest.model_validate(
        document(
            model=model, cluster=cluster, workload=workload, objective=objective, top=6, **fields
        )
    )


def everything(request):
    """Return every strategy of the space by the exact door, without any column."""
    # Only inference offers fewer devices for the sake of some objectives.
    objective = "throughput" if request.workload.kind == "train" else request.objective
    plain = {"objective": objective, "constraints": {}, "top": 1}
    return _everything(request.model_copy(update=plain).model_dump_json())


@cache
def _everything(document_):
    costed = []
    for part in explore(PlanRequest.model_validate_json(document_)).parts:
        for row in range(len(part)):
            own = part.question.estimate_request(part.strategy(row))
            costed.append((estimate_request(own, explain=False), part.question.hardware))
    return costed


def within_limits(request, costed):
    limits = constraints_of(request)
    return [pair for pair in costed if pair[0].fits and first_violation(pair[0], limits) is None]


# Another space of the suite has the same kind of pin, method or load.
NIGHTLY = {
    "8b pinned data",
    "8b pinned steps",
    "8b pinned schedule",
    "70b lora",
    "own host pretrain",
    "serve experts in an open loop",
    "serve beyond saturation",
}


def differences(name):
    """Return what differs between the search's answer and the one of brute force."""
    request = asked(name)
    answer, costed = plan(request), everything(request)
    feasible = within_limits(request, costed)
    feasible.sort(key=lambda pair: order_of(pair[0], request.objective))
    best = {}
    for estimate, device in feasible:
        best.setdefault((strategy_family_of(estimate.strategy), device), estimate)

    ranked = stored_first(best.values(), request.objective, engine=request.engine)
    expected = [estimate.strategy for estimate in ranked][: request.top]
    whole = [criteria(one) for one in frontier([estimate for estimate, _ in feasible])]
    lost = {strategy_family_of(estimate.strategy) for estimate, _ in costed} - {
        key[0] for key in best
    }
    families = {one.family for one in answer.rejected.values() if one.constraint != APPLICABILITY}
    pairs = {
        "plans": ([found.strategy for found in answer.plans], expected),
        "strategies": (answer.searched.strategies, len(costed)),
        "frontier": ([criteria(found) for found in answer.pareto], whole[:24]),
        "families": (families - lost, set()),
        "number of families": (len(families), min(len(lost), 32)),
    }
    return {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}


def test_the_search_answers_what_brute_force_answers():
    names = first(sorted(SPACES, key=NIGHTLY.__contains__), len(SPACES) - len(NIGHTLY))
    assert names
    chosen = sample(names, kind=lambda name: SPACES[name][2]["kind"])
    wrong = {name: found for name in chosen if (found := differences(name))}
    assert not wrong, wrong


def test_a_rejected_family_is_counted_and_shown_by_its_closest_member():
    request = asked("70b does not fit")
    costed = [estimate for estimate, _ in everything(request)]
    for family, lost in plan(request).rejected.items():
        if lost.constraint != "memory":
            continue
        members = [one for one in costed if strategy_family_of(one.strategy) == family]
        assert lost.strategies == len(members)
        assert lost.required == min(one.memory.per_device_peak_bytes for one in members)


def test_columns_cover_every_figure_of_the_exact_door():
    """The sharpest form: every row of several spaces, every figure that a limit may name."""
    for name in ("two nodes", "mixtral lora", "8b pinned offload"):
        for part in explore(asked(name)).parts:
            for row in range(0, len(part), 7):
                _assert_same(part, row)


def _assert_same(part, row):
    estimate = part.exact(row)
    performance = estimate.performance.model_dump()
    for figure in ("step_seconds", "tokens_per_second", "mfu", "communication_ratio"):
        assert part.figures(figure)[row] == pytest.approx(performance[figure], rel=1e-9)
    peak = part.figures("per_device_peak_bytes")[row]
    assert peak == pytest.approx(estimate.memory.per_device_peak_bytes, rel=1e-9)
    assert part.fits[row] == estimate.fits
    energy = part.figures("energy_joules_per_token")[row]
    assert energy == pytest.approx(estimate.energy_joules_per_token, rel=1e-9)


INF = float("inf")
COORDINATES = st.sampled_from((-INF, 0, 1, 2, 3, 4, INF))
POINTS = st.lists(st.tuples(*[COORDINATES] * 3), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(points=POINTS)
@example(points=[(1, INF, 0), (2, 1, 0), (3, 3, 0)])
def test_the_skyline_is_what_nothing_dominates_and_no_point_twice(points):
    values = np.array(points, dtype=float)
    kept = [tuple(values[row]) for row in pareto_rows(values)]
    free = {
        one
        for one in set(map(tuple, values))
        if not any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True))
            for other in map(tuple, values)
        )
    }
    assert kept == sorted(free)


def test_the_skyline_of_nothing_is_nothing():
    assert len(pareto_rows(np.zeros((0, 4)))) == 0


def test_a_frontier_of_a_table_has_rows_of_the_table():
    found = explore(asked("8b full fast"))
    table = Table(found.parts, found.limits)
    assert set(frontier_rows(table)) <= set(table.feasible)


ONE_CARD = {"device": "rtx-4090"}
LATE = {"constraints": {"tpot_seconds": {"max": 1e-9}}}
ASKED = {
    "met": {"workload": SERVE},
    "met at a percentile": {
        "workload": SERVE,
        "constraints": {"ttft_p95_seconds": {"max": 60.0}},
    },
    "a target that only some plans meet": {
        "workload": SERVE,
        "constraints": {"tpot_p99_seconds": {"max": 0.02}},
    },
    "missed": {"workload": SERVE, **LATE},
    "too large": {"workload": SERVE, "model": "meta-llama/Llama-3.1-70B", "cluster": ONE_CARD},
    "too large and missed": {
        "workload": SERVE, "model": "meta-llama/Llama-3.1-70B", "cluster": ONE_CARD, **LATE,
    },
    "trained": {"workload": TRAIN},
    "compressed": {"workload": {"kind": "compress", "method": "gptq"}},
}  # fmt: skip


def test_it_is_the_first_plan_of_the_whole_answer():
    for fields in sample(ASKED.values(), share=0.4):
        request = PlanRequest.model_validate(document(**fields))
        ESTIMATES.clear()
        quick = api.best_plan(request)
        ESTIMATES.clear()
        whole = api.plan(request)
        answered = request if whole.plans else request.without_targets()
        whole = whole if whole.plans else api.plan(answered)
        assert quick.plans == whole.plans[:1]
        assert quick.searched.strategies == whole.searched.strategies
        assert quick.request == answered
        assert quick.rejected == ({} if quick.plans else whole.rejected)
        assert (quick.pareto, quick.suggestions) == ((), ())


STEP = {"kind": "train", "sequence_length": 2048, "global_batch_size": 16}
WORKLOADS = {
    "closed": SERVE,
    "open": {**SERVE, "concurrency": None, "request_rate_per_second": 1000.0},
    "burst": {**SERVE, "concurrency": None, "burst_requests": 512},
    "short prompts": {**SERVE, "input_tokens": 1, "concurrency": 4096},
    "whole training": {**STEP, "method": "pretrain"},
    "adapters": {**STEP, "method": "lora"},
}
PLACES = [
    (LLAMA_8B, "h100-sxm-80gb"),
    ("Qwen/Qwen3-30B-A3B", "b200-sxm"),
    ("Qwen/Qwen3-0.6B", "mi300x"),
]


def asked_on(workload, model=LLAMA_8B, device="rtx-4090", devices=1, **fields):
    cluster = {"device": device, "devices_per_node": devices}
    return PlanRequest.model_validate(
        document(model=model, cluster=cluster, workload=workload, **fields)
    )


def limited(least, **fields):
    return asked_on(SERVE, constraints={"tokens_per_second": {"min": least}}, **fields)


def test_no_strategy_comes_near_the_ceiling():
    wrong = []
    for (name, workload), (model, device) in product(WORKLOADS.items(), PLACES):
        request = asked_on(workload, model, device, devices=4)
        ceiling = min(throughput_bound(question) for question in questions(request))
        speeds = np.concatenate([part.merit.speed for part in explore(request).parts])
        if not len(speeds) or not 0 < speeds.max() < ceiling / 2:
            wrong.append((name, model, device, speeds, ceiling))
    assert not wrong, wrong


def test_the_ceiling_by_hand_grows_with_the_devices_and_spares_pruned_weights():
    # 2 devices of 1 PFLOP/s and 10^9 weights: 10^6 tokens a second, and the slack on top.
    found = most_tokens_per_second.compute(
        devices=2, peak_flops_per_s=1e15, weights_per_token=1e9, slack=1.0
    )
    assert found == pytest.approx(1e6)

    # More devices raise the ceiling in proportion.
    one, eight = (next(questions(asked_on(SERVE, devices=count))) for count in (1, 8))
    assert throughput_bound(eight) == pytest.approx(8 * throughput_bound(one))
    # Pruned weights are not held against the datasheet.
    question = next(questions(asked_on(SERVE, pins={"sparsity": 0.5})))
    assert throughput_bound(question) == float("inf")
    # A modest target is searched.
    for least in [None, 1.0]:
        question = next(questions(asked_on(SERVE)))
        assert not exceeds_peak(question, {"tokens_per_second": Bound(min=least, max=9.0)})


CALLERS = {
    "prompts": {**SERVE, "input_tokens": 4096, "concurrency": 512},
    "answers": {**SERVE, "input_tokens": 16, "output_tokens": 512, "concurrency": 1024},
    "a shared prefix": {**SERVE, "prefix_share_ratio": 0.5, "concurrency": 64},
    "one token": {**SERVE, "output_tokens": 1, "concurrency": 4096},
    "one caller": {**SERVE, "concurrency": 1},
}
SERVERS = (*product((LLAMA_8B, MIXTRAL), ("h100-sxm-80gb", "b200-sxm", "l4", "rtx-4090")),
    ("openai/gpt-oss-20b", "rtx-5090"), ("google/gemma-3-27b-it", "rtx-3090"),
    ("Qwen/Qwen3-30B-A3B", "mi300x"), (LLAMA_8B, "rtx-2080-ti"))  # fmt: skip


def test_no_strategy_answers_callers_before_the_devices_have_computed_their_answers():
    closest = 0.0
    for workload, (model, device) in sample(product(CALLERS.values(), SERVERS), 0.4):
        for engine_of, devices in (("vllm", 4), ("runner", 1)):
            request = asked_on(workload, model, device, devices=devices, engine=engine_of)
            (question,) = questions(request)
            least = least_latency_seconds(question)
            with contextlib.suppress(PlannerError):  # what the engine refuses has no latency
                found = explore(request).table.column("latency_seconds").min()
                assert 0 < least <= found, (workload, model, device, engine_of)
                closest = max(closest, least / found)
    assert 0.2 < closest < 1


def test_a_latency_below_the_bound_is_refused_by_the_full_search_too():
    request = asked_on(CALLERS["prompts"], engine="vllm")
    (question,) = questions(request)
    least = least_latency_seconds(question)
    for name, share in (("latency_seconds", 1.0), ("latency_p99_seconds", 0.8)):
        below, above = (
            request.model_copy(update={"constraints": {name: Bound(max=least * share * rest)}})
            for rest in (0.99, 1.01)
        )
        assert exceeds_peak(question, constraints_of(below)), name
        assert not exceeds_peak(question, constraints_of(above)), name
        assert not len(explore(below).table.feasible), name


def test_the_least_latency_by_hand_is_unknown_where_others_help():
    # 100 callers with answers of 10^12 FLOP on 2 devices of 1 PFLOP/s.
    found = least_seconds_of_callers.compute(
        callers=100, weights_per_token=1e9, tokens=500, devices=2, peak_flops_per_s=1e15
    )
    assert found == pytest.approx(0.05)
    for fields in (
        {"workload": WORKLOADS["open"]}, {"workload": STEP}, {"pins": {"sparsity": 0.5}},
        {"engine": "llama.cpp"}, {"device": {**CPU, "kind": "gpu"}},
    ):  # fmt: skip
        question = next(questions(asked_on(**{"workload": SERVE, "engine": "vllm", **fields})))
        assert least_latency_seconds(question) == 0.0, fields


def test_a_target_out_of_reach_is_refused_without_scoring(monkeypatch):
    ESTIMATES.clear()
    monkeypatch.setattr(engine, "score", lambda *_: pytest.fail("a strategy was scored"))
    assert best_of(limited(1e12)) is None


def test_what_is_refused_unsearched_is_refused_by_searching():
    unreachable = plan(limited(1e12))
    assert not unreachable.plans
    assert unreachable.rejected
    (best,) = [one.title for one in unreachable.suggestions]
    assert best.startswith("tokens per second of ")


def test_memory_is_costed_once_for_fitting_and_for_the_score(monkeypatch):
    ESTIMATES.clear()
    held, asked_for = generate._held, []
    monkeypatch.setattr(
        generate, "_held", lambda *found: asked_for.append(found[0]) or held(*found)
    )
    assert explore(asked_on(SERVE), only_fitting=True).parts
    assert asked_for
    assert len(asked_for) == len({id(setting) for setting in asked_for})
