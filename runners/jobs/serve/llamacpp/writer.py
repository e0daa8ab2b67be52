"""Has llama.cpp write answers: as many at once as it has slots, the others wait here.

Everything but ``run`` and ``wait_until_idle`` happens in the door's own loop.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence

import httpx

from runners.jobs.serve.contract import (
    EngineEndedError,
    Limits,
    Pending,
    QueueFullError,
    Wish,
)
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.llamacpp.answers import Answer, Event, asked_of
from runners.jobs.serve.llamacpp.process import EngineProcess
from runners.jobs.serve.own_writer import OwnWriter

CONNECT_SECONDS = 10.0
# A connection for each request: those that are kept alive were seen to be dropped in between.
CONNECTIONS = httpx.Limits(max_keepalive_connections=0)
DATA = "data: "


class LlamaWriter(OwnWriter):
    """One life of the engine, who is being answered and who waits."""

    def __init__(self, process: EngineProcess, limits: Limits, figures: Figures) -> None:
        super().__init__(process, limits)
        self.process = process
        self.texts: dict[int, str] = {}
        self._figures = figures
        self._places = asyncio.Semaphore(limits.max_concurrency)
        self._tasks: dict[Answer, asyncio.Task[None]] = {}
        self._running: set[Answer] = set()
        self._signed_at = 0.0  # when a token came last, or somebody began
        self.client = httpx.AsyncClient(
            base_url=process.address,
            headers={"Authorization": f"Bearer {process.key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=CONNECTIONS,
            trust_env=False,
        )

    @property
    def is_idle(self) -> bool:
        """Return whether nobody is answered and nobody waits."""
        return not self._tasks

    @property
    def step_began_at(self) -> float | None:
        """Return since when no token came though somebody waits for one."""
        return self._signed_at if self._running else None

    def ask(self, wishes: Sequence[Wish]) -> list[Answer]:
        """Take on the answers of one request.

        Raises:
            QueueFullError: too many wait already.
            EngineEndedError: it has ended, by a fault or because it was told to.
        """
        if self.is_closed:
            raise EngineEndedError
        most = self.limits.max_concurrency + self.limits.queue_limit
        if len(self._tasks) + len(wishes) > most:
            raise QueueFullError
        answers = [Answer(wish, texts=self.texts) for wish in wishes]
        for answer in answers:
            self._tasks[answer] = asyncio.ensure_future(self._write(answer))
        self._count(0)
        return answers

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Let answers go that nobody waits for: llama.cpp frees a slot whose connection ends."""
        for answer, task in list(self._tasks.items()):
            if answer in sequences:
                answer.is_cancelled = True
                task.cancel()

    def run(self) -> None:
        """Wait until the engine ends.

        Raises:
            EngineLostError: nobody told it to.
        """
        self.process.wait()
        self.ended()

    # One answer

    async def _write(self, answer: Answer) -> None:
        try:
            async with self._places:
                if not self._running:
                    self._signed_at = time.perf_counter()
                self._running.add(answer)
                self._count(0)
                async for event in self._events(answer.wish):
                    self._take(answer, event)
        except (httpx.HTTPError, ValueError, KeyError):  # the engine is gone, or talks nonsense
            pass
        finally:
            answer.fail()
            self._leave(answer)

    async def _events(self, wish: Wish) -> AsyncIterator[Event]:
        body = asked_of(wish, has_adapters=self.process.has_adapters)
        async with self.client.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith(DATA):
                    yield json.loads(line.removeprefix(DATA))

    def _take(self, answer: Answer, event: Event) -> None:
        is_first = not answer.num_written
        tokens = answer.take(event)
        if tokens:
            since = answer.touch()
            if is_first:
                self._figures.first_token(since, len(answer.wish.prompt))
            for _ in range(tokens - is_first):
                self._figures.later_token(since / tokens)
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
        """Tell the figures what came, and how full the engine is."""
        now = time.perf_counter()
        held = sum(len(each.wish.prompt) + each.num_written for each in self._running)
        gauges = {
            "running_requests": float(len(self._running)),
            "waiting_requests": float(len(self._tasks) - len(self._running)),
            "kv_cache_used_ratio": held / (self.limits.max_concurrency * self.limits.max_length),
        }
        self._figures.step(now - self._signed_at if tokens else 0.0, tokens, gauges)
        if tokens:
            self._signed_at = now
