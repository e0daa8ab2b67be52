"""The llama.cpp engine: its process, one running answer per slot, converted to stream chunks."""

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from runners.jobs.runtime import BadInputError, num_threads
from runners.jobs.serve.contract import (
    Choice,
    EngineEndedError,
    EngineProcessError,
    FinishReason,
    GenerationRequest,
    Limits,
    Pending,
    QueueFullError,
    Sampling,
    StreamChunk,
    TokenLogprob,
)
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.process import OwnProcess, OwnWriter
from runners.jobspec.serve import NO_ADAPTER

# Convert llama.cpp's completion events to stream chunks.


Event = Mapping[str, Any]


def completion_body(wish: GenerationRequest, *, has_adapters: bool) -> dict[str, Any]:
    """Return the body for llama.cpp's ``/completion``, with its other samplers switched off.

    An adapter that is not named has no effect; with adapters loaded, one has to be named.
    """
    sampling = wish.sampling
    body: dict[str, Any] = {
        "prompt": list(wish.prompt),
        "n_predict": sampling.max_tokens,
        "stop": list(sampling.stops),
        "stream": True,
        "ignore_eos": sampling.ignore_eos,
        "return_tokens": True,
        "cache_prompt": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "n_probs": _num_logprobs(sampling),
    }
    if has_adapters:
        is_base = wish.adapter == NO_ADAPTER
        body["lora"] = [{"id": max(0, wish.adapter), "scale": 0.0 if is_base else 1.0}]
    return body if sampling.seed is None else {**body, "seed": sampling.seed % 2**32}


def _num_logprobs(sampling: Sampling) -> int:
    return 0 if sampling.top_logprobs is None else max(1, sampling.top_logprobs)


@dataclass(eq=False)
class Answer(Pending):
    """One answer that is being received."""

    wish: GenerationRequest
    is_over: bool = False
    num_written: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # token texts as llama.cpp reported them
    _at: int = 0  # offset of the next token's text

    def take(self, event: Event) -> int:
        """Deliver the chunk of an event and return the number of new tokens."""
        text = str(event.get("content", ""))
        before = self.num_written
        self.num_written = max(before, int(event.get("tokens_predicted", before)))
        reason = _reason(event) if event.get("stop") else None
        logprobs = self._token_logprobs(event.get("completion_probabilities") or ())
        self.is_over = reason is not None
        if text or logprobs or reason:
            self.wish.deliver(StreamChunk(text, logprobs, reason, self.num_written))
        return self.num_written - before

    def fail(self) -> None:
        """Deliver an error unless the answer is complete."""
        if not self.is_over:
            self.is_over = True
            self.wish.deliver(StreamChunk(finish_reason="error"))

    def touch(self) -> float:
        """Return the seconds since the last token, and reset the clock."""
        now = time.perf_counter()
        elapsed = now - (self.last_at or self.asked_at)
        self.last_at = now
        return elapsed

    def _token_logprobs(self, probabilities: Sequence[Event]) -> list[TokenLogprob]:
        if self.wish.sampling.top_logprobs is None:
            return []
        logprobs = []
        for each in probabilities:
            top = each.get("top_logprobs") or ()
            for alternative in (each, *top):
                self.texts[int(alternative["id"])] = str(alternative["token"])
            pairs = [
                (int(alternative["id"]), float(alternative["logprob"])) for alternative in top
            ]
            reported = tuple(pairs[: self.wish.sampling.top_logprobs])
            logprobs.append(
                TokenLogprob(Choice(int(each["id"]), float(each["logprob"]), reported), self._at)
            )
            self._at += len(str(each["token"]))
        return logprobs


def _reason(event: Event) -> FinishReason:
    return "length" if event.get("stop_type") == "limit" else "stop"


# Start llama.cpp's process and read its listening address.


LISTENING = "LISTENING "  # prefix of the line with the address
START_SECONDS = 600.0  # a large file from a slow disk
LOOK_SECONDS = 0.05
_REFUSALS = (
    "error loading model", "failed to load model", "invalid magic", "unknown model",
    "failed to apply lora adapter", "failed to load lora adapter",
)  # fmt: skip


class Shape(NamedTuple):
    """The start settings of the engine."""

    path: Path
    slots: int  # sequences in parallel
    tokens_per_slot: int
    adapters: tuple[Path, ...] = ()  # GGUF files, by index


class EngineProcess(OwnProcess):
    """One life of the llama.cpp process."""

    def __init__(self, shape: Shape) -> None:
        self.key = secrets.token_urlsafe(24)
        self.address = ""
        self._shape = shape
        child = [sys.executable, "-m", "runners.jobs.serve.llamacpp.child"]
        super().__init__("llama.cpp", child)

    @property
    def has_adapters(self) -> bool:
        """Return whether requests may name adapters."""
        return bool(self._shape.adapters)

    def start(self) -> None:
        """Send the settings to the process and wait until it listens.

        Raises:
            BadInputError: it cannot load the model.
            EngineProcessError: it exited, or did not listen in time.
        """
        settings = {
            "path": str(self._shape.path),
            "key": self.key,
            "slots": self._shape.slots,
            "context_tokens": self._shape.slots * self._shape.tokens_per_slot,
            "adapters": [str(each) for each in self._shape.adapters],
            "threads": num_threads(),
            "parent": os.getpid(),
        }
        with suppress(OSError):  # it has exited already; the loop below raises
            self.stdin.write(json.dumps(settings) + "\n")
            self.stdin.flush()
        deadline = time.monotonic() + START_SECONDS
        while not self.address:
            if self.has_ended:
                self._raise_start_error()
            if time.monotonic() > deadline:
                self.kill()
                raise EngineProcessError(f"llama.cpp did not listen within {START_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    def _raise_start_error(self) -> None:
        """Raise the error that explains the failed start."""
        error_line = next(
            (line for line in self.last_words() if any(w in line for w in _REFUSALS)), ""
        )
        if error_line:
            message = error_line.partition(": ")[2] or error_line
            msg = f"llama.cpp does not open {self._shape.path.name}: {message[:300]}"
            raise BadInputError(msg)
        raise EngineProcessError(f"llama.cpp did not start: {self.how()}")

    def handle_line(self, line: str) -> None:
        """Read the listening address; the process prints no other line."""
        if line.startswith(LISTENING):
            self.address = line.removeprefix(LISTENING).strip()


CONNECT_SECONDS = 10.0
# One connection per request: kept-alive connections have been dropped between requests.
CONNECTIONS = httpx.Limits(max_keepalive_connections=0)
DATA = "data: "


class LlamaWriter(OwnWriter):
    """One life of the engine, its running answers and its queue."""

    def __init__(self, process: EngineProcess, limits: Limits, figures: Figures) -> None:
        super().__init__(process, limits)
        self.process = process
        self.texts: dict[int, str] = {}
        self._figures = figures
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        self._tasks: dict[Answer, asyncio.Task[None]] = {}
        self._running: set[Answer] = set()
        self._last_token_at = 0.0  # time of the last token, or of the first running answer
        self.client = httpx.AsyncClient(
            base_url=process.address,
            headers={"Authorization": f"Bearer {process.key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=CONNECTIONS,
            trust_env=False,
        )

    @property
    def is_idle(self) -> bool:
        """Return whether no request is running or queued."""
        return not self._tasks

    @property
    def step_began_at(self) -> float | None:
        """Return since when running answers have had no new token."""
        return self._last_token_at if self._running else None

    def submit(self, wishes: Sequence[GenerationRequest]) -> list[Answer]:
        """Queue the answers of one request.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        if self.is_closed:
            raise EngineEndedError
        most = self.limits.max_concurrency + self.limits.queue_limit
        if len(self._tasks) + len(wishes) > most:
            raise QueueFullError
        answers = [Answer(request, texts=self.texts) for request in wishes]
        for answer in answers:
            self._tasks[answer] = asyncio.ensure_future(self._write(answer))
        self._count(0)
        return answers

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Cancel answers of disconnected clients; llama.cpp frees the slot with the connection."""
        for answer, task in list(self._tasks.items()):
            if answer in sequences:
                answer.is_cancelled = True
                task.cancel()

    def run(self) -> None:
        """Wait until the engine exits.

        Raises:
            EngineProcessError: it exited without having been closed.
        """
        self.process.wait()
        self.ended()

    # One answer

    async def _write(self, answer: Answer) -> None:
        try:
            async with self._slots:
                if not self._running:
                    self._last_token_at = time.perf_counter()
                self._running.add(answer)
                self._count(0)
                async for event in self._events(answer.wish):
                    self._take(answer, event)
        except (httpx.HTTPError, ValueError, KeyError):  # the engine is down or sends garbage
            pass
        finally:
            answer.fail()
            self._leave(answer)

    async def _events(self, request: GenerationRequest) -> AsyncIterator[Event]:
        body = completion_body(request, has_adapters=self.process.has_adapters)
        async with self.client.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith(DATA):
                    yield json.loads(line.removeprefix(DATA))

    def _take(self, answer: Answer, event: Event) -> None:
        is_first = not answer.num_written
        tokens = answer.take(event)
        if tokens:
            elapsed = answer.touch()
            if is_first:
                self._figures.first_token(elapsed, len(answer.wish.prompt))
            for _ in range(tokens - is_first):
                self._figures.later_token(elapsed / tokens)
            self._count(tokens)
        if answer.is_over:
            self._figures.count("requests")

    def _leave(self, answer: Answer) -> None:
        if answer.is_cancelled:
            self._figures.count("cancelled")
        self._running.discard(answer)
        with self.changed:
            self._tasks.pop(answer, None)
            self.changed.notify_all()
        self._count(0)

    def _count(self, tokens: int) -> None:
        """Update the token counters and gauges."""
        now = time.perf_counter()
        cached_tokens = sum(len(each.wish.prompt) + each.num_written for each in self._running)
        gauges = {
            "running_requests": float(len(self._running)),
            "waiting_requests": float(len(self._tasks) - len(self._running)),
            "kv_cache_used_ratio": cached_tokens
            / (self.limits.max_concurrency * self.limits.max_length),
        }
        self._figures.step(now - self._last_token_at if tokens else 0.0, tokens, gauges)
        if tokens:
            self._last_token_at = now
