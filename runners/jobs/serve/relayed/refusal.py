"""What an engine refuses, in our form."""

from http import HTTPStatus

import httpx

from runners.jobs.serve.protocol import AskedError

TOO_LONG = "maximum context length"  # as vLLM and OpenAI say it


def refusal(status: int, body: bytes) -> AskedError:
    """Return an engine's error in our form: its words and field, no code of its own."""
    try:
        said = httpx.Response(status, content=body).json()
        said = said.get("error", said)
        message = str(said["message"] if isinstance(said, dict) else said)[:1000]
    except (ValueError, KeyError, AttributeError):
        said, message = {}, f"The engine answered with status {status}."
    param = said.get("param") if isinstance(said, dict) else None
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return AskedError(500, message, code="engine_error")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return AskedError(500, "The engine does not take its own key.", code="engine_error")
    code = "context_length_exceeded" if TOO_LONG in message else None
    return AskedError(status, message, param=param if isinstance(param, str) else None, code=code)
