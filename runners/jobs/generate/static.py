"""Greedy generation of one batch, padded or packed, with prefill and decode timed apart."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    DynamicLayer,
    PreTrainedModel,
)

from runners.jobs.generate.stage_model import Chain, Session, cache_size, new_cache
from runners.jobs.loading import use_attn_implementation
from runners.jobs.runtime import BadInputError
from runners.jobspec import KvCache

# Padding-free prefill: all prompts of a batch in one row, with attention per prompt.
#
# Nothing is computed for padding: linear layers get real tokens only, and attention runs once per
# prompt. Keys and values are then copied to a padded batch for decoding.
#
# Source: Zhai et al. 2022 (ByteTransformer), arXiv:2210.03052, section III-D.


VARLEN = "slipway_varlen"


def varlen_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each pair of consecutive ``bounds``; tensors are [1, heads, tokens, size]."""
    out = torch.empty_like(query)
    is_grouped = query.shape[1] != key.shape[1]
    for begin, end in itertools.pairwise(options["bounds"]):
        out[:, :, begin:end] = functional.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end],
            value[:, :, begin:end],
            is_causal=True,
            scale=options.get("scaling"),
            enable_gqa=is_grouped,
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, lambda *_args, **_options: None)


def check_packable(model: PreTrainedModel) -> None:
    """Check that all layers have a plain KV cache.

    Raises:
        BadInputError: a layer has another cache; the message names it and an alternative.
    """
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if other := layers - {DynamicLayer}:
        names = ", ".join(sorted(each.__name__ for each in other))
        msg = f"packed batches need full attention in every layer, here is {names}; choose turbo"
        raise BadInputError(msg)


def packed_prefill(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], cache: Cache
) -> torch.Tensor:
    """Fill the cache as a left-padded batch, and return the next token of each prompt."""
    device = next(model.parameters()).device
    bounds = [0, *itertools.accumulate(map(len, prompts))]
    ids = torch.tensor([[token for each in prompts for token in each]], device=device)
    positions = torch.cat([torch.arange(len(each), device=device) for each in prompts])
    row_cache = DynamicCache(config=model.config)
    with use_attn_implementation(model, VARLEN):
        output = model(
            input_ids=ids,
            position_ids=positions[None],
            past_key_values=row_cache,
            use_cache=True,
            logits_to_keep=torch.tensor(bounds[1:], device=device) - 1,
            bounds=bounds,
        )
    layers: list[Any] = list(row_cache.layers)  # all of them DynamicLayer, as checked
    for index, layer in enumerate(layers):
        keys, values = (_padded(each, bounds) for each in (layer.keys, layer.values))
        cache.update(keys, values, index)
    tokens: torch.Tensor = output.logits[0].argmax(dim=-1)
    return tokens


def _padded(row: torch.Tensor | None, bounds: Sequence[int]) -> torch.Tensor:
    """Return [prompts, heads, longest, size] from a row [1, heads, tokens, size]."""
    if row is None:
        raise ValueError("a layer kept no keys")
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    _, heads, _, size = row.shape
    out = row.new_zeros(len(lengths), heads, max(lengths), size)
    for at, length in enumerate(lengths):
        out[at, :, max(lengths) - length :] = row[0, :, bounds[at] : bounds[at + 1]]
    return out


FinishReason = Literal["stop", "length"]
Ids = Sequence[int]


class StopRequestedError(Exception):
    """The job was asked to stop between two tokens."""


@dataclass(frozen=True)
class AnswerLimits:
    """The limits of an answer, and the job's stop flag."""

    output_tokens: int
    end_ids: frozenset[int] = frozenset()  # empty: always generate output_tokens
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class BatchSetup:
    """The settings of a batch."""

    kv_cache: KvCache = "plain"
    is_packed: bool = False  # padding-free prefill
    chain: Chain | None = None  # computes instead of the model, if set


PLAIN = BatchSetup()


@dataclass
class Answer:
    """The generated tokens of one prompt."""

    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def take(self, token: int, limits: AnswerLimits) -> bool:
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
    model: PreTrainedModel, prompts: Sequence[Ids], limits: AnswerLimits, setup: BatchSetup = PLAIN
) -> BatchRun:
    """Answer the prompts as one left-padded batch.

    Raises:
        StopRequestedError: the job is to stop; nothing of this batch is kept.
    """
    device = setup.chain.device if setup.chain else next(model.parameters()).device
    padded = PaddedBatch.of(prompts, device)
    cache = setup.chain.begin() if setup.chain else new_cache(setup.kv_cache, model)
    began = now(device)
    if setup.is_packed and not isinstance(cache, Session):
        tokens = packed_prefill(model, prompts, cache)
        padded.advance()
    else:
        tokens = padded.step(model, padded.ids, cache)
    prefilled = now(device)
    answers, steps = decode_greedily(
        tokens,
        len(prompts),
        limits,
        lambda last: padded.step(model, last, cache),
        queues_ahead=tokens.is_cuda and setup.chain is None,
    )
    ended = now(device)
    cache_bytes = cache.close() if isinstance(cache, Session) else cache_size(cache)
    return BatchRun(answers, prefilled - began, ended - prefilled, steps, cache_bytes)


def decode_greedily(
    tokens: torch.Tensor,
    num_rows: int,
    limits: AnswerLimits,
    step: Callable[[torch.Tensor], torch.Tensor],
    *,
    queues_ahead: bool = False,
) -> tuple[list[Answer], int]:
    """Return the answers that begin with ``tokens`` [rows], and the number of decode steps.

    ``step`` takes the last tokens [rows, 1] and returns the next ones [rows]. With
    ``queues_ahead`` the next step is queued on the GPU before the tokens of the last one are read,
    so that the GPU does not wait for Python: 1 to 2 ms of each step of an 8B model on an H100. If
    all answers end by an end token, one step more than needed is computed.

    Raises:
        StopRequestedError: the job is to stop.
    """
    answers = [Answer() for _ in range(num_rows)]
    open_rows = list(range(num_rows))
    steps = 0
    while True:
        read = _begin_reading(tokens)
        is_last = steps + 1 >= limits.output_tokens
        if queues_ahead and not is_last:
            tokens = step(tokens[:, None])
        open_rows = append_tokens(answers, open_rows, read(), limits)
        if not open_rows:
            return answers, steps
        if limits.should_stop():
            raise StopRequestedError
        if not queues_ahead:
            tokens = step(tokens[:, None])
        steps += 1


def _begin_reading(tokens: torch.Tensor) -> Callable[[], list[int]]:
    """Begin to copy tokens to the host; return a function that waits for the copy alone."""
    if not tokens.is_cuda:
        return tokens.tolist
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        ids: list[int] = host.tolist()
        return ids

    return read


@dataclass
class PaddedBatch:
    """A left-padded batch, with its positions and attention mask."""

    ids: torch.Tensor
    mask: torch.Tensor | None  # None: no padding
    positions: torch.Tensor  # of the next input tokens

    @classmethod
    def of(cls, prompts: Sequence[Ids], device: torch.device) -> "PaddedBatch":
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


def append_tokens(
    answers: Sequence[Answer], rows: Sequence[int], token_ids: Sequence[int], limits: AnswerLimits
) -> list[int]:
    """Append each open row's token and return the rows that are still open."""
    return [row for row in rows if not answers[row].take(token_ids[row], limits)]
