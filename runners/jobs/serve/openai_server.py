"""The Starlette application of an endpoint: state, routes, API keys and errors."""

import asyncio
import hmac
import json
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runners.jobs.chat_template import TemplateRefusedError
from runners.jobs.serve.answers import (
    ChatFormat,
    CommonFields,
    CompletionFormat,
    ParsedRequest,
    RequestAnswers,
)
from runners.jobs.serve.chat_options import completion_constraint, constraint_of, tool_offer
from runners.jobs.serve.chat_translations import (
    COUNT_TOKENS,
    MESSAGES,
    TRANSLATED,
    parse_count,
    parse_translated,
)
from runners.jobs.serve.contract import (
    Answer,
    EmbeddingModel,
    EngineEndedError,
    ForwardingModel,
    QueueFullError,
    ServingModel,
)
from runners.jobs.serve.embeddings import check_texts, parse_embedding
from runners.jobs.serve.event_stream import EventStream, server_sent_event, unless_disconnected
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.openai_requests import (
    COMPLETION_TOKENS,
    ENGINE_ENDED,
    ChatRequest,
    Document,
    RequestError,
    parse_chat,
    parse_completion,
    retry_after,
    unsupported,
)
from runners.jobs.serve.reranking import RERANK, parse_rerank, unranked
from runners.jobs.serve.tool_calls import call_form
from runners.jobs.serve.translated import TranslatedAnswer, TranslatedRequest
from runners.jobspec import ServeSpec
from runners.jobspec.engines import ENGINES, OWN
from runners.jobspec.serve import NO_ADAPTER, key_hash
from runners.shared.event_streams import USAGE_HEADER, TokensUsed

# The state of an endpoint: loading, ready, draining or failed; and the model it serves.


State = Literal["loading", "ready", "draining", "failed"]


class ErrorLog:
    """Refused and failed requests in the job's log: a line for each, so many a minute."""

    LINES = 30

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._minute = 0
        self._num_lines = 0

    def add(self, line: str) -> None:
        """Write a line, unless this minute has had its share; then count it."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            if (num_left_out := self._num_lines - self.LINES) > 0:
                self._write(f"{num_left_out} further errors of that minute are not listed")
            self._minute, self._num_lines = minute, 0
        self._num_lines += 1
        if self._num_lines <= self.LINES:
            self._write(line.encode("utf-8", "backslashreplace").decode())


class ServiceState:
    """The endpoint's state as the HTTP server sees it."""

    def __init__(self, spec: ServeSpec, log: Callable[[str], None]) -> None:
        self.spec = spec
        self.errors = ErrorLog(log)
        self.figures = EndpointMetrics()
        self.state: State = "loading"
        self.loaded: ServingModel | ForwardingModel | None = None
        self.asked_at = time.monotonic()
        self._created = int(time.time())

    @property
    def ready(self) -> ServingModel | ForwardingModel | None:
        """Return the model if requests are accepted."""
        return self.loaded if self.state == "ready" else None

    @property
    def names(self) -> list[str]:
        """Return the names that clients may request: the model, then its adapters."""
        return [self.spec.served_name, *(each.name for each in self.spec.adapters)]

    def model_card(self, name: str) -> dict[str, Any]:
        """Return the served model, or one of its adapters, as ``/v1/models`` lists it."""
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "slipway",
        }
        if name != self.spec.served_name:
            card["parent"] = self.spec.served_name
        if self.loaded is not None:
            card["max_model_len"] = self.loaded.engine.limits.max_length
            card["capabilities"] = self._capabilities(self.loaded)
        return card

    def _capabilities(self, loaded: ServingModel | ForwardingModel) -> list[str]:
        """Return what requests can ask of the model; tools: calls that it may choose."""
        if isinstance(loaded, ForwardingModel):
            has_tools = not loaded.calls_refusal
        else:
            has_tools = call_form(loaded.template) is not None
        options = ENGINES[self.spec.engine].request_options
        is_held = isinstance(loaded, ForwardingModel) or not loaded.constraint_refusal
        if isinstance(loaded, ForwardingModel) and not loaded.ranking_refusal:
            return ["rerank"]
        found = {"chat": True, "completions": True, "logprobs": True, "tools": has_tools}
        found["response_format"] = "response_format" in options and is_held
        found["embeddings"] = isinstance(loaded, EmbeddingModel) and not loaded.embedding_refusal
        return [name for name, has_it in found.items() if has_it]

    def open(self, loaded: ServingModel | ForwardingModel) -> None:
        """Accept requests from now on, unless the endpoint was stopped meanwhile."""
        self.loaded = loaded
        self.touch()
        if self.state == "loading":
            self.state = "ready"

    def refuse_requests(self) -> None:
        """Refuse requests until another engine is loaded, unless the endpoint is ending."""
        self.loaded = None
        if self.state == "ready":
            self.state = "loading"

    def touch(self) -> None:
        """Record that a request arrived."""
        self.asked_at = time.monotonic()


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
MAX_BODY_BYTES = 4 * 1024**2
MAX_BODIES_BYTES = 256 * 1024**2  # of all bodies that are being received
BODY_SECONDS = 60.0  # for a whole body
LARGE_BODY_BYTES = 64 * 1024  # parsed in a thread, so that others' answers go on
LOADING_SECONDS, FULL_SECONDS = 5, 1  # Retry-After while the model loads, and with a full queue
JSON, PLAIN = "application/json", "text/plain; version=0.0.4; charset=utf-8"
LOGGED_CHARACTERS = 300  # of an error's message
METHOD_NOT_ALLOWED = 405
CLIENT_GONE = 499  # nginx's number; nobody reads it
CLOSE = {"Connection": "close"}  # the rest of a body is not read
Parsed = TypeVar("Parsed")
Handler = Callable[[Request], Awaitable[Response]]


class OpenAIServer(Starlette):
    """The application of one endpoint."""

    def __init__(self, service: ServiceState) -> None:
        self.service = service
        refused = dict.fromkeys(
            (HTTPException, RequestError, QueueFullError, EngineEndedError), self._refuse
        )
        self._bodies_bytes = 0
        self._parser = ThreadPoolExecutor(1, "parser")  # one: pure Python work gains from no more
        super().__init__(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
                *(
                    Route(path, self._guarded(self._answer), methods=["POST"])
                    for path in (COMPLETIONS, CHAT, *TRANSLATED)
                ),
                Route(EMBEDDINGS, self._guarded(self._embed), methods=["POST"]),
                Route(RERANK, self._guarded(self._rerank), methods=["POST"]),
                Route(COUNT_TOKENS, self._guarded(self._count_tokens), methods=["POST"]),
            ],
            exception_handlers={**refused, ClientDisconnect: _nobody_reads},
            # Around Starlette's own, which would answer an unforeseen error and raise it again.
            middleware=[Middleware(ExceptionMiddleware, handlers={Exception: self._refuse})],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a slash at the end of its address changes nothing."""
        if scope["type"] == "http":
            scope["path"] = "/" + scope["path"].strip("/")
        await super().__call__(scope, receive, send)

    # Errors: every one is answered in OpenAI's form, counted and logged

    async def _refuse(self, request: Request, fault: Exception) -> Response:
        if isinstance(fault, HTTPException) and fault.status_code == METHOD_NOT_ALLOWED:
            methods = sorted((fault.headers or {})["Allow"].split(", "))
            fault.headers = {"Allow": ", ".join([*methods, "OPTIONS"])}
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=fault.headers)
        error, translated = self._recorded(request.scope, fault), _translated(request.scope)
        document = translated.error_document(error) if translated else error.document
        return _json(document, error.status, error.headers)

    def _error_event(self, scope: Scope, fault: Exception) -> bytes:
        error, translated = self._recorded(scope, fault), _translated(scope)
        return translated.error_event(error) if translated else server_sent_event(error.document)

    def _recorded(self, scope: Scope, fault: Exception) -> RequestError:
        """Return an error as clients see it, counted and logged."""
        error, details = self._request_error(scope, fault), ""
        if error.code == "internal_error":
            details = "".join(traceback.format_exception(fault))
        self.service.figures.count("failed" if error.is_server_error else "refused")
        message = str(error)[:LOGGED_CHARACTERS]
        line = f"{scope['method']} {scope['path'][:100]}: {error.status} {message}"
        line = "".join(each if each.isprintable() else " " for each in line)  # of clients' making
        self.service.errors.add(f"{line}\n{details}".strip())
        return error

    def _request_error(self, scope: Scope, fault: Exception) -> RequestError:
        match fault:
            case RequestError():
                return fault
            case QueueFullError():
                message, again = "Too many requests wait already; try again shortly.", FULL_SECONDS
                return RequestError(429, message, code="queue_full", headers=retry_after(again))
            case EngineEndedError():
                return RequestError(503, "The endpoint is ending.", code="draining")
            case HTTPException(headers={"Allow": allow}):
                message = f"{scope['path'][:200]} takes {allow}, not {scope['method'][:20]}."
                code = "method_not_allowed"
                return RequestError(405, message, code=code, headers=fault.headers)
            case HTTPException():
                paths = ", ".join(each.path for each in self.routes if isinstance(each, Route))
                message = f"There is no {scope['path'][:200]} here; there is {paths}."
                return RequestError(fault.status_code, message, code="not_found")
            case _:
                message = f"The endpoint failed ({type(fault).__name__}); see the job's log."
                return RequestError(500, message, code="internal_error")

    # Checks before a request is read

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler that checks the key first."""

        async def checked(request: Request) -> Response:
            headers = request.headers  # x-api-key is how Anthropic's clients send it
            self._check_key(headers.get("authorization") or headers.get("x-api-key", ""))
            return await handler(request)

        return checked

    def _check_key(self, header: str) -> None:
        hashes = self.service.spec.key_hashes
        if not hashes:
            return
        scheme, *key = header.split(None, 1) or [""]  # a scheme has no case
        digest = key_hash((key[0] if key and scheme.lower() == "bearer" else header).strip())
        # compare with every hash: constant time
        if sum(hmac.compare_digest(digest, each) for each in hashes) == 0:
            message = "This endpoint needs its key: Authorization: Bearer KEY."
            challenge = {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, message, code="invalid_api_key", headers=challenge)

    def _accepting(self) -> ServingModel | ForwardingModel:
        """Return the model if it is there and has room for a request.

        Raises:
            RequestError: the endpoint is loading or ending.
            QueueFullError: the queue is full.
        """
        ready = self.service.ready
        if ready is None:
            message = f"The endpoint is {self.service.state}; try again in a few seconds."
            headers = retry_after(LOADING_SECONDS)
            raise RequestError(503, message, code=self.service.state, headers=headers)
        ready.engine.admit(1)
        return ready

    def _adapter_of(self, name: str) -> int:
        """Return the index of the adapter with this name, or ``NO_ADAPTER`` for the base model.

        Raises:
            RequestError: no served model or adapter has this name.
        """
        served, *adapters = self.service.names
        if name == served:
            return NO_ADAPTER
        if name not in adapters:
            also = f", with adapters {', '.join(adapters)}"[:500] if adapters else ""
            message = f"The model {name[:120]!r} is not served here; {served!r} is{also}."
            raise RequestError(404, message, param="model", code="model_not_found")
        return adapters.index(name)

    # Handlers

    async def _health(self, _request: Request) -> Response:
        state = self.service.state
        return _json({"status": state}, 200 if state == "ready" else 503)

    async def _metrics(self, _request: Request) -> Response:
        return Response(self.service.figures.prometheus(), media_type=PLAIN)

    async def _models(self, _request: Request) -> Response:
        cards = [self.service.model_card(each) for each in self.service.names]
        return _json({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._adapter_of(name)
        return _json(self.service.model_card(name))

    async def _answer(self, request: Request) -> Response:
        check_stated_body(request)
        ready = self._accepting()
        body = await self._body(request)
        is_counted = request.headers.get(USAGE_HEADER, "").strip() == "1"
        answer = await self._parsed(ready, request.scope["path"], body, is_counted=is_counted)
        self.service.touch()
        if not answer.is_streamed:
            document = await unless_disconnected(request, answer.whole())
            headers = {USAGE_HEADER: answer.used.words} if is_counted else None
            return Response(document, headers=headers, media_type=JSON)
        events = _counted(answer) if is_counted else answer.events()
        error_event = partial(self._error_event, request.scope)
        return await EventStream.begun(request, events, error_event)

    async def _count_tokens(self, request: Request) -> Response:
        check_stated_body(request)
        ready = self._accepting()
        body = await self._body(request)
        asked = await self._in_thread(parse_count, body)
        self._adapter_of(asked.model)
        self.service.touch()
        if isinstance(ready, ForwardingModel):
            count = await ready.count_tokens(asked.document)
        else:
            parse = partial(parse_chat, engine=self.service.spec.engine)
            chat = await self._in_thread(parse, asked.chat_body)
            tool_offer(ready, chat, self.service.spec.engine)
            count = len(await self._prompt_of(ready, chat))
        return _json({"input_tokens": count})

    async def _embed(self, request: Request) -> Response:
        check_stated_body(request)
        ready = self._accepting()
        asked = await self._in_thread(parse_embedding, await self._body(request))
        if self._adapter_of(asked.model) != NO_ADAPTER:
            message = f"{asked.model[:120]!r} is an adapter; the model itself gives embeddings"
            raise unsupported("model", message)
        if not isinstance(ready, EmbeddingModel):
            own = ENGINES[OWN].title
            raise unsupported("model", f"no embeddings of this engine; serve the model with {own}")
        if ready.embedding_refusal:
            raise unsupported("model", f"{asked.model[:120]!r}: {ready.embedding_refusal}")
        ready.engine.admit(len(asked.prompts))
        texts = [await ready.prompt_ids(each) for each in asked.prompts]
        check_texts(texts, ready.engine.limits.max_length)
        self.service.touch()
        embeddings = await unless_disconnected(request, embeddings_of(ready, texts))
        tokens = sum(map(len, texts))
        document = await asyncio.to_thread(asked.document, embeddings, tokens)
        self.service.figures.count("requests")
        is_counted = request.headers.get(USAGE_HEADER, "").strip() == "1"
        used = {USAGE_HEADER: TokensUsed(tokens, 0, 0).words} if is_counted else None
        return _json(document, headers=used)

    async def _rerank(self, request: Request) -> Response:
        check_stated_body(request)
        ready, engine = self._accepting(), ENGINES[self.service.spec.engine]
        asked = await self._in_thread(parse_rerank, await self._body(request))
        if self._adapter_of(asked.model) != NO_ADAPTER:
            message = f"{asked.model[:120]!r} is an adapter; the model itself ranks documents"
            raise unsupported("model", message)
        if not isinstance(ready, ForwardingModel):
            raise unsupported("model", unranked(engine))
        if ready.ranking_refusal:
            raise unsupported("model", ready.ranking_refusal)
        self.service.touch()
        ranked = await unless_disconnected(request, ready.rank(asked.model, asked.engine_body))
        is_counted = request.headers.get(USAGE_HEADER, "").strip() == "1"
        document = asked.document(ranked)
        tokens = TokensUsed(document["usage"]["prompt_tokens"])
        return _json(document, headers={USAGE_HEADER: tokens.words} if is_counted else None)

    async def _body(self, request: Request) -> bytes:
        """Return the whole request body.

        Raises:
            RequestError: the body is too large or too slow, or other bodies take too much memory.
            ClientDisconnect: the client disconnected while it sent the body.
        """
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = bytearray()
                async for part in request.stream():
                    body += part
                    size += len(part)
                    self._bodies_bytes += len(part)
                    if size > MAX_BODY_BYTES:
                        raise _too_large()
                    if self._bodies_bytes > MAX_BODIES_BYTES:
                        raise _too_many_bodies()
        except TimeoutError:
            message = (
                f"The body did not arrive within {BODY_SECONDS:g} s ({size} bytes of it did); "
                "send it again over a faster connection."
            )
            raise RequestError(408, message, code="body_timeout", headers=CLOSE) from None
        finally:
            self._bodies_bytes -= size
        return bytes(body)

    async def _in_thread(self, parse: Callable[[bytes], Parsed], body: bytes) -> Parsed:
        """Return a parsed body; a large one is parsed in a thread."""
        if len(body) <= LARGE_BODY_BYTES:
            return parse(body)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parser, parse, body)

    async def _parsed(
        self,
        ready: ServingModel | ForwardingModel,
        path: str,
        body: bytes,
        *,
        is_counted: bool,
        shortens: bool = False,
    ) -> Answer:
        """Return a request that is parsed and not yet sent to the engine."""
        if path in TRANSLATED:
            asked = await self._in_thread(partial(parse_translated, path), body)
            try:
                chat = await self._parsed(
                    ready, CHAT, asked.chat_body, is_counted=is_counted, shortens=asked.SHORTENS
                )
            except RequestError as error:
                raise asked.renamed(error) from None
            return TranslatedAnswer(asked, chat)
        if isinstance(ready, ForwardingModel):
            if not ready.ranking_refusal:
                raise unsupported("model", "the engine ranks documents here, and writes no text")
            parse = partial(ready.forwarded_request, path, is_counted=is_counted)
            forwarded = await self._in_thread(parse, body)
            self._adapter_of(forwarded.model)
            return forwarded
        prepare = self._chat if path == CHAT else self._completion
        order = await prepare(ready, body)
        order.shortens = shortens
        return RequestAnswers(ready, order)

    async def _completion(self, ready: ServingModel, body: bytes) -> ParsedRequest:
        parse = partial(parse_completion, engine=self.service.spec.engine)
        request = await self._in_thread(parse, body)
        adapter = self._adapter_of(request.model)
        ready.engine.admit(len(request.prompts) * request.num_choices)  # before any is tokenised
        held = await completion_constraint(ready, request, request)
        prompts = [await ready.prompt_ids(each) for each in request.prompts]
        form = CompletionFormat(
            request.model, ready.token_text, has_logprobs=request.logprobs is not None
        )
        limit = request.max_tokens or COMPLETION_TOKENS
        fields = CommonFields(limit, request.logprobs, "prompt", adapter, None, held)
        return ParsedRequest(request, prompts, form, fields)

    async def _chat(self, ready: ServingModel, body: bytes) -> ParsedRequest:
        parse = partial(parse_chat, engine=self.service.spec.engine)
        request = await self._in_thread(parse, body)
        adapter = self._adapter_of(request.model)
        ready.engine.admit(request.num_choices)
        calls = tool_offer(ready, request, self.service.spec.engine)
        held = await constraint_of(ready, request, calls)
        prompt = await self._prompt_of(ready, request)
        form = ChatFormat(request.model, ready.token_text, has_logprobs=bool(request.logprobs))
        top = (request.top_logprobs or 0) if request.logprobs else None
        limit = request.max_completion_tokens or request.max_tokens
        return ParsedRequest(
            request, [prompt], form, CommonFields(limit, top, "messages", adapter, calls, held)
        )

    async def _prompt_of(self, ready: ServingModel, request: ChatRequest) -> list[int]:
        """Return the tokens of a conversation, with the tools on offer.

        Raises:
            RequestError: the chat template rejects the messages.
        """
        try:
            turns = [each.plain for each in request.messages]
            return await ready.chat_ids(turns, request.offered or None)
        except TemplateRefusedError as refusal:
            message = f"The model's chat template refuses these messages: {refusal}"
            raise RequestError(400, message, param="messages") from None


async def embeddings_of(
    ready: EmbeddingModel, texts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the embedding of each text; a cancellation cancels those that are not computed.

    Raises:
        RequestError: the engine ended.
    """
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[list[float] | None]] = [loop.create_future() for _ in texts]

    def take(at: int, embedding: list[float] | None) -> None:
        if not waiting[at].done():
            waiting[at].set_result(embedding)

    def deliver(at: int, embedding: list[float] | None) -> None:
        with suppress(RuntimeError):  # the event loop has closed meanwhile
            loop.call_soon_threadsafe(take, at, embedding)

    pending = ready.submit_texts(texts, deliver)
    try:
        found = [await each for each in waiting]
    finally:
        ready.engine.cancel(pending)
    if any(each is None for each in found):
        raise RequestError(500, ENGINE_ENDED, code="engine_ended")
    return [each for each in found if each is not None]


async def _counted(answer: Answer) -> AsyncGenerator[bytes]:
    """Yield a streamed answer's events, each with the tokens so far in a comment after it."""
    async with aclosing(answer.events()) as events:
        async for event in events:
            yield event + answer.used.comment


def check_stated_body(request: Request) -> None:
    """Check what the headers say about a body, before it is read.

    Raises:
        RequestError: the body is too large, or compressed.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        message = f"Content-Encoding {encoding[:40]!r} is not read here; send the body as it is."
        raise RequestError(415, message, code="unsupported_encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()


def _too_large() -> RequestError:
    message = f"The body is larger than {MAX_BODY_BYTES} bytes."
    return RequestError(413, message, code="body_too_large")


def _too_many_bodies() -> RequestError:
    message = "The bodies that are being received here take too much memory; try again shortly."
    headers = {**retry_after(FULL_SECONDS), **CLOSE}
    return RequestError(503, message, code="too_many_bodies", headers=headers)


def _translated(scope: Scope) -> type[TranslatedRequest] | None:
    """Return the API of an address, or of one below it, if it has errors of its own form."""
    path = MESSAGES if scope["path"].startswith(f"{MESSAGES}/") else scope["path"]
    return TRANSLATED.get(path)


def _json(
    document: Document, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(document), status, headers, JSON)


async def _nobody_reads(_request: Request, _fault: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
