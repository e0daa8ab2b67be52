"""The serving engine: scheduling of requests."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from runners.jobs.adapters import NONE, MixedAdapters
from runners.jobs.memory import release_free_memory
from runners.jobs.serve.contract import (
    BoundedEngine,
    Choice,
    FinishReason,
    Limits,
    Pending,
    Sampling,
    StreamChunk,
)
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.grammars import AnswerMatcher
from runners.jobs.serve.padded_decode import (
    CaptureError,
    PaddedDecode,
    Sampler,
    choose,
    eager_line,
)
from runners.jobs.serve.paging import PagedCache, TokenRow, forward, pages_for
from runners.jobs.serve.pooling import Pooling, embedded
from runners.jobs.serve.text import IncrementalDetokenizer

# ---------------------------------------------------------------------------
# Continuous batching: after each forward pass finished sequences leave and queued ones enter.
#
# Pages are allocated as sequences grow. When none is free, the youngest sequence is preempted and
# recomputed later; its random generator keeps its state, so its text does not change. On a GPU,
# steps that only decode are padded and run from CUDA graphs.
#
# Texts are embedded before the answers of a step are scheduled, and their pages are free again by
# then: they preempt no answer. A text that waits for pages holds back the answers after it.
# ---------------------------------------------------------------------------


WAIT_SECONDS = 0.5


@dataclass(eq=False)
class AnswerSequence(Pending):
    """One answer that is being generated."""

    prompt: Sequence[int]
    sampling: Sampling
    answer: IncrementalDetokenizer
    deliver: Callable[[StreamChunk], None]
    adapter: int = NONE  # index of its adapter
    matcher: AnswerMatcher | None = None  # what it is held to
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are cached

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.sampling, self.prompt, self.matcher)
        self.tokens = list(self.prompt)

    @property
    def num_written(self) -> int:
        """Return the number of generated tokens."""
        return len(self.tokens) - len(self.prompt)


@dataclass(eq=False)
class EmbeddedText(Pending):
    """One text whose embedding is asked for."""

    tokens: Sequence[int]
    deliver: Callable[[list[float] | None], None]


class Engine(BoundedEngine):
    """The serving engine: continuous batching of one model over a paged KV cache.

    One thread calls ``run``, which generates until ``close``. Other threads ``submit`` and
    ``cancel`` answers, whose chunks are delivered from the engine's thread. ``decode`` runs padded
    decode steps from CUDA graphs; without it every step runs eagerly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        limits: Limits,
        figures: EndpointMetrics,
        adapters: MixedAdapters | None = None,
        decode: PaddedDecode | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        super().__init__(limits)
        self.model = model
        self.adapters = adapters
        self.decode = decode  # None: every step runs eagerly
        self.cache = cache
        self.figures = figures
        self.running: list[AnswerSequence] = []
        self.step_began_at: float | None = None  # None: no step is running
        self.pooling = pooling  # None: the model gives no embeddings
        self._waiting: deque[AnswerSequence] = deque()
        self._texts: deque[EmbeddedText] = deque()
        self._embedding: deque[EmbeddedText] = deque()  # being computed
        self._text_lacks_pages = False  # the next text waits for answers to end

    # Callable from any thread

    @property
    def num_waiting(self) -> int:
        """Return the number of queued requests."""
        return len(self._waiting) + len(self._texts)

    @property
    def num_open(self) -> int:
        """Return the number of answers and texts that are running or queued."""
        return len(self.running) + len(self._embedding) + self.num_waiting

    def submit(self, sequences: Sequence[AnswerSequence]) -> None:
        """Queue the answers of one request.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        with self.changed:
            self.admit(len(sequences))
            self._waiting.extend(sequences)
            self.changed.notify_all()

    def submit_texts(self, texts: Sequence[EmbeddedText]) -> None:
        """Queue the texts of one request for their embeddings.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        with self.changed:
            self.admit(len(texts))
            self._texts.extend(texts)
            self.changed.notify_all()

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Cancel answers of disconnected clients; their pages are free after the current step."""
        with self.changed:
            for each in sequences:
                each.is_cancelled = True
            self.changed.notify_all()

    def close(self) -> None:
        """Stop the loop; unfinished answers end with an error."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    # The engine loop

    def run(self) -> None:
        """Generate until the engine is closed; an error ends it and every unfinished answer."""
        try:
            while self._wait():
                self._step()
        finally:
            self.close()
            for each in (*self.running, *self._waiting):
                each.deliver(StreamChunk(finish_reason="error"))
            for text in (*self._embedding, *self._texts):
                text.deliver(None)

    def _wait(self) -> bool:
        """Wait for work, at most ``WAIT_SECONDS``; return whether the engine is still open."""
        with self.changed:
            if self.is_idle and not self.is_closed:
                self._record_step(0.0, 0)
                self.changed.notify_all()
                self.changed.wait(WAIT_SECONDS)
            return not self.is_closed

    def _step(self) -> None:
        with self.changed:
            self._drop_cancelled()
            texts = self._next_texts()
        if texts:
            self._embed(texts)
        with self.changed:
            self._admit()
            scheduled = self._schedule()
        if not scheduled:
            return
        began = self.step_began_at = time.perf_counter()
        due = [each for each, count in scheduled if _is_due(each, count)]
        choices = self._decode(scheduled) if len(due) == len(scheduled) else None
        if choices is None:
            choices = self._forward(scheduled, due)
        for each, count in scheduled:
            each.computed += count
        self._append_tokens(due, choices)
        self.step_began_at = None
        self._record_step(time.perf_counter() - began, len(due))

    def _next_texts(self) -> list[tuple[EmbeddedText, list[int]]]:
        """Return texts with their pages: as many as one pass reads, a longer one alone."""
        found: list[tuple[EmbeddedText, list[int]]] = []
        budget = self.limits.step_tokens
        self._text_lacks_pages = False
        while self._texts and (not found or len(self._texts[0].tokens) <= budget):
            pages = self.cache.allocate(pages_for(len(self._texts[0].tokens)))
            if pages is None:
                self._text_lacks_pages = not found
                break
            text = self._texts[0]
            self._embedding.append(text)  # first, so that no other thread sees an idle engine
            self._texts.popleft()
            budget -= len(text.tokens)
            found.append((text, pages))
        return found

    def _embed(self, texts: Sequence[tuple[EmbeddedText, list[int]]]) -> None:
        """Free the pages of texts, and deliver their embeddings."""
        if self.pooling is None:
            raise RuntimeError("texts were sent to a model without pooling")
        began = self.step_began_at = time.perf_counter()
        rows = [TokenRow(text.tokens, 0, pages) for text, pages in texts]
        owners = torch.full((1, sum(len(row.tokens) for row in rows)), NONE)
        most = self.limits.step_tokens
        with self.adapters.serving(owners) if self.adapters else nullcontext():
            found = embedded(self.model, self.cache, rows, self.pooling, most)
        for _, pages in texts:
            self.cache.free(pages)
        for (text, _), each in zip(texts, found, strict=True):
            text.deliver(each)
            self._embedding.popleft()
        self.step_began_at = None
        self._record_step(time.perf_counter() - began, 0)

    def _decode(self, scheduled: Sequence[tuple[AnswerSequence, int]]) -> list[Choice] | None:
        """Return the tokens of a padded step, or None if this one has to run eagerly.

        It does with prefill chunks, adapters, and contexts that are too uneven to be padded.
        """
        if self.decode is None or any(
            count > 1 or each.adapter != NONE for each, count in scheduled
        ):
            return None
        rows = [_next_tokens_row(each, count) for each, count in scheduled]
        try:
            return self.decode.step(rows, [each.sampler for each, _ in scheduled])
        except CaptureError as error:
            self.decode.log(eager_line(error))
        self.decode = None
        release_free_memory()
        return None

    def _forward(
        self, scheduled: Sequence[tuple[AnswerSequence, int]], due: Sequence[AnswerSequence]
    ) -> list[Choice]:
        """Run an eager step; return the tokens of the sequences that are due one."""
        rows = [_next_tokens_row(each, count) for each, count in scheduled]
        with self._adapter_context(scheduled):
            logits = forward(self.model, self.cache, rows)
        if not due:
            return []
        ends = [at for at, (each, count) in enumerate(scheduled) if _is_due(each, count)]
        return choose(logits[ends], [each.sampler for each in due])

    def _adapter_context(
        self, scheduled: Sequence[tuple[AnswerSequence, int]]
    ) -> AbstractContextManager[None]:
        """Return a context in which every token of the step uses the adapter of its answer."""
        if self.adapters is None:
            return nullcontext()
        owners = [each.adapter for each, count in scheduled for _ in range(count)]
        return self.adapters.serving(torch.tensor([owners]))

    def _append_tokens(self, due: Sequence[AnswerSequence], choices: Sequence[Choice]) -> None:
        now = time.perf_counter()
        for each, choice in zip(due, choices, strict=True):
            if each.num_written:
                self.figures.later_token(now - each.last_at)
            else:
                self.figures.first_token(now - each.asked_at, len(each.prompt))
            each.last_at = now
            self._append_token(each, choice)

    def _append_token(self, reply: AnswerSequence, choice: Choice) -> None:
        """Append a token to its answer; release the answer when it is complete."""
        reply.tokens.append(choice.token)
        reason: FinishReason | None = None
        if choice.token in self.limits.end_ids and not reply.sampling.ignore_eos:
            reason, (text, logprobs) = "stop", reply.answer.finish()
        else:
            text, logprobs = reply.answer.add_token(choice)
            if reply.answer.stopped_by is not None:
                reason = "stop"
            elif (reason := self._limit_of(reply)) is not None:
                rest, rest_logprobs = reply.answer.finish()
                text, logprobs = text + rest, [*logprobs, *rest_logprobs]
        if reason is not None:
            self._release(reply)
            self.figures.count("requests")
        if text or logprobs or reason:
            stop_text = reply.answer.stopped_by if reason else None
            reply.deliver(StreamChunk(text, logprobs, reason, reply.num_written, stop_text))

    def _limit_of(self, reply: AnswerSequence) -> FinishReason | None:
        """Return why an answer ends after a token that is no end itself, None if it goes on."""
        matcher = reply.matcher
        if matcher is not None and matcher.is_complete and not matcher.has_failed:
            return "stop"
        is_full = (
            reply.num_written >= reply.sampling.max_tokens
            or len(reply.tokens) >= self.limits.max_length
            or (matcher is not None and matcher.has_failed)
        )
        return "length" if is_full else None

    def _record_step(self, seconds: float, tokens: int) -> None:
        gauges = {
            "running_requests": float(len(self.running)),
            "waiting_requests": float(self.num_waiting),
            "kv_cache_used_ratio": self.cache.used_ratio,
        }
        self.figures.step(seconds, tokens, gauges)

    # Scheduling

    def _drop_cancelled(self) -> None:
        for each in [each for each in self.running if each.is_cancelled]:
            self._release(each)
            self.figures.count("cancelled")
        for each in [each for each in self._waiting if each.is_cancelled]:
            self._waiting.remove(each)
            self.figures.count("cancelled")
        for text in [each for each in self._texts if each.is_cancelled]:
            self._texts.remove(text)

    def _admit(self) -> None:
        """Start queued answers; of those that came after a text that waits for pages, none."""
        while self._waiting and len(self.running) < self.limits.max_concurrency:
            if self._text_lacks_pages and self._texts[0].asked_at < self._waiting[0].asked_at:
                return
            pages = self.cache.allocate(pages_for(len(self._waiting[0].tokens) + 1))
            if pages is None:
                return
            reply = self._waiting.popleft()
            reply.pages = pages
            self.running.append(reply)

    def _schedule(self) -> list[tuple[AnswerSequence, int]]:
        """Return the sequences of the next step with their token counts: prefill chunks first."""
        for each in list(self.running):
            self._grow(each)
        decoding = [each for each in self.running if len(each.tokens) - each.computed == 1]
        budget = max(1, self.limits.step_tokens - len(decoding))
        prefills: list[tuple[AnswerSequence, int]] = []
        for each in self.running:
            count = min(budget, len(each.tokens) - each.computed)
            if each not in decoding and count:
                prefills.append((each, count))
                budget -= count
        prefills.sort(key=lambda pair: pair[1] == 1)  # the last chunk may be one token
        return [*prefills, *((each, 1) for each in decoding)]

    def _grow(self, reply: AnswerSequence) -> None:
        """Allocate the page of the next token; preempt the youngest sequence if none is free."""
        while reply in self.running and len(reply.pages) < pages_for(len(reply.tokens)):
            page = self.cache.allocate(1)
            if page is not None:
                reply.pages += page
                continue
            youngest = self.running[-1]
            self._release(youngest)
            youngest.computed = 0
            self._waiting.appendleft(youngest)

    def _release(self, reply: AnswerSequence) -> None:
        self.running.remove(reply)
        self.cache.free(reply.pages)
        reply.pages = []


def _is_due(reply: AnswerSequence, count: int) -> bool:
    """Return whether a step of ``count`` of its tokens gives the sequence a new one."""
    return reply.computed + count == len(reply.tokens)


def _next_tokens_row(reply: AnswerSequence, count: int) -> TokenRow:
    """Return the next ``count`` uncached tokens of a sequence, with its pages."""
    return TokenRow(
        reply.tokens[reply.computed : reply.computed + count], reply.computed, reply.pages
    )
