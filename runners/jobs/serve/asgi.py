"""HTTP of the endpoint: ASGI messages, bodies, event streams, errors."""

import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

# ---------------------------------------------------------------------------
# The OpenAI request format: fields, validation and error documents.
# ---------------------------------------------------------------------------


MAX_CHOICES = 16
MAX_STOPS = 4
MAX_MESSAGES = 2000
MAX_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
# Values of unsupported fields that are accepted because they have no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {
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
# Fields about the caller or for a service around the model: accepted and ignored.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "reasoning_effort", "verbosity",
)  # fmt: skip

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Text = Annotated[str, StringConstraints(min_length=1)]
Each = TypeVar("Each")
Several = Annotated[list[Each], Field(min_length=1, max_length=64)]


class RequestError(Exception):
    """A rejected request: HTTP status and OpenAI error document."""

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
    def is_server_error(self) -> bool:
        """Return whether the endpoint, not the client, is at fault."""
        return self.status == HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def document(self) -> dict[str, Any]:
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


class StreamOptions(BaseModel):
    """What a stream contains besides text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: token counts in each chunk
    include_obfuscation: bool = False  # padding against traffic analysis; never sent


class RequestBody(BaseModel):
    """The fields that both APIs share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
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


class CompletionRequest(RequestBody):
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
    """One part of a message; only text is supported."""

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
        """Return role and text, as chat templates expect them."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatFields(RequestBody):
    """The fields of ``POST /v1/chat/completions`` except the conversation."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @classmethod
    def checked(cls, document: dict[str, Any]) -> Self:
        """Return the validated request; ``top_logprobs`` needs ``logprobs``."""
        request = cls.model_validate(document)
        if request.top_logprobs and not request.logprobs:
            message = "top_logprobs is given without logprobs; set logprobs to true"
            raise RequestError(400, message, param="top_logprobs")
        return request


class ChatRequest(ChatFields):
    """A chat request for Slipway's own engines: text only."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def checked_token_ids(prompt: Sequence[int], vocabulary: int) -> list[int]:
    """Return a prompt of token ids, checked against the vocabulary size.

    Raises:
        RequestError: a token id is outside the vocabulary.
    """
    if max(prompt, default=0) >= vocabulary:
        message = f"prompt holds token {max(prompt)}; the model has {vocabulary}"
        raise RequestError(400, message, param="prompt")
    return list(prompt)


OneAsked = TypeVar("OneAsked", bound=RequestBody)


def parse_completion(body: bytes) -> CompletionRequest:
    """Return the parsed request.

    Raises:
        RequestError: a field is invalid; the error names it.
    """
    return parse_body(CompletionRequest.model_validate, body)


def parse_chat(body: bytes) -> ChatRequest:
    """Return the parsed request.

    Raises:
        RequestError: a field is invalid; the error names it.
    """
    return parse_body(ChatRequest.checked, body)


def parse_body(
    check: Callable[[dict[str, Any]], OneAsked],
    body: bytes,
    understood: Collection[str] = (),
) -> OneAsked:
    """Return the parsed request; ``understood``: fields exempt from the ``NEUTRAL`` check.

    Raises:
        RequestError: a field is invalid; the error names it.
    """
    try:
        return check(_document(body, understood))
    except ValidationError as error:
        raise _field_error(error) from None


def _document(body: bytes, understood: Collection[str]) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, "The body is not JSON.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise RequestError(400, "The body is not a JSON object.", code="invalid_json")
    unsupported = {name: values for name, values in NEUTRAL.items() if name not in understood}
    for name, neutral in unsupported.items():
        if document.get(name) is not None and document[name] not in neutral:
            message = f"{name} is not supported by this endpoint; leave it out"
            raise RequestError(400, message, param=name, code="unsupported_parameter")
    dropped = {*unsupported, *IGNORED}
    return {name: value for name, value in document.items() if name not in dropped}


def _field_error(error: ValidationError) -> RequestError:
    """Return the first validation error, with the field name that the client sent."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    name = place[0] if place else ""
    where = ".".join([name, *(part for part in place[1:] if part.isdigit() or part.islower())])
    if first["type"] == "extra_forbidden":
        return RequestError(400, f"Unrecognized request argument: {where}", param=name)
    reason = first["msg"][0].lower() + first["msg"][1:]
    value = "" if first["type"] == "missing" else f" (given: {str(first['input'])[:80]!r})"
    return RequestError(400, f"{where}: {reason}{value}", param=name)


# ---------------------------------------------------------------------------
# Minimal HTTP over ASGI: read bodies; send JSON, errors and server-sent events.
# ---------------------------------------------------------------------------


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Document = dict[str, Any]

MAX_BODY_BYTES = 4 * 1024**2
JSON = b"application/json"


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def read_body(receive: Receive) -> bytes:
    """Return the whole request body.

    Raises:
        RequestError: the body is too large.
        ClientGoneError: the client disconnected while it sent the body.
    """
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            limit = f"The body is larger than {MAX_BODY_BYTES} bytes."
            raise RequestError(413, limit, code="body_too_large")
        if not message.get("more_body"):
            return b"".join(parts)


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def server_sent_event(document: Document) -> bytes:
    """Return a document as one server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


async def send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    """Send a part of a response body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_error(send: Send, error: RequestError) -> None:
    """Send an error as an OpenAI error document."""
    wait = error.retry_after_seconds
    headers = [] if wait is None else [(b"retry-after", str(wait).encode())]
    await send_bytes(send, error.status, json.dumps(error.document).encode(), JSON, headers)


async def send_json(send: Send, status: int, document: Document) -> None:
    """Send a JSON response."""
    await send_bytes(send, status, json.dumps(document).encode(), JSON)


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    kind: bytes,
    more: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send a complete response."""
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_part(send, body, more=False)
