"""Greedy generation of one padded batch, with separate timing of prefill and decode."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import Cache, PreTrainedModel

from runners.jobs.generate.caches import cache_size, new_cache
from runners.jobs.generate.chain import Chain, Session
from runners.jobs.generate.packed import packed_prefill
from runners.jobspec import KvCache

FinishReason = Literal["stop", "length"]
Ids = Sequence[int]


class StopRequestedError(Exception):
    """The job was asked to stop between two tokens."""


@dataclass(frozen=True)
class Limits:
    """The limits of an answer, and the job's stop flag."""

    output_tokens: int
    end_ids: frozenset[int] = frozenset()  # empty: always generate output_tokens
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Setup:
    """The settings of a batch."""

    kv_cache: KvCache = "plain"
    is_packed: bool = False  # padding-free prefill
    chain: Chain | None = None  # computes instead of the model, if set


PLAIN = Setup()


@dataclass
class Answer:
    """The generated tokens of one prompt."""

    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def take(self, token: int, limits: Limits) -> bool:
        """Add the next token and return whether the answer is complete."""
        if token in limits.end_ids:
            self.finish_reason = "stop"
            return True
        self.ids.append(token)
        return len(self.ids) >= limits.output_tokens


@dataclass(frozen=True)
class BatchRun:
    """The answers of one batch in order, and its timing."""

    answers: list[Answer]
    prefill_seconds: float
    decode_seconds: float
    num_steps: int  # decode steps after the prefill
    kv_cache_bytes: int


@torch.inference_mode()
def run_batch(
    model: PreTrainedModel, prompts: Sequence[Ids], limits: Limits, setup: Setup = PLAIN
) -> BatchRun:
    """Answer the prompts as one left-padded batch.

    Raises:
        StopRequestedError: the job is to stop; nothing of this batch is kept.
    """
    device = setup.chain.device if setup.chain else next(model.parameters()).device
    padded = Padded.of(prompts, device)
    cache = setup.chain.begin() if setup.chain else new_cache(setup.kv_cache, model)
    began = now(device)
    if setup.is_packed and not isinstance(cache, Session):
        tokens = packed_prefill(model, prompts, cache)
        padded.advance()
    else:
        tokens = padded.step(model, padded.ids, cache)
    prefilled = now(device)
    answers, steps = write_out(
        tokens, len(prompts), limits, lambda last: padded.step(model, last, cache)
    )
    ended = now(device)
    cache_bytes = cache.close() if isinstance(cache, Session) else cache_size(cache)
    return BatchRun(answers, prefilled - began, ended - prefilled, steps, cache_bytes)


def write_out(
    tokens: torch.Tensor,
    num_rows: int,
    limits: Limits,
    step: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[list[Answer], int]:
    """Return the answers that begin with ``tokens`` [rows], and the number of decode steps.

    ``step`` takes the last tokens [rows, 1] and returns the next ones [rows].

    Raises:
        StopRequestedError: the job is to stop.
    """
    answers = [Answer() for _ in range(num_rows)]
    open_rows = take_tokens(answers, list(range(num_rows)), tokens, limits)
    steps = 0
    while open_rows:
        if limits.should_stop():
            raise StopRequestedError
        tokens = step(tokens[:, None])
        open_rows = take_tokens(answers, open_rows, tokens, limits)
        steps += 1
    return answers, steps


@dataclass
class Padded:
    """A left-padded batch, with its positions and attention mask."""

    ids: torch.Tensor
    mask: torch.Tensor | None  # None: no padding
    positions: torch.Tensor  # of the next input tokens

    @classmethod
    def of(cls, prompts: Sequence[Ids], device: torch.device) -> "Padded":
        """Return the prompts as one padded tensor."""
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(each)) + list(each) for each in prompts]
        is_text = [[0] * (longest - len(each)) + [1] * len(each) for each in prompts]
        mask = torch.tensor(is_text, device=device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        is_even = all(len(each) == longest for each in prompts)
        return cls(torch.tensor(rows, device=device), None if is_even else mask, positions)

    def step(
        self, model: PreTrainedModel, ids: torch.Tensor, cache: Cache | Session
    ) -> torch.Tensor:
        """Run tokens [rows, new] through the model and return the next one of each row."""
        if isinstance(cache, Session):
            tokens = cache.next_tokens(ids, self.mask, self.positions)
            self.advance()
            return tokens
        output = model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.advance()
        next_tokens: torch.Tensor = output.logits[:, -1].argmax(dim=-1)
        return next_tokens

    def advance(self) -> None:
        """Advance the mask and positions past the tokens of the last step."""
        self.positions = self.positions[:, -1:] + 1
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)


def now(device: torch.device) -> float:
    """Return the time after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def take_tokens(
    answers: Sequence[Answer], rows: Sequence[int], tokens: torch.Tensor, limits: Limits
) -> list[int]:
    """Append each open row's token and return the rows that are still open."""
    token_ids = tokens.tolist()
    return [row for row in rows if not answers[row].take(token_ids[row], limits)]
