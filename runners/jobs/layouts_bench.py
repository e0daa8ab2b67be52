"""Step times of layouts, each on as many real ranks of this machine as it takes, in turns.

``python -m runners.jobs.layouts_bench`` reads one ``Asked`` from its input and prints a JSON line
per layout and round, after one of the collectives. Every layout has forked processes of its own,
so that none finds groups, caches or memory of another.
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

from runners.jobs.forked_ranks import load_what_training_loads, on_ranks
from runners.jobs.ranks import Ranks
from runners.jobs.ratios import ratio_of
from runners.jobs.runtime import prepare_process
from runners.jobs.train.quiet import quiet_trainer
from runners.layouts_asked import Asked, Collective, CollectiveTime, StepTime
from runners.ratios import Ratio

TINY, LARGE = 2**10, 2**24  # bytes: what a collective costs by itself, and what its bytes do
FP32_BYTES = 4
REPETITIONS = 8
FIRST_MARGIN = 0.5  # of the fastest one's time, after one round
# How often what is exchanged travels round a ring, but for each rank's own part.
RING_PASSES: dict[Collective, int] = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "send": 1,
}


def step_times(asked: Asked) -> Iterator[StepTime]:
    """Yield layouts' step seconds, round by round; every other round goes backwards.

    The more rounds, the nearer to the fastest a layout must be to be run again: half more than
    its time after the first, a twentieth more after ten. What is ``always`` asked for stays.
    """
    order, taken = list(asked.layouts), defaultdict[str, list[float]](list)
    for number in range(asked.rounds):
        for each in _round(asked, order, number):
            taken[each.layout].append(each.seconds)
            yield each
        means = {name: statistics.geometric_mean(taken[name]) for name in order}
        near = (1 + FIRST_MARGIN / (number + 1)) * min(means.values())
        order = [each for each in order if each in asked.always or means[each] <= near]


def final_times(asked: Asked, first: str, rival: str) -> Iterator[StepTime]:
    """Yield step seconds of the first choice and its fastest rival, after the rounds of all.

    The rival was picked by the rounds before, so that the pair's ratio owes nothing to luck.
    """
    for number in range(asked.rounds, asked.rounds + asked.final_rounds):
        yield from _round(asked, [first, rival], number)


def _round(asked: Asked, order: Sequence[str], number: int) -> Iterator[StepTime]:
    for name in order if number % 2 == 0 else reversed(order):
        lead, *_ = on_ranks(asked.ranks_of(name), partial(_steps, asked, name))
        yield StepTime(layout=name, round=number, seconds=lead["seconds"])


def regret(first: str, times: Sequence[StepTime]) -> Ratio:
    """Return the fastest other layout's step time as a share of the first choice's.

    Of those that ran in all rounds, or, where all were left out, of the one that stayed longest.
    Where the same times pick the rival, the ratio is too small rather than too large. Its
    interval is of the rounds' pairs.
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
    """Yield what each exchange takes among so many ranks of this machine, as its bytes grow."""
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
    found = {}
    for name, num_bytes in product(RING_PASSES, (TINY, LARGE)):
        whole = torch.zeros(num_bytes // FP32_BYTES)
        part = torch.zeros(len(whole) // ranks.size)
        times = []
        for _ in range(REPETITIONS):
            ranks.total([0.0])
            began = time.monotonic()
            _exchange(name, whole, part, ranks)
            times.append(time.monotonic() - began)
        found[f"{name} {num_bytes}"] = statistics.median(times)
    return found


def _exchange(name: Collective, whole: torch.Tensor, part: torch.Tensor, ranks: Ranks) -> None:
    """Make one exchange of ``whole``; a message goes to the next rank, as between stages."""
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


def _steps(asked: Asked, name: str, ranks: Ranks) -> dict[str, float]:
    """Return the median step's seconds of one layout, after the first ones."""
    fields = {**asked.training, "layout": asked.layouts[name]}
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(fields, asked.config, Path(folder), ranks)
        trainer.model.train()
        trainer.layout.begin()
        deadline = math.inf
        while len(times) < asked.warm_up_steps + asked.steps:
            (late,) = ranks.total([float(time.monotonic() > deadline)])
            if late and len(times) > asked.warm_up_steps:
                break
            began = time.monotonic()
            trainer.make_step()
            ranks.total([0.0])
            times.append(time.monotonic() - began)
            if len(times) == asked.warm_up_steps:
                deadline = time.monotonic() + asked.patience_seconds
    return {"seconds": statistics.median(times[asked.warm_up_steps :])}


def main() -> None:
    """Answer what is asked on the input."""
    prepare_process()
    asked = Asked.model_validate_json(sys.stdin.read())
    load_what_training_loads(asked.config)
    for exchange in collective_times(asked.ranks):
        sys.stdout.write(exchange.model_dump_json() + "\n")
    rounds = _said(step_times(asked))
    if asked.first_choice:
        found = regret(asked.first_choice, rounds)
        if asked.final_rounds:
            found = regret(
                asked.first_choice, _said(final_times(asked, asked.first_choice, found.name))
            )
        sys.stdout.write(json.dumps(found) + "\n")


def _said(times: Iterator[StepTime]) -> list[StepTime]:
    """Return the times, each printed on a line as soon as it was taken."""
    taken = []
    for each in times:
        sys.stdout.write(each.model_dump_json() + "\n")
        sys.stdout.flush()
        taken.append(each)
    return taken


if __name__ == "__main__":
    main()
