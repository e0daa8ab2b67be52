"""Samples text from domains with dynamic weights that follow each domain's excess loss.

Source: Xia et al. 2023 (Sheared LLaMA), arXiv:2310.06694, section 2.2, algorithm 1.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.corpus import Corpus, Document, TokenIds, tokenized
from runners.jobs.runtime import BadInputError

CODE, PROSE = "code", "prose"
VALIDATION_ONE_IN = 8  # the end of a domain's text, which is not trained on
VALIDATION_SEQUENCES = 8
Losses = Mapping[str, float]


def domain_of(document: Document) -> str:
    """Return a document's domain: code for Python files, prose for licences and manuals."""
    return CODE if document.name.startswith("python/") else PROSE


class Domains:
    """The host's text by domain, and the sampling weights."""

    def __init__(self, texts: Mapping[str, TokenIds], length: int, seed: int) -> None:
        """Start with weights in proportion to each domain's text.

        Raises:
            BadInputError: a domain has too little text for a training and a validation sequence.
        """
        self._length = length
        self.random = np.random.default_rng(seed)
        self._train: dict[str, TokenIds] = {}
        self._validation: dict[str, torch.Tensor] = {}
        for name, ids in texts.items():
            begin = len(ids) - max(len(ids) // VALIDATION_ONE_IN, length)
            if begin <= length:
                msg = f"the {name} text of this host has {len(ids)} tokens: too few to learn from"
                raise BadInputError(msg)
            self._train[name] = ids[:begin]
            self._validation[name] = _spread(ids[begin:], length)
        sizes = np.array([len(each) for each in self._train.values()], dtype=np.float64)
        self.weights: dict[str, float] = dict(
            zip(self._train, (sizes / sizes.sum()).tolist(), strict=True)
        )

    def batch(self, count: int) -> torch.Tensor:
        """Return sequences [count, length], each from a domain sampled by weight."""
        names = list(self.weights)
        drawn = self.random.choice(len(names), size=count, p=list(self.weights.values()))
        return torch.from_numpy(np.stack([self._sample(names[each]) for each in drawn]))

    def _sample(self, name: str) -> npt.NDArray[np.int64]:
        ids = self._train[name]
        at = int(self.random.integers(0, len(ids) - self._length))
        piece: npt.NDArray[np.int64] = np.asarray(ids[at : at + self._length], dtype=np.int64)
        return piece

    @torch.no_grad()
    def losses(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the model's loss, in nats per token, on each domain's validation text."""
        by_domain = {}
        for name, ids in self._validation.items():
            here = ids.to(model.device)
            by_domain[name] = float(model(here, labels=here, use_cache=False).loss)
        return by_domain

    def follow(self, losses: Losses, reference: Losses) -> None:
        """Increase the weights of domains whose loss is further above its reference."""
        behind = [losses[name] - reference[name] for name in self.weights]
        grown = followed(list(self.weights.values()), behind)
        self.weights = dict(zip(self.weights, grown, strict=True))


def followed(weights: Sequence[float], behind: Sequence[float]) -> list[float]:
    """Return the updated weights, which sum to 1.

    Each is multiplied by the exponential of its loss's excess over its reference, ``behind`` in
    nats; a negative excess counts as 0. Without finite losses the weights do not change.
    """
    if not all(map(math.isfinite, behind)):
        return list(weights)
    above = [max(0.0, each) for each in behind]
    most = max(above)  # subtracted from the exponents to avoid overflow
    grown = [weight * math.exp(each - most) for weight, each in zip(weights, above, strict=True)]
    total = sum(grown)
    return [each / total for each in grown]


def domains_of(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    cache_dir: Path,
    length: int,
    seed: int,
) -> Domains:
    """Return the host's training text by domain, without the held-out text."""
    texts = {}
    for name in (CODE, PROSE):
        own = [each for each in corpus.train if domain_of(each) == name]
        texts[name] = tokenized(tokenizer, own, f"{corpus.digest}/train/{name}", cache_dir)
    return Domains(texts, length, seed)


def _spread(ids: TokenIds, length: int) -> torch.Tensor:
    """Return sequences [count, length] spread evenly over a text."""
    count = min(VALIDATION_SEQUENCES, len(ids) // length)
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    pieces = np.stack([np.asarray(ids[at : at + length], dtype=np.int64) for at in starts])
    return torch.from_numpy(pieces)
