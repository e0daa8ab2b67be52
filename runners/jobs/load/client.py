"""One request to an OpenAI-compatible endpoint, streamed, and when what of it came.

Instants are seconds of this process's monotonic clock. Time counts from the instant at which the
request was due, so that a generator that is late hides nothing.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import httpx

STREAM_END = "data: [DONE]"
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
ERROR_LENGTH = 160
LONGEST_SECONDS = 3600.0  # of any silence; each request has a limit of its own


@dataclass(frozen=True)
class Target:
    """Where the requests go, and how each is answered."""

    url: str  # the base address, with /v1
    model: str
    output_tokens: int
    timeout_seconds: float
    key: str = ""


@dataclass(frozen=True)
class Answered:
    """What one client saw; ``error`` is empty where the whole answer came."""

    due: float
    sent: float
    last: float
    first: float | None = None  # None: no token came
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_seconds(self) -> float | None:
        """Return the seconds from when it was due to the first token."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot_seconds(self) -> float | None:
        """Return the mean seconds between tokens after the first; None where there is no gap."""
        if self.first is None or self.output_tokens <= 1:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def latency_seconds(self) -> float:
        """Return the seconds from when it was due to the last token, or to the error."""
        return self.last - self.due


class EndpointError(Exception):
    """What the endpoint said instead of an answer."""


class Stream:
    """A streamed answer as it is read."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.output_tokens = 0
        self.is_whole = False

    def take(self, line: str) -> None:
        """Read one line.

        Raises:
            EndpointError: the endpoint says that it failed.
            ValueError: the line is no event of such a stream.
        """
        if line == STREAM_END:
            self.is_whole = True
        if not line.startswith("data: {"):
            return
        document = json.loads(line.removeprefix("data: "))
        if error := document.get("error"):
            raise EndpointError(_words(error))
        if document.get("choices"):
            self.last = time.monotonic()
            self.first = self.first or self.last
        if usage := document.get("usage"):
            self.output_tokens = int(usage["completion_tokens"])


async def ask(
    client: httpx.AsyncClient, target: Target, prompt: Sequence[int], due: float
) -> Answered:
    """Return what came of one request; never raise because of the endpoint."""
    stream, sent = Stream(), time.monotonic()
    try:
        async with asyncio.timeout(target.timeout_seconds):
            await _read(client, target, prompt, stream)
        error = "" if stream.is_whole else "the stream was cut off"
    except TimeoutError:
        error = f"no whole answer within {target.timeout_seconds:g} s"
    except httpx.HTTPError as problem:
        error = type(problem).__name__
    except EndpointError as problem:
        error = str(problem)
    except (ValueError, LookupError, TypeError, AttributeError):
        error = "not a stream in OpenAI's form"
    last = time.monotonic() if error else stream.last
    return Answered(due, sent, last, stream.first, stream.output_tokens, error)


async def _read(
    client: httpx.AsyncClient, target: Target, prompt: Sequence[int], stream: Stream
) -> None:
    body = {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": target.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    url = f"{target.url}/completions"
    async with client.stream("POST", url, json=body, headers=headers) as answer:
        if answer.status_code != HTTPStatus.OK:
            raise EndpointError(f"{answer.status_code} {_refusal(await answer.aread())}")
        async for line in answer.aiter_lines():
            stream.take(line)


def new_client() -> httpx.AsyncClient:
    """Return a client for any number of requests at once, each of whom says how long it waits."""
    return httpx.AsyncClient(trust_env=False, timeout=LONGEST_SECONDS, limits=NO_LIMITS)


def _refusal(body: bytes) -> str:
    try:
        return _words(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return "without words"


def _words(error: object) -> str:
    """Return what an error in OpenAI's form says, short."""
    said = error.get("code") or error.get("message") if isinstance(error, dict) else error
    return str(said)[:ERROR_LENGTH]
