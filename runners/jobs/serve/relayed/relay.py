"""Forward requests to an engine with its own OpenAI API, and stream the responses back.

Everything except ``run`` and ``wait_until_idle`` runs in the HTTP event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from runners.jobs.serve.asgi import (
    JSON,
    ClientGoneError,
    Receive,
    Send,
    disconnected,
    event_of,
    send_bytes,
    send_part,
)
from runners.jobs.serve.contract import Limits, Pending
from runners.jobs.serve.conversation import DEAD, RETRY_SECONDS
from runners.jobs.serve.figures import Figures
from runners.jobs.serve.own_writer import OwnWriter
from runners.jobs.serve.protocol import RequestError
from runners.jobs.serve.relayed.engines import Engines
from runners.jobs.serve.relayed.handover import course_of
from runners.jobs.serve.relayed.refusal import refusal
from runners.jobs.serve.relayed.request_fields import Handed, document_of, handed, num_answers
from runners.jobs.serve.relayed.scrape import Scraper

CONNECT_SECONDS = 10.0
SCRAPE_SECONDS = 1.0
CONNECTIONS = httpx.Limits(max_keepalive_connections=0)  # idle connections may be dropped


class RelayWriter(OwnWriter):
    """One life of an engine: its open requests, its metrics and its exit."""

    def __init__(
        self,
        engines: Engines,
        limits: Limits,
        scraper: Scraper,
        is_ending: Callable[[], bool],
    ) -> None:
        super().__init__(engines, limits)
        self.engines = engines
        self.open: dict[asyncio.Task[None], int] = {}  # number of answers per open request
        self.signed_at = 0.0  # time of the last token, or of the first open request
        self._scraper = scraper
        self._is_ending = is_ending

    @property
    def is_idle(self) -> bool:
        """Return whether no request is open."""
        return not self.open

    @property
    def step_began_at(self) -> float | None:
        """Return since when open requests have had no new token."""
        return self.signed_at if self.open else None

    def admit(self, answers: int) -> None:
        """Check that the engine or its queue has room for a request.

        Raises:
            RequestError: the queue is full, or the endpoint is ending.
        """
        if self.is_closed:
            raise RequestError(503, "The endpoint is ending.", code="draining")
        if (
            sum(self.open.values()) + answers
            > self.limits.max_concurrency + self.limits.queue_limit
        ):
            message, wait = "Too many requests wait already; try again shortly.", RETRY_SECONDS
            raise RequestError(429, message, code="queue_full", retry_after_seconds=wait)

    def enter(self, task: asyncio.Task[None], answers: int) -> None:
        """Register an open request."""
        if not self.open:
            self.signed_at = time.perf_counter()
        self.open[task] = answers

    def leave(self, task: asyncio.Task[None]) -> None:
        """Remove a request that has ended."""
        with self.changed:
            self.open.pop(task, None)
            self.changed.notify_all()

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Do nothing: the engine cancels a request when its connection closes."""

    def run(self) -> None:
        """Scrape the engine's metrics until it exits.

        Raises:
            EngineProcessError: it exited without having been closed.
        """
        at = time.perf_counter()
        while not self.engines.wait(SCRAPE_SECONDS):
            page, now = self.engines.page(), time.perf_counter()
            twice = self.engines.twice  # read after the page, so tokens are never counted twice
            if page is not None and self._scraper.take(page, now - at, twice):
                self.signed_at = now
            self.engines.peak_bytes()
            at = now
        self.is_closed = self.is_closed or self._is_ending()
        try:
            self.ended()
        finally:
            self.engines.reap()


class RelayReady:
    """A loaded model whose engine has its own OpenAI API."""

    def __init__(
        self, engine: RelayWriter, figures: Figures, called: Callable[[str], str]
    ) -> None:
        self.engine = engine
        self.figures = figures
        self.called = called  # maps the name in a request to the engine's name

    def handing(self, path: str, body: bytes) -> "Handover":
        """Return the parsed request.

        Raises:
            RequestError: a field is invalid; the error names it.
        """
        return Handover(self, path, handed(path, body))


class Handover:
    """One request that is forwarded to the engine, and its response."""

    def __init__(self, ready: RelayReady, path: str, asked: Handed) -> None:
        self.asked = asked
        self.answers = num_answers(asked)
        self._path = path
        self._began = 0.0
        self._engine = ready.engine
        self._figures = ready.figures
        self._engine_name = ready.called

    @property
    def model(self) -> str:
        """Return the model name in the request."""
        return self.asked.model

    async def run(self, receive: Receive, send: Send) -> None:
        """Forward the request and stream the engine's response back.

        Raises:
            RequestError: the queue is full, or the engine rejects the request or is down.
            ClientGoneError: the client disconnected; the engine cancels with the connection.
        """
        self._engine.admit(self.answers)
        self._began = time.perf_counter()
        answering = asyncio.create_task(self._answer(send))
        self._engine.enter(answering, self.answers)
        disconnect = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((answering, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._count("cancelled")
                raise ClientGoneError
            answering.result()
            self._count("requests")
        finally:
            disconnect.cancel()
            answering.cancel()
            await asyncio.wait((answering,))
            self._engine.leave(answering)

    def _count(self, name: str) -> None:
        for _ in range(self.answers):
            self._figures.count(name)

    async def _answer(self, send: Send) -> None:
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        document = document_of(self.asked) | {"model": self._engine_name(self.model)}
        engines, path = self._engine.engines, self._path
        try:
            async with (
                httpx.AsyncClient(timeout=timeout, limits=CONNECTIONS, trust_env=False) as client,
                course_of(engines, client, path, self.asked, document) as course,
                client.stream(
                    "POST",
                    f"{course.engine.address}{path}",
                    json=course.document,
                    headers=course.engine.headers,
                ) as answer,
            ):
                if not answer.is_success:
                    raise refusal(answer.status_code, await answer.aread())
                if self.asked.stream:
                    await self._stream(answer, send)
                else:
                    await send_bytes(send, answer.status_code, await answer.aread(), JSON)
        except httpx.HTTPError:
            raise RequestError(500, DEAD, code="engine_ended") from None

    async def _stream(self, answer: httpx.Response, send: Send) -> None:
        """Forward events as they arrive; an interrupted stream ends with an OpenAI error event."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        is_first = self._engine.engines.is_split  # no single engine measures the TTFT
        try:
            async for part in answer.aiter_bytes():
                self._engine.signed_at = now = time.perf_counter()
                if is_first:
                    self._figures.first_token(now - self._began, 0)
                    is_first = False
                await send_part(send, part)
        except httpx.HTTPError:
            error = RequestError(500, DEAD, code="engine_ended")
            self._figures.count("failed")
            await send_part(send, event_of(error.document))
        await send_part(send, b"", more=False)
