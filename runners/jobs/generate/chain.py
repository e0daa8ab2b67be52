"""The interface of a model that several processes compute."""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.generate.stage_model import Call


class Chain(ABC):
    """Several processes that together compute a model, led by this process."""

    model: PreTrainedModel  # this process's part, with the config of the whole model
    tokenizer: PreTrainedTokenizerFast | None
    device: torch.device
    where: str  # a description for people
    weight_bytes: int  # of this process's part

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def begin(self) -> "Session":
        """Start a batch's session; the processes keep its KV cache."""
        return Session(self, next(self._numbers))

    @abstractmethod
    def next_tokens(self, call: Call, ids: torch.Tensor) -> torch.Tensor:
        """Run tokens [rows, new] through the model and return the next one of each row."""

    @abstractmethod
    def forget(self, session: int) -> None:
        """Drop a session's KV cache in every process."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the bytes of the KV caches in this process."""

    @abstractmethod
    def finish(self, *, is_stopped: bool) -> None:
        """Stop the other processes, and tell them whether the job was stopped."""

    def measured(self) -> dict[str, float]:
        """Return additional figures of the chain."""
        return {}


@dataclass(frozen=True)
class Session:
    """One batch that is computed by a chain."""

    chain: Chain
    number: int

    def next_tokens(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run tokens [rows, new] through the model and return the next one of each row."""
        return self.chain.next_tokens(Call(self.number, positions, mask), ids)

    def close(self) -> int:
        """End the session; return the bytes of its KV cache in this process."""
        cache_bytes = self.chain.cache_bytes
        self.chain.forget(self.number)
        return cache_bytes
