"""A chat completion in the form of another API: what the translations have in common.

Text and tool calls are carried; every engine answers them as it answers a chat completion. Nothing
is stored.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from runners.jobs.serve.contract import Answer
from runners.jobs.serve.event_stream import server_sent_event
from runners.jobs.serve.openai_requests import (
    ClientFields,
    Document,
    Ignored,
    RequestError,
    TextPart,
)
from runners.shared.event_streams import TokensUsed

CHAT_DATA = b"data: {"
Event = tuple[str, Document]  # name and data, which repeats the name as its type


class CallPart(NamedTuple):
    """A part of a call: its place among the answer's calls, its begin or more of its arguments."""

    at: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatChunk(NamedTuple):
    """What a chunk of a chat completion adds, and the token counts so far."""

    text: str
    finish_reason: str | None
    usage: Document
    stop_text: str | None = None  # the stop string that ended the answer
    calls: tuple[CallPart, ...] = ()
    reasoning: str = ""  # that the engine tells apart from the text


class TranslatedRequest(ClientFields, ABC):
    """A request of another API."""

    # Fields of other kinds of content: values without effect, which are accepted.
    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]]
    # Names of a chat completion's fields in this API.
    NAMES: ClassVar[dict[str, str]] = {}
    # Whether a limit of the answer may exceed what the context leaves.
    SHORTENS: ClassVar[bool] = False

    model: str
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    service_tier: Ignored = None
    metadata: Ignored = None

    @property
    @abstractmethod
    def chat(self) -> Document:
        """Return the conversation, the tools and the limits as fields of a chat completion."""

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

    @classmethod
    def renamed(cls, error: RequestError) -> RequestError:
        """Return an error of a chat completion with the names that this API has for its fields."""
        name = cls.NAMES.get(error.param or "")
        if name is None:
            return error
        message = re.sub(rf"\b{error.param}\b", name, str(error))
        return RequestError(
            error.status, message, param=name, code=error.code, headers=error.headers
        )

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
        delta: Document = choice.get("delta") or {}
        text, calls = delta.get("content") or "", call_parts(delta)
        usage, stop = document.get("usage") or {}, stop_text(choice)
        reason, reasoning = choice.get("finish_reason"), reasoning_text(delta)
        yield ChatChunk(text, reason, usage, stop, calls, reasoning)


def call_parts(message: Document) -> tuple[CallPart, ...]:
    """Return the calls of a whole message, or the parts of calls of a delta."""
    found: list[CallPart] = []
    for at, each in enumerate(message.get("tool_calls") or ()):
        function: Document = each.get("function") or {}
        found.append(
            CallPart(
                int(each.get("index", at)),
                str(each.get("id") or ""),
                str(function.get("name") or ""),
                str(function.get("arguments") or ""),
            )
        )
    return tuple(found)


def reasoning_text(message: Document) -> str:
    """Return the reasoning of a message or a delta; vLLM has a newer name for it."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def stop_text(choice: Document) -> str | None:
    """Return the stop string that ended a choice: of our engines and vLLM, else of SGLang.

    Both engines put the number of a stop token there, too.
    """
    found = choice.get("stop_reason") or choice.get("matched_stop")
    return found if isinstance(found, str) else None


def text_of(parts: str | Sequence[TextPart]) -> str:
    """Return a text in one piece."""
    return parts if isinstance(parts, str) else "".join(each.text for each in parts)


def function_tool(
    name: str,
    description: str | None,
    schema: Document | None,
    *,
    strict: bool | None = None,
) -> Document:
    """Return a tool as a chat completion has it."""
    fields = {
        "name": name, "description": description, "parameters": schema, "strict": strict or None,
    }  # fmt: skip
    function = {name: each for name, each in fields.items() if each is not None}
    return {"type": "function", "function": function}


def function_call(call_id: str, name: str, arguments: str) -> Document:
    """Return a call of the history as a chat completion has it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def named_choice(name: str) -> Document:
    """Return the choice of one function as a chat completion has it."""
    return {"type": "function", "function": {"name": name}}


def cached_tokens(usage: Document) -> int | None:
    """Return the prompt tokens from a prefix cache, or None if the engine does not report them."""
    found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return None if found is None else int(found)


def reasoning_tokens(usage: Document) -> int | None:
    """Return the tokens of an answer's reasoning, or None if the engine does not report them.

    vLLM has OpenAI's name for them (its pull request 35037), SGLang 0.5.9 one of its own
    (``UsageInfo`` in ``entrypoints/openai/protocol.py``).
    """
    details = usage.get("completion_tokens_details") or {}
    found = details.get("reasoning_tokens", usage.get("reasoning_tokens"))
    return None if found is None else int(found)
