"""Requests of the Python client: credentials, retries, errors, files and event streams.

``generated.py`` builds each operation on :class:`Caller` or :class:`AsyncCaller`.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

PREFIX = "/api/v1"
TIMEOUT = httpx.Timeout(60.0, connect=10.0)  # seconds; a plan of a large search takes some
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=10.0)  # the server sends a ping every 15 s
TRIES = 4
LONGEST_WAIT = 30.0  # seconds before a repetition
LATER = frozenset({429, 502, 503, 504})
PIECE_BYTES = 1024 * 1024
_ANY: TypeAdapter[Any] = TypeAdapter(Any)  # of JSON values


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


class Call(NamedTuple):
    """A request as the generated operations describe it."""

    method: str
    path: str
    query: Mapping[str, Any]
    body: object = None
    key: str | None = None


@cache
def _adapter(reply: Any) -> TypeAdapter[Any]:  # noqa: ANN401 (a type)
    return TypeAdapter(reply)


def part(value: object, *, safe: str = "") -> str:
    """Return a value as a part of a path."""
    return quote(str(value), safe=safe)


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


def _headers(call: Call) -> dict[str, str]:
    """Return the headers of a call; a write has a key, so that its repetition is harmless."""
    if call.method == "GET":
        return {}
    return {"Idempotency-Key": call.key or str(uuid.uuid4())}


def _json(body: object) -> object:
    """Return a body as JSON values; of a model only what was set."""
    if isinstance(body, BaseModel):
        return body.model_dump(mode="json", exclude_unset=True)
    return _ANY.dump_python(body, mode="json")


def _query(call: Call) -> dict[str, Any]:
    return {
        name: _ANY.dump_python(value, mode="json")
        for name, value in call.query.items()
        if value is not None
    }


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


def _read(response: httpx.Response, reply: Any) -> Any:  # noqa: ANN401 (the operation's type)
    if response.status_code >= httpx.codes.BAD_REQUEST:
        raise error_of(response)
    if reply is None:
        return None
    try:
        return _adapter(reply).validate_json(response.content)
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


class Caller:
    """The synchronous half: sends requests and reads replies."""

    def __init__(self, server: str, token: str, *, client: httpx.Client | None = None) -> None:
        """Connect to ``server`` with an access token.

        Raises:
            ValueError: the address is invalid.
        """
        self.base_url = server_url(server)
        self._client = client or httpx.Client(timeout=TIMEOUT, follow_redirects=False)
        self._client.headers["Authorization"] = f"Bearer {token}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, call: Call, reply: Any) -> Any:  # noqa: ANN401 (the operation's type)
        headers = _headers(call)
        for attempt in range(TRIES):
            response = self._send(call, headers, attempt)
            if response is not None and not _is_repeated(response, attempt):
                return _read(response, reply)
            time.sleep(_wait_of(response, attempt) if response is not None else 2.0**attempt)
        raise AssertionError("the last try returns or raises")

    def _send(self, call: Call, headers: dict[str, str], attempt: int) -> httpx.Response | None:
        """Return the response, or None if the connection failed and there are tries left."""
        try:
            if isinstance(call.body, Path):
                with call.body.open("rb") as file:
                    return self._client.request(
                        call.method,
                        self._url(call),
                        files={"file": (call.body.name, file)},
                        headers=headers,
                    )
            content = None if call.body is None else json.dumps(_json(call.body)).encode()
            kind = {} if content is None else {"Content-Type": "application/json"}
            return self._client.request(
                call.method,
                self._url(call),
                params=_query(call),
                content=content,
                headers=headers | kind,
            )
        except httpx.TransportError as error:
            if attempt >= TRIES - 1 or isinstance(error, httpx.ConnectError):
                raise _unreachable(self.base_url, error) from error
            return None

    def _url(self, call: Call) -> str:
        return f"{self.base_url}{PREFIX}{call.path}"

    def _download(self, call: Call, sink: BinaryIO) -> int:
        """Write a binary reply to ``sink``; return its bytes."""
        num_bytes = 0
        try:
            with self._client.stream(call.method, self._url(call)) as response:
                if response.status_code >= httpx.codes.BAD_REQUEST:
                    response.read()
                    raise error_of(response)
                for piece in response.iter_bytes(PIECE_BYTES):
                    num_bytes += sink.write(piece)
        except httpx.TransportError as error:
            raise _unreachable(self.base_url, error) from error
        return num_bytes

    def _events(self, call: Call) -> Iterator[Event]:
        """Yield events to the ``end``; a broken connection goes on after the last number."""
        number, failures = "", 0
        while True:
            frames = _Frames()
            headers = {"Accept": "text/event-stream"}
            headers |= {"Last-Event-ID": number} if number else {}
            try:
                with self._client.stream(
                    "GET",
                    self._url(call),
                    params=_query(call),
                    headers=headers,
                    timeout=STREAM_TIMEOUT,
                ) as response:
                    if response.status_code >= httpx.codes.BAD_REQUEST:
                        response.read()
                        if not _is_repeated(response, failures):
                            raise error_of(response)
                    else:
                        for data in response.iter_bytes():
                            for event in frames.feed(data):
                                failures, number = 0, event.number or number
                                if event.name == "end":
                                    return
                                yield event
            except httpx.TransportError as error:
                if failures >= TRIES - 1:
                    raise _unreachable(self.base_url, error) from error
            time.sleep(2.0**failures if failures else 1.0)
            failures += 1


class AsyncCaller:
    """The asynchronous half, the same call by call."""

    def __init__(
        self, server: str, token: str, *, client: httpx.AsyncClient | None = None
    ) -> None:
        """Connect to ``server`` with an access token.

        Raises:
            ValueError: the address is invalid.
        """
        self.base_url = server_url(server)
        self._client = client or httpx.AsyncClient(timeout=TIMEOUT, follow_redirects=False)
        self._client.headers["Authorization"] = f"Bearer {token}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(self, call: Call, reply: Any) -> Any:  # noqa: ANN401 (the operation's type)
        headers = _headers(call)
        for attempt in range(TRIES):
            response = await self._send(call, headers, attempt)
            if response is not None and not _is_repeated(response, attempt):
                return _read(response, reply)
            seconds = _wait_of(response, attempt) if response is not None else 2.0**attempt
            await asyncio.sleep(seconds)
        raise AssertionError("the last try returns or raises")

    async def _send(
        self, call: Call, headers: dict[str, str], attempt: int
    ) -> httpx.Response | None:
        try:
            if isinstance(call.body, Path):
                content = await asyncio.to_thread(call.body.read_bytes)
                files = {"file": (call.body.name, content)}
                return await self._client.request(
                    call.method, self._url(call), files=files, headers=headers
                )
            data = None if call.body is None else json.dumps(_json(call.body)).encode()
            kind = {} if data is None else {"Content-Type": "application/json"}
            return await self._client.request(
                call.method,
                self._url(call),
                params=_query(call),
                content=data,
                headers=headers | kind,
            )
        except httpx.TransportError as error:
            if attempt >= TRIES - 1 or isinstance(error, httpx.ConnectError):
                raise _unreachable(self.base_url, error) from error
            return None

    def _url(self, call: Call) -> str:
        return f"{self.base_url}{PREFIX}{call.path}"

    async def _download(self, call: Call, sink: BinaryIO) -> int:
        num_bytes = 0
        try:
            async with self._client.stream(call.method, self._url(call)) as response:
                if response.status_code >= httpx.codes.BAD_REQUEST:
                    await response.aread()
                    raise error_of(response)
                async for piece in response.aiter_bytes(PIECE_BYTES):
                    num_bytes += sink.write(piece)
        except httpx.TransportError as error:
            raise _unreachable(self.base_url, error) from error
        return num_bytes

    async def _events(self, call: Call) -> AsyncIterator[Event]:
        number, failures = "", 0
        while True:
            frames = _Frames()
            headers = {"Accept": "text/event-stream"}
            headers |= {"Last-Event-ID": number} if number else {}
            try:
                async with self._client.stream(
                    "GET",
                    self._url(call),
                    params=_query(call),
                    headers=headers,
                    timeout=STREAM_TIMEOUT,
                ) as response:
                    if response.status_code >= httpx.codes.BAD_REQUEST:
                        await response.aread()
                        if not _is_repeated(response, failures):
                            raise error_of(response)
                    else:
                        async for data in response.aiter_bytes():
                            for event in frames.feed(data):
                                failures, number = 0, event.number or number
                                if event.name == "end":
                                    return
                                yield event
            except httpx.TransportError as error:
                if failures >= TRIES - 1:
                    raise _unreachable(self.base_url, error) from error
            await asyncio.sleep(2.0**failures if failures else 1.0)
            failures += 1
