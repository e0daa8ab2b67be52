"""Sends one streamed request to an OpenAI-compatible endpoint and records its timing.

Instants are seconds of this process's monotonic clock. Latencies count from the instant at which
the request was due, so that a delayed generator does not hide waiting time.
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
LONGEST_SECONDS = 3600.0  # of silence; each request has its own limit


@dataclass(frozen=True)
class Target:
    """The endpoint and the parameters of the requests."""

    url: str  # the base URL, with /v1
    model: str
    output_tokens: int
    timeout_seconds: float
    key: str = ""


@dataclass(frozen=True)
class RequestOutcome:
    """The timing of one request; ``error`` is empty for a complete answer."""

    due: float
    sent: float
    last: float
    first: float | None = None  # None: no token arrived
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_seconds(self) -> float | None:
        """Return the seconds from the due instant to the first token."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot_seconds(self) -> float | None:
        """Return the mean seconds per token after the first, or None for fewer than two tokens."""
        if self.first is None or self.output_tokens <= 1:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def latency_seconds(self) -> float:
        """Return the seconds from the due instant to the last token, or to the error."""
        return self.last - self.due


class EndpointError(Exception):
    """The endpoint returned an error instead of an answer."""


class Stream:
    """The state of a streamed answer."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.output_tokens = 0
        self.is_whole = False

    def take(self, line: str) -> None:
        """Parse one line.

        Raises:
            EndpointError: the endpoint reports an error.
            ValueError: the line is not an event of such a stream.
        """
        if line == STREAM_END:
            self.is_whole = True
        if not line.startswith("data: {"):
            return
        document = json.loads(line.removeprefix("data: "))
        if error := document.get("error"):
            raise EndpointError(_error_text(error))
        if document.get("choices"):
            self.last = time.monotonic()
            self.first = self.first or self.last
        if usage := document.get("usage"):
            self.output_tokens = int(usage["completion_tokens"])


async def send_request(
    client: httpx.AsyncClient, target: Target, prompt: Sequence[int], due: float
) -> RequestOutcome:
    """Return the outcome of one request; endpoint errors are recorded, not raised."""
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
    return RequestOutcome(due, sent, last, stream.first, stream.output_tokens, error)


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
    async with client.stream("POST", url, json=body, headers=headers) as response:
        if response.status_code != HTTPStatus.OK:
            raise EndpointError(f"{response.status_code} {_refusal_text(await response.aread())}")
        async for line in response.aiter_lines():
            stream.take(line)


def new_client() -> httpx.AsyncClient:
    """Return a client without connection limit; each request has its own timeout."""
    return httpx.AsyncClient(trust_env=False, timeout=LONGEST_SECONDS, limits=NO_LIMITS)


def _refusal_text(body: bytes) -> str:
    try:
        return _error_text(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return "without words"


def _error_text(error: object) -> str:
    """Return the short message of an error in OpenAI's form."""
    text = error.get("code") or error.get("message") if isinstance(error, dict) else error
    return str(text)[:ERROR_LENGTH]
