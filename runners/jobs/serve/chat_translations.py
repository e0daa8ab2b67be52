"""OpenAI's Responses and Anthropic's Messages API, translated to chat completions and back.

Both carry text; every engine answers them as it answers a chat completion. Nothing is stored.
Sources: the types of the packages openai 3.54.0 (``openai/types/responses``) and anthropic 2.14.0
(``anthropic/types``).
"""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from runners.jobs.serve.contract import Answer
from runners.jobs.serve.event_stream import server_sent_event
from runners.jobs.serve.openai_requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    ClientFields,
    Document,
    Ignored,
    RequestError,
    Stop,
    TextPart,
    TextParts,
    checked,
    is_neutral,
    read_document,
    unsupported,
)
from runners.shared.event_streams import TokensUsed

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
CHAT_DATA = b"data: {"
WAY_OUT = "leave it out, or use /v1/chat/completions"
Event = tuple[str, Document]  # name and data, which repeats the name as its type


class ChatChunk(NamedTuple):
    """What a chunk of a chat completion adds, and the token counts so far."""

    text: str
    finish_reason: str | None
    usage: Document
    stop_text: str | None = None  # the stop string that ended the answer


class TranslatedRequest(ClientFields, ABC):
    """A request of another API."""

    # Fields of other kinds of content: values without effect, which are accepted.
    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]]

    model: str
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    service_tier: Ignored = None
    metadata: Ignored = None

    @property
    @abstractmethod
    def chat(self) -> Document:
        """Return the conversation and the limits as fields of a chat completion."""

    @abstractmethod
    def document(self, chat: Document) -> Document:
        """Return the API's document of a whole chat completion."""

    @abstractmethod
    def events(self, chunks: AsyncIterator[ChatChunk]) -> AsyncGenerator[Event]:
        """Yield the API's events of a streamed chat completion."""

    @classmethod
    @abstractmethod
    def error_document(cls, error: RequestError) -> Document:
        """Return the body of an error."""

    @classmethod
    def error_event(cls, error: RequestError) -> bytes:
        """Return the event of an error that ends a stream."""
        return server_sent_event({"type": "error", **cls.error_document(error)}, "error")

    @property
    def chat_body(self) -> bytes:
        """Return the body of the chat completion that answers this request."""
        fields = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            **self.chat,
        }
        if self.stream:
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return json.dumps(
            {name: each for name, each in fields.items() if each is not None}
        ).encode()


class TranslatedAnswer:
    """A chat completion in the form of another API."""

    def __init__(self, request: TranslatedRequest, chat: Answer) -> None:
        self._request = request
        self._chat = chat
        self.model = request.model
        self.is_streamed = bool(request.stream)

    @property
    def used(self) -> TokensUsed:
        """Return the tokens of the chat completion so far."""
        return self._chat.used

    async def whole(self) -> bytes:
        """Return the JSON document of the whole answer; raises what the chat completion does."""
        return json.dumps(self._request.document(json.loads(await self._chat.whole()))).encode()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of the answer; raises what the chat completion does."""
        async with aclosing(self._chat.events()) as events:
            async for name, data in self._request.events(_chunks(events)):
                yield server_sent_event({"type": name, **data}, name)


async def _chunks(events: AsyncIterator[bytes]) -> AsyncGenerator[ChatChunk]:
    """Yield the chunks of a chat completion.

    Raises:
        RequestError: the engine reports an error within its stream.
    """
    async for event in events:
        if not event.startswith(CHAT_DATA):
            continue
        document = json.loads(event.removeprefix(b"data: "))
        if error := document.get("error"):
            message = str(error.get("message", error) if isinstance(error, dict) else error)
            raise RequestError(500, message[:1000], code="engine_error")
        choice: Document = next(iter(document.get("choices") or ()), {})
        text = (choice.get("delta") or {}).get("content") or ""
        usage, stop_text = document.get("usage") or {}, _stop_text(choice)
        yield ChatChunk(text, choice.get("finish_reason"), usage, stop_text)


def _stop_text(choice: Document) -> str | None:
    """Return the stop string that ended a choice: of our engines and vLLM, else of SGLang.

    Both engines put the number of a stop token there, too.
    """
    found = choice.get("stop_reason") or choice.get("matched_stop")
    return found if isinstance(found, str) else None


def _text_of(parts: str | Sequence[TextPart]) -> str:
    return parts if isinstance(parts, str) else "".join(each.text for each in parts)


# Anthropic's Messages


class AnthropicMessage(ClientFields):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | TextParts


NO_TOOLS: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},),
}
Turns = Annotated[
    list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


def chat_turns(
    system: str | Sequence[TextPart] | None, messages: Sequence[AnthropicMessage]
) -> list[dict[str, str]]:
    """Return a conversation as a chat completion has it."""
    first = [{"role": "system", "content": _text_of(system)}] if system else []
    return [*first, *({"role": each.role, "content": _text_of(each.content)} for each in messages)]


class CountRequest(ClientFields):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: Turns
    system: str | TextParts | None = None
    cache_control: Ignored = None

    @property
    def chat(self) -> list[dict[str, str]]:
        """Return the conversation as a chat completion has it."""
        return chat_turns(self.system, self.messages)

    @property
    def document(self) -> Document:
        """Return the request for an engine that counts itself."""
        first, *turns = self.chat if self.system else (None, *self.chat)
        system = {"system": first["content"]} if first else {}
        return {"model": self.model, "messages": turns, **system}


class MessagesRequest(TranslatedRequest):
    """``POST /v1/messages``."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = NO_TOOLS

    max_tokens: Annotated[int, Field(ge=1)]
    messages: Turns
    system: str | TextParts | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = (
        None
    )
    cache_control: Ignored = None

    @property
    def chat(self) -> Document:
        """Return the conversation and the limits as fields of a chat completion."""
        limits = {"max_tokens": self.max_tokens, "top_k": self.top_k, "stop": self.stop_sequences}
        return {"messages": chat_turns(self.system, self.messages), **limits}

    def document(self, chat: Document) -> Document:
        """Return the message of a whole chat completion."""
        choice = chat["choices"][0]
        block = {"type": "text", "text": choice["message"].get("content") or "", "citations": None}
        end = self._end(choice["finish_reason"], _stop_text(choice))
        return self._message([block], chat.get("usage") or {}) | end

    async def events(self, chunks: AsyncIterator[ChatChunk]) -> AsyncGenerator[Event]:
        """Yield a message's start, the deltas of its one text block, and its end."""
        has_begun, reason, stop_text, usage = False, None, None, Document()
        async for chunk in chunks:
            usage, reason = chunk.usage or usage, chunk.finish_reason or reason
            stop_text = chunk.stop_text or stop_text
            if not has_begun:
                has_begun = True
                yield "message_start", {"message": self._message([], usage)}
                block = {"type": "text", "text": "", "citations": None}
                yield "content_block_start", {"index": 0, "content_block": block}
            if chunk.text:
                delta = {"type": "text_delta", "text": chunk.text}
                yield "content_block_delta", {"index": 0, "delta": delta}
        yield "content_block_stop", {"index": 0}
        end = self._end(reason, stop_text)
        yield "message_delta", {"delta": end, "usage": _anthropic_usage(usage)}
        yield "message_stop", {}

    def _end(self, reason: str | None, stop_text: str | None) -> Document:
        """Return why a message ended; a stop string of the chat template's is the model's end."""
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if stop_text in (self.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_text}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _message(self, content: Sequence[Document], usage: Document) -> Document:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _anthropic_usage(usage),
        }

    @classmethod
    def error_document(cls, error: RequestError) -> Document:
        """Return the body of an error."""
        kind = _ANTHROPIC_ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


_ANTHROPIC_ERRORS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def _anthropic_usage(usage: Document) -> Document:
    """Return the token counts; cached ones are counted apart, where the engine reports them."""
    cached = _cached(usage)
    counts = {
        "input_tokens": usage.get("prompt_tokens", 0) - (cached or 0),
        "output_tokens": usage.get("completion_tokens", 0),
    }
    return counts if cached is None else counts | {"cache_read_input_tokens": cached}


def _cached(usage: Document) -> int | None:
    """Return the prompt tokens from a prefix cache, or None if the engine does not report them."""
    found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return None if found is None else int(found)


# OpenAI's Responses


class ResponsePart(ClientFields):
    """One part of an input message, or of an answer that is sent back."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class InputMessage(ClientFields):
    """One message of a conversation, or an answer that is sent back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ResponsePart], Field(fail_fast=True, max_length=MAX_PARTS)]
    type: Literal["message"] = "message"
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class ResponsesRequest(TranslatedRequest):
    """``POST /v1/responses``."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "text": ({}, {"format": {"type": "text"}}),
        "include": ([],),
        "background": (False,),
        "truncation": ("disabled",),
        "previous_response_id": (),  # no response is stored
        "conversation": (),
    }

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[
            list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
        ]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: Ignored = None
    store: Ignored = None
    stream_options: Ignored = None
    reasoning: Ignored = None
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @property
    def chat(self) -> Document:
        """Return the conversation and the limit as fields of a chat completion."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            turns = [{"role": "user", "content": self.input}]
        else:
            turns = [
                {
                    "role": each.role,
                    "content": each.content
                    if isinstance(each.content, str)
                    else "".join(part.text for part in each.content),
                }
                for each in self.input
            ]
        return {"messages": [*first, *turns], "max_completion_tokens": self.max_output_tokens}

    def document(self, chat: Document) -> Document:
        """Return the response of a whole chat completion."""
        choice = chat["choices"][0]
        text = choice["message"].get("content") or ""
        return self._ended(self._begun(), text, choice["finish_reason"], chat.get("usage") or {})

    async def events(self, chunks: AsyncIterator[ChatChunk]) -> AsyncGenerator[Event]:
        """Yield a response's start, the deltas of its one message, and its end."""
        begun, numbers, has_begun = self._begun(), count(), False
        item, text, reason, usage = _message("", "in_progress"), "", None, Document()
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}

        def event(name: str, **data: object) -> Event:
            return f"response.{name}", {"sequence_number": next(numbers), **data}

        async for chunk in chunks:
            usage, reason = chunk.usage or usage, chunk.finish_reason or reason
            if not has_begun:
                has_begun = True
                yield event("created", response=begun)
                yield event("in_progress", response=begun)
                yield event("output_item.added", output_index=0, item=item | {"content": []})
                yield event("content_part.added", **place, part=_part(""))
            if chunk.text:
                text += chunk.text
                yield event("output_text.delta", **place, delta=chunk.text, logprobs=[])
        ended = self._ended(begun, text, reason, usage, item["id"])
        yield event("output_text.done", **place, text=text, logprobs=[])
        yield event("content_part.done", **place, part=_part(text))
        yield event("output_item.done", output_index=0, item=ended["output"][0])
        yield event(ended["status"], response=ended)

    def _begun(self) -> Document:
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": self.model,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "output": [],
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    @staticmethod
    def _ended(
        begun: Document, text: str, reason: str | None, usage: Document, item_id: str = ""
    ) -> Document:
        status = "incomplete" if reason == "length" else "completed"
        item = _message(text, status)
        return begun | {
            "status": status,
            "output": [item | ({"id": item_id} if item_id else {})],
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "usage": {
                "input_tokens": usage.get("prompt_tokens", 0),
                "input_tokens_details": {
                    "cached_tokens": _cached(usage) or 0,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.get("completion_tokens", 0),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.get("total_tokens", 0),
            },
        }

    @classmethod
    def error_document(cls, error: RequestError) -> Document:
        """Return the body of an error."""
        return error.document


def _part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(text: str, status: str) -> Document:
    content = [_part(text)]
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
    return {**head, "status": status, "content": content}


TRANSLATED: dict[str, type[TranslatedRequest]] = {
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
}


def parse_translated(path: str, body: bytes) -> TranslatedRequest:
    """Return the parsed request of another API.

    Raises:
        RequestError: a field is invalid, or asks for more than text; the error names it.
    """
    kind = TRANSLATED[path]
    return checked(kind.model_validate, _of_text(path, kind.NEUTRAL, body))


def parse_count(body: bytes) -> CountRequest:
    """Return the parsed request to count a conversation's tokens.

    Raises:
        RequestError: a field is invalid, or asks for more than text; the error names it.
    """
    return checked(CountRequest.model_validate, _of_text(COUNT_TOKENS, NO_TOOLS, body))


def _of_text(path: str, neutral_values: Mapping[str, tuple[object, ...]], body: bytes) -> Document:
    """Return a body's document without the fields that ask for nothing here."""
    document = read_document(body)
    for name, neutral in neutral_values.items():
        if not is_neutral(document.pop(name, None), neutral):
            raise unsupported(name, f"{name} is not supported by {path}; {WAY_OUT}")
    return document
