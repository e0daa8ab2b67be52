"""What clients may ask of an engine that speaks OpenAI's form itself, field by field.

More than our own engines do: tools, JSON formats, penalties. Whatever is in neither list is
refused by its name: an engine has fields that only a service around it may set, such as vLLM's
``kv_transfer_params``, which name hosts to fetch from.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runners.jobs.serve.protocol import (
    MAX_MESSAGES,
    AskedCompletion,
    ChatFields,
    TextPart,
    asked_by,
)

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Object = dict[str, Any]
MAX_TOOLS = 128


class Sampling(BaseModel):
    """How tokens are chosen, beside what every endpoint knows."""

    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    response_format: Object | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None


class HandedMessage(BaseModel):
    """One message of a conversation, with the calls and answers of tools."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Object], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class TemplateSettings(BaseModel):
    """What a conversation's template is told; others could stand in for the template itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_thinking: bool | None = None
    thinking: bool | None = None


class HandedCompletion(AskedCompletion, Sampling):
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
    """Return the request of a body.

    Raises:
        AskedError: what is wrong with which field.
    """
    if path.endswith("/chat/completions"):
        return asked_by(HandedChat.checked, body, HandedChat.model_fields)
    return asked_by(HandedCompletion.model_validate, body, HandedCompletion.model_fields)


def num_answers(asked: Handed) -> int:
    """Return how many answers are written for a request."""
    prompts = len(asked.prompts) if isinstance(asked, HandedCompletion) else 1
    return prompts * asked.num_choices


def document_of(asked: Handed) -> Object:
    """Return the body that the engine gets: what the client set, and nothing else."""
    return asked.model_dump(mode="json", exclude_unset=True)
