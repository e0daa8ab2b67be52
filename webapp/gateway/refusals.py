"""Refusals of the gateway, in the form of the API that the client speaks."""

import json
from collections.abc import Mapping
from typing import Any

MESSAGES = "/v1/messages"  # Anthropic's API, with its token count below
OPENAI_TYPES = {
    401: "authentication_error", 429: "rate_limit_error", 500: "server_error",
    502: "server_error", 503: "service_unavailable_error",
}  # fmt: skip
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 502: "api_error",
    503: "overloaded_error",
}  # fmt: skip
INVALID = "invalid_request_error"


class Refusal(Exception):  # noqa: N818 -- an answer, not a fault
    """A request that the gateway does not pass on, or could not; ``code`` is stable."""

    def __init__(
        self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})

    def document(self, path: str) -> dict[str, Any]:
        """Return the body in the form of the API at a path."""
        if path.startswith(MESSAGES):
            kind = ANTHROPIC_TYPES.get(self.status, INVALID)
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        kind = OPENAI_TYPES.get(self.status, INVALID)
        param = "model" if self.code == "model_not_found" else None
        error = {"message": str(self), "type": kind, "param": param, "code": self.code}
        return {"error": error}

    def event(self, path: str) -> bytes:
        """Return the event that ends a stream which has begun."""
        return error_event(path, self.document(path))


def error_event(path: str, document: Mapping[str, Any]) -> bytes:
    """Return a document of an error as the last event of a stream."""
    head = b"event: error\n" if path.startswith(MESSAGES) else b""
    return head + b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def event_of_body(path: str, body: bytes) -> bytes:
    """Return an endpoint's error document as the last event of a stream."""
    try:
        document = json.loads(body)
    except ValueError:
        return Refusal(502, "The endpoint failed.", "upstream").event(path)
    return error_event(path, document)
