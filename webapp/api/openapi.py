"""What the OpenAPI document says beyond ninja's: summaries, headers, examples, media types."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from webapp.api.requests import KEY_HEADER, LONGEST_KEY, REPLAYED, REQUEST_ID, WRITES
from webapp.core.problems import JSON_TYPE, name_media_types

Document = dict[str, Any]
UNNAMED = "webapp_api_hosts_"  # begins the ids of the hosts' own operations: module and function
RETRIED = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
HEADERS = {
    REQUEST_ID: {
        "description": "Id of the request, also in what the site logs of it",
        "schema": {"type": "string"},
    },
    REPLAYED: {
        "description": f"“true” if the reply is a repeated one, of an earlier {KEY_HEADER}",
        "schema": {"type": "string", "const": "true"},
    },
    "WWW-Authenticate": {
        "description": "The scheme of access tokens and of hosts' credentials",
        "schema": {"type": "string", "const": "Bearer"},
    },
    "Retry-After": {
        "description": "Seconds until the request may be repeated",
        "schema": {"type": "integer", "minimum": 0},
    },
}
KEY_PARAMETER = {
    "name": KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "A text of the caller's, such as a UUID: a repetition within 24 hours gets the "
    "first reply, and nothing happens twice",
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[ -~]+$"},
}
# Bodies by operation; a test checks them against the operations' own types.
EXAMPLES: dict[str, dict[str, Any]] = {
    "create_plan": {
        "goal": "serve",
        "model": "meta-llama/Llama-3.1-8B",
        "workload": {"input_tokens": 1024, "output_tokens": 256, "concurrency": 16},
        "hardware": {"host": "this-machine"},
        "pins": {"weight_dtype": "fp8"},
    },
    "launch_plan": {"run": "endpoint", "engine": "vllm", "hours": 8},
}


def complete(document: Document) -> None:
    """Add to ninja's OpenAPI document, in place, what holds for its operations alike."""
    name_media_types(document)
    components = document["components"]
    components["parameters"] = {KEY_HEADER: KEY_PARAMETER}
    components["headers"] = HEADERS
    for method, operation in _operations(document):
        operation["summary"] = summary_of(operation["operationId"])
        if method in WRITES:
            key = {"$ref": f"#/components/parameters/{KEY_HEADER}"}
            operation["parameters"] = [*operation["parameters"], key]
        if JSON_TYPE in operation.get("requestBody", {}).get("content", {}):
            refusal = operation["responses"][HTTPStatus.CONFLICT]
            operation["responses"][415] = {**refusal, "description": "Unsupported Media Type"}
        for status, response in operation["responses"].items():
            is_replayed = method in WRITES and int(status) < HTTPStatus.BAD_REQUEST
            names = [REQUEST_ID, *[REPLAYED] * is_replayed, *["Retry-After"] * (status in RETRIED)]
            names += ["WWW-Authenticate"] * (status == HTTPStatus.UNAUTHORIZED)
            refs = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
            response["headers"] = refs
        if example := EXAMPLES.get(operation["operationId"]):
            operation["requestBody"]["content"][JSON_TYPE]["example"] = example


def summary_of(operation_id: str) -> str:
    """Return an operation's id as words: “List jobs” of ``list_jobs``."""
    return operation_id.removeprefix(UNNAMED).replace("_", " ").capitalize()


def _operations(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in document["paths"].values():
        for method, operation in path.items():
            yield method.upper(), operation
