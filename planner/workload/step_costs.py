"""The cost of one step of a serving engine, interpolated between a few costed passes.

A simulation has thousands of steps, of which the cost model computes a handful. Decode steps are
linear in the cached tokens, at batch sizes a factor of four apart; prefill steps are linear in
the prompt tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from planner.cost.quantity import Unrecorded
from planner.specs.workload import ServeWorkload
from planner.workload.forward import PassCost, paced
from planner.workload.generate import decode_pass, prefill_pass
from planner.workload.setting import Setting

Floats = npt.NDArray[np.float64]
BATCH_STEP = 4
PREFILL_TOKENS = (32.0, 128.0, 512.0, 2048.0)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of steps at sampled sizes: prefill by tokens, decode by batch and cached tokens."""

    prefill_tokens: Sequence[float]
    prefill_s: Sequence[float]
    batches: Sequence[float]
    decode_base_s: Sequence[float]
    decode_context_s: Sequence[float]
    known: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False)
    read: dict[float, float] = field(default_factory=dict, compare=False)

    def prefill_seconds(self, tokens: float) -> float:
        """Return the seconds of a prefill step of ``tokens`` tokens."""
        seconds = self.read.get(tokens)
        if seconds is None:
            seconds = self.read[tokens] = _between(tokens, self.prefill_tokens, self.prefill_s)
        return seconds

    def decode_seconds(self, batch: int, context_tokens: float) -> float:
        """Return the seconds of a decode step with ``context_tokens`` cached tokens in total."""
        base, each = self._decode_terms_of(batch)
        return base + each * context_tokens

    def decode_line(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """Return the seconds of the next decode step and the growth per further step."""
        base, each = self._decode_terms_of(batch)
        return base + each * context_tokens, each * batch

    def prefill_terms(self, tokens: Floats) -> Floats:
        """Return ``prefill_seconds`` of several steps."""
        return _between_all(tokens, self.prefill_tokens, self.prefill_s)

    def decode_terms(self, batches: Floats) -> tuple[Floats, Floats]:
        """Return the base seconds and the seconds per cached token of several decode steps."""
        return (
            _between_all(batches, self.batches, self.decode_base_s),
            _between_all(batches, self.batches, self.decode_context_s),
        )

    def _decode_terms_of(self, batch: int) -> tuple[float, float]:
        terms = self.known.get(batch)
        if terms is None:
            terms = self.known[batch] = (
                _between(batch, self.batches, self.decode_base_s),
                _between(batch, self.batches, self.decode_context_s),
            )
        return terms


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the linear interpolation at ``at``, extrapolated beyond the last point."""
    left = min(max(bisect_right(places, at) - 1, 0), len(places) - 2)
    share = (at - places[left]) / (places[left + 1] - places[left])
    return values[left] + (values[left + 1] - values[left]) * share


def _between_all(at: Floats, places: Sequence[float], values: Sequence[float]) -> Floats:
    """Return ``_between`` for several sizes, bit-identical to single calls."""
    x, y = np.asarray(places, dtype=np.float64), np.asarray(values, dtype=np.float64)
    left = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    share = (at - x[left]) / (x[left + 1] - x[left])
    result: Floats = y[left] + (y[left + 1] - y[left]) * share
    return result


def step_costs(setting: Setting, workload: ServeWorkload, slots: int, budget: float) -> StepCosts:
    """Return the step costs of one replica with up to ``slots`` running requests."""
    tokens, batches = _prefill_sizes(budget), _batch_sizes(slots)
    base, per_token = _decode_lines(setting, workload, np.array(batches))
    return StepCosts(
        prefill_tokens=tokens,
        prefill_s=_prefill(setting, workload, np.array(tokens)).tolist(),
        batches=batches,
        decode_base_s=base.tolist(),
        decode_context_s=per_token.tolist(),
    )


class StepColumns:
    """The step costs of settings whose layout has columns, costed once per size."""

    def __init__(self, setting: Setting, workload: ServeWorkload, most_slots: int) -> None:
        self._setting, self._workload = setting, workload
        self._batches = _batch_sizes(most_slots)
        self._read: dict[float, Floats] = {}  # by budget

    @cached_property
    def _decode(self) -> tuple[Floats, Floats]:
        return _decode_lines(self._setting, self._workload, _as_rows(self._batches))

    def costs(self, column: int, slots: int, budget: float) -> StepCosts:
        """Return the step costs of one column, equal to ``step_costs`` of its setting."""
        tokens, num = _prefill_sizes(budget), len(_batch_sizes(slots))
        if budget not in self._read:
            self._read[budget] = _prefill(self._setting, self._workload, _as_rows(tokens))
        base, each = self._decode
        return StepCosts(
            prefill_tokens=tokens,
            prefill_s=_column(self._read[budget], column),
            batches=self._batches[:num],
            decode_base_s=_column(base, column)[:num],
            decode_context_s=_column(each, column)[:num],
        )


def _as_rows(sizes: Sequence[float]) -> Floats:
    """Return the sizes as rows that broadcast against the columns of a layout."""
    return np.array(sizes)[:, np.newaxis]


def _column(values: Floats, column: int) -> list[float]:
    """Return one column, or the only column if all are equal."""
    result: list[float] = values[:, column if values.shape[1] > 1 else 0].tolist()
    return result


def _prefill_sizes(budget: float) -> list[float]:
    longest = max(budget, 2.0)
    return [*([size for size in PREFILL_TOKENS if size < longest] or [longest / 2]), longest]


def _batch_sizes(slots: int) -> list[float]:
    batches = [1.0]
    while batches[-1] < max(slots, 2):
        batches.append(batches[-1] * BATCH_STEP)
    return batches


def _prefill(setting: Setting, workload: ServeWorkload, tokens: Floats) -> Floats:
    """Return the seconds of prefill steps that read part of a prompt or several prompts."""
    prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
    sequences = np.maximum(1.0, tokens / prompt)
    read = prefill_pass(setting, Unrecorded(), cast("float", sequences), prompt)
    whole = _seconds_to_next_step(setting, read, tokens)
    parts = tokens[np.ravel(tokens) < prompt]
    cut = prefill_pass(setting, Unrecorded(), cast("float", np.ones(1)), cast("float", parts))
    # A chunk also attends to earlier chunks: its share of the whole prompt is a lower bound.
    least = whole[: len(parts)] * parts / prompt
    cut_s = _seconds_to_next_step(setting, cut, parts)
    return np.concatenate([np.maximum(cut_s, least), whole[len(parts) :]])


def _decode_lines(
    setting: Setting, workload: ServeWorkload, batches: Floats
) -> tuple[Floats, Floats]:
    """Return base seconds and seconds per cached token of a decode step of each batch size."""
    low, high = workload.input_tokens, workload.input_tokens + workload.output_tokens
    stages = setting.layout.pipeline
    sequences, in_flight = np.maximum(1.0, batches / stages), np.minimum(batches, stages)
    # The start and end of an output are costed in one call with columns.
    contexts = np.concatenate([np.full(batches.shape, float(at)) for at in (low, high)])
    twice = [cast("float", np.concatenate([each, each])) for each in (sequences, in_flight)]
    step = decode_pass(setting, Unrecorded(), twice[0], cast("float", contexts))
    paced_step = paced(setting, Unrecorded(), step, "decode", twice[1])
    first, last = np.split(_seconds(paced_step, contexts), 2)
    each = (last - first) / (batches * (high - low))
    return first - each * batches * low, each


def _seconds_to_next_step(setting: Setting, cost: PassCost, sizes: Floats) -> Floats:
    """Return the seconds until the next step can begin, set by the slowest stage."""
    return _seconds(cost, sizes) / cost.turns(setting.layout.pipeline)


def _seconds(cost: PassCost, sizes: Floats) -> Floats:
    """Return the seconds of a pass for each size and each column."""
    total = np.asarray(cost.total_s, dtype=np.float64)
    return np.broadcast_to(total, np.broadcast_shapes(total.shape, sizes.shape))
