"""A load generator for OpenAI-compatible endpoints: requests, arrivals, timings, percentiles.

The load test of a job and ``slipway bench`` send their requests with it. Instants are seconds of
this process's monotonic clock. Latencies count from the instant at which a request was due, so
that a delayed generator does not hide waiting time.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import chain
from typing import Any

import httpx

from runners.jobspec.compress import PERCENTILES, Arrivals, ClosedLoop, OpenLoop
from runners.shared.event_streams import read_events
from runners.shared.log_text import plain

# ---------------------------------------------------------------------------
# One streamed request and its timing.
# ---------------------------------------------------------------------------


STREAM_END, JSON_EVENT = b"data: [DONE]", b"data: {"
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
ERROR_LENGTH = 160
LONGEST_SECONDS = 3600.0  # of silence; each request has its own limit
DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of generated tokens
Prompt = Sequence[int] | str  # token ids, or text


@dataclass(frozen=True)
class Target:
    """The endpoint and the parameters of the requests; a chat's prompts are text."""

    url: str  # the base URL, with /v1
    model: str
    output_tokens: int
    timeout_seconds: float
    key: str = ""
    is_chat: bool = False
    ignores_eos: bool = True  # generate all output tokens; an extension of vLLM, SGLang and others

    @property
    def request_url(self) -> str:
        """Return the URL that requests are posted to."""
        return f"{self.url}/chat/completions" if self.is_chat else f"{self.url}/completions"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Return the body of a request."""
        text = prompt if isinstance(prompt, str) else list(prompt)
        own: dict[str, Any] = (
            {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        )
        return {
            "model": self.model,
            **own,
            "max_tokens": self.output_tokens,
            "temperature": 0.0,
            **({"ignore_eos": True} if self.ignores_eos else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True)
class RequestOutcome:
    """The timing of one request; ``error`` is empty for a complete answer."""

    due: float
    sent: float
    last: float
    first: float | None = None  # None: no token arrived
    output_tokens: int = 0
    error: str = ""
    error_kind: str = ""  # the error without its details, such as HTTP 429
    input_tokens: int = 0  # 0: the endpoint reported no usage
    itl_seconds: tuple[float, ...] = ()  # between the chunks that bring tokens

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

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class Stream:
    """The state of a streamed answer."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.itl_seconds: list[float] = []
        self.input_tokens = 0
        self.output_tokens = 0
        self.is_complete = False

    def take(self, event: bytes) -> None:
        """Parse one event.

        Raises:
            EndpointError: the endpoint reports an error.
            ValueError: it is not an event of such a stream.
        """
        if event == STREAM_END:
            self.is_complete = True
        if not event.startswith(JSON_EVENT):
            return
        document = json.loads(event.removeprefix(b"data: "))
        if error := document.get("error"):
            raise EndpointError(_error_text(error), "error in the stream")
        if (choices := document.get("choices")) and _has_token(choices[0]):
            now = time.monotonic()
            if self.first is None:
                self.first = now
            else:
                self.itl_seconds.append(now - self.last)
            self.last = now
        if usage := document.get("usage"):
            self.output_tokens = int(usage["completion_tokens"])
            self.input_tokens = int(usage.get("prompt_tokens") or 0)


def _has_token(choice: dict[str, Any]) -> bool:
    """Return whether a chunk brings tokens: not a chat's role or the finish reason alone."""
    if "delta" in choice:
        return any(choice["delta"].get(name) for name in DELTA_FIELDS)
    return bool(choice.get("text")) or choice.get("finish_reason") is None


async def send_request(
    client: httpx.AsyncClient, target: Target, prompt: Prompt, due: float
) -> RequestOutcome:
    """Return the outcome of one request; endpoint errors are recorded, not raised.

    An endpoint that reports no usage counts as one token per chunk.
    """
    stream, sent = Stream(), time.monotonic()
    error = kind = ""
    try:
        async with asyncio.timeout(target.timeout_seconds):
            await _read(client, target, prompt, stream)
        if not stream.is_complete:
            error = kind = "the stream was cut off"
        elif stream.first is None:
            error = kind = "the answer has no token"
    except TimeoutError:
        error, kind = f"no whole answer within {target.timeout_seconds:g} s", "timeout"
    except httpx.HTTPError as problem:
        error = kind = type(problem).__name__
    except EndpointError as problem:
        error, kind = str(problem), problem.kind
    except (ValueError, LookupError, TypeError, AttributeError):
        error = kind = "not a stream in OpenAI's form"
    return RequestOutcome(
        due,
        sent,
        time.monotonic() if error else stream.last,
        stream.first,
        stream.output_tokens or len(stream.itl_seconds) + (stream.first is not None),
        error,
        kind,
        stream.input_tokens,
        tuple(stream.itl_seconds),
    )


async def _read(client: httpx.AsyncClient, target: Target, prompt: Prompt, stream: Stream) -> None:
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    url = target.request_url
    async with client.stream("POST", url, json=target.body(prompt), headers=headers) as response:
        if response.status_code != HTTPStatus.OK:
            reply = await response.aread()
            words = refusal_text(
                reply.replace(target.key.encode(), b"***") if target.key else reply
            )
            raise EndpointError(
                f"{url} answers {response.status_code}: {words}", f"HTTP {response.status_code}"
            )
        async for event in read_events(response.aiter_bytes()):
            stream.take(event)


def new_client(*, trust_env: bool = False) -> httpx.AsyncClient:
    """Return a client without connection limit; each request has its own timeout.

    ``trust_env``: use the proxies and certificates that the environment names.
    """
    return httpx.AsyncClient(trust_env=trust_env, timeout=LONGEST_SECONDS, limits=NO_LIMITS)


def refusal_text(body: bytes) -> str:
    """Return the short message of a refusal: OpenAI's form, older vLLM's, or FastAPI's."""
    try:
        document = json.loads(body)
        error = document.get("error") or document.get("message") or document["detail"]
        return _error_text(error)
    except (ValueError, LookupError, TypeError, AttributeError):
        return "without words"


def _error_text(error: object) -> str:
    """Return an error in OpenAI's form as short text: its code, if that is a word, and message."""
    if isinstance(error, dict):
        code, message = error.get("code"), error.get("message")
        if isinstance(code, str) and code and message:
            error = f"{code}: {message}"
        else:
            error = message or code
    return plain(str(error))[:ERROR_LENGTH]


# ---------------------------------------------------------------------------
# Request arrivals: closed loop, Poisson process or burst; and the generator's own delay.
# ---------------------------------------------------------------------------


TICK_SECONDS = 0.01
ALIVE_SECONDS = 0.5  # between two looks whether requests are still to be sent
Ask = Callable[[Prompt, float], Awaitable[RequestOutcome]]
Alive = Callable[[], bool]


@dataclass
class Repetition:
    """Results of one repetition of one load point."""

    began: float
    ended: float = 0.0
    answered: list[RequestOutcome] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # delays of the event loop itself

    @property
    def seconds(self) -> float:
        """Return the duration in seconds."""
        return self.ended - self.began


async def repetition(
    arrivals: Arrivals, point: float, prompts: Iterable[Prompt], ask: Ask, alive: Alive, seed: str
) -> Repetition:
    """Send every prompt according to the arrivals and return the answers.

    Once ``alive`` returns False no more requests are sent; pending ones end with their connection.
    """
    result = Repetition(time.monotonic())
    watch = asyncio.ensure_future(record_lags(result.lags))
    try:
        if isinstance(arrivals, ClosedLoop):
            result.answered = await _closed(prompts, round(point), ask, alive)
        elif isinstance(arrivals, OpenLoop):
            source = random.Random(seed)  # noqa: S311 - the same instants again, no secret
            result.answered = await _open(prompts, point, ask, alive, source)
        else:
            now = time.monotonic()
            result.answered = list(await asyncio.gather(*(ask(each, now) for each in prompts)))
    finally:
        watch.cancel()
    result.ended = time.monotonic()
    return result


async def _closed(
    prompts: Iterable[Prompt], clients: int, send: Ask, alive: Alive
) -> list[RequestOutcome]:
    shared_prompts, answered = iter(prompts), list[RequestOutcome]()

    async def client(queue: Iterator[Prompt]) -> None:
        for each in queue:  # shared by all clients: the next free client takes the next prompt
            answered.append(await send(each, time.monotonic()))
            if not alive():
                return

    await asyncio.gather(*(client(shared_prompts) for _ in range(clients)))
    return answered


async def _open(
    prompts: Iterable[Prompt], rate: float, send: Ask, alive: Alive, source: random.Random
) -> list[RequestOutcome]:
    due, pending = time.monotonic(), list[asyncio.Future[RequestOutcome]]()
    for each in prompts:
        due += source.expovariate(rate)
        while alive() and (rest := due - time.monotonic()) > 0:  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(min(rest, ALIVE_SECONDS))
        if not alive():
            break
        pending.append(asyncio.ensure_future(send(each, due)))
    return list(await asyncio.gather(*pending))


async def record_lags(lags: list[float]) -> None:
    """Record how late the event loop wakes, which bounds the error of all its timestamps."""
    while True:
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.monotonic() - due))


# ---------------------------------------------------------------------------
# Percentiles of the answers, and what makes them doubtful.
# ---------------------------------------------------------------------------


BEYOND = 10  # minimum number of values beyond a percentile for it to be reliable
LATE_SECONDS = 0.005
LATE_SHARE = 0.1  # of the mean time to the first token
KEPT_UP = 0.9  # of the arrival rate


def values_of(answered: Iterable[RequestOutcome], name: str) -> list[float]:
    """Return the complete answers' ``ttft``, ``tpot`` or ``latency`` in seconds, sorted."""
    values = (getattr(each, f"{name}_seconds") for each in answered if not each.error)
    return sorted(each for each in values if each is not None)


def percentile(sorted_values: Sequence[float], percent: int) -> float:
    """Return a percentile of values in ascending order (nearest rank)."""
    return sorted_values[max(0, math.ceil(percent * len(sorted_values) / 100) - 1)]


def sample_size_warnings(answered: Sequence[RequestOutcome]) -> Iterable[str]:
    """Yield a caveat if the complete answers are too few for a percentile."""
    count = sum(not each.error for each in answered)
    for percent in PERCENTILES:
        needed = round(BEYOND * 100 / (100 - percent))
        if count < needed:
            yield f"{count} answers are few for a p{percent}: {needed:,} would be enough"
            return


def generator_lag_warnings(
    repetitions: Sequence[Repetition], mean_ttft_seconds: float
) -> Iterable[str]:
    """Yield caveats if the generator was late: its event loop woke, or its requests went, late."""
    limit = max(LATE_SECONDS, LATE_SHARE * mean_ttft_seconds)
    lags = sorted(chain.from_iterable(each.lags for each in repetitions))
    sent = sorted(each.sent - each.due for one in repetitions for each in one.answered)
    for values, words in ((lags, "its clock ran"), (sent, "its requests went out")):
        if values and (late := percentile(values, 99)) > limit:
            yield f"the generator itself fell behind: {words} up to {late:.3f} s late (p99)"


def short_answer_warnings(answered: Sequence[RequestOutcome], output_tokens: int) -> Iterable[str]:
    """Yield a caveat if complete answers have fewer tokens than requested."""
    short = sum(not each.error and each.output_tokens < output_tokens for each in answered)
    if short:
        yield f"{short} answers ended before their {output_tokens} tokens"


def overload_warnings(requests_per_second: float, request_rate_per_second: float) -> Iterable[str]:
    """Yield a caveat if an endpoint under an open loop answered fewer requests than arrived."""
    if requests_per_second < KEPT_UP * request_rate_per_second:
        yield (
            f"the endpoint did not keep up: {requests_per_second:.3g} of "
            f"{request_rate_per_second:g} requests a second, so waiting times grow for as long as "
            "it is asked"
        )
