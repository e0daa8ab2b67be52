"""A model that is computed by several processes, as a generation sees it: it asks for tokens."""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.generate.stage_model import Call


class Chain(ABC):
    """Whoever together computes a model, led by this process."""

    model: PreTrainedModel  # what of it is here; its config is the whole model's
    tokenizer: PreTrainedTokenizerFast | None
    device: torch.device
    where: str  # in words
    weight_bytes: int  # of what is here

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def begin(self) -> "Session":
        """Return a batch's session: who computes keeps its keys and values."""
        return Session(self, next(self._numbers))

    @abstractmethod
    def next_tokens(self, call: Call, ids: torch.Tensor) -> torch.Tensor:
        """Put tokens [rows, new] through the model and return the next one of each row."""

    @abstractmethod
    def forget(self, session: int) -> None:
        """Let a session's keys and values go everywhere."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the bytes of the keys and values that are here."""

    @abstractmethod
    def finish(self, *, is_stopped: bool) -> None:
        """Tell the others that nothing more comes, and whether that is a stop."""

    def measured(self) -> dict[str, float]:
        """Return figures of its own."""
        return {}


@dataclass(frozen=True)
class Session:
    """One batch on its way through a chain."""

    chain: Chain
    number: int

    def next_tokens(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """Put tokens [rows, new] through the model and return the next one of each row."""
        return self.chain.next_tokens(Call(self.number, positions, mask), ids)

    def close(self) -> int:
        """End the session; return the bytes that its keys and values took here."""
        held = self.chain.cache_bytes
        self.chain.forget(self.number)
        return held
