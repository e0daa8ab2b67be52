"""Benchmarks the step times of layouts on real ranks of this machine, in alternating rounds.

``python -m runners.jobs.bench.layouts_bench`` reads a ``LayoutBenchRequest`` from stdin and prints
JSON lines: the collectives, then one per layout and round. Every layout has its own forked
processes, so that none shares groups, caches or memory.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from runners.host.bench import Collective, CollectiveTime, LayoutBenchRequest, Ratio, StepTime
from runners.jobs.ranks import Ranks
from runners.jobs.ratios import ratio_of
from runners.jobs.runtime import prepare_process
from runners.jobs.train.local_ranks import load_what_training_loads, on_ranks
from runners.jobs.train.trainer import random_token_trainer

TINY, LARGE = 2**10, 2**24  # bytes: for a collective's latency, and for its bandwidth
FP32_BYTES = 4
REPETITIONS = 8
FIRST_MARGIN = 0.5  # relative to the fastest, after one round
# How often a collective's data passes round the ring, without each rank's own part.
RING_PASSES: dict[Collective, int] = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "send": 1,
}


def step_times(request: LayoutBenchRequest) -> Iterator[StepTime]:
    """Yield the layouts' step times per round; every other round runs in reverse order.

    Slow layouts are dropped: the limit above the fastest falls from one half after the first
    round to a twentieth after ten. ``always`` layouts are kept.
    """
    order, taken = list(request.layouts), defaultdict[str, list[float]](list)
    for number in range(request.rounds):
        for each in _round(request, order, number):
            taken[each.layout].append(each.seconds)
            yield each
        means = {name: statistics.geometric_mean(taken[name]) for name in order}
        near = (1 + FIRST_MARGIN / (number + 1)) * min(means.values())
        order = [each for each in order if each in request.always or means[each] <= near]


def final_times(request: LayoutBenchRequest, first: str, rival: str) -> Iterator[StepTime]:
    """Yield additional step times of the first choice and its fastest rival.

    The rival was selected in earlier rounds, so these times have no selection bias.
    """
    for number in range(request.rounds, request.rounds + request.final_rounds):
        yield from _round(request, [first, rival], number)


def _round(request: LayoutBenchRequest, order: Sequence[str], number: int) -> Iterator[StepTime]:
    for name in order if number % 2 == 0 else reversed(order):
        lead, *_ = on_ranks(request.ranks_of(name), partial(_steps, request, name))
        yield StepTime(layout=name, round=number, seconds=lead["seconds"])


def regret(first: str, times: Sequence[StepTime]) -> Ratio:
    """Return the fastest other layout's step time as a share of the first choice's.

    Considers layouts that ran in all rounds or, if there are none, the one that ran longest. If
    the same times select the rival, the ratio is biased low. The interval is over the rounds'
    pairs.
    """
    taken = defaultdict[str, list[float]](list)
    for each in times:
        taken[each.layout].append(each.seconds)
    own = taken.pop(first)
    most = max(len(rival) for rival in taken.values())
    rivals = {name: rival for name, rival in taken.items() if len(rival) == most}
    best = min(rivals, key=lambda name: statistics.geometric_mean(rivals[name]))
    return ratio_of(best, rivals[best], own[:most])._replace(of="step seconds")


def collective_times(size: int) -> Iterator[CollectiveTime]:
    """Yield latency and bandwidth of each collective among ``size`` ranks of this machine."""
    lead, *_ = on_ranks(size, _exchanges)
    for name, passes in RING_PASSES.items():
        tiny, large = lead[f"{name} {TINY}"], lead[f"{name} {LARGE}"]
        travelling = passes * ((size - 1) / size if name != "send" else 1.0) * LARGE
        yield CollectiveTime(
            collective=name,
            ranks=size,
            latency_seconds=tiny,
            bytes_per_second=travelling / max(1e-9, large - tiny),
        )


def _exchanges(ranks: Ranks) -> dict[str, float]:
    seconds = {}
    for name, num_bytes in product(RING_PASSES, (TINY, LARGE)):
        whole = torch.zeros(num_bytes // FP32_BYTES)
        part = torch.zeros(len(whole) // ranks.size)
        times = []
        for _ in range(REPETITIONS):
            ranks.total([0.0])
            began = time.monotonic()
            _exchange(name, whole, part, ranks)
            times.append(time.monotonic() - began)
        seconds[f"{name} {num_bytes}"] = statistics.median(times)
    return seconds


def _exchange(name: Collective, whole: torch.Tensor, part: torch.Tensor, ranks: Ranks) -> None:
    """Run one collective on ``whole``; ``send`` goes to the next rank, as between stages."""
    if name == "all_reduce":
        dist.all_reduce(whole)
    elif name == "all_gather":
        dist.all_gather_into_tensor(whole, part)
    elif name == "reduce_scatter":
        dist.reduce_scatter_tensor(part, whole)
    else:
        sent = dist.isend(whole.clone(), (ranks.rank + 1) % ranks.size)
        dist.recv(whole, (ranks.rank - 1) % ranks.size)
        if sent is not None:
            sent.wait()


def _steps(request: LayoutBenchRequest, name: str, ranks: Ranks) -> dict[str, float]:
    """Return one layout's median step time, after warm-up steps."""
    fields = {**request.training, "layout": request.layouts[name]}
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = random_token_trainer(fields, request.config, Path(folder), ranks)
        trainer.model.train()
        trainer.layout.begin()
        deadline = math.inf
        while len(times) < request.warm_up_steps + request.steps:
            (late,) = ranks.total([float(time.monotonic() > deadline)])
            if late and len(times) > request.warm_up_steps:
                break
            began = time.monotonic()
            trainer.make_step()
            ranks.total([0.0])
            times.append(time.monotonic() - began)
            if len(times) == request.warm_up_steps:
                deadline = time.monotonic() + request.max_round_seconds
    return {"seconds": statistics.median(times[request.warm_up_steps :])}


def main() -> None:
    """Run the request from stdin."""
    prepare_process()
    request = LayoutBenchRequest.model_validate_json(sys.stdin.read())
    load_what_training_loads(request.config)
    for exchange in collective_times(request.ranks):
        sys.stdout.write(exchange.model_dump_json() + "\n")
    rounds = _printed(step_times(request))
    if request.first_choice:
        ratio = regret(request.first_choice, rounds)
        if request.final_rounds:
            ratio = regret(
                request.first_choice,
                _printed(final_times(request, request.first_choice, ratio.name)),
            )
        sys.stdout.write(json.dumps(ratio) + "\n")


def _printed(times: Iterator[StepTime]) -> list[StepTime]:
    """Return the times, printing each as soon as it is measured."""
    taken = []
    for each in times:
        sys.stdout.write(each.model_dump_json() + "\n")
        sys.stdout.flush()
        taken.append(each)
    return taken


if __name__ == "__main__":
    main()
