"""``manage.py client``: write the Python client, and the schema of ``job.yaml`` for editors."""

import json
import keyword
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.http import HttpRequest

import runners.client.replies
from webapp.api.openapi import JOB_SPEC
from webapp.api.plans import plan_schema
from webapp.api.urls import api
from webapp.wizard.documents import SCHEMA_FILE

Schema = Mapping[str, Any]
FOLDER = Path(runners.client.replies.__file__).parent.parent
SCHEMA = Path(settings.BASE_DIR) / "static" / SCHEMA_FILE
# What both sides have: the classes of planner and plan documents instead of copies.
SHARED = {
    **dict.fromkeys(
        (
            "Estimate",
            "EstimateRequest",
            "InverseAnswer",
            "InverseRequest",
            "PlanAnswer",
            "PlanRequest",
        ),
        "planner.specs.estimate",
    ),
    "ModelSpec": "planner.specs.model",
    **dict.fromkeys(
        ("DisaggregatedSpec", "OffloadSpec", "SpeculativeSpec", "Strategy"),
        "planner.specs.workload",
    ),
    **dict.fromkeys(
        (
            "CompressPlan",
            "FinetunePlan",
            "GeneratePlan",
            "HardwareChoice",
            "ModelChoice",
            "PretrainPlan",
            "ServePlan",
        ),
        "runners.plans.document",
    ),
    "Launch": "runners.plans.launch",
    "Scope": "runners.client.replies.team",
    **dict.fromkeys(
        (
            "CompressWork",
            "FinetuneWork",
            "GenerateWork",
            "MixtureSource",
            "PretrainWork",
            "ServeWork",
        ),
        "runners.plans.workloads",
    ),
}
# What a newer server may have more kinds of: any JSON object to the client.
OPEN = {JOB_SPEC}
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
FORMATS = {"date-time": "datetime", "date": "date"}
REF = "#/components/schemas/"
TYPES = '''\
"""The types of the API's requests, written by ``manage.py client`` from its schema."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any, Literal, NotRequired, TypedDict

{imports}


{types}
'''
OPERATIONS = '''\
"""The operations of the API, written by ``manage.py client`` from its schema."""

# ruff: noqa: E501, F403, F405, PLR0913, W505
# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

{imports}
from runners.client.operation import JsonObject, event_stream, operation
{replies}
from runners.client.requests import *
from runners.client.transport import AsyncCaller, Caller, Event


class Operations:
    """Every operation of the API, as both clients have it."""

{operations}


class Slipway(Operations, Caller):
    """The client of a server, one request after the other."""


class AsyncSlipway(Operations, AsyncCaller):
    """The client of a server for asyncio: the same methods, to be awaited."""
'''
FILE_NAME = str(FOLDER / "generated.py")  # for ruff's configuration
# Arguments that are neither of the path nor of the query.
SPECIAL = {"self", "body", "file", "sink", "idempotency_key"}


class Command(BaseCommand):
    """Write the files of ``runners/client`` and ``static/schemas/job.json``."""

    help = "Write the Python client and the schema of job.yaml from the API's schema."

    def handle(self, **_options: Any) -> None:
        """Write the files."""
        SCHEMA.parent.mkdir(exist_ok=True)
        sources = {FOLDER / name: source for name, source in client_sources().items()}
        for path, text in (sources | {SCHEMA: schema_text()}).items():
            path.write_text(text)
            self.stdout.write(f"{path} is written.")


def schema_text() -> str:
    """Return the JSON schema of ``job.yaml``: what ``GET /api/v1/plans/schema`` replies."""
    return json.dumps(plan_schema(HttpRequest()), indent=1) + "\n"


def client_sources() -> dict[str, str]:
    """Return the source of the client for the API as it is, by file name."""
    document = api.get_openapi_schema()
    schemas = document["components"]["schemas"]
    calls = list(_operations(document))
    requests = _reachable([[_body(call), call.get("parameters")] for call in calls], schemas)
    names = sorted(requests | _reachable([_success(call) for call in calls], schemas))
    imports = "\n".join(f"from {SHARED[name]} import {name}" for name in names if name in SHARED)
    types = "\n\n".join(
        _request(name, schemas[name]) for name in sorted(requests) if name not in SHARED
    )
    operations = "\n".join(map(_method, calls))
    replies = "\n".join(f"from runners.client.replies.{name} import *" for name in _subjects())
    return {
        "requests.py": _formatted(TYPES.format(imports=imports, types=types)),
        "generated.py": _formatted(
            OPERATIONS.format(imports=imports, operations=operations, replies=replies)
        ),
    }


def _subjects() -> list[str]:
    """Return the names of the modules with replies."""
    return sorted(each.name for each in iter_modules(runners.client.replies.__path__))


def _formatted(source: str) -> str:
    """Return the source as ruff formats it."""
    fix = ("check", "--fix-only", "--select")
    for arguments in ((*fix, "F401"), (*fix, "I"), ("format",)):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", FILE_NAME, "-"],
            input=source,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
        )
        source = done.stdout
    return source


def _operations(document: Schema) -> Iterator[dict[str, Any]]:
    """Yield the operations that an access token may be sent to."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if {"TokenAuth": []} in operation.get("security", ()):
                # A parameter by reference is a header, which the transport sends.
                own = [each for each in operation["parameters"] if "$ref" not in each]
                parts = {"method": method.upper(), "path": path.removeprefix("/api/v1")}
                yield {**operation, "parameters": own, **parts}


def _references(schema: Any) -> Iterator[str]:  # noqa: ANN401 (JSON)
    if isinstance(schema, Mapping):
        if isinstance(ref := schema.get("$ref"), str) and ref.startswith(REF):
            yield ref.removeprefix(REF)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _reachable(used: list[Any], schemas: Schema) -> set[str]:
    """Return the names of all schemas that are used; of the planner's, only their own."""
    found: set[str] = set()
    pending = list(_references(used))
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += [] if name in {*SHARED, *OPEN} else list(_references(schemas[name]))
    return found - OPEN


def _body(call: Schema) -> Schema | None:
    """Return the schema of a JSON body with fields of its own.

    A plan's document has another form for each goal: to the client it is any JSON object.
    """
    content = (call.get("requestBody") or {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    return schema if "$ref" in schema else None


def _success(call: Schema) -> Mapping[str, Any]:
    return next(
        (reply for code, reply in call["responses"].items() if str(code).startswith("2")), {}
    )


def _type(schema: Schema) -> str:  # noqa: PLR0911 (one per kind of schema)
    """Return the annotation of a schema."""
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(REF)
        return "dict[str, Any]" if name in OPEN else name
    if "const" in schema:
        return f"Literal[{schema['const']!r}]"
    if "enum" in schema:
        return f"Literal[{', '.join(map(repr, schema['enum']))}]"
    if options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " | ".join(dict.fromkeys(map(_type, options)))
    kind = schema.get("type")
    if kind == "array":
        return f"list[{_type(schema.get('items', {}))}]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"dict[str, {_type(values) if isinstance(values, Mapping) else 'Any'}]"
    if kind == "string":
        return FORMATS.get(str(schema.get("format")), "str")
    return PLAIN.get(str(kind), "Any")


def _annotation(schema: Schema, *, is_required: bool) -> tuple[str, str]:
    """Return the annotation of a field or an argument, and its default after ``=``."""
    annotation, default = _type(schema), schema.get("default")
    if is_required:
        return annotation, ""
    if isinstance(default, dict):
        default = None
    if default is None and "None" not in annotation.split(" | "):
        annotation += " | None"
    return annotation, f" = {default!r}"


def _fields(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Return the fields of an object: name, schema, and whether it is required."""
    required = set(schema.get("required", ()))
    return [
        (name, inner, name in required) for name, inner in schema.get("properties", {}).items()
    ]


def _request(name: str, schema: Schema) -> str:
    """Return the class of a request's body, or an alias."""
    if "properties" not in schema:
        return f"{name} = {_type(schema)}\n"
    lines = [_head(name, "TypedDict", schema)]
    for field, inner, is_required in _fields(schema):
        annotation = _type(inner)
        lines.append(f"    {field}: {annotation if is_required else f'NotRequired[{annotation}]'}")
    return "\n".join([*lines, ""])


def _head(name: str, base: str, schema: Schema) -> str:
    words = _words(schema)
    end = "\n    " if "\n" in words else ""
    return f'class {name}({base}):\n    """{_indented(words, 4)}{end}"""\n'


def _words(schema: Schema) -> str:
    text = str(schema.get("description") or schema.get("title") or "").strip()
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _method(call: Schema) -> str:
    """Return the declaration of an operation."""
    given = ["self"]
    keyed: list[str] = []
    for each in call.get("parameters", ()):
        name = f"{each['name']}_" if keyword.iskeyword(each["name"]) else each["name"]
        if name in SPECIAL:
            raise ValueError(f"{call['operationId']}: an argument cannot be named {name}")
        annotation, default = _annotation(
            each["schema"], is_required=each["in"] == "path" or each.get("required", False)
        )
        (given if each["in"] == "path" else keyed).append(f"{name}: {annotation}{default}")
    content = (call.get("requestBody") or {}).get("content", {})
    if "multipart/form-data" in content:
        given.append("file: Path")
    elif "application/octet-stream" in content:
        given.append("body: bytes")
    elif content:
        body = _body(call)
        given.append(f"body: {_type(body)} | JsonObject" if body else "body: JsonObject")
    replies = _success(call).get("content", {})
    reply = _type(next(iter(replies.values()))["schema"]) if replies else "None"
    decorator = f'operation("{call["method"]}", "{call["path"]}")'
    if "application/octet-stream" in replies:
        given.append("sink: BinaryIO")
        reply = "int"
    elif "text/event-stream" in replies:
        decorator = f'event_stream("{call["path"]}")'
        reply = "Iterator[Event]"
    elif call["method"] != "GET" and "application/octet-stream" not in content:
        keyed.append("idempotency_key: str | None = None")
    signature = ", ".join([*given, *(["*", *keyed] if keyed else [])])
    words = _words(call)
    end = "\n        " if "\n" in words else ""
    return (
        f"    @{decorator}\n"
        f"    def {call['operationId']}({signature}) -> {reply}:\n"
        f'        """{_indented(words, 8)}{end}"""\n'
    )


def _indented(text: str, width: int) -> str:
    """Return text whose lines but the first begin with ``width`` blanks."""
    return text.replace("\n", "\n" + " " * width).replace(" " * width + "\n", "\n")
