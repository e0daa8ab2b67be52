"""One HTTP request to an endpoint, from the parsed body to the end of its OpenAI response."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from runners.jobs.serve.asgi import (
    ClientGoneError,
    Document,
    Receive,
    Send,
    disconnected,
    event_of,
    send_json,
    send_part,
)
from runners.jobs.serve.contract import (
    UNFINISHED,
    EngineEndedError,
    FinishReason,
    GenerationRequest,
    QueueFullError,
    Ready,
    Sampling,
    StreamChunk,
    TokenLogprob,
)
from runners.jobs.serve.protocol import RequestBody, RequestError
from runners.jobspec.serve import NO_ADAPTER

# OpenAI response documents: whole answers, stream chunks and logprobs of both APIs.


@dataclass
class Written:
    """The text, logprobs and token count of one answer so far."""

    text: str = ""
    told: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    output_tokens: int = 0

    def add(self, piece: StreamChunk) -> None:
        """Append a chunk."""
        self.text += piece.text
        self.told += piece.logprobs
        self.finish_reason = piece.finish_reason
        self.output_tokens = max(self.output_tokens, piece.output_tokens)


def usage(prompt_tokens: int, output_tokens: int) -> Document:
    """Return the token counts of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


class Form:
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

    def document(self, written: Sequence[Written], used: Document) -> Document:
        """Return the document of complete answers."""
        choices = [self._choice(index, each) for index, each in enumerate(written)]
        return {**self._head(self.whole), "choices": choices, "usage": used}

    def opening(self, _index: int) -> Document | None:
        """Return the chunk before the first text, if the API has one."""
        return None

    def part(self, index: int, piece: StreamChunk) -> Document:
        """Return the document of a stream chunk."""
        return {**self._head(self.chunk), "choices": [self._part(index, piece)]}

    def closing(self, used: Document) -> Document:
        """Return the chunk with the token counts."""
        return {**self._head(self.chunk), "choices": [], "usage": used}

    def _head(self, kind: str) -> Document:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _choice(self, index: int, written: Written) -> Document:
        raise NotImplementedError

    def _part(self, index: int, chunk: StreamChunk) -> Document:
        raise NotImplementedError


class CompletionForm(Form):
    """``/v1/completions``: plain text after a prompt."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def _choice(self, index: int, written: Written) -> Document:
        return {
            "index": index,
            "text": written.text,
            "logprobs": self._logprobs(written.told),
            "finish_reason": written.finish_reason,
        }

    def _part(self, index: int, chunk: StreamChunk) -> Document:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document | None:
        if not self.has_logprobs:
            return None
        return {
            "tokens": [self.token_text(each.choice.token) for each in logprobs],
            "token_logprobs": [each.choice.logprob for each in logprobs],
            "top_logprobs": [
                {self.token_text(token): logprob for token, logprob in each.choice.top}
                for each in logprobs
            ],
            "text_offset": [each.at for each in logprobs],
        }


class ChatForm(Form):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int) -> Document | None:
        """Return the chunk that states the assistant's role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head(self.chunk), "choices": [choice]}

    def _choice(self, index: int, written: Written) -> Document:
        return {
            "index": index,
            "message": {"role": "assistant", "content": written.text, "refusal": None},
            "logprobs": self._logprobs(written.told),
            "finish_reason": written.finish_reason,
        }

    def _part(self, index: int, chunk: StreamChunk) -> Document:
        return {
            "index": index,
            "delta": {"content": chunk.text} if chunk.text else {},
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document | None:
        if not self.has_logprobs:
            return None
        return {"content": [self._logprob_document(each) for each in logprobs], "refusal": None}

    def _logprob_document(self, entry: TokenLogprob) -> Document:
        top = [self._token_document(token, logprob) for token, logprob in entry.choice.top]
        return {
            **self._token_document(entry.choice.token, entry.choice.logprob),
            "top_logprobs": top,
        }

    def _token_document(self, token: int, logprob: float | None) -> Document:
        text = self.token_text(token)
        utf8_bytes = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": utf8_bytes}


RETRY_SECONDS = 1
STREAM_END = b"data: [DONE]\n\n"
DEAD = "The engine ended while it answered. See the job's page for the reason."
Prompts = Sequence[Sequence[int]]


class Wanted(NamedTuple):
    """The fields that both APIs have under different names."""

    max_tokens: int | None
    top_logprobs: int | None
    param: str  # name of the request field with the prompts
    adapter: int = NO_ADAPTER


class Order:
    """A parsed request: its prompts as token ids, and how it is answered."""

    def __init__(self, asked: RequestBody, prompts: Prompts, form: Form, wanted: Wanted) -> None:
        self.asked = asked
        self.prompts = prompts
        self.form = form
        self.max_tokens, self.top_logprobs, self.param, self.adapter = wanted

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
        body = self.asked
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


class Conversation:
    """The answers of one request, until they are complete or the client disconnects."""

    def __init__(self, ready: Ready, order: Order) -> None:
        self.ready = ready
        self.order = order
        self.pieces: asyncio.Queue[tuple[int, StreamChunk]] = asyncio.Queue()
        self.wishes = self._generation_requests()
        self.written = [Written() for _ in self.wishes]

    def _generation_requests(self) -> list[GenerationRequest]:
        loop = asyncio.get_running_loop()
        order, longest = self.order, self.ready.engine.limits.max_length
        requests: list[GenerationRequest] = []
        for prompt in order.prompts:
            for choice in range(order.asked.num_choices):
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
            replies = self.ready.submit(self.wishes)
        except QueueFullError:
            message = "Too many requests wait already; try again shortly."
            raise RequestError(
                429, message, code="queue_full", retry_after_seconds=RETRY_SECONDS
            ) from None
        except EngineEndedError:
            raise RequestError(503, "The endpoint is ending.", code="draining") from None
        disconnect = asyncio.ensure_future(disconnected(receive))
        try:
            async with aclosing(self._chunks_until(disconnect)) as chunks:
                await (self._stream if self.order.asked.stream else self._whole)(chunks, send)
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

    async def _whole(self, chunks: AsyncIterator[tuple[int, StreamChunk]], send: Send) -> None:
        async for _, chunk in chunks:
            if chunk.finish_reason == "error":
                raise RequestError(500, DEAD, code="engine_ended")
        await send_json(send, 200, self.order.form.document(self.written, self._used()))

    async def _stream(self, chunks: AsyncIterator[tuple[int, StreamChunk]], send: Send) -> None:
        form = self.order.form
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index in range(len(self.wishes)):
            if opening := form.opening(index):
                await self._send_chunk(send, opening)
        async for index, chunk in chunks:
            if chunk.finish_reason == "error":
                error = RequestError(500, DEAD, code="engine_ended")
                await send_part(send, event_of(error.document))
                await send_part(send, b"", more=False)
                return
            await self._send_chunk(send, form.part(index, chunk))
        if self.order.asked.wants_usage:
            await send_part(send, event_of(form.closing(self._used())))
        await send_part(send, STREAM_END, more=False)

    async def _send_chunk(self, send: Send, chunk: Document) -> None:
        body = self.order.asked
        if body.wants_usage:
            chunk = {**chunk, "usage": self._used() if body.counts_on else None}
        await send_part(send, event_of(chunk))

    def _used(self) -> Document:
        written = sum(each.output_tokens for each in self.written)
        return usage(sum(map(len, self.order.prompts)), written)
