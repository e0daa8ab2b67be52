"""The next token of each sequence: greedy, or drawn by temperature, top-p and its own seed."""

from collections.abc import Sequence

import torch

from runners.jobs.serve.contract import Choice, Sampling

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


def new_generator(sampling: Sampling) -> torch.Generator:
    """Return the source of one answer's draws."""
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed % 2**63)
    return generator


def choose(
    logits: torch.Tensor, wishes: Sequence[tuple[Sampling, torch.Generator]]
) -> list[Choice]:
    """Choose a token for each row of logits [rows, vocabulary]."""
    greedy = logits.argmax(dim=-1).tolist()
    return [
        _told(row, _drawn(row, sampling, generator, best), sampling)
        for row, best, (sampling, generator) in zip(logits, greedy, wishes, strict=True)
    ]


def _drawn(row: torch.Tensor, sampling: Sampling, generator: torch.Generator, best: int) -> int:
    if sampling.temperature == 0.0:
        return best
    below = row.cpu() - row.max().cpu()  # a tiny temperature would overflow otherwise
    shares = torch.softmax(below / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        shares = _nucleus(shares, sampling.top_p)
    return int(torch.multinomial(shares, 1, generator=generator))


def _nucleus(shares: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest likeliest tokens whose shares reach ``top_p``; at least one."""
    ordered, order = shares.sort(descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(before < top_p, ordered, 0.0)
    return torch.zeros_like(shares).scatter(0, order, kept)


def _told(row: torch.Tensor, token: int, sampling: Sampling) -> Choice:
    if sampling.top_logprobs is None:
        return Choice(token)
    logprobs = torch.log_softmax(row, dim=-1).clamp(min=LOWEST_LOGPROB)
    values, ids = logprobs.topk(min(sampling.top_logprobs, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Choice(token, float(logprobs[token]), top)
