"""Plans batches from prompt lengths in tokens, with costs calibrated on this host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from runners.jobs.generate.static import PLAIN, BatchRun, Ids, Limits, Setup, run_batch
from runners.jobspec import Batching

Batch = list[int]


@dataclass(frozen=True)
class CostModel:
    """The cost of a padded batch on this host, in seconds."""

    fixed_seconds: float
    seconds_per_token: float

    def of(self, count: int, longest: int) -> float:
        """Return the seconds of ``count`` prompts padded to ``longest`` tokens."""
        return self.fixed_seconds + self.seconds_per_token * count * longest


def given_batches(lengths: Sequence[int], batch_size: int, _cost: CostModel) -> list[Batch]:
    """Return full batches in the given order."""
    return _cut(range(len(lengths)), batch_size)


def sorted_batches(lengths: Sequence[int], batch_size: int, _cost: CostModel) -> list[Batch]:
    """Return full batches of prompts of similar length."""
    return _cut(_by_length(lengths), batch_size)


def turbo_batches(lengths: Sequence[int], batch_size: int, cost: CostModel) -> list[Batch]:
    """Return the cheapest batches of prompts adjacent in length, by dynamic programming.

    Source: Fang et al. 2021 (TurboTransformers), arXiv:2010.05680, algorithm 3.
    """
    order = _by_length(lengths)
    best = [0.0]  # minimal seconds of the shortest prompts up to here
    begins = [0]  # start of the last of their batches
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        options = [
            (best[begin] + cost.of(end - begin, longest), begin)
            for begin in range(max(0, end - batch_size), end)
        ]
        seconds, begin = min(options)
        best.append(seconds)
        begins.append(begin)
    return _traced(order, begins)


POLICIES: Mapping[Batching, Callable[[Sequence[int], int, CostModel], list[Batch]]] = {
    "given": given_batches,
    "sorted": sorted_batches,
    "turbo": turbo_batches,
    "packed": sorted_batches,  # no padding in the prefill, and little when decoding
}


def planned_seconds(batches: Sequence[Batch], lengths: Sequence[int], cost: CostModel) -> float:
    """Return the cost of running the batches in sequence."""
    return sum(cost.of(len(each), max(lengths[at] for at in each)) for each in batches)


def padding_ratio(batches: Sequence[Batch], lengths: Sequence[int]) -> float:
    """Return the share of padding in the padded prompts."""
    padded = sum(len(each) * max(lengths[at] for at in each) for each in batches)
    return 1.0 - sum(lengths[at] for each in batches for at in each) / padded if padded else 0.0


def _by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda at: (lengths[at], at))


def _cut(order: Sequence[int], batch_size: int) -> list[Batch]:
    return [list(order[at : at + batch_size]) for at in range(0, len(order), batch_size)]


def _traced(order: Sequence[int], begins: Sequence[int]) -> list[Batch]:
    batches: list[Batch] = []
    end = len(order)
    while end:
        batches.append(list(order[begins[end] : end]))
        end = begins[end]
    return batches[::-1]


# Calibration of the batch cost model on this host, by short runs before the first batch.


ROUNDS = 2
STEPS = 3  # tokens of a short run: one from the prefill, two decoded


def warm_up(model: PreTrainedModel, prompts: Sequence[Ids], setup: Setup = PLAIN) -> None:
    """Generate a few tokens for the shortest prompt, to exclude lazy loading from the timing."""
    run_batch(model, [min(prompts, key=len)], Limits(STEPS), setup)


def measured_cost(
    model: PreTrainedModel,
    prompts: Sequence[Ids],
    batch_size: int,
    output_tokens: int,
    setup: Setup = PLAIN,
) -> CostModel:
    """Return the constants of ``cost = fixed + per_token * count * longest``.

    The prefill is timed for one short prompt and for a full batch of the longest; the part of a
    decode step that does not depend on the batch size is in ``fixed``.
    """
    ordered = sorted(prompts, key=len)
    small, large = ordered[:1], ordered[-batch_size:]
    few, many = _best(model, small, setup), _best(model, large, setup)
    prefill = line(
        (len(small[0]), few.prefill_seconds),
        (len(large) * len(large[-1]), many.prefill_seconds),
    )
    decode = line((1, _step(few)), (len(large), _step(many)))
    fixed = prefill[0] + decode[0] * (output_tokens - 1)
    return CostModel(fixed, prefill[1])


def line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Return intercept and slope through two points, neither negative."""
    (x1, y1), (x2, y2) = first, second
    if x1 == x2:
        return 0.0, min(y1, y2) / x1
    slope = max(0.0, (y2 - y1) / (x2 - x1))
    return max(0.0, y1 - slope * x1), slope


def _best(model: PreTrainedModel, prompts: Sequence[Ids], setup: Setup) -> BatchRun:
    runs = [run_batch(model, prompts, Limits(STEPS), setup) for _ in range(ROUNDS)]
    return min(runs, key=lambda run: run.prefill_seconds + run.decode_seconds)


def _step(run: BatchRun) -> float:
    return run.decode_seconds / run.num_steps
