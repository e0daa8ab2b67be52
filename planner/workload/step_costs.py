"""What one step of a serving engine costs, by interpolation between a few costed passes.

A simulation takes thousands of steps; the cost model is asked for a handful of them. Decode steps
are straight lines in the cached tokens between batch sizes a factor of four apart, prefill steps
straight lines in the prompt tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from planner.cost.equation import Unrecorded
from planner.specs.workload import ServeWorkload
from planner.workload.forward import PassCost
from planner.workload.generate import decode_pass, prefill_pass
from planner.workload.setting import Setting
from planner.workload.staged import paced

Floats = npt.NDArray[np.float64]
BATCH_STEP = 4
PREFILL_TOKENS = (32.0, 128.0, 512.0, 2048.0)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of steps at a few sizes: prefill by tokens, decode by batch and cached tokens."""

    prefill_tokens: Sequence[float]
    prefill_s: Sequence[float]
    batches: Sequence[float]
    decode_base_s: Sequence[float]
    decode_context_s: Sequence[float]
    known: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False)
    read: dict[float, float] = field(default_factory=dict, compare=False)

    def prefill_seconds(self, tokens: float) -> float:
        """Return the seconds of reading so many prompt tokens in one step."""
        known = self.read.get(tokens)
        if known is None:
            known = self.read[tokens] = _between(tokens, self.prefill_tokens, self.prefill_s)
        return known

    def decode_seconds(self, batch: int, context_tokens: float) -> float:
        """Return the seconds of one more token for a batch with so many cached tokens in all."""
        base, each = self._at(batch)
        return base + each * context_tokens

    def decode_line(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """Return the seconds of the next decode step, and how much longer each further one is."""
        base, each = self._at(batch)
        return base + each * context_tokens, each * batch

    def _at(self, batch: int) -> tuple[float, float]:
        known = self.known.get(batch)
        if known is None:
            known = self.known[batch] = (
                _between(batch, self.batches, self.decode_base_s),
                _between(batch, self.batches, self.decode_context_s),
            )
        return known


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the value on the line through the two places around ``at``, or beyond the last."""
    left = min(max(bisect_right(places, at) - 1, 0), len(places) - 2)
    share = (at - places[left]) / (places[left + 1] - places[left])
    return values[left] + (values[left + 1] - values[left]) * share


def step_costs(setting: Setting, workload: ServeWorkload, slots: int, budget: float) -> StepCosts:
    """Return the step costs of one replica that holds up to ``slots`` requests at once."""
    prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
    longest = max(budget, 2.0)
    tokens = [size for size in PREFILL_TOKENS if size < longest] or [longest / 2]
    tokens.append(longest)
    batches = [1.0]
    while batches[-1] < max(slots, 2):
        batches.append(batches[-1] * BATCH_STEP)
    base, each = _decode_lines(setting, workload, np.array(batches))
    return StepCosts(
        prefill_tokens=tokens,
        prefill_s=_prefill(setting, np.array(tokens), prompt).tolist(),
        batches=batches,
        decode_base_s=base.tolist(),
        decode_context_s=each.tolist(),
    )


def _prefill(setting: Setting, tokens: Floats, prompt: float) -> Floats:
    """Return the seconds of reading tokens of prompts: part of one, or several."""
    sequences = np.maximum(1.0, tokens / prompt)
    read = prefill_pass(setting, Unrecorded(), cast("float", sequences), prompt)
    whole = _turn_seconds(setting, read, tokens)
    parts = tokens[tokens < prompt]
    cut = prefill_pass(setting, Unrecorded(), cast("float", np.ones(1)), cast("float", parts))
    # A part of a prompt attends to what was read before it: its share of the whole is a floor.
    least = whole[: len(parts)] * parts / prompt
    cut_s = _turn_seconds(setting, cut, parts)
    return np.concatenate([np.maximum(cut_s, least), whole[len(parts) :]])


def _decode_lines(
    setting: Setting, workload: ServeWorkload, batches: Floats
) -> tuple[Floats, Floats]:
    """Return base seconds and seconds per cached token of a decode step of each batch size."""
    low, high = workload.input_tokens, workload.input_tokens + workload.output_tokens
    stages = setting.layout.pipeline
    sequences = cast("float", np.maximum(1.0, batches / stages))
    in_flight = cast("float", np.minimum(batches, stages))
    first, last = (
        _seconds(
            paced(
                setting,
                Unrecorded(),
                decode_pass(setting, Unrecorded(), sequences, float(context)),
                "decode",
                in_flight,
            ),
            batches,
        )
        for context in (low, high)
    )
    each = (last - first) / (batches * (high - low))
    return first - each * batches * low, each


def _turn_seconds(setting: Setting, cost: PassCost, sizes: Floats) -> Floats:
    """Return after which seconds the next step may begin: when the slowest stage is done."""
    return _seconds(cost, sizes) / cost.turns(setting.layout.pipeline)


def _seconds(cost: PassCost, sizes: Floats) -> Floats:
    return np.broadcast_to(np.asarray(cost.total_s, dtype=np.float64), sizes.shape)
