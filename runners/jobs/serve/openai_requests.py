"""OpenAI's request format: fields, validation and error documents."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)

from runners.jobspec.engines import EngineName
from runners.jobspec.request_options import refusal_text, refused_options

Document = dict[str, Any]

MAX_CHOICES = 16
MAX_STOPS = 64  # OpenAI's API takes four; vLLM, SGLang and Anthropic's API take more
MAX_PROMPTS = 64
MAX_MESSAGES = 2000
MAX_PARTS = 2000  # of one message
MAX_BIASES = 4096
MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
SCHEMA = "response_format"
ENGINE_ENDED = "The engine ended while it answered. See the job's page for the reason."
# Fields about the caller or for a service around the model: accepted and ignored.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "prediction", "reasoning",
    "reasoning_effort", "verbosity",
)  # fmt: skip

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
# A list ends at its first wrong element: an error for each would hold the endpoint for minutes.
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, min_length=1)]
Text = Annotated[str, StringConstraints(min_length=1)]
Each = TypeVar("Each")
Several = Annotated[list[Each], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]


def bounded_dict(most: int) -> BeforeValidator:
    """Return a check of a dict's length, which pydantic itself makes after all its values."""

    def check(sent: object) -> object:
        if isinstance(sent, dict) and len(sent) > most:
            raise ValueError(f"it should have at most {most} items, not {len(sent)}")
        return sent

    return BeforeValidator(check)


def _prompt_kind(sent: object) -> str:
    """Return which of its four forms a prompt has, by its first element."""
    first = sent[0] if isinstance(sent, list) and sent else None
    if isinstance(first, list):
        return "lists of token ids"
    if isinstance(first, str):
        return "texts"
    return "token ids" if isinstance(sent, list) else "text"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Ids, Tag("token ids")]
    | Annotated[Several[Text], Tag("texts")]
    | Annotated[Several[Ids], Tag("lists of token ids")],
    Discriminator(_prompt_kind),
]


class RequestError(Exception):
    """A rejected request: HTTP status and OpenAI error document."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def is_server_error(self) -> bool:
        """Return whether the endpoint, not the client, is at fault."""
        return self.status == HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def document(self) -> Document:
        """Return the response body."""
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


def retry_after(seconds: int) -> dict[str, str]:
    """Return the headers that ask a client to come again."""
    return {"Retry-After": str(seconds)}


class ClientFields(BaseModel):
    """Fields as client libraries fill them: one that is null is as if it was left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    EMPTY: ClassVar[frozenset[str]] = frozenset()  # fields that an empty value leaves out too

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, sent: object) -> object:
        if not isinstance(sent, dict):
            return sent
        found = {
            name: value
            for name, value in sent.items()
            if value is not None and not (name in cls.EMPTY and value in ("", []))
        }
        known = {each.alias or name for name, each in cls.model_fields.items()}
        # One unknown field is enough for the refusal.
        unknown = next((name for name in found if name not in known), None)
        return {name: each for name, each in found.items() if name in known or name == unknown}


class StreamOptions(ClientFields):
    """What a stream contains besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: token counts in each chunk
    include_obfuscation: bool = False  # padding against traffic analysis; never sent


class RequestBody(ClientFields):
    """The fields that both APIs share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # as in vLLM, with the next two
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[Annotated[int, Field(ge=0)], Bias], bounded_dict(MAX_BIASES)] | None
    ) = None  # by token id
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False  # as in vLLM: generate max_tokens tokens
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_choices(self) -> int:
        """Return the number of answers per prompt."""
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
    def wants_continuous_usage(self) -> bool:
        """Return whether each chunk of a stream carries the token counts so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class JsonSchema(ClientFields):
    """The schema that an answer is held to; it is held to it whether ``strict`` is true or not."""

    document: Annotated[Document, Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(ClientFields):
    """What an answer is: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            has = "needs" if self.json_schema is None else "has no"
            raise ValueError(f"a format of the type {self.type} {has} json_schema")
        return self


class AnswerFormat(ClientFields):
    """What our own engine holds an answer to; other engines read the field themselves."""

    response_format: ResponseFormat | None = None

    @property
    def answer_schema(self) -> str | None:
        """Return the JSON schema of the answer as text, None if it is any text."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        schema = wanted.json_schema.document if wanted.json_schema else {"type": "object"}
        return json.dumps(schema)


class CompletionRequest(RequestBody):
    """``POST /v1/completions``."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return each prompt, as text or as tokens."""
        return prompts_of(self.prompt)


def prompts_of(prompt: Prompt) -> list[str | list[int]]:
    """Return each of the prompts of a field, as text or as tokens."""
    if isinstance(prompt, str):
        return [prompt]
    parts: Sequence[int | str | list[int]] = prompt
    ids = [each for each in parts if isinstance(each, int)]
    return [ids] if ids else [each for each in parts if not isinstance(each, int)]


class TextRequest(AnswerFormat, CompletionRequest):
    """A completion for Slipway's own engine and llama.cpp."""


# For a service around the model, or for the reader of an answer: accepted, and not forwarded.
Ignored = Annotated[Any, Field(exclude=True)]


MEDIA = {  # parts of messages that no engine here gets, by their types in the three APIs
    **dict.fromkeys(("image_url", "input_image", "image"), "images"),
    **dict.fromkeys(("input_audio", "audio_url"), "audio recordings"),
    **dict.fromkeys(("video_url",), "videos"),
    **dict.fromkeys(("file", "input_file", "document"), "files"),
}


class TextPart(ClientFields):
    """One part of a message; only text is supported."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None  # a hint for caches of prompts


TextParts = Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class BaseMessage(ClientFields):
    """What every engine takes in a message, also an endpoint's own answer as history."""

    EMPTY: ClassVar[frozenset[str]] = frozenset({"tool_calls", "refusal", "annotations"})

    role: str
    content: str | TextParts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of the same
    annotations: Ignored = None  # sources of an answer, for its reader
    cache_control: Ignored = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(
                f"content is missing; a message of the role {self.role} needs a string or a list "
                "of text parts"
            )
        return self


def _is_call(sent: Document) -> Document:
    """Check a call of an earlier answer: its function's name, and its arguments in JSON."""
    function = sent.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call needs a function with a name")  # noqa: TRY004 - pydantic's
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("a call's arguments are a JSON object, as text")  # noqa: TRY004
    return sent


class Message(BaseMessage):
    """One message of a conversation, also tool calls and their results."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Several[Annotated[Document, AfterValidator(_is_call)]] | None = None
    tool_call_id: str | None = None

    @property
    def plain(self) -> Document:
        """Return the message as chat templates expect it: with its text in one piece."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        more = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
        }
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | {
            name: value for name, value in more.items() if value is not None
        }


def _is_tool(sent: Document) -> Document:
    """Check a tool: a function with a name."""
    function = sent.get("function")
    if sent.get("type") != "function" or not isinstance(function, dict):
        raise ValueError("a tool is of the type function, and has a function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("a tool's function needs a name")
    return sent


class ChatFields(RequestBody):
    """The fields of ``POST /v1/chat/completions`` except the conversation."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: (
        Annotated[
            list[Annotated[Document, AfterValidator(_is_tool)]],
            Field(fail_fast=True, max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    tool_choice: str | Document | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> list[Document]:
        """Return the tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @classmethod
    def checked(cls, document: dict[str, Any]) -> Self:
        """Return the validated request; ``top_logprobs`` needs ``logprobs``."""
        request = cls.model_validate(document)
        if request.top_logprobs and not request.logprobs:
            message = "top_logprobs is given without logprobs; set logprobs to true"
            raise RequestError(400, message, param="top_logprobs")
        return request


class ChatRequest(AnswerFormat, ChatFields):
    """A chat request for Slipway's own engine and llama.cpp."""

    messages: Annotated[
        list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]


def checked_token_ids(ids: Iterable[int], vocabulary: int, param: str = "prompt") -> list[int]:
    """Return token ids of a field, checked against the vocabulary size.

    Raises:
        RequestError: a token id is outside the vocabulary.
    """
    found = list(ids)
    if max(found, default=0) >= vocabulary:
        message = f"{param} holds token {max(found)}; the model has {vocabulary}"
        raise RequestError(400, message, param=param)
    return found


OneAsked = TypeVar("OneAsked", bound=RequestBody)
OneParsed = TypeVar("OneParsed", bound=ClientFields)


def parse_completion(body: bytes, engine: EngineName) -> TextRequest:
    """Return the parsed request.

    Raises:
        RequestError: a field is invalid, or not supported by the engine; the error names it.
    """
    return parse_body(TextRequest.model_validate, body, engine)


def parse_chat(body: bytes, engine: EngineName) -> ChatRequest:
    """Return the parsed request.

    Raises:
        RequestError: a field is invalid, or not supported by the engine; the error names it.
    """
    return parse_body(ChatRequest.checked, body, engine)


def parse_body(check: Callable[[Document], OneAsked], body: bytes, engine: EngineName) -> OneAsked:
    """Return the parsed request; fields that ask nothing of the engine are left out.

    Raises:
        RequestError: a field is invalid, or not supported by the engine; the error names it.
    """
    document, refused = read_document(body), refused_options(engine)
    for name, option in refused.items():
        if not is_neutral(document.get(name), option.neutral):
            raise unsupported(name, refusal_text(name, engine))
    dropped = {*refused, *IGNORED}
    return checked(check, {name: each for name, each in document.items() if name not in dropped})


def checked(check: Callable[[Document], OneParsed], document: Document) -> OneParsed:
    """Return the parsed request.

    Raises:
        RequestError: a field is invalid; the error names it.
    """
    try:
        return check(document)
    except ValidationError as error:
        raise _media_error(document) or _field_error(error, document) from None


def read_document(body: bytes) -> Document:
    """Return the JSON object of a body.

    Raises:
        RequestError: it is none.
    """
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
        if b"\\ud" in body.lower():  # half of a surrogate pair is no text, and cannot be sent on
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        message = f"The body is not JSON: {str(error)[:200]}. Send one JSON object in UTF-8."
        raise RequestError(400, message, code="invalid_json") from None
    if not isinstance(document, dict):
        raise RequestError(400, "The body is not a JSON object.", code="invalid_json")
    return document


def is_neutral(value: object, neutral: Sequence[object]) -> bool:
    """Return whether a field's value asks for nothing: null, or one of the neutral values."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    return value is None or value in neutral


def schema_error(tool: str, message: str) -> RequestError:
    """Return the error of a JSON schema that no answer can be held to; "": the answer's own."""
    name, whose = ("tools", f"the parameters of {tool[:64]!r}") if tool else (SCHEMA, "its schema")
    text = f"{name}: {whose} cannot be held to: {message}; change the schema"
    return RequestError(400, text, param=name, code="invalid_json_schema")


def unsupported(name: str, message: str) -> RequestError:
    """Return the error of a field that is understood and not supported."""
    return RequestError(400, message, param=name, code="unsupported_parameter")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _media_error(document: Document) -> RequestError | None:
    """Return the refusal of a part that is no text, by what it is; None if there is none."""
    for field in ("messages", "input"):  # of chat completions and messages; of responses
        turns = document.get(field)
        for number, turn in enumerate(turns if isinstance(turns, list) else ()):
            parts = turn.get("content") if isinstance(turn, dict) else None
            for at, part in enumerate(parts if isinstance(parts, list) else ()):
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind in MEDIA:
                    message = (
                        f"{field}.{number}.content.{at}: {MEDIA[kind]} are not taken ({kind}): "
                        "this endpoint reads text alone. Leave the part out, or say in words what "
                        "is in it"
                    )
                    return RequestError(400, message, param=field, code="unsupported_content")
    return None


def _field_error(error: ValidationError, document: dict[str, Any]) -> RequestError:
    """Return the error of the innermost wrong field, by the path that the client sent."""

    def depth(details: Mapping[str, Any]) -> tuple[int, bool]:
        is_other_alternative = details["type"].endswith("_type")
        return len(_path(details, document)), not is_other_alternative

    worst = max(error.errors(), key=depth)
    path = _path(worst, document)
    name, where = (path or [""])[0], ".".join(path)
    if worst["type"] == "extra_forbidden":
        message = f"Unrecognized request argument: {where}; leave it out"
        return RequestError(400, message, param=name)
    reason = worst["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    has_value = worst["type"] not in {"missing", "value_error"}
    value = f" (given: {str(worst['input'])[:80]!r})" if has_value else ""
    return RequestError(400, f"{where}: {reason}{value}", param=name)


def _path(details: Mapping[str, Any], document: object) -> list[str]:
    """Return where a value is in the document, without pydantic's names of alternatives."""
    path: list[str] = []
    at = document
    for part in details["loc"]:
        is_item = isinstance(at, list) and isinstance(part, int)
        if is_item or (isinstance(at, dict) and part in at):
            at = at[part]  # type: ignore[index]
        elif details["type"] != "missing" or part != details["loc"][-1]:
            continue
        path.append(str(part))
    return path
