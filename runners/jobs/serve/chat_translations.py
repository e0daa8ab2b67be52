"""The addresses of other APIs, which chat completions answer, and how their bodies are read."""

from collections.abc import Mapping

from runners.jobs.serve.anthropic_messages import CountRequest, MessagesRequest
from runners.jobs.serve.openai_requests import (
    Document,
    checked,
    is_neutral,
    read_document,
    unsupported,
)
from runners.jobs.serve.openai_responses import ResponsesRequest
from runners.jobs.serve.translated import TranslatedRequest

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
WAY_OUT = "leave it out, or use /v1/chat/completions"
TRANSLATED: dict[str, type[TranslatedRequest]] = {
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
}


def parse_translated(path: str, body: bytes) -> TranslatedRequest:
    """Return the parsed request of another API.

    Raises:
        RequestError: a field is invalid, or asks for what is not carried; the error names it.
    """
    kind = TRANSLATED[path]
    return checked(kind.model_validate, _of_text(path, kind.NEUTRAL, body))


def parse_count(body: bytes) -> CountRequest:
    """Return the parsed request to count a conversation's tokens.

    Raises:
        RequestError: a field is invalid, or asks for what is not carried; the error names it.
    """
    return checked(CountRequest.model_validate, _of_text(COUNT_TOKENS, {}, body))


def _of_text(path: str, neutral_values: Mapping[str, tuple[object, ...]], body: bytes) -> Document:
    """Return a body's document without the fields that ask for nothing here."""
    document = read_document(body)
    for name, neutral in neutral_values.items():
        if not is_neutral(document.pop(name, None), neutral):
            raise unsupported(name, f"{name} is not supported by {path}; {WAY_OUT}")
    return document
