"""One request to Slipway's own engine or llama.cpp: its chunks, and its OpenAI response."""

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from runners.jobs.serve.constraints import Constraint
from runners.jobs.serve.contract import (
    UNFINISHED,
    FinishReason,
    GenerationRequest,
    Sampling,
    ServingModel,
    StreamChunk,
    TokenLogprob,
)
from runners.jobs.serve.event_stream import server_sent_event
from runners.jobs.serve.openai_requests import (
    ENGINE_ENDED,
    Document,
    RequestBody,
    RequestError,
    checked_token_ids,
)
from runners.jobs.serve.tool_calls import CallForm, CallReader, ToolCall
from runners.jobspec.serve import NO_ADAPTER
from runners.shared.event_streams import TokensUsed

# OpenAI response documents: whole answers, stream chunks and logprobs of both APIs.


@dataclass
class AccumulatedAnswer:
    """The text, logprobs and token count of one answer so far."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    stop_text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, chunk: StreamChunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        self.calls += chunk.calls
        self.finish_reason, self.stop_text = chunk.finish_reason, chunk.stop_text
        self.output_tokens = max(self.output_tokens, chunk.output_tokens)
        if chunk.cached_tokens is not None:
            self.cached_tokens = chunk.cached_tokens


def usage(used: TokensUsed, *, has_cached: bool) -> Document:
    """Return the token counts of a request, with the cached ones if the engine reports them."""
    counts: Document = {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
    }
    return counts | (
        {"prompt_tokens_details": {"cached_tokens": used.cached}} if has_cached else {}
    )


class ResponseFormat(ABC):
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
            self._choice(index, self._message(each), each) for index, each in enumerate(written)
        ]
        return {**self._head(self.whole), "choices": choices, "usage": used}

    def opening_chunk(self, _index: int) -> Document | None:
        """Return the chunk before the first text, if the API has one."""
        return None

    def parts(self, index: int, chunk: StreamChunk) -> Iterator[Document]:
        """Yield the documents of a stream chunk: the text, each call's name and arguments."""
        if chunk.calls:
            if chunk.text or chunk.logprobs:
                told = replace(chunk, calls=(), finish_reason=None, stop_text=None)
                yield self._part(index, self._delta(told.text), told)
            for each in self._call_deltas(chunk.calls):
                yield self._part(index, each, StreamChunk())
            if chunk.finish_reason is None:
                return
            chunk = replace(chunk, text="", logprobs=())
        yield self._part(index, self._delta(chunk.text), chunk)

    def _part(self, index: int, delta: Document, chunk: StreamChunk) -> Document:
        return {**self._head(self.chunk), "choices": [self._choice(index, delta, chunk)]}

    def usage_chunk(self, used: Document) -> Document:
        """Return the chunk with the token counts."""
        return {**self._head(self.chunk), "choices": [], "usage": used}

    def _head(self, kind: str) -> Document:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _choice(
        self, index: int, text: Document, written: AccumulatedAnswer | StreamChunk
    ) -> Document:
        logprobs = self._logprobs(written.logprobs) if self.has_logprobs else None
        ending: Document = {"logprobs": logprobs, "finish_reason": written.finish_reason}
        if written.stop_text is not None:
            ending["stop_reason"] = written.stop_text  # as in vLLM
        return {"index": index, **text, **ending}

    def _call_deltas(self, _calls: Sequence[ToolCall]) -> Iterator[Document]:
        """Yield the parts of calls as this API has them, if it has calls."""
        yield from ()

    @abstractmethod
    def _message(self, written: AccumulatedAnswer) -> Document:
        """Return a whole answer as this API has it."""

    @abstractmethod
    def _delta(self, text: str) -> Document:
        """Return a text's next part as this API has it."""

    @abstractmethod
    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document:
        """Return the log probabilities of tokens as this API has them."""


class CompletionFormat(ResponseFormat):
    """``/v1/completions``: plain text after a prompt."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def _message(self, written: AccumulatedAnswer) -> Document:
        return {"text": written.text}

    def _delta(self, text: str) -> Document:
        return {"text": text}

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

    def _message(self, written: AccumulatedAnswer) -> Document:
        message: Document = {"role": "assistant", "content": written.text, "refusal": None}
        if written.calls:
            calls = [_call(each, each.arguments) for each in written.calls]
            message |= {"content": written.text or None, "tool_calls": calls}
        return {"message": message}

    def _delta(self, text: str) -> Document:
        return {"delta": {"content": text} if text else {}}

    def _call_deltas(self, calls: Sequence[ToolCall]) -> Iterator[Document]:
        for each in calls:
            named = {"index": each.at, **_call(each, "")}
            more = {"index": each.at, "function": {"arguments": each.arguments}}
            yield {"delta": {"tool_calls": [named]}}
            yield {"delta": {"tool_calls": [more]}}

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


def _call(call: ToolCall, arguments: str) -> Document:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


STREAM_END = b"data: [DONE]\n\n"
Prompts = Sequence[Sequence[int]]


class CommonFields(NamedTuple):
    """The fields that both APIs have under different names."""

    max_tokens: int | None
    top_logprobs: int | None
    param: str  # name of the request field with the prompts
    adapter: int = NO_ADAPTER
    calls: "ToolOffer | None" = None  # if the model may call tools
    constraint: Constraint | None = None  # what the answer is held to


class ToolOffer(NamedTuple):
    """The tools that an answer may call, and how the model writes its calls."""

    form: CallForm
    names: frozenset[str]
    is_parallel: bool

    def reader(self) -> CallReader:
        """Return a reader of one answer."""
        return CallReader(self.form, self.names, is_parallel=self.is_parallel)


class ParsedRequest:
    """A parsed request: its prompts as token ids, and how it is answered."""

    def __init__(
        self, body: RequestBody, prompts: Prompts, form: ResponseFormat, fields: CommonFields
    ) -> None:
        self.body = body
        self.prompts = prompts
        self.form = form
        self.max_tokens, self.top_logprobs, self.param, self.adapter, *_ = fields
        self.calls, self.constraint = fields.calls, fields.constraint
        self.shortens = False  # a limit beyond the context is one at its end

    def sampling(self, prompt: Sequence[int], choice: int, max_length: int) -> Sampling:
        """Return the sampling parameters of one choice.

        Raises:
            RequestError: prompt and answer exceed the context length.
        """
        room = max_length - len(prompt)
        max_tokens = self.max_tokens if self.max_tokens is not None else max(1, room)
        if not prompt:
            raise RequestError(400, f"{self.param} holds no token", param=self.param)
        if self.shortens and room >= 1:
            max_tokens = min(max_tokens, room)
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
            tuple((body.logit_bias or {}).items()),
            self.calls.form.special if self.calls else (),
            self.constraint,
        )


def _with_calls(reader: CallReader, chunk: StreamChunk) -> StreamChunk:
    """Return a chunk with the calls that are complete, and without their text."""
    (text, calls), reason = reader.add(chunk.text), chunk.finish_reason
    if reason is not None:
        rest = reader.finish()
        text, calls = text + rest.content, (*calls, *rest.calls)
    if reason == "stop" and reader.num_calls:
        reason = "tool_calls"
    return replace(chunk, text=text, calls=calls, finish_reason=reason)


class RequestAnswers:
    """The answers of one request, until they are complete or the client disconnects."""

    def __init__(self, ready: ServingModel, order: ParsedRequest) -> None:
        self.ready = ready
        self.order = order
        self.pieces: asyncio.Queue[tuple[int, StreamChunk]] = asyncio.Queue()
        self.requests = self._generation_requests()
        self.written = [AccumulatedAnswer() for _ in self.requests]
        self._readers = [order.calls.reader() if order.calls else None for _ in self.requests]

    @property
    def model(self) -> str:
        """Return the model name in the request."""
        return self.order.body.model

    @property
    def is_streamed(self) -> bool:
        """Return whether the client wants events."""
        return bool(self.order.body.stream)

    def _generation_requests(self) -> list[GenerationRequest]:
        loop = asyncio.get_running_loop()
        order, longest = self.order, self.ready.engine.limits.max_length
        requests: list[GenerationRequest] = []
        checked_token_ids(order.body.logit_bias or (), self.ready.vocabulary, "logit_bias")
        for prompt in order.prompts:
            for choice in range(order.body.num_choices):
                deliver = partial(self._deliver, loop, len(requests))
                sampling = order.sampling(prompt, choice, longest)
                requests.append(GenerationRequest(prompt, sampling, deliver, order.adapter))
        return requests

    def _deliver(self, loop: asyncio.AbstractEventLoop, index: int, chunk: StreamChunk) -> None:
        with suppress(RuntimeError):  # the event loop has closed meanwhile
            loop.call_soon_threadsafe(self.pieces.put_nowait, (index, chunk))

    async def whole(self) -> bytes:
        """Return the document of the complete answers; see ``Answer.whole``."""
        with self._submitted():
            async for _ in self._chunks():
                pass
        return json.dumps(self.order.form.document(self.written, self._used())).encode()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the answers' events, then the token counts if wanted; see ``Answer.events``."""
        form = self.order.form
        with self._submitted():
            for index in range(len(self.requests)):
                if opening := form.opening_chunk(index):
                    yield self._event(opening)
            async for index, chunk in self._chunks():
                for part in form.parts(index, chunk):
                    yield self._event(part)
        if self.order.body.wants_usage:
            yield server_sent_event(form.usage_chunk(self._used()))
        yield STREAM_END

    @contextmanager
    def _submitted(self) -> Iterator[None]:
        """Queue the answers; cancel those that are not complete at the end of the block."""
        replies = self.ready.submit(self.requests)
        try:
            yield
        finally:
            self.ready.engine.cancel(
                [
                    reply
                    for reply, written in zip(replies, self.written, strict=True)
                    if written.finish_reason is None
                ]
            )

    async def _chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        while any(each.finish_reason is None for each in self.written):
            index, chunk = await self.pieces.get()
            if (reader := self._readers[index]) is not None:
                chunk = _with_calls(reader, chunk)
            self.written[index].add(chunk)
            if chunk.finish_reason == "error":
                raise RequestError(500, ENGINE_ENDED, code="engine_ended")
            yield index, chunk

    def _event(self, chunk: Document) -> bytes:
        body = self.order.body
        if body.wants_usage:
            chunk = {**chunk, "usage": self._used() if body.wants_continuous_usage else None}
        return server_sent_event(chunk)

    @property
    def used(self) -> TokensUsed:
        """Return the tokens so far; a prompt counts once, however many answers it has."""
        written = sum(each.output_tokens for each in self.written)
        cached = sum(each.cached_tokens or 0 for each in self._first_answers)
        return TokensUsed(sum(map(len, self.order.prompts)), cached, written)

    @property
    def _first_answers(self) -> Sequence[AccumulatedAnswer]:
        """Return the first answer of each prompt; later ones find the prompt in the cache."""
        return self.written[:: self.order.body.num_choices]

    def _used(self) -> Document:
        has_cached = any(each.cached_tokens is not None for each in self._first_answers)
        return usage(self.used, has_cached=has_cached)
