"""Calibration of the batch cost model on this host, by short runs before the first batch."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from runners.jobs.generate.batching import CostModel
from runners.jobs.generate.static import PLAIN, BatchRun, Ids, Limits, Setup, run_batch

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
