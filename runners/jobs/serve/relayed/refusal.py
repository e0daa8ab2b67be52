"""Conversion of engine errors to the endpoint's error format."""

from http import HTTPStatus

import httpx

from runners.jobs.serve.protocol import RequestError

TOO_LONG = "maximum context length"  # as in vLLM's and OpenAI's messages


def refusal(status: int, body: bytes) -> RequestError:
    """Return an engine error as a ``RequestError``: its message and field, without its code."""
    try:
        document = httpx.Response(status, content=body).json()
        document = document.get("error", document)
        message = str(document["message"] if isinstance(document, dict) else document)[:1000]
    except (ValueError, KeyError, AttributeError):
        document, message = {}, f"The engine answered with status {status}."
    param = document.get("param") if isinstance(document, dict) else None
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return RequestError(500, message, code="engine_error")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return RequestError(500, "The engine does not take its own key.", code="engine_error")
    code = "context_length_exceeded" if TOO_LONG in message else None
    return RequestError(
        status, message, param=param if isinstance(param, str) else None, code=code
    )
