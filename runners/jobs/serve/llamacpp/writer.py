"""The llama.cpp engine: one running answer per slot, further answers are queued here.

Everything except ``run`` and ``wait_until_idle`` runs in the HTTP event loop.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence

import httpx

from runners.jobs.serve.contract import (
    EngineEndedError,
    GenerationRequest,
    Limits,
    Pending,
    QueueFullError,
)
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.llamacpp.answers import Answer, Event, completion_body
from runners.jobs.serve.llamacpp.process import EngineProcess
from runners.jobs.serve.own_writer import OwnWriter

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
