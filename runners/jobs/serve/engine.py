"""Continuous batching: after each forward pass sequences leave, and others take their place.

Pages are given out as sequences grow. When none is free the youngest sequence gives its pages
back and is read again later; its draws go on where they were, so its text does not change.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from runners.jobs.mixed_adapters import NONE, MixedAdapters
from runners.jobs.serve.contract import (
    Choice,
    EngineEndedError,
    FinishReason,
    Limits,
    Pending,
    Piece,
    QueueFullError,
    Sampling,
)
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.paging import PagedCache, Row, forward, pages_for
from runners.jobs.serve.sampling import choose, new_generator
from runners.jobs.serve.text import Answer

WAIT_SECONDS = 0.5


@dataclass(eq=False)
class Reply(Pending):
    """One answer being written."""

    prompt: Sequence[int]
    sampling: Sampling
    answer: Answer
    deliver: Callable[[Piece], None]
    adapter: int = NONE  # number of its adapter
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in the pages

    def __post_init__(self) -> None:
        self.generator = new_generator(self.sampling)
        self.tokens = list(self.prompt)

    @property
    def wish(self) -> tuple[Sampling, torch.Generator]:
        """Return how its next token is chosen."""
        return self.sampling, self.generator

    @property
    def num_written(self) -> int:
        """Return how many tokens of the answer there are."""
        return len(self.tokens) - len(self.prompt)


class Engine:
    """One model, its pages, who is being answered and who waits."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        limits: Limits,
        figures: Figures,
        adapters: MixedAdapters | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.cache = cache
        self.limits = limits
        self.figures = figures
        self.running: list[Reply] = []
        self.step_began_at: float | None = None  # None: no pass is under way
        self._waiting: deque[Reply] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    # Asked from any thread

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Return whether nobody is answered and nobody waits."""
        return not self.running and not self._waiting

    def submit(self, sequences: Sequence[Reply]) -> None:
        """Take on the answers of one request.

        Raises:
            QueueFullError: too many wait already.
            EngineEndedError: it has ended, by a fault or because it was told to.
        """
        with self._changed:
            if self._is_closed:
                raise EngineEndedError
            room = self.limits.max_concurrency - len(self.running) + self.limits.queue_limit
            if len(self._waiting) + len(sequences) > room:
                raise QueueFullError
            self._waiting.extend(sequences)
            self._changed.notify_all()

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Let answers go that nobody waits for; their pages are free after the current pass."""
        with self._changed:
            for each in sequences:
                each.is_cancelled = True
            self._changed.notify_all()

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until nobody is answered and nobody waits; return whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, timeout_seconds)

    def close(self) -> None:
        """Let the loop end; whoever is still being answered hears of it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # The loop

    def run(self) -> None:
        """Answer until it is closed; an error ends it, and every open answer with it."""
        try:
            while self._wait():
                self._step()
        finally:
            self.close()
            for each in (*self.running, *self._waiting):
                each.deliver(Piece(finish_reason="error"))

    def _wait(self) -> bool:
        """Wait for work; return whether there may be some."""
        with self._changed:
            if self.is_idle and not self._is_closed:
                self._gauges(0.0, 0)
                self._changed.notify_all()
                self._changed.wait(WAIT_SECONDS)
            return not self._is_closed

    def _step(self) -> None:
        with self._changed:
            self._drop_cancelled()
            self._admit()
            chosen = self._chosen()
        if not chosen:
            return
        began = self.step_began_at = time.perf_counter()
        rows = [_row(each, count) for each, count in chosen]
        with self._adapted(chosen):
            logits = forward(self.model, self.cache, rows)
        for each, count in chosen:
            each.computed += count
        due = [at for at, (each, _) in enumerate(chosen) if each.computed == len(each.tokens)]
        self._hand_out([chosen[at][0] for at in due], logits[due])
        self.step_began_at = None
        self._gauges(time.perf_counter() - began, len(due))

    def _adapted(self, chosen: Sequence[tuple[Reply, int]]) -> AbstractContextManager[None]:
        """Let every token of the pass go through the adapter of its answer."""
        if self.adapters is None:
            return nullcontext()
        owners = [each.adapter for each, count in chosen for _ in range(count)]
        return self.adapters.serving(torch.tensor([owners]))

    def _hand_out(self, due: Sequence[Reply], logits: torch.Tensor) -> None:
        if not due:
            return
        choices = choose(logits, [each.wish for each in due])
        now = time.perf_counter()
        for each, choice in zip(due, choices, strict=True):
            self._clock(each, now)
            self._give(each, choice)

    def _give(self, each: Reply, choice: Choice) -> None:
        """Hand a token to its answer; an answer that is complete leaves."""
        each.tokens.append(choice.token)
        reason: FinishReason | None = None
        if choice.token in self.limits.end_ids and not each.sampling.ignore_eos:
            reason, (text, told) = "stop", each.answer.finish()
        else:
            text, told = each.answer.take(choice)
            if each.answer.is_stopped:
                reason = "stop"
            elif self._is_full(each):
                more, more_told = each.answer.finish()
                reason, text, told = "length", text + more, [*told, *more_told]
        if reason is not None:
            self._release(each)
            self.figures.count("requests")
        if text or told or reason:
            each.deliver(Piece(text, told, reason, each.num_written))

    def _is_full(self, each: Reply) -> bool:
        return (
            each.num_written >= each.sampling.max_tokens
            or len(each.tokens) >= self.limits.max_length
        )

    def _clock(self, each: Reply, now: float) -> None:
        if each.num_written:
            self.figures.later_token(now - each.last_at)
        else:
            self.figures.first_token(now - each.asked_at, len(each.prompt))
        each.last_at = now

    def _gauges(self, seconds: float, tokens: int) -> None:
        gauges = {
            "running_requests": float(len(self.running)),
            "waiting_requests": float(len(self._waiting)),
            "kv_cache_used_ratio": self.cache.used_ratio,
        }
        self.figures.step(seconds, tokens, gauges)

    # Who is in

    def _drop_cancelled(self) -> None:
        for each in [each for each in self.running if each.is_cancelled]:
            self._release(each)
            self.figures.count("cancelled")
        for each in [each for each in self._waiting if each.is_cancelled]:
            self._waiting.remove(each)
            self.figures.count("cancelled")

    def _admit(self) -> None:
        while self._waiting and len(self.running) < self.limits.max_concurrency:
            pages = self.cache.take(pages_for(len(self._waiting[0].tokens) + 1))
            if pages is None:
                return
            each = self._waiting.popleft()
            each.pages = pages
            self.running.append(each)

    def _chosen(self) -> list[tuple[Reply, int]]:
        """Return who is in the next pass with how many tokens: several first, then single ones."""
        for each in list(self.running):
            self._grow(each)
        singles = [each for each in self.running if len(each.tokens) - each.computed == 1]
        budget = max(1, self.limits.step_tokens - len(singles))
        several: list[tuple[Reply, int]] = []
        for each in self.running:
            count = min(budget, len(each.tokens) - each.computed)
            if each not in singles and count:
                several.append((each, count))
                budget -= count
        several.sort(key=lambda pair: pair[1] == 1)  # the rest of the budget may be one token
        return [*several, *((each, 1) for each in singles)]

    def _grow(self, each: Reply) -> None:
        """Give a sequence the page of its next token; the youngest makes room if it must."""
        while each in self.running and len(each.pages) < pages_for(len(each.tokens)):
            more = self.cache.take(1)
            if more is not None:
                each.pages += more
                continue
            youngest = self.running[-1]
            self._release(youngest)
            youngest.computed = 0
            self._waiting.appendleft(youngest)

    def _release(self, each: Reply) -> None:
        self.running.remove(each)
        self.cache.give(each.pages)
        each.pages = []


def _row(each: Reply, count: int) -> Row:
    return Row(each.tokens[each.computed : each.computed + count], each.computed, each.pages)
