"""Benchmark of the planner's search speed, in CPU seconds; they depend on the machine."""

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median

from planner.search.engine import blocks_of, search
from planner.search.question import questions
from planner.search.scoring import ESTIMATES, score
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Bound, PlanRequest
from planner.specs.workload import ServeWorkload, Strategy

ROUNDS = 3
LARGE = "meta-llama/Llama-3.1-405B"
TRAINING = PlanRequest.model_validate(
    {
        "model": LARGE,
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 128},
        "workload": {
            "kind": "train",
            "method": "pretrain",
            "sequence_length": 8192,
            "global_batch_size": 2048,
        },
        "engine": "megatron",
        "objective": "throughput",
    }
)
SERVING = PlanRequest.model_validate(
    {
        "model": LARGE,
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 8},
        "workload": {
            "kind": "serve",
            "input_tokens": 2048,
            "output_tokens": 256,
            "concurrency": 256,
        },
        "engine": "vllm",
        "objective": "throughput",
    }
)
MIXTURE = PlanRequest.model_validate(
    {
        "model": "Qwen/Qwen3-235B-A22B",
        "cluster": {"device": "h200-sxm-141gb", "devices_per_node": 8, "nodes": 128},
        "workload": dict(SERVING.workload),
        "engine": "sglang",
        "objective": "cost",
    }
)
REWARDED = PlanRequest.model_validate(
    {
        "model": "meta-llama/Llama-3.1-8B",
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 16},
        "workload": {
            "kind": "train",
            "objective": "grpo",
            "method": "full",
            "sequence_length": 4096,
            "max_completion_length": 3072,
            "global_batch_size": 1024,
        },
        "engine": "nemo_rl",
        "objective": "throughput",
    }
)
WIZARD = PlanRequest.model_validate(
    {
        "model": "meta-llama/Llama-3.1-8B",
        "cluster": {"device": "rtx-4090"},
        "workload": {
            "kind": "train",
            "method": "lora",
            "sequence_length": 2048,
            "global_batch_size": 16,
        },
    }
)
# An infeasible request on the same GPU: every suggestion runs a search.
TOO_LARGE = WIZARD.model_copy(
    update={"workload": WIZARD.workload.model_copy(update={"method": "full"})}
)
OPEN_LOOP = {"concurrency": None, "request_rate_per_second": 4.0}
BURST = {"concurrency": None, "burst_requests": 256}
ONE_NODE = ClusterSpec(device="h100-sxm-80gb", devices_per_node=8)
ONE_CARD = ClusterSpec(device="h100-sxm-80gb")
SMALL = "meta-llama/Llama-3.1-8B"
EASY = {"tokens_per_second": Bound(min=1.0)}
HARD = {"tokens_per_second": Bound(min=1e12)}
TAIL = {"latency_p99_seconds": Bound(max=10.0)}
RATE_GOAL, PLAN_GOAL, WIZARD_GOAL = "at least 200,000", "below 1", "below 0.1"
Row = tuple[str, float, str, str]


def figures(rounds: int = ROUNDS) -> Iterator[Row]:
    """Yield the benchmark rows: name, median over the rounds, unit, goal."""
    for name, request in RATES.items():
        yield f"strategies scored: {name}", scoring_rate(request, rounds), "1/s", RATE_GOAL
    for name, request in PLANS.items():
        yield f"plan: {name}", planning_seconds(request, rounds), "s", PLAN_GOAL
    for name, request in REPLANS.items():
        yield f"re-plan: {name}", planning_seconds(request, rounds), "s", WIZARD_GOAL
        for what, changed in changes(request).items():
            seconds = replanning_seconds(request, changed, rounds)
            yield f"re-plan: {name}, {what}", seconds, "s", WIZARD_GOAL


def _serving(
    request: PlanRequest, load: Mapping[str, float | None] | None = None, **changes: object
) -> PlanRequest:
    """Return a serving request with another load and other changes."""
    workload = request.workload.model_copy(update=dict(load or {}))
    return request.model_copy(update={"workload": workload, **changes})


RATES = {
    "training": TRAINING,
    "serving, closed loop": MIXTURE,
    "serving, open loop": _serving(MIXTURE, OPEN_LOOP),
    "serving, burst": _serving(MIXTURE, BURST),
}
PLANS = {
    "405B training on 1,024 devices": TRAINING,
    "8B by GRPO on 128 devices": REWARDED,
    "405B serving on 8 devices": _serving(SERVING, cluster=ONE_NODE),
    "405B serving on 64 devices": SERVING,
    "405B serving on 64 devices, open loop": _serving(SERVING, OPEN_LOOP),
    "405B serving on 64 devices, burst": _serving(SERVING, BURST),
}
REPLANS = {
    "one card, training": WIZARD,
    "one card, training, nothing fits": TOO_LARGE,
    "one card, serving": _serving(SERVING, model=SMALL, cluster=ONE_CARD),
    "one card, serving, open loop": _serving(SERVING, OPEN_LOOP, model=SMALL, cluster=ONE_CARD),
    "one card, serving, burst": _serving(SERVING, BURST, model=SMALL, cluster=ONE_CARD),
    "one card, serving, nothing fits": _serving(SERVING, cluster=ONE_CARD),
    "one card, open loop, nothing fits": _serving(SERVING, OPEN_LOOP, cluster=ONE_CARD),
}


def changes(request: PlanRequest) -> dict[str, PlanRequest]:
    """Return follow-up requests for the same model, hardware and load, by kind of change."""
    changed: dict[str, dict[str, object]] = {
        "another objective": {"objective": "latency"},
        "a pin": {"pins": Strategy(weight_dtype="bf16")},
        "a target": {"constraints": EASY},
        "a target out of reach": {"constraints": HARD},
    }
    if isinstance(request.workload, ServeWorkload):
        changed["a target on a percentile"] = {"constraints": TAIL}
    return {what: request.model_copy(update=fields) for what, fields in changed.items()}


def scoring_rate(request: PlanRequest, rounds: int = ROUNDS) -> float:
    """Return the number of strategies scored per second of CPU time."""
    blocks = [block for question in questions(request) for block in blocks_of(question)]
    rows = sum(len(block.cells) for block in blocks)
    return rows / _seconds(lambda: [score(block) for block in blocks], rounds)


def planning_seconds(request: PlanRequest, rounds: int = ROUNDS) -> float:
    """Return the CPU seconds of a complete search: plans, frontier, rejections, suggestions.

    The cache is cleared before each round.
    """
    return _seconds(lambda: search(request), rounds, before=ESTIMATES.clear)


def replanning_seconds(before: PlanRequest, request: PlanRequest, rounds: int = ROUNDS) -> float:
    """Return the CPU seconds of a complete search with only another request in the cache."""

    def warm_up() -> None:
        ESTIMATES.clear()
        search(before)

    return _seconds(lambda: search(request), rounds, before=warm_up)


def _seconds(
    work: Callable[[], object],
    rounds: int,
    before: Callable[[], None] = lambda: None,
) -> float:
    work()
    durations = []
    for _ in range(rounds):
        before()
        started = time.process_time()
        work()
        durations.append(time.process_time() - started)
    return median(durations)
