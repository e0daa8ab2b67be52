"""Requests of the Python client: credentials, retries, errors, files and event streams.

:class:`BaseCaller` holds their logic once, as coroutines: :class:`AsyncCaller` awaits them. The
steps of :class:`Caller` block and never suspend, so that it runs them without an event loop.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, Self, TypeVar, cast
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from runners.client.replies.base import FROM_SERVER
from runners.shared.timing import CLIENT_SILENCE_SECONDS

PREFIX = "/api/v1"
TIMEOUT = httpx.Timeout(CLIENT_SILENCE_SECONDS, connect=10.0)
TRIES = 4
LONGEST_WAIT = 30.0  # seconds before a repetition
LATER = frozenset({429, 502, 503, 504})
PIECE_BYTES = 1024 * 1024
_ANY: TypeAdapter[Any] = TypeAdapter(Any)  # of JSON values
Client = TypeVar("Client", httpx.Client, httpx.AsyncClient)
T = TypeVar("T")
Item_co = TypeVar("Item_co", covariant=True)


class ApiError(Exception):
    """A refusal of the server: its status, stable code, sentence and invalid fields."""

    def __init__(
        self, status: int, code: str, detail: str, facts: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.facts = dict(facts or {})

    @property
    def errors(self) -> list[dict[str, str]]:
        """The invalid fields, each with ``field`` and ``message``."""
        return list(self.facts.get("errors") or ())


class UnreachableError(Exception):
    """The server did not answer; the message names it and what to check."""


class Event(NamedTuple):
    """One server-sent event."""

    name: str
    data: dict[str, Any]
    number: str = ""


class Page(Protocol[Item_co]):
    """A page of a list, as every list of the API replies."""

    @property
    def items(self) -> Sequence[Item_co]: ...
    @property
    def next_cursor(self) -> str | None: ...


class Call(NamedTuple):
    """The request of an operation, below ``/api/v1``."""

    method: str
    path: str
    query: Mapping[str, Any]
    body: object = None  # a model, JSON values, bytes, or the path of a file to upload
    key: str | None = None  # idempotency key
    sink: BinaryIO | None = None  # what a binary reply is written to
    reply: Any = None  # type of the reply


@cache
def _adapter(reply: Any) -> TypeAdapter[Any]:  # noqa: ANN401 (a type)
    return TypeAdapter(reply)


def part(value: object) -> str:
    """Return a value as a part of a path."""
    return quote(str(value), safe="")


def server_url(text: str) -> str:
    """Return a server's address without the slash at its end; ``https`` if no scheme is given.

    Raises:
        ValueError: the address has another scheme, or no name.
    """
    url = text.strip() if "://" in text else f"https://{text.strip()}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError(f"{text!r} is not the address of a server, such as https://slipway.lan")
    return url.rstrip("/")


def _json(body: object) -> object:
    """Return a body as JSON values; of a model only what was set."""
    if isinstance(body, BaseModel):
        return body.model_dump(mode="json", exclude_unset=True)
    return _ANY.dump_python(body, mode="json")


@contextmanager
def _content(call: Call) -> Iterator[dict[str, Any]]:
    """Yield the query and body of a call as arguments of ``build_request``; a file is open."""
    query = {
        name: _ANY.dump_python(value, mode="json")
        for name, value in call.query.items()
        if value is not None
    }
    if isinstance(call.body, Path):
        with call.body.open("rb") as file:
            yield {"params": query, "files": {"file": (call.body.name, file)}}
    elif isinstance(call.body, bytes):
        yield {"params": query, "content": call.body}
    else:
        yield {"params": query, "json": None if call.body is None else _json(call.body)}


def error_of(response: httpx.Response) -> ApiError:
    """Return the error that a response describes; a proxy's page has no code."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {}
    detail = problem.get("detail") or f"The server answered {response.status_code}."
    return ApiError(response.status_code, str(problem.get("code", "")), str(detail), problem)


def _wait_of(response: httpx.Response, attempt: int) -> float:
    """Return the seconds before a repetition: what the server says, else a growing time."""
    said = response.headers.get("Retry-After", "")
    seconds = float(said) if said.isascii() and said.isdigit() else 2.0**attempt
    return min(seconds, LONGEST_WAIT)


def _is_repeated(response: httpx.Response, attempt: int) -> bool:
    if attempt >= TRIES - 1:
        return False
    code = error_of(response).code if response.status_code == httpx.codes.CONFLICT else ""
    return response.status_code in LATER or code == "in_progress"


def _reply_of(response: httpx.Response, reply: Any) -> Any:  # noqa: ANN401 (the operation's type)
    if reply is type(None):
        return None
    try:
        return _adapter(reply).validate_json(  # perhaps of a newer server
            response.content, extra="ignore", context=FROM_SERVER
        )
    except ValidationError as error:
        raise ApiError(
            response.status_code,
            "unknown_reply",
            f"The reply of {response.url} is not one that this client knows: it is of an older "
            "server, or not Slipway's. Update the client or check the address.",
        ) from error


class _Frames:
    """Reads server-sent events from the parts of a response; lines end with a line feed."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that are complete."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for frame in whole:
            fields = [line.partition(b": ")[::2] for line in frame.split(b"\n")]
            named = {name.decode(): value.decode() for name, value in fields if name}
            if "event" in named:
                document = _ANY.validate_json(named.get("data") or "{}")
                yield Event(named["event"], document, named.get("id", ""))


def _unreachable(base_url: str, error: Exception) -> UnreachableError:
    return UnreachableError(
        f"{base_url} does not answer ({str(error) or type(error).__name__}). Check the address, "
        "and that the server runs."
    )


class BaseCaller(ABC, Generic[Client]):
    """Sends requests and reads replies, by the steps of one of the two halves."""

    _client: Client

    def __init__(self, server: str, token: str, client: Client) -> None:
        self.base_url = server_url(server)
        self._client = client
        client.headers["Authorization"] = f"Bearer {token}"

    @abstractmethod
    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Return the response to a request, its body not read yet."""

    @abstractmethod
    async def _read(self, response: httpx.Response) -> None:
        """Read the body of a response."""

    @abstractmethod
    def _pieces(self, response: httpx.Response, num_bytes: int | None) -> AsyncIterator[bytes]:
        """Yield the body in pieces: of a size, or as they arrive."""

    @abstractmethod
    async def _close(self, response: httpx.Response) -> None:
        """Release the connection of a response."""

    @abstractmethod
    async def _sleep(self, seconds: float) -> None:
        """Wait."""

    @asynccontextmanager
    async def _response(
        self, call: Call, headers: Mapping[str, str], timeouts: httpx.Timeout | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a call; yield its response, of which only a refusal's body is read.

        Raises:
            httpx.TransportError: the connection failed.
        """
        with _content(call) as content:
            request = self._client.build_request(
                call.method,
                f"{self.base_url}{PREFIX}{call.path}",
                headers=headers,
                timeout=timeouts or self._client.timeout,
                **content,
            )
            response = await self._send(request)
            try:
                if response.is_error:
                    await self._read(response)
                yield response
            finally:
                await self._close(response)

    async def _call(self, call: Call) -> Any:  # noqa: ANN401 (the operation's type)
        """Send a call until it is answered for good, and return its reply.

        Raises:
            ApiError: the server refused it.
            UnreachableError: the server did not answer.
        """
        headers: dict[str, str] = {}
        # The repetition of others is harmless: a part states where it belongs.
        if call.method != "GET" and not isinstance(call.body, bytes):
            headers["Idempotency-Key"] = call.key or str(uuid.uuid4())
        for attempt in range(TRIES):
            try:
                async with self._response(call, headers) as response:
                    if not _is_repeated(response, attempt):
                        return await self._reply(response, call)
                    seconds = _wait_of(response, attempt)
            except httpx.TransportError as error:
                is_last = attempt >= TRIES - 1 or call.sink is not None  # half written
                if is_last or isinstance(error, httpx.ConnectError):
                    raise _unreachable(self.base_url, error) from error
                seconds = 2.0**attempt
            await self._sleep(seconds)
        raise AssertionError("the last try returns or raises")

    async def _reply(self, response: httpx.Response, call: Call) -> Any:  # noqa: ANN401
        """Return the reply in a response; a file is written to its sink, and its bytes counted."""
        if response.is_error:
            raise error_of(response)
        if call.sink is None:
            await self._read(response)
            return _reply_of(response, call.reply)
        num_bytes = 0
        async for piece in self._pieces(response, PIECE_BYTES):
            num_bytes += call.sink.write(piece)
        return num_bytes

    async def _events(self, call: Call) -> AsyncGenerator[Event, None]:
        """Yield events to the ``end``; a broken connection goes on after the last number."""
        number, failures = "", 0
        while True:
            frames = _Frames()
            headers = {"Accept": "text/event-stream"}
            headers |= {"Last-Event-ID": number} if number else {}
            try:
                async with self._response(call, headers, TIMEOUT) as response:
                    if response.is_error:
                        if not _is_repeated(response, failures):
                            raise error_of(response)
                    else:
                        async for data in self._pieces(response, None):
                            for event in frames.feed(data):
                                failures, number = 0, event.number or number
                                if event.name == "end":
                                    return
                                yield event
            except httpx.TransportError as error:
                if failures >= TRIES - 1:
                    raise _unreachable(self.base_url, error) from error
            await self._sleep(2.0**failures if failures else 1.0)
            failures += 1


class Caller(BaseCaller[httpx.Client]):
    """The synchronous half: its steps block and never suspend."""

    def __init__(self, server: str, token: str, *, client: httpx.Client | None = None) -> None:
        """Connect to ``server`` with an access token.

        Raises:
            ValueError: the address is invalid.
        """
        super().__init__(server, token, client or httpx.Client(timeout=TIMEOUT))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def paginate(
        self, operation: Callable[..., Page[T]], *given: object, **query: object
    ) -> Iterator[T]:
        """Yield the items of every page of a list: ``paginate(client.list_jobs, state="queued")``.

        The arguments are those of the operation; ``limit`` is the size of a page.
        """
        cursor: str | None = ""
        while cursor is not None:
            page = operation(*given, **query, cursor=cursor)
            yield from page.items
            cursor = page.next_cursor

    async def _send(self, request: httpx.Request) -> httpx.Response:
        return self._client.send(request, stream=True)

    async def _read(self, response: httpx.Response) -> None:
        response.read()

    async def _pieces(
        self, response: httpx.Response, num_bytes: int | None
    ) -> AsyncIterator[bytes]:
        for piece in response.iter_bytes(num_bytes):
            yield piece

    async def _close(self, response: httpx.Response) -> None:
        response.close()

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 (no event loop runs this)

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns, which never suspends."""
        try:
            step.send(None)
        except StopIteration as done:
            return cast("T", done.value)
        raise AssertionError("a step of the synchronous half suspended")

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Iterator[Event]:
        """Yield the events of a generator, which never suspends."""
        try:
            while True:
                yield self._run(events.__anext__())
        except StopAsyncIteration:
            return
        finally:
            self._run(events.aclose())


class AsyncCaller(BaseCaller[httpx.AsyncClient]):
    """The asynchronous half, the same call by call."""

    def __init__(
        self, server: str, token: str, *, client: httpx.AsyncClient | None = None
    ) -> None:
        """Connect to ``server`` with an access token.

        Raises:
            ValueError: the address is invalid.
        """
        super().__init__(server, token, client or httpx.AsyncClient(timeout=TIMEOUT))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def paginate(
        self, operation: Callable[..., Awaitable[Page[T]]], *given: object, **query: object
    ) -> AsyncIterator[T]:
        """Yield the items of every page of a list, as :meth:`Caller.paginate` does."""
        cursor: str | None = ""
        while cursor is not None:
            page = await operation(*given, **query, cursor=cursor)
            for item in page.items:
                yield item
            cursor = page.next_cursor

    async def _send(self, request: httpx.Request) -> httpx.Response:
        return await self._client.send(request, stream=True)

    async def _read(self, response: httpx.Response) -> None:
        await response.aread()

    def _pieces(self, response: httpx.Response, num_bytes: int | None) -> AsyncIterator[bytes]:
        return response.aiter_bytes(num_bytes)

    async def _close(self, response: httpx.Response) -> None:
        await response.aclose()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _run(self, step: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return step

    def _iterate(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        return events
