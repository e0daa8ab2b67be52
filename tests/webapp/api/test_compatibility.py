"""A newer server serves an older command: what the API's schema had, it keeps.

``served.json`` is the schema as last committed, in short: operations, parameters, fields of
requests and replies, statuses. A removal, a new required field or a value that an older command
does not know fails; an addition only has to be stored, with ``--rewrite-books``.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from webapp.api.urls import api

STORED = Path(__file__).with_name("served.json")
REF = "#/components/schemas/"
# A type, "=" and a constant, "#" and a schema's name, or one of {"items"}, {"values"}, {"fields"}.
Alternatives = list[Any]


# The schema in short


def alternatives(schema: dict[str, Any]) -> Alternatives:  # noqa: PLR0911 (one per kind)
    """Return what a schema permits; a name with "?" is a field that may be missing."""
    if "$ref" in schema:
        return ["#" + schema["$ref"].removeprefix(REF)]
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return [one for each in schema[word] for one in alternatives(each)]
    if "const" in schema or "enum" in schema:
        return [f"={json.dumps(one)}" for one in schema.get("enum", [schema.get("const")])]
    kind = schema.get("type", "any")
    if kind == "array":
        return [{"items": alternatives(schema.get("items", {}))}]
    if kind != "object":
        return [kind]
    if "properties" in schema:
        return [{"fields": named(schema["properties"], schema.get("required", ()))}]
    values = schema.get("additionalProperties")
    return [{"values": alternatives(values if isinstance(values, dict) else {})}]


def named(properties: dict[str, Any], required: Any) -> dict[str, Alternatives]:
    marks = {name: "" if name in required else "?" for name in properties}
    return {name + marks[name]: alternatives(one) for name, one in properties.items()}


def contents(part: dict[str, Any]) -> dict[str, Alternatives]:
    return {media: alternatives(one["schema"]) for media, one in part.get("content", {}).items()}


def in_short(document: dict[str, Any]) -> dict[str, Any]:
    """Return what a command relies on of an OpenAPI document."""
    operations = {}
    for path, item in document["paths"].items():
        for method, one in item.items():
            components = document.get("components", {}).get("parameters", {})
            parameters = [
                components[each["$ref"].rpartition("/")[2]] if "$ref" in each else each
                for each in one.get("parameters", ())
            ]
            properties = {each["name"]: each["schema"] for each in parameters}
            required = {each["name"] for each in parameters if each.get("required")}
            replies: dict[str, Any] = {}  # by statuses of one content, such as "401 403 404"
            for status, reply in sorted(one["responses"].items(), key=lambda each: str(each[0])):
                content = contents(reply)
                same = next((each for each in replies if replies[each] == content), "")
                replies.pop(same, None)
                replies[f"{same} {status}".strip()] = content
            operations[f"{method.upper()} {path}"] = {
                "id": one["operationId"],
                "parameters": named(properties, required),
                "request": contents(one.get("requestBody", {})),
                "replies": replies,
            }
    schemas = document.get("components", {}).get("schemas", {})
    return {
        "operations": operations,
        "schemas": {name: alternatives(one) for name, one in schemas.items()},
    }


# What an older command can no longer rely on


class Comparison:
    """The differences of two schemas that an older command meets."""

    def __init__(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        self.old, self.new = old, new
        self._known: dict[tuple[str, str, bool], list[str]] = {}  # of two names, sent or received

    def breaks(self) -> Iterator[str]:
        """Yield a sentence for each difference that breaks an older command."""
        for call, old in self.old["operations"].items():
            new = self.new["operations"].get(call)
            if new is None:
                yield f"{call} is gone"
                continue
            if new["id"] != old["id"]:
                yield f"{call}: scripts call it {old['id']}, it is {new['id']} now"
            yield from self.of_fields(f"{call}: ", old["parameters"], new["parameters"], sent=True)
            yield from self.of_contents(f"{call} takes", old["request"], new["request"], sent=True)
            if new["request"] and not old["request"]:
                yield f"{call} takes a body that no command sends"
            before, after = each_status(old["replies"]), each_status(new["replies"])
            for status, reply in before.items():
                where = f"{call} {status}"
                if status not in after:
                    yield f"{where} is gone"
                    continue
                yield from self.of_contents(where, reply, after[status], sent=False)

    def of_contents(self, where: str, old: Any, new: Any, *, sent: bool) -> Iterator[str]:
        for media, before in old.items():
            if media in new:
                yield from self.of_types(where, before, new[media], sent=sent)
            else:
                yield f"{where} no {media} any more"

    def of_fields(self, where: str, old: Any, new: Any, *, sent: bool) -> Iterator[str]:
        """Compare two objects: none of the old fields may go; one that is sent stays optional."""
        before, after = ({name.rstrip("?"): name for name in each} for each in (old, new))
        for name, marked in before.items():
            if name not in after:
                yield f"{where}{name} is gone"
                continue
            yield from self.of_types(where + name, old[marked], new[after[name]], sent=sent)
            if not sent and marked == name and after[name] != name:
                yield f"{where}{name} may be missing now"
        for name in after if sent else ():
            if after[name] == name and before.get(name) != name:
                yield f"{where}{name} is required now"

    def of_types(self, where: str, old: Any, new: Any, *, sent: bool) -> list[str]:
        """Compare two types: whoever reads must understand all that the other side may write."""
        before, after = flat(old, self.old["schemas"]), flat(new, self.new["schemas"])
        written, read = (before, after) if sent else (after, before)
        found = [
            f"{where}: {one} was {'accepted' if sent else 'never sent'}"
            for one in written
            if not is_part(one) and not understands(read, one)
        ]
        parts = [one for one in read if is_part(one)]
        for one in written:
            if is_part(one) and "any" not in read:
                likest = [one] * (one in parts) + parts  # of the same name, if there is one
                pairs = [(one, other) if sent else (other, one) for other in likest]
                each = [self.of_objects(where, *pair, sent=sent) for pair in pairs]
                found += min(each, key=len, default=[f"{where}: {one} became {read}"])
        return found

    def of_objects(self, where: str, old: Any, new: Any, *, sent: bool) -> list[str]:
        """Compare two schemas with names, or two lists, maps or objects without one."""
        if isinstance(old, dict) and isinstance(new, dict):
            (kind, inner), (other, compared) = *old.items(), *new.items()
            if kind != other:
                return [f"{where}: {kind} became {other}"]
            if kind == "fields":
                return list(self.of_fields(f"{where}.", inner, compared, sent=sent))
            return self.of_types(f"{where}[]", inner, compared, sent=sent)
        if not all(isinstance(one, str) and one.startswith("#") for one in (old, new)):
            return [f"{where}: {old} became {new}"]
        key = (old, new, sent)
        if key not in self._known:
            self._known[key] = []  # while it is compared: a schema may hold itself
            parts = (self.old["schemas"][old[1:]][0], self.new["schemas"][new[1:]][0])
            self._known[key] = self.of_objects(old[1:], *parts, sent=sent)
        return self._known[key]


def is_part(one: Any) -> bool:
    """Tell whether an alternative is an object, list or map, or the name of one."""
    return isinstance(one, dict) or one.startswith("#")


def each_status(replies: dict[str, Any]) -> dict[str, Any]:
    return {one: reply for statuses, reply in replies.items() for one in statuses.split()}


def flat(types: Alternatives, schemas: dict[str, Alternatives]) -> Alternatives:
    """Return alternatives in which a name is that of an object, list or map."""
    found: Alternatives = []
    for one in types:
        inner = schemas[one[1:]] if isinstance(one, str) and one.startswith("#") else []
        is_one = len(inner) == 1 and isinstance(inner[0], dict)
        found += flat(inner, schemas) if inner and not is_one else [one]
    return found


def understands(read: Alternatives, one: str) -> bool:
    """Tell whether a reader of ``read`` takes a type or a constant."""
    if one in read or "any" in read or (one == "integer" and "number" in read):
        return True
    kinds = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
    return one.startswith("=") and kinds.get(type(json.loads(one[1:])).__name__) in read


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return sorted(set(Comparison(old, new).breaks()))


def text_of(value: Any, depth: int = 0) -> str:
    """Return the short form as JSON with a line for each field, so that a diff is read."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and depth < 3:
        return f"[{text_of(value[0], depth)}]" if len(value) == 1 else json.dumps(value)
    if not isinstance(value, dict) or depth > 3:
        return json.dumps(value)
    blanks = " " * (depth + 1)
    inner = [f"{blanks}{json.dumps(key)}: {text_of(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}" if inner else "{}"


def test_a_newer_server_serves_an_older_command(is_rewriting):
    today = in_short(api.get_openapi_schema())
    if is_rewriting:
        STORED.write_text(text_of(today) + "\n")
    stored = json.loads(STORED.read_text())
    assert breaks(stored, today) == [], (
        "An older command breaks: keep what it relies on, or say in CHANGELOG.md which commands "
        "must be updated, and store the schema with --rewrite-books."
    )
    assert stored == today, "Something is new and nothing is lost: store it with --rewrite-books."


# The comparison itself, on an API of one operation


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the small API with the value at a path replaced, or removed where it is None."""
    document = copy.deepcopy(SMALL)
    *parents, last = path.split("/")
    part = document
    for name in parents:
        part = part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return document


def reply_of(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": REF + name}}}}


SMALL = {
    "paths": {"job": {"post": {
        "operationId": "make_job",
        "parameters": [{"name": "q", "in": "query", "schema": {"type": "string"}}],
        "requestBody": reply_of("Sent"),
        "responses": {"200": reply_of("Job"), "404": {}},
    }}},
    "components": {"schemas": {
        "Sent": {
            "type": "object", "required": ["name"],
            "properties": {"name": {"type": "string"},
                           "tries": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
        },
        "Job": {
            "type": "object", "required": ["state"],
            "properties": {"state": {"enum": ["queued", "done"]}, "points": {"type": "integer"},
                           "next": {"anyOf": [{"$ref": REF + "Job"}, {"type": "null"}]}},
        },
    }},
}  # fmt: skip
MAKE, SENT, JOB = (
    "paths/job/post", "components/schemas/Sent", "components/schemas/Job"
)  # fmt: skip
BREAKS = [
    ("paths/job", {}, "POST job is gone"),
    (f"{MAKE}/operationId", "start", "POST job: scripts call it make_job, it is start now"),
    (f"{MAKE}/parameters", [], "POST job: q is gone"),
    (f"{MAKE}/responses/404", None, "POST job 404 is gone"),
    (f"{MAKE}/responses/200", {}, "POST job 200 no application/json any more"),
    (f"{SENT}/properties/tries", None, "Sent.tries is gone"),
    (f"{SENT}/required", ["name", "tries"], "Sent.tries is required now"),
    (f"{SENT}/properties/tries", {"type": "number"}, "Sent.tries: null was accepted"),
    (f"{JOB}/properties/points", None, "Job.points is gone"),
    (f"{JOB}/required", [], "Job.state may be missing now"),
    (f"{JOB}/properties/points", {"type": "number"}, "Job.points: number was never sent"),
    (f"{JOB}/properties/state/enum", ["queued", "done", "lost"],
     'Job.state: ="lost" was never sent'),
]  # fmt: skip
ADDITIONS = [
    ("paths/other", {"get": {"operationId": "other", "responses": {}}}),
    (f"{MAKE}/responses/409", {}),
    (f"{SENT}/properties/more", {"type": "string"}),
    (f"{SENT}/required", []),
    (f"{SENT}/properties/name", {"anyOf": [{"type": "string"}, {"type": "integer"}]}),
    (f"{JOB}/properties/more", {"type": "string"}),
    (f"{JOB}/properties/state/enum", ["queued"]),
]


@pytest.mark.parametrize(("path", "value", "sentence"), BREAKS)
def test_what_an_older_command_relies_on_may_not_change(path, value, sentence):
    assert breaks(in_short(SMALL), in_short(changed(path, value))) == [sentence]


@pytest.mark.parametrize(("path", "value"), ADDITIONS)
def test_an_older_command_does_not_notice_an_addition(path, value):
    assert breaks(in_short(SMALL), in_short(changed(path, value))) == []
