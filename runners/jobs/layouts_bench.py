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
from itertools import chain, product
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
        for name in order if number % 2 == 0 else reversed(order):
            lead, *_ = on_ranks(asked.ranks_of(name), partial(_steps, asked, name))
            taken[name].append(lead["seconds"])
            yield StepTime(layout=name, round=number, seconds=lead["seconds"])
        means = {name: statistics.geometric_mean(taken[name]) for name in order}
        near = (1 + FIRST_MARGIN / (number + 1)) * min(means.values())
        order = [each for each in order if each in asked.always or means[each] <= near]


def regret(first: str, times: Sequence[StepTime]) -> Ratio:
    """Return the fastest other layout's step time as a share of the first choice's.

    Of those that ran in all rounds. It is picked by the same times, so that the ratio is too
    small rather than too large; its interval is of the rounds' pairs.
    """
    taken = defaultdict[str, list[float]](list)
    for each in times:
        taken[each.layout].append(each.seconds)
    own = taken.pop(first)
    rivals = {name: rival for name, rival in taken.items() if len(rival) == len(own)}
    if not rivals:  # all were left out: the one that stayed longest
        most = max(len(rival) for rival in taken.values())
        rivals = {name: rival for name, rival in taken.items() if len(rival) == most}
        own = own[:most]
    best = min(rivals, key=lambda name: statistics.geometric_mean(rivals[name]))
    return ratio_of(best, rivals[best], own)._replace(of="step seconds")


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
    told = []
    for each in chain(collective_times(asked.ranks), step_times(asked)):
        sys.stdout.write(each.model_dump_json() + "\n")
        sys.stdout.flush()
        told.append(each)
    if asked.first_choice:
        times = [each for each in told if isinstance(each, StepTime)]
        sys.stdout.write(json.dumps(regret(asked.first_choice, times)) + "\n")


if __name__ == "__main__":
    main()
