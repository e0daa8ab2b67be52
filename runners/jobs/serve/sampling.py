"""Sampling of next tokens on the device, for all rows at once; only the chosen ids come back.

Each answer has a random generator of its own on the host, which gives one number per token: its
text depends on its seed, not on the answers beside it. A token is the one at which the cumulated
probabilities pass that number. The order is vLLM's: penalties, temperature, ``min_p``, ``top_k``,
``top_p`` of what is left; tokens as likely as the last one that is kept are kept too.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from runners.jobs.serve.contract import Choice, Sampling

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
BLOCK = 128  # tokens whose weights are summed first
CANDIDATES = 1024  # sorted at first on a CPU: they usually hold the whole nucleus
SMALLEST_TEMPERATURE = 1e-37  # above fp32's denormal numbers


class Sampler:
    """The sampling of one answer: its parameters, its generator, its tokens so far."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self.has_penalty = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self._generator = np.random.default_rng(
            None if sampling.seed is None else sampling.seed % 2**63
        )
        self._counts: Counter[int] = Counter()  # of the answer's tokens; 0 for the prompt's
        if self.has_penalty:
            self._counts.update(dict.fromkeys(prompt, 0))

    def draw(self) -> float:
        """Return the next random number, in [0, 1)."""
        return 0.0 if self.sampling.temperature == 0.0 else float(self._generator.random())

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        if self.has_penalty:
            self._counts[token] += 1

    def counts(self) -> Counter[int]:
        """Return how often each token was generated; the prompt's have 0."""
        return self._counts


class Filters(NamedTuple):
    """The filters of each row, [rows, 1]."""

    min_p: torch.Tensor  # fp32
    top_k: torch.Tensor  # int64; the whole vocabulary if there is none
    top_p: torch.Tensor  # fp32


@torch.inference_mode()
def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice]:
    """Choose a token for each row of logits [rows, vocabulary]; one copy to the host."""
    wishes = [each.sampling for each in samplers]
    penalised = _penalised(logits, samplers)
    ids = penalised.argmax(dim=-1)
    if any(wish.temperature for wish in wishes):
        draws = torch.tensor([each.draw() for each in samplers], dtype=torch.float64)
        is_drawn = _column([wish.temperature > 0.0 for wish in wishes], logits.device, torch.bool)
        drawn = _drawn(penalised, wishes, draws.to(logits.device, non_blocking=True))
        ids = torch.where(is_drawn[:, 0], drawn, ids)
    choices = _choices(logits, ids, wishes)
    for sampler, choice in zip(samplers, choices, strict=True):
        sampler.add(choice.token)
    return choices


def _column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return one value per row, [rows, 1]."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)[:, None]


def _penalised(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Return the logits less their penalties; the tokens that have any are few.

    ``repetition_penalty`` counts the prompt, the others do not.
    Source: Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1; OpenAI's API reference.
    """
    entries = [
        (row, token, count, each.sampling)
        for row, each in enumerate(samplers)
        for token, count in each.counts().items()
    ]
    if not entries:
        return logits
    rows, tokens = (torch.tensor([each[at] for each in entries]) for at in (0, 1))
    terms = [
        (
            wish.repetition_penalty,
            wish.frequency_penalty * count + wish.presence_penalty * bool(count),
        )
        for _row, _token, count, wish in entries
    ]
    places = tuple(each.to(logits.device, non_blocking=True) for each in (rows, tokens))
    factor, term = torch.tensor(terms, dtype=logits.dtype).to(logits.device).unbind(dim=1)
    found = logits[places]
    changed = torch.where(found > 0, found / factor, found * factor) - term
    return logits.index_put(places, changed)


def _drawn(logits: torch.Tensor, wishes: Sequence[Sampling], draws: torch.Tensor) -> torch.Tensor:
    """Return a token per row, drawn at its temperature from what its filters leave."""
    device = logits.device
    scaled, weights = _weighted(logits, _column([wish.temperature for wish in wishes], device))
    filtered = [
        row
        for row, wish in enumerate(wishes)
        if wish.temperature and (wish.top_p < 1.0 or wish.top_k > 0 or wish.min_p > 0.0)
    ]
    if filtered:
        rows = torch.tensor(filtered).to(device, non_blocking=True)
        is_all = len(filtered) == len(wishes)
        some, theirs = (scaled, weights) if is_all else (scaled[rows], weights[rows])
        lowest = _lowest_kept(some, theirs, [wishes[row] for row in filtered])
        theirs.masked_fill_(some < lowest, 0.0)
        if not is_all:
            weights[rows] = theirs
    return _passed(weights, draws[:, None])


def draw_rows(
    logits: torch.Tensor, temperature: torch.Tensor, draws: torch.Tensor, filters: Filters | None
) -> torch.Tensor:
    """Return a token per row as ``choose`` does without penalties, from device tensors alone.

    ``temperature`` (0: greedy) and ``draws`` are [rows, 1] in fp64. Which operations run does not
    depend on the values, so that a CUDA graph can hold them.
    """
    scaled, weights = _weighted(logits, temperature.float())
    if filters is not None:
        lowest, _is_enough = _least_of(
            scaled, weights, filters, size=scaled.shape[-1], has_cut=True
        )
        weights = weights.masked_fill(scaled < lowest, 0.0)
    return torch.where(temperature[:, 0] > 0.0, _passed(weights, draws), logits.argmax(dim=-1))


def _weighted(
    logits: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled logits, of which the largest is 0, and the weights of the tokens."""
    warmth = temperature.clamp(min=SMALLEST_TEMPERATURE)
    # Relative to the largest, which avoids overflow at a small temperature.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(warmth)
    return scaled, scaled.exp()


def _passed(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the index at which each row's cumulated weights pass its draw in [0, 1).

    First by blocks, then within one: to cumulate a whole vocabulary takes several times longer.
    """
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % BLOCK))
    blocks = padded.view(len(weights), -1, BLOCK)
    block, rest = _step(blocks.sum(dim=-1, dtype=torch.float64), draws)
    within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    token, _rest = _step(within.double(), rest)
    return (block * BLOCK + token)[:, 0]


def _step(weights: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index that each draw passes, and what of its weight is before it, in [0, 1)."""
    cumulated = weights.cumsum(dim=-1)
    below_one = 1.0 - torch.finfo(torch.float64).eps
    goal = cumulated[:, -1:] * draws.clamp(max=below_one)
    index = torch.searchsorted(cumulated, goal, right=True)
    index.clamp_(max=weights.shape[-1] - 1)  # not beyond the end if a logit is NaN
    own = weights.gather(1, index)
    return index, ((goal - (cumulated.gather(1, index) - own)) / own).clamp(0.0, below_one)


def _lowest_kept(
    scaled: torch.Tensor, weights: torch.Tensor, wishes: Sequence[Sampling]
) -> torch.Tensor:
    """Return the lowest kept value of each row, [rows, 1]; the largest is 0, its weight 1."""
    device, vocabulary = scaled.device, scaled.shape[-1]
    counts = [wish.top_k if 0 < wish.top_k < vocabulary else vocabulary for wish in wishes]
    filters = Filters(
        _column([wish.min_p for wish in wishes], device),
        _column(counts, device, torch.int64),
        _column([wish.top_p for wish in wishes], device),
    )
    needed = max([count for count in counts if count < vocabulary], default=1)
    # A CPU sorts few at first; a GPU sorts all, since looking at the sum would wait for it.
    has_cut = needed > 1 or min(counts) == 1 or any(wish.min_p for wish in wishes)
    pairs = zip(wishes, counts, strict=True)
    is_sure = all(wish.top_p == 1.0 or count < vocabulary for wish, count in pairs)
    at_first = CANDIDATES if device.type == "cpu" else vocabulary
    size = min(needed if is_sure else max(needed, at_first), vocabulary)
    lowest, is_enough = _least_of(scaled, weights, filters, size=size, has_cut=has_cut)
    if is_sure or size == vocabulary or bool(is_enough):
        return lowest
    return _least_of(scaled, weights, filters, size=vocabulary, has_cut=has_cut)[0]


def _least_of(
    scaled: torch.Tensor, weights: torch.Tensor, filters: Filters, *, size: int, has_cut: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest kept value of each row by its ``size`` largest, [rows, 1].

    Also returns whether these hold every nucleus. Without ``has_cut`` no row has ``min_p`` or
    ``top_k``.
    """
    values = scaled.topk(size, dim=-1).values
    lowest = filters.min_p.log()  # -inf without it
    at_count = values.gather(1, (filters.top_k - 1).clamp(max=size - 1))
    is_cut = filters.top_k < scaled.shape[-1]
    least = torch.where(is_cut, torch.maximum(lowest, at_count), lowest)
    kept = values.exp().double().masked_fill(values < least, 0.0)
    kept_weights = weights.masked_fill(scaled < least, 0.0) if has_cut else weights
    total = kept_weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    wanted = total * filters.top_p.double()
    cumulated = kept.cumsum(dim=-1)
    in_nucleus = (cumulated - kept < wanted) & (kept > 0.0)
    last = (in_nucleus.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    nucleus = torch.maximum(least, values.gather(1, last))
    return (
        torch.where(filters.top_p < 1.0, nucleus, least),
        (cumulated[:, -1:] >= wanted).all(),
    )


def _choices(logits: torch.Tensor, ids: torch.Tensor, wishes: Sequence[Sampling]) -> list[Choice]:
    """Return the chosen tokens with the logprobs that were asked for, in one copy."""
    asked = [row for row, wish in enumerate(wishes) if wish.top_logprobs is not None]
    if not asked:
        return [Choice(token) for token in ids.tolist()]
    rows = torch.tensor(asked).to(logits.device, non_blocking=True)
    most = min(max(wishes[row].top_logprobs or 0 for row in asked), logits.shape[-1])
    logprobs = torch.log_softmax(logits[rows], dim=-1).clamp(min=LOWEST_LOGPROB)
    own = logprobs.gather(1, ids[rows][:, None])
    values, top = logprobs.topk(most, dim=-1)
    padding = ids.new_zeros(1 + 2 * most, dtype=torch.float64)
    packed = torch.cat([own, values, top], dim=1).double()  # ids below 2^53 are exact
    table = padding.repeat(len(wishes), 1).index_copy_(0, rows, packed)
    told = torch.cat([ids[:, None].double(), table], dim=1).tolist()
    choices = []
    for (token, logprob, *rest), wish in zip(told, wishes, strict=True):
        if wish.top_logprobs is None:
            choices.append(Choice(int(token)))
            continue
        pairs = zip(map(int, rest[most:]), rest[:most], strict=True)
        choices.append(Choice(int(token), logprob, tuple(pairs)[: wish.top_logprobs]))
    return choices
