"""How fast the search answers, for a bench to print: seconds depend on the machine that asks."""

import time
from collections.abc import Callable, Iterator
from statistics import median

from planner.search.engine import search
from planner.search.question import questions
from planner.search.scoring import score
from planner.search.training_space import training_blocks
from planner.specs.plan import PlanRequest
from planner.specs.workload import TrainWorkload

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
Row = tuple[str, float, str]


def figures(rounds: int = ROUNDS) -> Iterator[Row]:
    """Yield what the bench shows: the name, the median over some rounds, and the unit."""
    yield "training strategies scored", scoring_rate(TRAINING, rounds), "1/s"
    yield "plan 405B training on 1,024 devices", planning_seconds(TRAINING, rounds), "s"
    yield "plan 405B serving on 64 devices", planning_seconds(SERVING, rounds), "s"
    yield "re-plan for one card", planning_seconds(WIZARD, rounds), "s"


def scoring_rate(request: PlanRequest, rounds: int = ROUNDS) -> float:
    """Return how many training strategies are fully scored per second on one core."""
    workload = request.workload
    if not isinstance(workload, TrainWorkload):
        raise TypeError("the rate is that of the training space")
    blocks = [
        block for question in questions(request) for block in training_blocks(question, workload)
    ]
    rows = sum(len(block.cells) for block in blocks)
    return rows / _seconds(lambda: [score(block) for block in blocks], rounds)


def planning_seconds(request: PlanRequest, rounds: int = ROUNDS) -> float:
    """Return the seconds of a complete answer: plans, frontier, rejections, suggestions."""
    return _seconds(lambda: search(request), rounds)


def _seconds(work: Callable[[], object], rounds: int) -> float:
    work()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return median(taken)
