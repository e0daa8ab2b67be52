"""Tokens are drawn as the parameters say, for all rows at once, and for each row as if alone."""

import pytest
import torch
from scipy.stats import chisquare

from runners.jobs.serve import sampling
from runners.jobs.serve.contract import Sampling
from runners.jobs.serve.sampling import Sampler, choose

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
NUM_DRAWS = 4000


def expected(wish: Sampling, counts: dict[int, int]) -> torch.Tensor:
    """Return the probabilities by the definition, one token after the other."""
    logits = LOGITS.double().clone()
    for token, count in counts.items():
        factor = wish.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= wish.frequency_penalty * count + wish.presence_penalty * (count > 0)
    shares = torch.softmax(logits / wish.temperature, dim=-1)
    shares[shares < wish.min_p * shares.max()] = 0.0
    if wish.top_k:
        shares[shares.argsort(descending=True)[wish.top_k :]] = 0.0
    shares /= shares.sum()
    before = 0.0
    for token in shares.argsort(descending=True).tolist():
        own = float(shares[token])
        shares[token] = own if before < wish.top_p else 0.0
        before += own
    return shares / shares.sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.75},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
        {"repetition_penalty": 1.5, "top_p": 0.95},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    ],
)
@pytest.mark.parametrize("candidates", [2, 1024])
def test_draws_follow_the_distribution(monkeypatch, changes, candidates):
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    wish = Sampling(1, seed=11, **changes)
    sampler = Sampler(wish, prompt=[0, 7])
    sampler.add(1)
    sampler.add(1)
    counts = dict(sampler.counts())
    monkeypatch.setattr(sampler, "add", lambda _token: None)

    drawn = [choose(LOGITS[None], [sampler])[0].token for _ in range(NUM_DRAWS)]

    shares = expected(wish, counts)
    found = torch.bincount(torch.tensor(drawn), minlength=len(LOGITS))
    assert not found[shares == 0].any()
    is_possible = shares > 0
    assert chisquare(found[is_possible], shares[is_possible] * NUM_DRAWS).pvalue > 0.001


WISHES = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1e-50},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 50, "top_logprobs": 3},
    {"temperature": 1.0, "min_p": 0.1, "top_logprobs": 0},
    {"temperature": 1.5, "top_p": 0.999, "presence_penalty": 0.5},
]


@pytest.mark.equality
def test_an_answer_is_the_same_whoever_is_beside_it():
    torch.manual_seed(5)
    steps = torch.randn(6, len(WISHES), 5000).bfloat16().float()  # with ties, as real logits

    def answers(rows: list[int]) -> list[list[object]]:
        samplers = [Sampler(Sampling(9, seed=row, **WISHES[row]), [1, 2]) for row in rows]
        return [choose(logits[rows], samplers) for logits in steps]

    together = answers(list(range(len(WISHES))))
    for row in range(len(WISHES)):
        assert [each[row] for each in together] == [each[0] for each in answers([row])]
    greedy = steps.argmax(dim=-1)
    for row in (0, 2):
        assert [each[row].token for each in together] == greedy[:, row].tolist()


def test_logprobs_are_the_models_own_and_only_for_those_who_ask():
    logits = LOGITS.repeat(2, 1)
    wishes = [Sampling(1, temperature=0.0), Sampling(1, temperature=0.0, top_logprobs=2, top_k=1)]

    without, asked = choose(logits, [Sampler(each) for each in wishes])

    logprobs = torch.log_softmax(LOGITS, dim=-1).tolist()
    assert (without.token, without.logprob, without.top) == (0, None, ())
    assert asked.logprob == pytest.approx(logprobs[0])
    assert [token for token, _ in asked.top] == [0, 1]
    assert [value for _, value in asked.top] == pytest.approx(logprobs[:2])
