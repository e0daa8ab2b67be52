"""OpenAI's routes, and one conversation with a client."""

import asyncio
import hmac
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from runners.jobs.chat_template import TemplateRefusedError
from runners.jobs.serve.asgi import (
    COMPLETION_TOKENS,
    ClientGoneError,
    Document,
    Receive,
    RequestBody,
    RequestError,
    Response,
    Scope,
    Send,
    parse_chat,
    parse_completion,
    read_body,
    send_bytes,
    send_json,
    send_part,
    server_sent_event,
    start_stream,
    wait_for_disconnect,
)
from runners.jobs.serve.contract import (
    UNFINISHED,
    EngineEndedError,
    FinishReason,
    ForwardingModel,
    GenerationRequest,
    QueueFullError,
    Sampling,
    ServingModel,
    StreamChunk,
    TokenLogprob,
)
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobspec import ServeSpec
from runners.jobspec.serve import NO_ADAPTER, key_hash

# ---------------------------------------------------------------------------
# One HTTP request to an endpoint, from the parsed body to the end of its OpenAI response.
# ---------------------------------------------------------------------------


# OpenAI response documents: whole answers, stream chunks and logprobs of both APIs.


@dataclass
class AccumulatedAnswer:
    """The text, logprobs and token count of one answer so far."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    output_tokens: int = 0

    def add(self, chunk: StreamChunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason
        self.output_tokens = max(self.output_tokens, chunk.output_tokens)


def usage(prompt_tokens: int, output_tokens: int) -> Document:
    """Return the token counts of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


class ResponseFormat:
    """The response format of one API: documents, chunks and logprobs."""

    prefix = ""
    whole = ""
    chunk = ""

    def __init__(
        self, model: str, token_text: Callable[[int], str], *, has_logprobs: bool
    ) -> None:
        self.model = model
        self.token_text = token_text
        self.has_logprobs = has_logprobs
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def document(self, written: Sequence[AccumulatedAnswer], used: Document) -> Document:
        """Return the document of complete answers."""
        choices = [
            self._choice(index, self._message(each.text), each)
            for index, each in enumerate(written)
        ]
        return {**self._head(self.whole), "choices": choices, "usage": used}

    def opening_chunk(self, _index: int) -> Document | None:
        """Return the chunk before the first text, if the API has one."""
        return None

    def part(self, index: int, chunk: StreamChunk) -> Document:
        """Return the document of a stream chunk."""
        choice = self._choice(index, self._delta(chunk.text), chunk)
        return {**self._head(self.chunk), "choices": [choice]}

    def usage_chunk(self, used: Document) -> Document:
        """Return the chunk with the token counts."""
        return {**self._head(self.chunk), "choices": [], "usage": used}

    def _head(self, kind: str) -> Document:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _choice(
        self, index: int, text: Document, written: AccumulatedAnswer | StreamChunk
    ) -> Document:
        logprobs = self._logprobs(written.logprobs) if self.has_logprobs else None
        ending = {"logprobs": logprobs, "finish_reason": written.finish_reason}
        return {"index": index, **text, **ending}

    def _message(self, text: str) -> Document:
        """Return a whole text as this API has it."""
        raise NotImplementedError

    def _delta(self, text: str) -> Document:
        """Return a text's next part as this API has it."""
        raise NotImplementedError

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document:
        raise NotImplementedError


class CompletionFormat(ResponseFormat):
    """``/v1/completions``: plain text after a prompt."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def _message(self, text: str) -> Document:
        return {"text": text}

    _delta = _message

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document:
        return {
            "tokens": [self.token_text(each.choice.token) for each in logprobs],
            "token_logprobs": [each.choice.logprob for each in logprobs],
            "top_logprobs": [
                {self.token_text(token): logprob for token, logprob in each.choice.top}
                for each in logprobs
            ],
            "text_offset": [each.at for each in logprobs],
        }


class ChatFormat(ResponseFormat):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening_chunk(self, index: int) -> Document | None:
        """Return the chunk that states the assistant's role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head(self.chunk), "choices": [choice]}

    def _message(self, text: str) -> Document:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> Document:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document:
        content = [
            {
                **self._token_document(each.choice.token, each.choice.logprob),
                "top_logprobs": [self._token_document(*pair) for pair in each.choice.top],
            }
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token_document(self, token: int, logprob: float | None) -> Document:
        text = self.token_text(token)
        utf8_bytes = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": utf8_bytes}


RETRY_SECONDS = 1
STREAM_END = b"data: [DONE]\n\n"
ENGINE_ENDED = "The engine ended while it answered. See the job's page for the reason."
Prompts = Sequence[Sequence[int]]


class CommonFields(NamedTuple):
    """The fields that both APIs have under different names."""

    max_tokens: int | None
    top_logprobs: int | None
    param: str  # name of the request field with the prompts
    adapter: int = NO_ADAPTER


class ParsedRequest:
    """A parsed request: its prompts as token ids, and how it is answered."""

    def __init__(
        self, body: RequestBody, prompts: Prompts, form: ResponseFormat, fields: CommonFields
    ) -> None:
        self.body = body
        self.prompts = prompts
        self.form = form
        self.max_tokens, self.top_logprobs, self.param, self.adapter = fields

    def sampling(self, prompt: Sequence[int], choice: int, max_length: int) -> Sampling:
        """Return the sampling parameters of one choice.

        Raises:
            RequestError: prompt and answer exceed the context length.
        """
        room = max_length - len(prompt)
        max_tokens = self.max_tokens if self.max_tokens is not None else max(1, room)
        if not prompt:
            raise RequestError(400, f"{self.param} holds no token", param=self.param)
        if max_tokens > room:
            message = (
                f"This model's maximum context length is {max_length} tokens. However, you "
                f"requested {len(prompt) + max_tokens} tokens ({len(prompt)} in the {self.param}, "
                f"{max_tokens} in the completion). Please reduce the length of either."
            )
            raise RequestError(400, message, param=self.param, code="context_length_exceeded")
        body = self.body
        return Sampling(
            max_tokens,
            1.0 if body.temperature is None else body.temperature,
            1.0 if body.top_p is None else body.top_p,
            None if body.seed is None else body.seed + choice,
            body.stops,
            self.top_logprobs,
            body.ignore_eos,
            max(0, body.top_k or 0),
            body.min_p or 0.0,
            body.repetition_penalty or 1.0,
            body.presence_penalty or 0.0,
            body.frequency_penalty or 0.0,
        )


class RequestAnswers:
    """The answers of one request, until they are complete or the client disconnects."""

    def __init__(self, ready: ServingModel, order: ParsedRequest) -> None:
        self.ready = ready
        self.order = order
        self.pieces: asyncio.Queue[tuple[int, StreamChunk]] = asyncio.Queue()
        self.requests = self._generation_requests()
        self.written = [AccumulatedAnswer() for _ in self.requests]

    def _generation_requests(self) -> list[GenerationRequest]:
        loop = asyncio.get_running_loop()
        order, longest = self.order, self.ready.engine.limits.max_length
        requests: list[GenerationRequest] = []
        for prompt in order.prompts:
            for choice in range(order.body.num_choices):
                deliver = partial(self._deliver, loop, len(requests))
                sampling = order.sampling(prompt, choice, longest)
                requests.append(GenerationRequest(prompt, sampling, deliver, order.adapter))
        return requests

    def _deliver(self, loop: asyncio.AbstractEventLoop, index: int, chunk: StreamChunk) -> None:
        with suppress(RuntimeError):  # the event loop has closed meanwhile
            loop.call_soon_threadsafe(self.pieces.put_nowait, (index, chunk))

    async def run(self, receive: Receive, send: Send) -> None:
        """Generate and send the answers; cancel unfinished ones when the client disconnects."""
        try:
            replies = self.ready.submit(self.requests)
        except QueueFullError:
            message = "Too many requests wait already; try again shortly."
            raise RequestError(
                429, message, code="queue_full", retry_after_seconds=RETRY_SECONDS
            ) from None
        except EngineEndedError:
            raise RequestError(503, "The endpoint is ending.", code="draining") from None
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            async with aclosing(self._chunks_until(disconnect)) as chunks:
                await (self._stream if self.order.body.stream else self._send_whole)(chunks, send)
        finally:
            disconnect.cancel()
            self.ready.engine.cancel(
                [
                    reply
                    for reply, written in zip(replies, self.written, strict=True)
                    if written.finish_reason is None
                ]
            )

    async def _chunks_until(
        self, disconnect: asyncio.Future[None]
    ) -> AsyncGenerator[tuple[int, StreamChunk]]:
        """Yield chunks until every answer is complete.

        Raises:
            ClientGoneError: the client has disconnected.
        """
        while any(each.finish_reason is None for each in self.written):
            next_chunk = asyncio.ensure_future(self.pieces.get())
            await asyncio.wait((next_chunk, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not next_chunk.done():
                next_chunk.cancel()
                raise ClientGoneError
            index, chunk = next_chunk.result()
            self.written[index].add(chunk)
            yield index, chunk

    async def _send_whole(
        self, chunks: AsyncIterator[tuple[int, StreamChunk]], send: Send
    ) -> None:
        async for _, chunk in chunks:
            if chunk.finish_reason == "error":
                raise RequestError(500, ENGINE_ENDED, code="engine_ended")
        await send_json(send, 200, self.order.form.document(self.written, self._used()))

    async def _stream(self, chunks: AsyncIterator[tuple[int, StreamChunk]], send: Send) -> None:
        form = self.order.form
        await start_stream(send)
        for index in range(len(self.requests)):
            if opening := form.opening_chunk(index):
                await self._send_chunk(send, opening)
        async for index, chunk in chunks:
            if chunk.finish_reason == "error":
                raise RequestError(500, ENGINE_ENDED, code="engine_ended")
            await self._send_chunk(send, form.part(index, chunk))
        if self.order.body.wants_usage:
            await send_part(send, server_sent_event(form.usage_chunk(self._used())))
        await send_part(send, STREAM_END, more=False)

    async def _send_chunk(self, send: Send, chunk: Document) -> None:
        body = self.order.body
        if body.wants_usage:
            chunk = {**chunk, "usage": self._used() if body.wants_continuous_usage else None}
        await send_part(send, server_sent_event(chunk))

    def _used(self) -> Document:
        written = sum(each.output_tokens for each in self.written)
        return usage(sum(map(len, self.order.prompts)), written)


# ---------------------------------------------------------------------------
# The ASGI application of an endpoint: state, routes, API keys and request handling.
# ---------------------------------------------------------------------------


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
        return card

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
LOADING_SECONDS = 5  # Retry-After while the model loads
PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
METHODS = {"GET": "GET, HEAD, OPTIONS", "POST": "POST, OPTIONS"}
LOGGED_CHARACTERS = 300  # of an error's message
Route = Callable[[Receive, Send], Awaitable[None]]
Prepare = Callable[[ServingModel, bytes], Awaitable[ParsedRequest]]


class OpenAIServer:
    """The ASGI application of one endpoint."""

    def __init__(self, service: ServiceState) -> None:
        self.service = service
        self._routes: dict[str, tuple[str, Route]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            COMPLETIONS: ("POST", partial(self._answer, COMPLETIONS, self._completion)),
            CHAT: ("POST", partial(self._answer, CHAT, self._chat)),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every error is answered in OpenAI's form, counted and logged."""
        if scope["type"] != "http":
            return
        response = Response(send, has_body=scope["method"] != "HEAD")
        try:
            await self._respond(scope, receive, response.send)
        except ClientGoneError:
            return
        except RequestError as error:
            self._record(scope, error)
            await response.end_with(error)
        except Exception as fault:  # noqa: BLE001 - no client is left without an answer
            message = f"The endpoint failed ({type(fault).__name__}); see the job's log."
            unforeseen = RequestError(500, message, code="internal_error")
            self._record(scope, unforeseen, "".join(traceback.format_exception(fault)))
            await response.end_with(unforeseen)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], "/" + scope["path"].strip("/")
        route = self._route(method, path)
        if method != "OPTIONS" and path != "/health":
            headers = dict(scope["headers"])
            self._check_key(headers.get(b"authorization", b"").decode("latin-1"))
            _check_encoding(headers.get(b"content-encoding", b"").decode("latin-1"))
        await route(receive, send)

    def _record(self, scope: Scope, error: RequestError, details: str = "") -> None:
        self.service.figures.count("failed" if error.is_server_error else "refused")
        said = str(error)[:LOGGED_CHARACTERS]
        line = f"{scope['method']} {scope['path'][:100]}: {error.status} {said}"
        line = "".join(each if each.isprintable() else " " for each in line)  # of clients' making
        self.service.errors.add(f"{line}\n{details}".strip())

    def _route(self, method: str, path: str) -> Route:
        name = path.removeprefix("/v1/models/")
        found = ("GET", partial(self._model, name)) if name != path else self._routes.get(path)
        if found is None:
            message = f"There is no {path[:200]} here; there is {', '.join(self._routes)}."
            raise RequestError(404, message, code="not_found")
        takes, route = found
        if method == "OPTIONS":
            return partial(_options, METHODS[takes])
        if method not in METHODS[takes].split(", "):
            message = f"{path[:200]} takes {takes}, not {method[:20]}."
            raise RequestError(405, message, code="method_not_allowed", allow=METHODS[takes])
        return route

    def _check_key(self, header: str) -> None:
        hashes = self.service.spec.key_hashes
        if not hashes:
            return
        scheme, *key = header.split(None, 1) or [""]  # a scheme has no case
        digest = key_hash((key[0] if key and scheme.lower() == "bearer" else header).strip())
        # compare with every hash: constant time
        if sum(hmac.compare_digest(digest, each) for each in hashes) == 0:
            message = "This endpoint needs its key: Authorization: Bearer KEY."
            raise RequestError(401, message, code="invalid_api_key")

    # Handlers

    async def _health(self, _receive: Receive, send: Send) -> None:
        state = self.service.state
        await send_json(send, 200 if state == "ready" else 503, {"status": state})

    async def _metrics(self, _receive: Receive, send: Send) -> None:
        text = self.service.figures.prometheus().encode()
        await send_bytes(send, 200, text, PLAIN)

    async def _models(self, _receive: Receive, send: Send) -> None:
        cards = [self.service.model_card(each) for each in self.service.names]
        await send_json(send, 200, {"object": "list", "data": cards})

    async def _model(self, name: str, _receive: Receive, send: Send) -> None:
        self._adapter_of(name)
        await send_json(send, 200, self.service.model_card(name))

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

    async def _answer(
        self,
        path: str,
        prepare: Prepare,
        receive: Receive,
        send: Send,
    ) -> None:
        body = await read_body(receive)
        ready = self.service.ready
        if ready is None:
            message = f"The endpoint is {self.service.state}; try again in a few seconds."
            wait = LOADING_SECONDS
            raise RequestError(503, message, code=self.service.state, retry_after_seconds=wait)
        if isinstance(ready, ForwardingModel):
            handing = ready.forwarded_request(path, body)
            self._adapter_of(handing.model)
            self.service.touch()
            await handing.run(receive, send)
            return
        order = await prepare(ready, body)
        self.service.touch()
        await RequestAnswers(ready, order).run(receive, send)

    async def _completion(self, ready: ServingModel, body: bytes) -> ParsedRequest:
        request = parse_completion(body)
        adapter = self._adapter_of(request.model)
        prompts = [await ready.prompt_ids(each) for each in request.prompts]
        form = CompletionFormat(
            request.model, ready.token_text, has_logprobs=request.logprobs is not None
        )
        limit = request.max_tokens or COMPLETION_TOKENS
        return ParsedRequest(
            request, prompts, form, CommonFields(limit, request.logprobs, "prompt", adapter)
        )

    async def _chat(self, ready: ServingModel, body: bytes) -> ParsedRequest:
        request = parse_chat(body)
        adapter = self._adapter_of(request.model)
        try:
            prompt = await ready.chat_ids([each.plain for each in request.messages])
        except TemplateRefusedError as refusal:
            message = f"The model's chat template refuses these messages: {refusal}"
            raise RequestError(400, message, param="messages") from None
        form = ChatFormat(request.model, ready.token_text, has_logprobs=bool(request.logprobs))
        top = (request.top_logprobs or 0) if request.logprobs else None
        limit = request.max_completion_tokens or request.max_tokens
        return ParsedRequest(
            request, [prompt], form, CommonFields(limit, top, "messages", adapter)
        )


async def _options(allow: str, _receive: Receive, send: Send) -> None:
    """Answer which methods an address takes."""
    headers = [(b"allow", allow.encode())]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send_part(send, b"", more=False)


def _check_encoding(encoding: str) -> None:
    """Check that a body is sent as it is.

    Raises:
        RequestError: it is compressed.
    """
    if encoding.strip().lower() not in {"", "identity"}:
        message = f"Content-Encoding {encoding[:40]!r} is not read here; send the body as it is."
        raise RequestError(415, message, code="unsupported_encoding")
