"""Forwards requests to engines with their own OpenAI API, whole or split by phase."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Literal, NamedTuple

import httpx
from pydantic import BaseModel, Field

from runners.jobs.serve.contract import Limits, Pending
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.openai_requests import (
    ENGINE_ENDED,
    MAX_MESSAGES,
    MAX_TOOLS,
    BaseMessage,
    ChatFields,
    ClientFields,
    CompletionRequest,
    Document,
    RequestError,
    parse_body,
    unsupported,
)
from runners.jobs.serve.process import ProcessEngine
from runners.jobs.serve.relayed.process import (
    METRICS,
    POLL_SECONDS,
    Scraper,
    ServerProcess,
    TokenCounts,
    merged_metrics,
)
from runners.jobs.serve.reranking import RERANK
from runners.jobspec.engines import EngineName
from runners.shared.event_streams import TokensUsed, read_events

# The engines of one endpoint life: a single one, or several for prefill and for decode.


REAP_SECONDS = 1.5


class Engines:
    """Engines that live and end together; without ``prefill``, ``decode`` does both phases.

    ``least_loaded`` is for the HTTP event loop only; the counts are read from another thread.
    """

    def __init__(
        self, decode: Sequence[ServerProcess], prefill: Sequence[ServerProcess] = ()
    ) -> None:
        self.prefill = tuple(prefill)
        self.decode = tuple(decode)
        self.repeated = TokenCounts()  # counts that both phases report for the same requests
        self._first_exited: ServerProcess | None = None
        self._open_requests: Counter[ServerProcess] = Counter()

    @property
    def is_split(self) -> bool:
        """Return whether prefill and decode run in different engines."""
        return bool(self.prefill)

    @property
    def all(self) -> tuple[ServerProcess, ...]:
        """Return every engine, prefill first."""
        return (*self.prefill, *self.decode)

    @property
    def title(self) -> str:
        """Return the title of the engine that exited first, else of the first engine."""
        return (self._first_exited or self.all[0]).title

    def how(self) -> str:
        """Return how the first exited engine ended."""
        return (self._first_exited or self.all[0]).how()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until an engine exits, at most ``timeout_seconds``; return whether one did."""
        if len(self.all) == 1:
            return self.all[0].wait(timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        while True:
            if ended := next((each for each in self.all if each.has_ended), None):
                self._first_exited = self._first_exited or ended
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(POLL_SECONDS, left))

    def kill(self) -> None:
        """Kill all engines at once, with every process they started."""
        for each in self.all:
            each.kill()

    def reap(self) -> None:
        """Wait briefly until each killed engine has exited."""
        for each in self.all:
            each.wait(REAP_SECONDS / len(self.all))

    def peak_bytes(self) -> int:
        """Return the peak memory of all engines, summed."""
        return sum(each.peak_bytes() for each in self.all)

    def page(self) -> str | None:
        """Return their Prometheus text with an engine label per sample; None if a scrape fails."""
        responses = [each.get(METRICS) for each in self.all]
        texts = [each.text for each in responses if each is not None and each.is_success]
        if len(texts) < len(responses):
            return None
        return (
            merged_metrics(dict(zip(self._names, texts, strict=True)))
            if self.is_split
            else texts[0]
        )

    @property
    def _names(self) -> list[str]:
        phases = (("prefill", self.prefill), ("decode", self.decode))
        return [f"{phase}-{at + 1}" for phase, own in phases for at in range(len(own))]

    @contextmanager
    def least_loaded(self, among: Sequence[ServerProcess]) -> Iterator[ServerProcess]:
        """Lend the engine with the fewest open requests for the duration of the block."""
        chosen = min(among, key=lambda each: self._open_requests[each])
        self._open_requests[chosen] += 1
        try:
            yield chosen
        finally:
            self._open_requests[chosen] -= 1


# Conversion of engine errors to the endpoint's error format.


TOO_LONG = "maximum context length"  # as in vLLM's and OpenAI's messages


def refusal(status: int, body: bytes) -> RequestError:
    """Return an engine error as a ``RequestError``: its message and field, without its code."""
    try:
        document = httpx.Response(status, content=body).json()
        document = document.get("error", document)
        message = str(document["message"] if isinstance(document, dict) else document)[:1000]
    except (ValueError, KeyError, AttributeError):
        document, message = {}, f"The engine answered with status {status}."
    param = document.get("param") if isinstance(document, dict) else None
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return RequestError(500, message, code="engine_error")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return RequestError(500, "The engine rejected its own API key.", code="engine_error")
    code = "context_length_exceeded" if TOO_LONG in message else None
    return RequestError(
        status, message, param=param if isinstance(param, str) else None, code=code
    )


# Request fields for engines with their own OpenAI API.
#
# They accept more than Slipway's own engine, such as JSON formats. Fields that are not
# listed are rejected by name: some are only for a service in front of the engine, such as
# vLLM's ``kv_transfer_params``, which names hosts to fetch from.


Object = dict[str, Any]


class Sampling(BaseModel):
    """Sampling fields in addition to those of every endpoint."""

    response_format: Object | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=64)] | None = None


class RelayedMessage(BaseMessage):
    """One message of a conversation, including tool calls and results."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[Object], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class TemplateSettings(ClientFields):
    """Chat template arguments; other keys could replace the template itself."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class RelayedCompletion(CompletionRequest, Sampling):
    """``POST /v1/completions``."""


class RelayedChat(ChatFields, Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[
        list[RelayedMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    chat_template_kwargs: TemplateSettings | None = None


RelayedRequest = RelayedCompletion | RelayedChat


def parse_request(
    path: str, body: bytes, engine: EngineName, calls_refusal: str = ""
) -> RelayedRequest:
    """Return the parsed request; ``calls_refusal`` says why the model's calls are not read.

    Raises:
        RequestError: a field is invalid, or not supported by the engine; the error names it.
    """
    if not path.endswith("/chat/completions"):
        return parse_body(RelayedCompletion.model_validate, body, engine)
    request = parse_body(RelayedChat.checked, body, engine)
    if calls_refusal:
        check_calls(request, calls_refusal)
    return request


def check_calls(request: RelayedChat, refusal: str) -> None:
    """Refuse tools of an engine that was started without a parser of the model's calls.

    Without one vLLM refuses them, also those that it would force (0.32.0,
    ``renderers/online_renderer.py``), and SGLang returns every call as text (0.5.23,
    ``entrypoints/openai/serving_chat.py``).

    Raises:
        RequestError: the request offers tools; the error has the reason.
    """
    if request.offered:
        raise unsupported("tools", f"tools need a parser of the model's calls: {refusal}")


def num_answers(request: RelayedRequest) -> int:
    """Return how many answers a request generates."""
    prompts = len(request.prompts) if isinstance(request, RelayedCompletion) else 1
    return prompts * request.num_choices


# Prefill/decode disaggregation: one engine reads a prompt, another generates the answer.
#
# The prefill engine generates one token and keeps the prompt's KV cache; the transfer parameters
# of its response go to the decode engine, which fetches the cache and frees it there.
#
# Source: vLLM 0.32.0, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl/``:
# ``pull_scheduler.py`` for the request and response fields, ``base_scheduler.py`` for the 30 s
# lease after which a cache that was not fetched is freed.


PARAMS = "kv_transfer_params"
KEPT_FOR_ANOTHER: Document = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Fields of the answer only: the prefill engine returns one token, not streamed.
OF_THE_ANSWER = ("stream", "stream_options", "min_tokens", "max_completion_tokens")


class DecodeTarget(NamedTuple):
    """The engine that generates an answer, and its request body.

    ``cached`` are the prompt tokens that a separate prefill engine had in its prefix cache: the
    decode engine counts those that it fetches.
    """

    engine: ServerProcess
    document: Document
    cached: int | None = None


@asynccontextmanager
async def decode_target(
    engines: Engines,
    client: httpx.AsyncClient,
    path: str,
    request: RelayedRequest,
    document: Document,
) -> AsyncIterator[DecodeTarget]:
    """Prefill the prompt if it runs in another engine; yield the answering engine and its request.

    Raises:
        RequestError: the prefill engine rejects the request or its response is malformed.
        httpx.HTTPError: the engine is down.
    """
    cached = None
    if engines.is_split and is_prefilled_elsewhere(request):
        with engines.least_loaded(engines.prefill) as reader:
            document, cached = await _prefill(engines, reader, client, path, document)
    among = engines.prefill if engines.is_split and _limit(request) == 1 else engines.decode
    with engines.least_loaded(among) as writer:
        yield DecodeTarget(writer, document, cached)


def is_prefilled_elsewhere(request: RelayedRequest) -> bool:
    """Return whether prompt and answer of a request are divided between two engines.

    A one-token answer is complete after prefill. Several answers would fetch one cache that is
    freed after the first, so one engine handles the whole request.
    """
    return num_answers(request) == 1 and _limit(request) != 1


def _limit(request: RelayedRequest) -> int | None:
    longest = request.max_completion_tokens if isinstance(request, RelayedChat) else None
    return longest or request.max_tokens


def prefill_body(document: Document) -> Document:
    """Return the body for the prefill engine: the same prompt, and one token."""
    own = {name: value for name, value in document.items() if name not in OF_THE_ANSWER}
    if own.get("tool_choice") not in (None, "none", "auto"):  # one token is no complete call
        own["tool_choice"] = "none"
    return own | {"max_tokens": 1, "stream": False, PARAMS: KEPT_FOR_ANOTHER}


async def _prefill(
    engines: Engines,
    reader: ServerProcess,
    client: httpx.AsyncClient,
    path: str,
    document: Document,
) -> tuple[Document, int | None]:
    """Run the prefill; return the body for the decode engine, and the cached prompt tokens."""
    answer = await client.post(
        f"{reader.address}{path}", json=prefill_body(document), headers=reader.headers
    )
    if not answer.is_success:
        raise refusal(answer.status_code, answer.content)
    params, counted, cached = _parsed(answer)
    if params is None:  # no cache was kept: the decode engine prefills itself
        return document, None
    before = engines.repeated
    engines.repeated = TokenCounts(before.prompt + counted.prompt, before.output + counted.output)
    return document | {PARAMS: params}, cached


def _parsed(answer: httpx.Response) -> tuple[Document | None, TokenCounts, int]:
    """Return the cache transfer parameters, or None if no cache is kept, and the token counts.

    The last count is of the prompt's tokens that were in the prefix cache.

    Raises:
        RequestError: the response has an unknown format.
    """
    try:
        body = answer.json()
        params, usage = body.get(PARAMS), body["usage"]
        counted = TokenCounts(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        is_kept = params is not None and bool(params["do_remote_prefill"])
    except (ValueError, KeyError, TypeError, AttributeError):
        message = "The engine that reads prompts did not say where it keeps what it read."
        raise RequestError(500, message, code="engine_error") from None
    return (dict(params) if is_kept else None), counted, cached


CONNECT_SECONDS = 10.0
COUNT_SECONDS = 60.0
COUNT_TOKENS = "/v1/messages/count_tokens"
SCRAPE_SECONDS = 1.0
CONNECTIONS = httpx.Limits(max_keepalive_connections=0)  # idle connections may be dropped


class RelayEngine(ProcessEngine):
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
        self.open: dict[ProxiedRequest | Ranking, int] = {}  # number of answers per open request
        self.signed_at = 0.0  # time of the last token, or of the first open request
        self._scraper = scraper
        self._is_ending = is_ending

    @property
    def num_open(self) -> int:
        """Return the number of answers that are running or queued."""
        return sum(self.open.values())

    @property
    def step_began_at(self) -> float | None:
        """Return since when open requests have had no new token."""
        return self.signed_at if self.open else None

    @contextmanager
    def serving(self, request: "ProxiedRequest | Ranking") -> Iterator[None]:
        """Hold a place for a request and count how it ends.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
        """
        self.admit(request.answers)
        if not self.open:
            self.signed_at = time.perf_counter()
        self.open[request] = request.answers
        try:
            yield
            request.count("requests")
        except (asyncio.CancelledError, GeneratorExit):
            request.count("cancelled")
            raise
        finally:
            with self.changed:
                del self.open[request]
                self.changed.notify_all()

    def cancel(self, sequences: Sequence[Pending]) -> None:
        """Do nothing: the engine cancels a request when its connection closes."""

    def run(self) -> None:
        """Scrape the engine's metrics until it exits.

        Raises:
            EngineProcessError: the engine exited without having been closed.
        """
        at = time.perf_counter()
        while not self.engines.wait(SCRAPE_SECONDS):
            page, now = self.engines.page(), time.perf_counter()
            repeated = self.engines.repeated  # after the page: no token is counted twice
            if page is not None and self._scraper.add_page(page, now - at, repeated):
                self.signed_at = now
            self.engines.peak_bytes()
            at = now
        self.is_closed = self.is_closed or self._is_ending()
        try:
            self.ended()
        finally:
            self.engines.reap()


class RelayServingModel:
    """A loaded model whose engine has its own OpenAI API."""

    def __init__(
        self,
        engine: RelayEngine,
        figures: EndpointMetrics,
        engine_name: EngineName,
        called: Callable[[str], str],
        calls_refusal: str = "",
        *,
        template: str = "",
        ranking_refusal: str,
    ) -> None:
        self.engine = engine
        self.template = template
        self.figures = figures
        self.served_name = called  # maps the name in a request to the engine's name
        self._engine_name = engine_name
        self.calls_refusal = calls_refusal
        self.ranking_refusal = ranking_refusal

    def forwarded_request(
        self, path: str, body: bytes, *, is_counted: bool = False
    ) -> "ProxiedRequest":
        """Return the parsed request; ``used`` of it needs ``is_counted``.

        Raises:
            RequestError: a field is invalid; the error names it.
        """
        request = parse_request(path, body, self._engine_name, self.calls_refusal)
        return ProxiedRequest(self, path, request, UsageReader(request) if is_counted else None)

    async def count_tokens(self, document: Document) -> int:
        """Return the prompt tokens of a conversation, by the engine's own count of them.

        vLLM and SGLang have the address (``entrypoints/anthropic``).

        Raises:
            RequestError: the engine rejects the request, or is down.
        """
        engine = self.engine.engines.decode[0]
        document = document | {"model": self.served_name(document["model"])}
        counted = await posted(engine, COUNT_TOKENS, document, COUNT_SECONDS)
        try:
            return int(counted["input_tokens"])
        except (ValueError, KeyError, TypeError):
            message = "The engine did not say how many tokens these messages have."
            raise RequestError(500, message, code="engine_error") from None

    async def rank(self, model: str, document: Document) -> Document:
        """Return the engine's ranking of documents by a query.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
            RequestError: the engine rejects the request, or is down.
        """
        engines = self.engine.engines
        document = document | {"model": self.served_name(model)}
        with (
            self.engine.serving(Ranking(self.figures)),
            engines.least_loaded(engines.decode) as engine,
        ):
            return await posted(engine, RERANK, document)


class Ranking:
    """A ranking takes the place of one answer."""

    answers = 1

    def __init__(self, figures: EndpointMetrics) -> None:
        self._figures = figures

    def count(self, name: str) -> None:
        """Count it under the named outcome."""
        self._figures.count(name)


async def posted(
    engine: ServerProcess, path: str, document: Document, seconds: float | None = None
) -> Document:
    """Return an engine's whole document.

    Raises:
        RequestError: the engine rejects the request, is down, or answers with no JSON object.
    """
    timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
    try:
        async with httpx.AsyncClient(
            timeout=timeout, limits=CONNECTIONS, trust_env=False
        ) as client:
            answer = await client.post(
                f"{engine.address}{path}", json=document, headers=engine.headers
            )
    except httpx.HTTPError:
        raise RequestError(500, ENGINE_ENDED, code="engine_ended") from None
    if not answer.is_success:
        raise refusal(answer.status_code, answer.content)
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        message = "The engine answered with no JSON object."
        raise RequestError(500, message, code="engine_error")
    return found


DATA = b"data: "
COUNTED = {"include_usage": True, "continuous_usage_stats": True}


class UsageReader:
    """Counts a request by what its engine reports, and takes out what the client did not ask for.

    The counts of a stream's chunk are those of one answer and its prompt; the last chunk, which
    has no choices, and a whole document have those of the request (vLLM 0.33.0, SGLang 0.5.23:
    ``entrypoints/openai/serving_chat.py``, ``serving_completions.py``).
    """

    def __init__(self, request: RelayedRequest) -> None:
        self.cached: int | None = None  # in a separate prefill engine
        self._used = TokensUsed()
        self._by_answer: dict[int, TokensUsed] = {}
        self._num_choices = request.num_choices
        self._wants_last = request.wants_usage
        self._wants_each = request.wants_usage and request.wants_continuous_usage

    @property
    def used(self) -> TokensUsed:
        """Return the tokens of the request so far."""
        return self._used if self.cached is None else self._used._replace(cached=self.cached)

    def read(self, data: bytes) -> Document | None:
        """Take the counts of a document; return it, or None if it is no JSON object."""
        try:
            document = json.loads(data)
            if not isinstance(document, dict):
                return None
            counted = _tokens_used(document.get("usage") or {})
            indices = [int(each["index"]) for each in document.get("choices") or ()]
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if counted is not None:
            self._add(counted, indices[0] if len(indices) == 1 else None)
        return document

    def read_event(self, event: bytes) -> bytes:
        """Take the counts of an event; return what the client is to see of it, or nothing."""
        document = self.read(event[len(DATA) :]) if event.startswith(DATA) else None
        if document is None:
            return event
        wants = self._wants_each if document.get("choices") else self._wants_last
        if wants or "usage" not in document:
            return event
        if not document.get("choices"):
            return b""
        del document["usage"]
        return DATA + json.dumps(document, separators=(",", ":")).encode()

    def _add(self, counted: TokensUsed, index: int | None) -> None:
        if index is None:
            self._used = counted
            return
        self._by_answer[index] = counted
        firsts = [each for at, each in self._by_answer.items() if at % self._num_choices == 0]
        self._used = TokensUsed(
            sum(each.prompt for each in firsts),
            sum(each.cached for each in firsts),
            sum(each.completion for each in self._by_answer.values()),
        )


def _tokens_used(usage: Document) -> TokensUsed | None:
    """Return an engine's counts, or None if it has not counted."""
    if "prompt_tokens" not in usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return TokensUsed(
        int(usage["prompt_tokens"]),
        int(details.get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
    )


class ProxiedRequest:
    """One request that is forwarded to the engine, and its response."""

    def __init__(
        self,
        ready: RelayServingModel,
        path: str,
        request: RelayedRequest,
        usage: "UsageReader | None" = None,
    ) -> None:
        self.request = request
        self._usage = usage
        self.answers = num_answers(request)
        self._path = path
        self._engine = ready.engine
        self._figures = ready.figures
        self._engine_name = ready.served_name

    @property
    def model(self) -> str:
        """Return the model name in the request."""
        return self.request.model

    @property
    def is_streamed(self) -> bool:
        """Return whether the client wants events."""
        return bool(self.request.stream)

    @property
    def used(self) -> TokensUsed:
        """Return the tokens that the engine has counted so far, nothing unless it was asked to."""
        return self._usage.used if self._usage is not None else TokensUsed()

    def count(self, name: str) -> None:
        """Count its answers under the named outcome."""
        for _ in range(self.answers):
            self._figures.count(name)

    async def whole(self) -> bytes:
        """Return the engine's document; see ``Answer.whole``."""
        async with self._forwarded() as answer:
            document = await answer.aread()
        if self._usage is not None:
            self._usage.read(document)
        return document

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the engine's events as they arrive; see ``Answer.events``."""
        began = time.perf_counter()
        is_first = self._engine.engines.is_split  # no single engine measures the TTFT
        async with self._forwarded() as answer:
            async for event in read_events(answer.aiter_bytes()):
                self._engine.signed_at = now = time.perf_counter()
                if is_first:
                    self._figures.first_token(now - began, 0)
                    is_first = False
                shown = event if self._usage is None else self._usage.read_event(event)
                if shown:
                    yield shown + b"\n\n"

    @asynccontextmanager
    async def _forwarded(self) -> AsyncIterator[httpx.Response]:
        """Send the request to the engine; the connection ends with the block, and so the request.

        Raises:
            QueueFullError: the queue is full.
            EngineEndedError: the engine has failed or was stopped.
            RequestError: the engine rejects the request or is down.
        """
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        document = self.request.model_dump(mode="json", exclude_unset=True)
        document["model"] = self._engine_name(self.model)
        if self._usage is not None and self.is_streamed:
            document["stream_options"] = COUNTED
        engines, path = self._engine.engines, self._path
        with self._engine.serving(self):
            try:
                async with (
                    httpx.AsyncClient(
                        timeout=timeout, limits=CONNECTIONS, trust_env=False
                    ) as client,
                    decode_target(engines, client, path, self.request, document) as course,
                    client.stream(
                        "POST",
                        f"{course.engine.address}{path}",
                        json=course.document,
                        headers=course.engine.headers,
                    ) as answer,
                ):
                    if not answer.is_success:
                        raise refusal(answer.status_code, await answer.aread())
                    if self._usage is not None:
                        self._usage.cached = course.cached
                    yield answer
            except httpx.HTTPError:
                raise RequestError(500, ENGINE_ENDED, code="engine_ended") from None
