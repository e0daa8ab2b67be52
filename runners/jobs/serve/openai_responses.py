"""OpenAI's Responses API, translated to chat completions and back.

Source: the types of the package openai 3.54.0 (``openai/types/responses``).
"""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from itertools import count
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from runners.jobs.serve.openai_requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ClientFields,
    Document,
    Ignored,
    RequestError,
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
    reasoning_tokens,
)


class ResponsePart(ClientFields):
    """One part of an input message, or of an answer that is sent back."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


Content = str | Annotated[list[ResponsePart], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputMessage(ClientFields):
    """One message of a conversation, or an answer that is sent back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    type: Literal["message"] = "message"
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None

    @property
    def turn(self) -> Document:
        """Return the message as a chat completion has it."""
        return {"role": self.role, "content": _text(self.content)}


class FunctionCall(ClientFields):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None

    @property
    def turn(self) -> Document:
        """Return the call as a message of a chat completion."""
        call = function_call(self.call_id, self.name, self.arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class FunctionCallOutput(ClientFields):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None

    @property
    def turn(self) -> Document:
        """Return the result as a message of a chat completion."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}


class CustomCall(ClientFields):
    """A call of a custom tool, whose input is a text, of an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None

    @property
    def turn(self) -> Document:
        """Return the call as a message of a chat completion."""
        call = function_call(self.call_id, self.name, json.dumps({INPUT: self.input}))
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class CustomCallOutput(FunctionCallOutput):
    """What a call of a custom tool came to."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]
    name: Ignored = None


class ReasoningText(ClientFields):
    """One part of an earlier answer's reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(ClientFields):
    """The reasoning of an earlier answer; summaries and what is encrypted are not read."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = (
        None
    )
    id: Ignored = None
    status: Ignored = None
    summary: Ignored = None
    encrypted_content: Ignored = None

    @property
    def turn(self) -> Document:
        """Return the reasoning as the begin of a message of a chat completion."""
        text = "".join(each.text for each in self.content or ())
        return {"role": "assistant", "content": "", "reasoning_content": text}


def _item_kind(sent: object) -> str:
    """Return the type of an item of the input; a message need not say it."""
    kind = sent.get("type") if isinstance(sent, dict) else None
    return kind if isinstance(kind, str) and kind in ITEM_KINDS else "message"


ITEM_KINDS = {
    "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "reasoning",
}  # fmt: skip
Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[CustomCallOutput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]


class FunctionTool(ClientFields):
    """A function of the client's; tools that OpenAI's servers run have other types."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Document | None = None
    strict: bool | None = None
    defer_loading: Ignored = None  # tools are offered at once

    @property
    def chat(self) -> Document:
        """Return the tool as a chat completion has it."""
        return function_tool(self.name, self.description, self.parameters, strict=self.strict)


class CustomTool(ClientFields):
    """A tool of the client's that takes a text: offered as a function with that text."""

    type: Literal["custom"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    format: Document | None = None  # told to the model, which is not held to it
    defer_loading: Ignored = None

    @property
    def chat(self) -> Document:
        """Return the tool as a chat completion has it."""
        grammar = str((self.format or {}).get("definition") or "")
        words = [self.description or "", f"The input has this grammar:\n{grammar}" * bool(grammar)]
        return function_tool(self.name, "\n\n".join(filter(None, words)), INPUT_SCHEMA)


class SearchTool(ClientFields):
    """The search that OpenAI's servers run: there is none here, and none is offered."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search", "web_search_preview", "web_search_2025_08_26"]


INPUT = "input"
INPUT_SCHEMA: Document = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
Tool = Annotated[FunctionTool | CustomTool | SearchTool, Field(discriminator="type")]


class NamedFunction(ClientFields):
    """The choice of one tool."""

    type: Literal["function", "custom"]
    name: str


class TextFormat(ClientFields):
    """What the text of a response is: any, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    document: Annotated[Document | None, Field(alias="schema")] = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.document is not None):
            has = "needs" if self.document is None else "has no"
            raise ValueError(f"a format of the type {self.type} {has} schema")
        return self

    @property
    def chat(self) -> Document:
        """Return the format as a chat completion has it."""
        if self.document is None:
            return {"type": self.type}
        more = {"name": self.name or "answer", "strict": self.strict}
        return {"type": self.type, "json_schema": {"schema": self.document, **more}}


class TextOptions(ClientFields):
    """How the text of a response is written."""

    format: TextFormat | None = None
    verbosity: Ignored = None


class ResponsesRequest(TranslatedRequest):
    """``POST /v1/responses``."""

    NAMES: ClassVar[dict[str, str]] = {
        "response_format": "text.format",
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
    }

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "background": (False,),
        "truncation": ("disabled",),
        "previous_response_id": (),  # no response is stored
        "conversation": (),
    }

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    # Of what has no kind here: no reasoning is encrypted, nothing is searched.
    include: (
        Annotated[
            list[Literal["reasoning.encrypted_content", "web_search_call.action.sources"]],
            Field(fail_fast=True, max_length=8),
        ]
        | None
    ) = None
    max_tool_calls: Ignored = None  # of tools that OpenAI's servers run
    client_metadata: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    store: Ignored = None
    stream_options: Ignored = None
    reasoning: Ignored = None
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @property
    def chat(self) -> Document:
        """Return the conversation, the tools and the limit as fields of a chat completion."""
        turns: list[Document] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            turns.append({"role": "user", "content": self.input})
        else:
            for each in self.input:
                _add_turn(turns, each)
        fields: Document = {"messages": turns, "max_completion_tokens": self.max_output_tokens}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.chat
        if self.offered:
            choice = self.tool_choice
            fields["tools"] = [each.chat for each in self.offered]
            fields["tool_choice"] = (
                named_choice(choice.name) if isinstance(choice, NamedFunction) else choice
            )
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        return fields

    @property
    def offered(self) -> list[FunctionTool | CustomTool]:
        """Return the tools that the model may call."""
        return [each for each in self.tools or () if not isinstance(each, SearchTool)]

    def _items(self, numbers: Iterator[int]) -> "_Items":
        custom = {each.name for each in self.offered if isinstance(each, CustomTool)}
        return _Items(numbers, frozenset(custom))

    def document(self, chat: Document) -> Document:
        """Return the response of a whole chat completion."""
        choice = chat["choices"][0]
        text, calls = choice["message"].get("content") or "", call_parts(choice["message"])
        reasoning = reasoning_text(choice["message"])
        items = self._items(count())
        for _ in items.of(ChatChunk(text, None, {}, None, calls, reasoning)):
            pass
        reason = choice["finish_reason"]
        for _ in items.end(_status(reason)):
            pass
        usage: Document = chat.get("usage") or {}
        # All of an answer that was cut off in its reasoning; else only the engine can tell.
        counted = usage.get("completion_tokens", 0) if reasoning and not (text or calls) else 0
        return self._ended(self._begun(), items.items, reason, usage, counted)

    async def events(self, chunks: AsyncIterator[ChatChunk]) -> AsyncGenerator[Event]:
        """Yield a response's start, its message and calls one by one, and its end."""
        begun, numbers, has_begun = self._begun(), count(), False
        items, reason, usage, counted = self._items(numbers), None, Document(), 0
        async for chunk in chunks:
            usage, reason = chunk.usage or usage, chunk.finish_reason or reason
            if chunk.reasoning:
                counted = usage.get("completion_tokens", 0)
            if not has_begun:
                has_begun = True
                for name in ("created", "in_progress"):
                    yield f"response.{name}", {"sequence_number": next(numbers), "response": begun}
            for event in items.of(chunk):
                yield event
        for event in items.end(_status(reason)):
            yield event
        ended = self._ended(begun, items.items, reason, usage, counted)
        name = f"response.{ended['status']}"
        yield name, {"sequence_number": next(numbers), "response": ended}

    @property
    def _format(self) -> Document:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return {"type": "text"}
        return wanted.model_dump(mode="json", by_alias=True, exclude_none=True)

    def _begun(self) -> Document:
        choice, is_parallel = self.tool_choice, self.parallel_tool_calls
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
            "tools": [each.model_dump(mode="json") for each in self.offered],
            "tool_choice": choice.model_dump(mode="json")
            if isinstance(choice, NamedFunction)
            else choice or "auto",
            "parallel_tool_calls": bool(self.offered) if is_parallel is None else is_parallel,
            "text": {"format": self._format},
            "store": False,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    @staticmethod
    def _ended(
        begun: Document, output: list[Document], reason: str | None, usage: Document, counted: int
    ) -> Document:
        """Return the response; ``counted``: the tokens of reasoning, if no engine reports them."""
        return begun | {
            "status": _status(reason),
            "output": output,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "usage": {
                "input_tokens": usage.get("prompt_tokens", 0),
                "input_tokens_details": {
                    "cached_tokens": cached_tokens(usage) or 0,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.get("completion_tokens", 0),
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens(usage) or counted},
                "total_tokens": usage.get("total_tokens", 0),
            },
        }

    @classmethod
    def error_document(cls, error: RequestError) -> Document:
        """Return the body of an error."""
        return error.document


def _add_turn(turns: list[Document], item: Item) -> None:
    """Add an item to a conversation; reasoning, text and calls of one answer are one message."""
    turn = item.turn
    if isinstance(item, ReasoningItem) and not turn["reasoning_content"]:
        return
    last = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    if last is not None and isinstance(item, ReasoningItem):
        told = (last.get("reasoning_content"), turn["reasoning_content"])
        last["reasoning_content"] = "\n\n".join(filter(None, told))
    elif last is not None and "tool_calls" in turn:
        last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
    elif last is not None and turn["role"] == "assistant" and _has_no_text_yet(last):
        last["content"] = turn["content"]
    else:
        turns.append(turn)


def _has_no_text_yet(turn: Document) -> bool:
    """Return whether a turn is reasoning alone, whose text may still come."""
    return not turn["content"] and "reasoning_content" in turn and "tool_calls" not in turn


REASONING = -1  # in the place of a call's number


class _Items:
    """The items of a response, one after another, and their events."""

    def __init__(self, numbers: Iterator[int], custom: frozenset[str]) -> None:
        self.items: list[Document] = []  # the last one may be open
        self._numbers = numbers
        self._custom = custom  # names of tools whose input is a text
        self._call: int | None = None  # which is open, None: the message, REASONING
        self._text = ""  # of the open message, or arguments of the open call
        self._is_open = False

    def of(self, chunk: ChatChunk) -> Iterator[Event]:
        """Yield the events of a chunk."""
        if chunk.reasoning:
            yield from self._in_reasoning()
            self._text += chunk.reasoning
            yield self._event("reasoning_text.delta", self._part_place, delta=chunk.reasoning)
        if chunk.text:
            yield from self._in_message()
            self._text += chunk.text
            yield self._event("output_text.delta", self._part_place, delta=chunk.text, logprobs=[])
        for each in chunk.calls:
            yield from self._in_call(each)
            self._text += each.arguments
            if each.arguments and self.items[-1]["type"] == "function_call":
                name = "function_call_arguments.delta"
                yield self._event(name, self._place, delta=each.arguments)

    def end(self, status: str) -> Iterator[Event]:
        """Yield the end of the last item; an empty answer is an empty message."""
        if not self.items:
            yield from self._in_message()
        yield from self._closed(status)

    def _in_reasoning(self) -> Iterator[Event]:
        if self._is_open and self._call == REASONING:
            return
        head = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": []}
        yield from self._opened(REASONING, {**head, "status": "in_progress", "content": []})

    def _in_message(self) -> Iterator[Event]:
        if self._is_open and self._call is None:
            return
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        yield from self._opened(None, {**head, "status": "in_progress", "content": []})
        yield self._event("content_part.added", self._part_place, part=_part(""))

    def _in_call(self, call: CallPart) -> Iterator[Event]:
        if self._is_open and self._call == call.at:
            return
        is_custom = call.name in self._custom
        kind = "custom_tool_call" if is_custom else "function_call"
        head = {"id": f"{'ctc' if is_custom else 'fc'}_{uuid.uuid4().hex}", "type": kind}
        named = {"status": "in_progress", "call_id": call.id, "name": call.name}
        yield from self._opened(
            call.at, {**head, **named, "input" if is_custom else "arguments": ""}
        )

    def _opened(self, call: int | None, item: Document) -> Iterator[Event]:
        yield from self._closed("completed")
        self.items.append(item)
        self._call, self._text, self._is_open = call, "", True
        index = len(self.items) - 1
        yield self._event("output_item.added", {"output_index": index}, item=item)

    def _closed(self, status: str) -> Iterator[Event]:
        """Yield the end of the item that is open, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1] | {"status": status}, self._text
        if self._call is None:
            item["content"] = [_part(text)]
            yield self._event("output_text.done", self._part_place, text=text, logprobs=[])
            yield self._event("content_part.done", self._part_place, part=_part(text))
        elif self._call == REASONING:
            item["content"] = [{"type": "reasoning_text", "text": text}]
            yield self._event("reasoning_text.done", self._part_place, text=text)
        elif item["type"] == "custom_tool_call":
            item["input"] = told = _input(text)
            yield self._event("custom_tool_call_input.delta", self._place, delta=told)
            yield self._event("custom_tool_call_input.done", self._place, input=told)
        else:
            item["arguments"] = text
            named = {"arguments": text, "name": item["name"]}
            yield self._event("function_call_arguments.done", self._place, **named)
        self.items[-1] = item
        index = len(self.items) - 1
        yield self._event("output_item.done", {"output_index": index}, item=item)

    @property
    def _place(self) -> Document:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part_place(self) -> Document:
        return {**self._place, "content_index": 0}

    def _event(self, name: str, place: Document, /, **data: object) -> Event:
        return f"response.{name}", {"sequence_number": next(self._numbers), **place, **data}


def _text(content: str | list[ResponsePart]) -> str:
    return content if isinstance(content, str) else "".join(each.text for each in content)


def _input(arguments: str) -> str:
    """Return the text of a custom tool's call, as far as it was written if it was cut off."""
    try:
        return str(json.loads(arguments)[INPUT])
    except (ValueError, TypeError, KeyError):
        return arguments


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"


def _part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
