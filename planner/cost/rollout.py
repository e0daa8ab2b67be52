"""Formulas of a reinforcement learning step: lengths of completions, generation, sync, idle.

Sources: volcengine/verl, docs/advance/one_step_off.md, for the phases that follow or overlap each
other; inclusionAI/AReaL, blog/AReaL_v0_3.md, for staleness.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.cost.quantity import Quantity, equation, maximum, minimum

VERL = "volcengine/verl, docs/advance/one_step_off.md, experimental results"
QUANTILES = 2048  # of the law of lengths
BISECTIONS = 60
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """The law of the lengths of completions, cut at ``most`` tokens, as sorted quantiles."""

    tokens: Floats

    @property
    def mean(self) -> float:
        """Return the mean tokens of a completion."""
        return float(self.tokens.mean())

    @property
    def while_decoding(self) -> float:
        """Return the mean tokens that a completion has so far, over the tokens of all."""
        return float((self.tokens**2).mean() / (2 * self.tokens.mean()))

    def longest_of(self, count: float) -> float:
        """Return the expected tokens of the longest of ``count`` completions."""
        place = (np.arange(len(self.tokens)) + 1.0) / len(self.tokens)
        return float(np.diff(place**count, prepend=0.0) @ self.tokens)

    def longer_than(self, tokens: Floats) -> Floats:
        """Return the shares of completions that are longer than each of ``tokens``."""
        shorter = np.searchsorted(self.tokens, tokens, side="right")
        return np.asarray(1 - shorter / len(self.tokens), dtype=np.float64)


@lru_cache(maxsize=256)
def lengths_of(mean: float, most: float, variation: float | None) -> Lengths:
    """Return the law of lengths with a mean after they are cut at ``most`` tokens.

    Before they are cut they are gamma distributed. Without a variation it is 1, with which each
    token is as likely to be the last.

    >>> round(lengths_of(100.0, 400.0, None).mean), lengths_of(64.0, 64.0, None).tokens.max()
    (100, 64.0)
    """
    from scipy.special import gammaincinv  # which other plans need not wait for

    if mean >= most:
        return Lengths(np.full(1, float(most)))
    spread = 1.0 if variation is None else variation
    place = (np.arange(QUANTILES) + 0.5) / QUANTILES
    relative = gammaincinv(spread**-2, place) * spread**2
    low, high = mean, mean
    while np.minimum(relative * high, most).mean() < mean:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_short = np.minimum(relative * middle, most).mean() < mean
        low, high = (middle, high) if is_short else (low, middle)
    return Lengths(np.minimum(relative * high, most))


@equation(
    "t = t_prompts + t_full + t_drain",
    unit="s",
    symbols={"prompts_s": "t_prompts", "full_s": "t_full", "drain_s": "t_drain"},
    source="decode steps of as many completions as run: all slots until the last starts, then "
    "fewer until the longest ends",
)
def generation_seconds(*, prompts_s: Quantity, full_s: Quantity, drain_s: Quantity) -> Quantity:
    """Return the seconds in which a replica generates its completions."""
    return prompts_s + full_s + drain_s


@equation(
    "t = min(t_a, (t_b + sqrt(t_b² + 4 · (t_a - t_b) · u)) / 2)",
    unit="s",
    symbols={"drained_s": "t_a", "joined_s": "t_b", "trainer_s": "u"},
    source="NVIDIA-NeMo/RL, nemo_rl/algorithms/async_utils (in_flight_weight_updates): a batch "
    "starts when the trainer is done with the one before the last, so that a + 1 - u / t batches "
    "are generated at once, and a where the trainer takes longer; linear between both",
)
def in_flight_generation_seconds(
    *, drained_s: Quantity, joined_s: Quantity, trainer_s: Quantity
) -> Quantity:
    """Return a batch's seconds where the next one starts before its last completions end.

    ``drained_s`` and ``joined_s`` are those with as many batches at once as may be ahead, and with
    one more; ``trainer_s`` is the trainer's time for a batch. The root solves
    t = t_b + (t_a - t_b) · u / t.
    """
    root = (joined_s**2 + 4 * (drained_s - joined_s) * trainer_s) ** 0.5
    return minimum(drained_s, (joined_s + root) / 2)


@equation(
    "r = t_tail / t",
    unit="",
    symbols={"tail_s": "t_tail", "generate_s": "t"},
    source="definition: the steps after half of the completions of a replica have ended",
)
def tail_ratio(*, tail_s: Quantity, generate_s: Quantity) -> Quantity:
    """Return the share of a generation in which the longest completions keep devices."""
    return tail_s / generate_s


@equation(
    "t = P · w / (k · B)",
    unit="s",
    symbols={
        "weight_bytes": "P · w",
        "efficiency": "k",
        "link_bytes_per_s": "B",
    },
    source="volcengine/verl, docs/advance/fully_async.md, checkpoint-engine ablation: 0.12 s for "
    "Qwen2.5-Math-7B, 15.8 s for Qwen3-30B-A3B, 58.6 s for Qwen3-235B-A22B",
)
def weight_sync_seconds(
    *, weight_bytes: Quantity, efficiency: Quantity, link_bytes_per_s: Quantity
) -> Quantity:
    """Return the seconds in which the trained weights reach a generating replica."""
    return weight_bytes / (efficiency * link_bytes_per_s)


@equation(
    "t = 2 · M / B_host",
    unit="s",
    symbols={"state_bytes": "M", "link_bytes_per_s": "B_host"},
    source="the trainer's states leave for the host before completions are generated, and return",
)
def swap_seconds(*, state_bytes: Quantity, link_bytes_per_s: Quantity) -> Quantity:
    """Return the seconds in which a device's training states go to the host and come back."""
    return 2 * state_bytes / link_bytes_per_s


@equation(
    "T = t_generate + t_reward + t_judge + t_swap + t_score + t_update + t_sync",
    unit="s",
    symbols={
        "generate_s": "t_generate",
        "reward_s": "t_reward",
        "judge_s": "t_judge",
        "swap_s": "t_swap",
        "score_s": "t_score",
        "update_s": "t_update",
        "sync_s": "t_sync",
    },
    source=VERL,
)
def synchronous_step_seconds(
    *,
    generate_s: Quantity,
    reward_s: Quantity,
    judge_s: Quantity,
    swap_s: Quantity,
    score_s: Quantity,
    update_s: Quantity,
    sync_s: Quantity,
) -> Quantity:
    """Return the seconds of a step whose phases follow each other."""
    return generate_s + reward_s + judge_s + swap_s + score_s + update_s + sync_s


@equation(
    "T = max(t_generate + t_reward, t_judge + t_score + t_update) + t_sync",
    unit="s",
    symbols={
        "generate_s": "t_generate",
        "reward_s": "t_reward",
        "judge_s": "t_judge",
        "score_s": "t_score",
        "update_s": "t_update",
        "sync_s": "t_sync",
    },
    source=VERL,
)
def asynchronous_step_seconds(
    *,
    generate_s: Quantity,
    reward_s: Quantity,
    judge_s: Quantity,
    score_s: Quantity,
    update_s: Quantity,
    sync_s: Quantity,
) -> Quantity:
    """Return the seconds of a step whose completions others generate while it trains.

    ``reward_s`` is of functions that follow a generation, ``judge_s`` of a reward model on the
    training devices.
    """
    return maximum(generate_s + reward_s, judge_s + score_s + update_s) + sync_s


@equation(
    "i = 1 - t_busy / T",
    unit="",
    symbols={"busy_s": "t_busy", "step_s": "T"},
    source="definition",
)
def idle_ratio(*, busy_s: Quantity, step_s: Quantity) -> Quantity:
    """Return the share of a step in which devices of one kind wait for those of the other."""
    return 1 - busy_s / step_s
