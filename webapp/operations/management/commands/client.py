"""``manage.py client``: write the Python client from the API's own schema."""

import keyword
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand

import runners.client
from webapp.api.urls import api

Schema = Mapping[str, Any]
TARGET = Path(runners.client.__file__).parent / "generated.py"
# What both sides have: the planner's own classes instead of copies.
PLANNER = {
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
}
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
FORMATS = {"date-time": "datetime", "date": "date"}
REF = "#/components/schemas/"
HEAD = '''\
"""The operations and types of the API, written by ``manage.py client`` from its schema."""

# ruff: noqa: E501, W505
from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict

{imports}
from runners.client.transport import AsyncCaller, Call, Caller, Event, part


class Reply(BaseModel):
    """What the server sends: fields of a newer server are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
'''
CLASS = {
    "Slipway": ("Caller", "Every operation of the API, one after the other."),
    "AsyncSlipway": ("AsyncCaller", "Every operation of the API, for asyncio."),
}


class Command(BaseCommand):
    """Write ``runners/client/generated.py``."""

    help = "Write the Python client from the API's schema."

    def handle(self, **_options: Any) -> None:
        """Write the file."""
        TARGET.write_text(client_source())
        self.stdout.write(f"{TARGET} is written.")


def client_source() -> str:
    """Return the source of the client for the API as it is."""
    document = api.get_openapi_schema()
    schemas = document["components"]["schemas"]
    calls = list(_operations(document))
    names = sorted(_reachable(calls, schemas))
    own = [name for name in names if name not in PLANNER]
    imports = "\n".join(f"from {PLANNER[name]} import {name}" for name in names if name in PLANNER)
    parts = [HEAD.format(imports=imports)]
    parts += [_model(name, schemas[name]) for name in own]
    for name, (base, words) in CLASS.items():
        is_async = name.startswith("Async")
        methods = "\n".join(_method(each, is_async=is_async) for each in calls)
        parts.append(f'class {name}({base}):\n    """{words}"""\n\n{methods}')
    return _formatted("\n\n".join(parts))


def _formatted(source: str) -> str:
    """Return the source as ruff formats it."""
    for arguments in (("check", "--fix-only", "--select", "I,F401"), ("format",)):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(TARGET), "-"],
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
                yield {**operation, "method": method.upper(), "path": path.removeprefix("/api/v1")}


def _references(schema: Any) -> Iterator[str]:  # noqa: ANN401 (JSON)
    if isinstance(schema, Mapping):
        if isinstance(ref := schema.get("$ref"), str):
            yield ref.removeprefix(REF)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _reachable(calls: list[dict[str, Any]], schemas: Schema) -> set[str]:
    """Return the names of all schemas that the operations use, without errors' and planner's."""
    found: set[str] = set()
    pending = [name for call in calls for name in _references(_used(call))]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += [] if name in PLANNER else list(_references(schemas[name]))
    return found


def _used(call: Schema) -> list[Any]:
    return [_success(call), call.get("requestBody"), call.get("parameters")]


def _success(call: Schema) -> Mapping[str, Any]:
    return next(
        (reply for code, reply in call["responses"].items() if str(code).startswith("2")), {}
    )


def _type(schema: Schema) -> str:  # noqa: PLR0911 (one per kind of schema)
    """Return the annotation of a schema."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(REF)
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


def _model(name: str, schema: Schema) -> str:
    """Return the class of an object's schema, or the alias of another one."""
    if "properties" not in schema:
        return f"{name} = {_type(schema)}"
    is_closed = schema.get("additionalProperties") is False
    base = "BaseModel" if is_closed else "Reply"
    words = _words(schema)
    end = "\n    " if "\n" in words else ""
    lines = [f"class {name}({base}):", f'    """{_indented(words, 4)}{end}"""', ""]
    if is_closed:
        lines.append('    model_config = ConfigDict(extra="forbid", protected_namespaces=())')
    required = set(schema.get("required", ()))
    for field, inner in schema["properties"].items():
        annotation = _type(inner)
        given = inner.get("default")
        default = "" if field in required else f" = {None if isinstance(given, dict) else given!r}"
        if default == " = None" and "None" not in annotation.split(" | "):
            annotation += " | None"
        lines.append(f"    {field}: {annotation}{default}")
    return "\n".join(lines)


def _words(schema: Schema) -> str:
    text = str(schema.get("description") or schema.get("title") or "").strip()
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _method(call: Schema, *, is_async: bool) -> str:
    """Return the method of an operation."""
    given, query = ["self"], []
    keyed: list[str] = []
    for each in call.get("parameters", ()):
        name, schema = each["name"], each["schema"]
        if each["in"] == "path":
            given.append(f"{name}: {_type(schema)}")
        elif each["in"] == "query":
            argument = f"{name}_" if keyword.iskeyword(name) else name
            query.append(f'"{name}": {argument}')
            default = "" if each.get("required") else f" = {schema.get('default')!r}"
            annotation = _type(schema)
            if default == " = None" and "None" not in annotation.split(" | "):
                annotation += " | None"
            keyed.append(f"{argument}: {annotation}{default}")
    content = (call.get("requestBody") or {}).get("content", {})
    body = ""
    if "multipart/form-data" in content:
        given.append("file: Path")
        body = ", file"
    elif "application/json" in content:
        annotation = _type(content["application/json"]["schema"])
        mapping = "Mapping[str, Any]"
        annotation = mapping if annotation.startswith("dict[") else f"{annotation} | {mapping}"
        given.append(f"body: {annotation}")
        body = ", body"
    replies = _success(call).get("content", {})
    is_stream, is_file = "text/event-stream" in replies, "application/octet-stream" in replies
    reply = _type(next(iter(replies.values()))["schema"]) if replies else "None"
    if is_file:
        given.append("sink: BinaryIO")
    elif call["method"] != "GET":
        keyed.append("idempotency_key: str | None = None")
        body = f"{body or ', None'}, idempotency_key"
    signature = ", ".join([*given, *(["*", *keyed] if keyed else [])])
    described = f'Call("{call["method"]}", {_path(call["path"])}, {{{", ".join(query)}}}{body})'
    lines = _words(call)
    documented = (
        f'        """{lines}"""'
        if "\n" not in lines
        else f'        """{_indented(lines, 8)}\n        """'
    )
    if is_stream:
        iterator = "AsyncIterator[Event]" if is_async else "Iterator[Event]"
        head = f"    def {call['operationId']}({signature}) -> {iterator}:"
        return f"{head}\n{documented}\n        return self._events({described})\n"
    prefix, wait = ("async def", "await ") if is_async else ("def", "")
    result = "int" if is_file else reply
    head = f"    {prefix} {call['operationId']}({signature}) -> {result}:"
    if is_file:
        action = f"return {wait}self._download({described}, sink)"
    elif reply == "None":
        action = f"{wait}self._call({described}, None)"
    else:
        action = f"result: {reply} = {wait}self._call({described}, {reply})\n        return result"
    return f"{head}\n{documented}\n        {action}\n"


def _indented(text: str, width: int) -> str:
    """Return text whose lines but the first begin with ``width`` blanks."""
    return text.replace("\n", "\n" + " " * width).replace(" " * width + "\n", "\n")


def _path(path: str) -> str:
    """Return the expression of a path, its arguments quoted."""
    if "{" not in path:
        return f'"{path}"'
    filled = re.sub(
        r"\{(path:)?(\w+)\}",
        lambda found: "{part(" + found[2] + (", safe='/'" if found[1] else "") + ")}",
        path,
    )
    return f'f"{filled}"'
