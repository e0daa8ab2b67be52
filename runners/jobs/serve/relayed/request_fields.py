"""Request fields for engines with their own OpenAI API.

They accept more than Slipway's own engine: tools, JSON formats, ``logit_bias``. Fields that are
not listed are rejected by name: some are only for a service in front of the engine, such as vLLM's
``kv_transfer_params``, which names hosts to fetch from.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runners.jobs.serve.protocol import (
    MAX_MESSAGES,
    ChatFields,
    CompletionRequest,
    TextPart,
    parse_body,
)

Object = dict[str, Any]
MAX_TOOLS = 128


class Sampling(BaseModel):
    """Sampling fields in addition to those of every endpoint."""

    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    response_format: Object | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None


class HandedMessage(BaseModel):
    """One message of a conversation, including tool calls and results."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Object], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class TemplateSettings(BaseModel):
    """Chat template arguments; other keys could replace the template itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_thinking: bool | None = None
    thinking: bool | None = None


class HandedCompletion(CompletionRequest, Sampling):
    """``POST /v1/completions``."""


class HandedChat(ChatFields, Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[HandedMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Object], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateSettings | None = None


Handed = HandedCompletion | HandedChat


def handed(path: str, body: bytes) -> Handed:
    """Return the parsed request.

    Raises:
        RequestError: a field is invalid; the error names it.
    """
    if path.endswith("/chat/completions"):
        return parse_body(HandedChat.checked, body, HandedChat.model_fields)
    return parse_body(HandedCompletion.model_validate, body, HandedCompletion.model_fields)


def num_answers(asked: Handed) -> int:
    """Return how many answers a request generates."""
    prompts = len(asked.prompts) if isinstance(asked, HandedCompletion) else 1
    return prompts * asked.num_choices


def document_of(asked: Handed) -> Object:
    """Return the body for the engine: only the fields that the client set."""
    return asked.model_dump(mode="json", exclude_unset=True)
