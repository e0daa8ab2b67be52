"""Sampling of next tokens: greedy, or by temperature and top-p with a seed per answer."""

from collections.abc import Sequence

import torch

from runners.jobs.serve.contract import Choice, Sampling

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


def new_generator(sampling: Sampling) -> torch.Generator:
    """Return the random generator of one answer."""
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
        _choice(row, _sample(row, sampling, generator, best), sampling)
        for row, best, (sampling, generator) in zip(logits, greedy, wishes, strict=True)
    ]


def _sample(row: torch.Tensor, sampling: Sampling, generator: torch.Generator, best: int) -> int:
    if sampling.temperature == 0.0:
        return best
    below = row.cpu() - row.max().cpu()  # avoids overflow at a small temperature
    probabilities = torch.softmax(below / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        probabilities = _nucleus(probabilities, sampling.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities reach ``top_p``; at least one."""
    values, order = probabilities.sort(descending=True)
    preceding = values.cumsum(dim=-1) - values
    nucleus = torch.where(preceding < top_p, values, 0.0)
    return torch.zeros_like(probabilities).scatter(0, order, nucleus)


def _choice(row: torch.Tensor, token: int, sampling: Sampling) -> Choice:
    if sampling.top_logprobs is None:
        return Choice(token)
    logprobs = torch.log_softmax(row, dim=-1).clamp(min=LOWEST_LOGPROB)
    values, ids = logprobs.topk(min(sampling.top_logprobs, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Choice(token, float(logprobs[token]), top)
