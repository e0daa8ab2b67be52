"""What clients may ask in OpenAI's form, field by field, and the errors they get."""

import json
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_MESSAGES = 2000
MAX_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16  # OpenAI's own default of the older form
# What a field may hold that this endpoint does not do: it changes nothing then.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
# What says who asks, or is meant for a service around a model: taken, and of no effect.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "reasoning_effort", "verbosity",
)  # fmt: skip

Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Text = Annotated[str, StringConstraints(min_length=1)]
Each = TypeVar("Each")
Several = Annotated[list[Each], Field(min_length=1, max_length=64)]


class AskedError(Exception):
    """A request that is not answered: its status, and OpenAI's document of the error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_ours(self) -> bool:
        """Return whether the fault is the endpoint's."""
        return self.status == HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def document(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error",
          503: "service_unavailable_error"}  # fmt: skip


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False  # as vLLM has it: each chunk counts what came so far
    include_obfuscation: bool = False  # a service's padding against listeners; never done


class Asked(BaseModel):
    """What both forms have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False  # as vLLM has it: the answer takes all its tokens
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_choices(self) -> int:
        """Return how many answers each prompt gets."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the strings that end an answer."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_on(self) -> bool:
        """Return whether each chunk of a stream has the token counts so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class AskedCompletion(Asked):
    """``POST /v1/completions``."""

    prompt: Text | Ids | Several[Text] | Several[Ids]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return each prompt, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        parts: Sequence[int | str | list[int]] = self.prompt
        ids = [each for each in parts if isinstance(each, int)]
        return [ids] if ids else [each for each in parts if not isinstance(each, int)]


class TextPart(BaseModel):
    """One part of a message; other kinds than text are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """Return role and text, as templates take them."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatFields(Asked):
    """``POST /v1/chat/completions``, beside the conversation itself."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @classmethod
    def checked(cls, document: dict[str, Any]) -> Self:
        """Return the request; ``top_logprobs`` needs ``logprobs``."""
        found = cls.model_validate(document)
        if found.top_logprobs and not found.logprobs:
            message = "top_logprobs is given without logprobs; set logprobs to true"
            raise AskedError(400, message, param="top_logprobs")
        return found


class AskedChat(ChatFields):
    """A conversation as our own engines read it: of text alone."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def known_ids(prompt: Sequence[int], vocabulary: int) -> list[int]:
    """Return a prompt that came as tokens, for a model of so many.

    Raises:
        AskedError: the model has no such token.
    """
    if max(prompt, default=0) >= vocabulary:
        message = f"prompt holds token {max(prompt)}; the model has {vocabulary}"
        raise AskedError(400, message, param="prompt")
    return list(prompt)


OneAsked = TypeVar("OneAsked", bound=Asked)


def asked_completion(body: bytes) -> AskedCompletion:
    """Return the request of a body.

    Raises:
        AskedError: what is wrong with which field.
    """
    return asked_by(AskedCompletion.model_validate, body)


def asked_chat(body: bytes) -> AskedChat:
    """Return the request of a body.

    Raises:
        AskedError: what is wrong with which field.
    """
    return asked_by(AskedChat.checked, body)


def asked_by(
    check: Callable[[dict[str, Any]], OneAsked],
    body: bytes,
    understood: Collection[str] = (),
) -> OneAsked:
    """Return the request of a body; ``understood``: fields that are not held to be neutral.

    Raises:
        AskedError: what is wrong with which field.
    """
    try:
        return check(_document(body, understood))
    except ValidationError as error:
        raise _field_error(error) from None


def _document(body: bytes, understood: Collection[str]) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise AskedError(400, "The body is not JSON.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise AskedError(400, "The body is no JSON object.", code="invalid_json")
    strange = {name: values for name, values in NEUTRAL.items() if name not in understood}
    for name, neutral in strange.items():
        if document.get(name) is not None and document[name] not in neutral:
            message = f"{name} is not supported by this endpoint; leave it out"
            raise AskedError(400, message, param=name, code="unsupported_parameter")
    dropped = {*strange, *IGNORED}
    return {name: value for name, value in document.items() if name not in dropped}


def _field_error(error: ValidationError) -> AskedError:
    """Return the first fault, by the name of the field that the client wrote."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    name = place[0] if place else ""
    where = ".".join([name, *(part for part in place[1:] if part.isdigit() or part.islower())])
    if first["type"] == "extra_forbidden":
        return AskedError(400, f"Unrecognized request argument: {where}", param=name)
    said = first["msg"][0].lower() + first["msg"][1:]
    value = "" if first["type"] == "missing" else f" (given: {str(first['input'])[:80]!r})"
    return AskedError(400, f"{where}: {said}{value}", param=name)
