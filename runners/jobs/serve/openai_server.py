"""OpenAI's routes, and one conversation with a client."""

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from runners.jobs.serve.asgi import (
    COMPLETION_TOKENS,
    ClientGoneError,
    Document,
    Receive,
    RequestBody,
    RequestError,
    Scope,
    Send,
    parse_chat,
    parse_completion,
    read_body,
    send_bytes,
    send_error,
    send_json,
    send_part,
    server_sent_event,
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
    TemplateRefusedError,
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
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index in range(len(self.requests)):
            if opening := form.opening_chunk(index):
                await self._send_chunk(send, opening)
        async for index, chunk in chunks:
            if chunk.finish_reason == "error":
                error = RequestError(500, ENGINE_ENDED, code="engine_ended")
                await send_part(send, server_sent_event(error.document))
                await send_part(send, b"", more=False)
                return
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


class ServiceState:
    """The endpoint's state as the HTTP server sees it."""

    def __init__(self, spec: ServeSpec) -> None:
        self.spec = spec
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
Route = Callable[[Receive, Send], Awaitable[None]]
Prepare = Callable[[ServingModel, bytes], Awaitable[ParsedRequest]]


class OpenAIServer:
    """The ASGI application of one endpoint."""

    def __init__(self, service: ServiceState) -> None:
        self.service = service
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", COMPLETIONS): partial(self._answer, COMPLETIONS, self._completion),
            ("POST", CHAT): partial(self._answer, CHAT, self._chat),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            route = self._route(scope["method"], scope["path"])
            if scope["path"] != "/health":
                self._check_key(scope["headers"])
            await route(receive, send)
        except RequestError as error:
            self.service.figures.count("failed" if error.is_server_error else "refused")
            await send_error(send, error)
        except ClientGoneError:
            return

    def _route(self, method: str, path: str) -> Route:
        if route := self._routes.get((method, path)):
            return route
        if path.startswith("/v1/models/") and method == "GET":
            return partial(self._model, path.removeprefix("/v1/models/"))
        if methods := [each for each, where in self._routes if where == path]:
            raise RequestError(405, f"{path} takes {methods[0]}, not {method}.")
        raise RequestError(404, f"There is no {path} here.", code="not_found")

    def _check_key(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        hashes = self.service.spec.key_hashes
        if not hashes:
            return
        header = dict(headers).get(b"authorization", b"").decode("latin-1")
        digest = key_hash(header.removeprefix("Bearer ").strip())
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
