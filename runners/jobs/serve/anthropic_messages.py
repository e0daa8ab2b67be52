"""Anthropic's Messages API, translated to chat completions and back.

Source: the types of the package anthropic 2.14.0 (``anthropic/types``).
"""

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from runners.jobs.serve.openai_requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    MAX_TOOLS,
    ClientFields,
    Document,
    Ignored,
    RequestError,
    Stop,
    TextPart,
    TextParts,
)
from runners.jobs.serve.translated import (
    CallPart,
    ChatChunk,
    Event,
    TranslatedRequest,
    cached_tokens,
    call_parts,
    function_call,
    function_tool,
    named_choice,
    reasoning_text,
    stop_text,
    text_of,
)


class ToolUsePart(ClientFields):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Document
    caller: Ignored = None  # who may call: the model, always
    cache_control: Ignored = None


class ToolResultPart(ClientFields):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextParts | None = None
    is_error: Ignored = None  # the text says it
    cache_control: Ignored = None


class ThinkingPart(ClientFields):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class RedactedPart(ClientFields):
    """Reasoning that only Anthropic's servers read; left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


Part = Annotated[
    TextPart | ToolUsePart | ToolResultPart | ThinkingPart | RedactedPart,
    Field(discriminator="type"),
]
OF_USERS = {"tool_result"}
OF_ASSISTANTS = {"tool_use", "thinking", "redacted_thinking"}


class AnthropicMessage(ClientFields):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]

    @model_validator(mode="after")
    def _parts_are_of_the_role(self) -> Self:
        others = OF_USERS if self.role == "assistant" else OF_ASSISTANTS
        if found := next((each.type for each in self._parts if each.type in others), ""):
            raise ValueError(f"a message of the role {self.role} has no {found}")
        return self

    @property
    def _parts(self) -> Sequence[Part]:
        return () if isinstance(self.content, str) else self.content

    @property
    def turns(self) -> Iterator[Document]:
        """Yield the message as a chat completion has it: each result of a tool on its own."""
        text, reasoning, calls, num_results = "", "", [], 0
        for each in self._parts:
            if isinstance(each, ToolResultPart):
                num_results += 1
                result = {"role": "tool", "tool_call_id": each.tool_use_id}
                yield result | {"content": text_of(each.content or "")}
            elif isinstance(each, ToolUsePart):
                calls.append(function_call(each.id, each.name, json.dumps(each.input)))
            elif isinstance(each, ThinkingPart):
                reasoning += each.thinking
            elif isinstance(each, TextPart):
                text += each.text
        text = self.content if isinstance(self.content, str) else text
        if text or calls or not num_results:
            turn: Document = {"role": self.role, "content": text}
            turn |= {"reasoning_content": reasoning} if reasoning else {}
            yield turn | ({"tool_calls": calls} if calls else {})


class AnthropicTool(ClientFields):
    """A tool of the client's; those that Anthropic's servers run have other types."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    input_schema: Document
    description: str | None = None
    cache_control: Ignored = None
    strict: bool | None = None
    input_examples: Ignored = None
    defer_loading: Ignored = None  # tools are offered at once
    allowed_callers: Ignored = None
    eager_input_streaming: Ignored = None

    @property
    def chat(self) -> Document:
        """Return the tool as a chat completion has it."""
        return function_tool(self.name, self.description, self.input_schema, strict=self.strict)


class ToolChoice(ClientFields):
    """Whether the model calls a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _tool_is_named(self) -> Self:
        if self.type == "tool" and not self.name:
            raise ValueError("name is missing; a choice of the type tool needs it")
        return self

    @property
    def chat(self) -> str | Document:
        """Return the choice as a chat completion has it."""
        if self.type == "tool":
            return named_choice(self.name or "")
        return "required" if self.type == "any" else self.type


class JsonOutput(ClientFields):
    """The JSON schema that an answer is held to."""

    type: Literal["json_schema"]
    document: Annotated[Document, Field(alias="schema")]


class OutputConfig(ClientFields):
    """How an answer is written."""

    format: JsonOutput | None = None
    effort: Ignored = None


Turns = Annotated[
    list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


class Conversation(ClientFields):
    """What both addresses have: messages, system text and tools."""

    messages: Turns
    system: str | TextParts | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        None
    )
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored = None
    thinking: Ignored = None  # a model reasons as its chat template has it
    context_management: Ignored = None  # edits of old turns: the conversation is read as it is
    metadata: Ignored = None
    speed: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None

    @property
    def conversation(self) -> Document:
        """Return the conversation and the tools as fields of a chat completion."""
        first = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        turns = [turn for each in self.messages for turn in each.turns]
        fields: Document = {"messages": [*first, *turns]}
        if self.tools:
            fields["tools"] = [each.chat for each in self.tools]
            if self.tool_choice is not None:
                fields["tool_choice"] = self.tool_choice.chat
                fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return fields


class CountRequest(Conversation):
    """``POST /v1/messages/count_tokens``."""

    model: str

    @property
    def chat_body(self) -> bytes:
        """Return the body of a chat completion with this prompt."""
        return json.dumps({"model": self.model, **self.conversation}).encode()

    @property
    def document(self) -> Document:
        """Return the request for an engine that counts itself."""
        kept = {"model", "messages", "system", "tools", "tool_choice"}
        return self.model_dump(mode="json", include=kept, exclude_unset=True)


class MessagesRequest(Conversation, TranslatedRequest):
    """``POST /v1/messages``."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {}
    SHORTENS: ClassVar[bool] = True  # max_tokens is required: agents send what they can read
    NAMES: ClassVar[dict[str, str]] = {"response_format": "output_config.format"}

    max_tokens: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = (
        None
    )

    @property
    def chat(self) -> Document:
        """Return the conversation, the tools and the limits as fields of a chat completion."""
        limits = {"max_tokens": self.max_tokens, "top_k": self.top_k, "stop": self.stop_sequences}
        wanted = self.output_config.format if self.output_config is not None else None
        if wanted is None:
            return {**self.conversation, **limits}
        schema = {"name": "answer", "schema": wanted.document}
        held = {"response_format": {"type": wanted.type, "json_schema": schema}}
        return {**self.conversation, **limits, **held}

    def document(self, chat: Document) -> Document:
        """Return the message of a whole chat completion."""
        choice = chat["choices"][0]
        text, calls = choice["message"].get("content") or "", call_parts(choice["message"])
        reasoning = reasoning_text(choice["message"])
        blocks = [_thinking_block(reasoning)] if reasoning else []
        blocks += [_text_block(text)] if text or not (calls or reasoning) else []
        blocks += [_call_block(each) | {"input": _object(each.arguments)} for each in calls]
        end = self._end(choice["finish_reason"], stop_text(choice))
        return self._message(blocks, chat.get("usage") or {}) | end

    async def events(self, chunks: AsyncIterator[ChatChunk]) -> AsyncGenerator[Event]:
        """Yield a message's start, its blocks of text and calls one by one, and its end."""
        has_begun, reason, stop, usage = False, None, None, Document()
        blocks = _Blocks()
        async for chunk in chunks:
            usage, reason = chunk.usage or usage, chunk.finish_reason or reason
            stop = chunk.stop_text or stop
            if not has_begun:
                has_begun = True
                yield "message_start", {"message": self._message([], usage)}
            for event in blocks.of(chunk):
                yield event
        for event in blocks.end():
            yield event
        end = self._end(reason, stop)
        yield "message_delta", {"delta": end, "usage": _usage(usage)}
        yield "message_stop", {}

    def _end(self, reason: str | None, stop: str | None) -> Document:
        """Return why a message ended; a stop string of the chat template's is the model's end."""
        if reason in _ENDS:
            return {"stop_reason": _ENDS[reason], "stop_sequence": None}
        if stop in (self.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
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
            "usage": _usage(usage),
        }

    @classmethod
    def error_document(cls, error: RequestError) -> Document:
        """Return the body of an error."""
        kind = _ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


THINKING = -1  # in the place of a call's number
_ENDS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


class _Blocks:
    """The blocks of a streamed message, one after another."""

    def __init__(self) -> None:
        self._index = -1
        self._call: int | None = None  # whose block is open, None: text's, THINKING
        self._is_open = False

    def of(self, chunk: ChatChunk) -> Iterator[Event]:
        """Yield the events of a chunk."""
        if chunk.reasoning:
            yield from self._in_block(THINKING, _thinking_block(""))
            yield self._delta({"type": "thinking_delta", "thinking": chunk.reasoning})
        if chunk.text:
            yield from self._in_block(None, _text_block(""))
            yield self._delta({"type": "text_delta", "text": chunk.text})
        for each in chunk.calls:
            yield from self._in_block(each.at, _call_block(each) | {"input": {}})
            if each.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": each.arguments})

    def end(self) -> Iterator[Event]:
        """Yield the end of the last block; an empty answer is one of empty text."""
        if self._index < 0:
            yield from self._in_block(None, _text_block(""))
        yield "content_block_stop", {"index": self._index}

    def _in_block(self, call: int | None, block: Document) -> Iterator[Event]:
        """Yield the change to the block of a call, or of text, unless it is open."""
        if self._is_open and self._call == call:
            return
        if self._is_open:
            yield "content_block_stop", {"index": self._index}
        self._index, self._call, self._is_open = self._index + 1, call, True
        yield "content_block_start", {"index": self._index, "content_block": block}

    def _delta(self, delta: Document) -> Event:
        return "content_block_delta", {"index": self._index, "delta": delta}


def _thinking_block(text: str) -> Document:
    """Return a block of reasoning; only Anthropic's servers sign theirs."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _text_block(text: str) -> Document:
    return {"type": "text", "text": text, "citations": None}


def _call_block(call: CallPart) -> Document:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _object(arguments: str) -> Document:
    """Return a call's arguments; none of a call that was cut off."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _usage(usage: Document) -> Document:
    """Return the token counts; cached ones are counted apart, where the engine reports them."""
    cached = cached_tokens(usage)
    counts = {
        "input_tokens": usage.get("prompt_tokens", 0) - (cached or 0),
        "output_tokens": usage.get("completion_tokens", 0),
    }
    return counts if cached is None else counts | {"cache_read_input_tokens": cached}
