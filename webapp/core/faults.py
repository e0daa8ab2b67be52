"""Faults of request bodies in words: the nearest name of a misspelt field, the tags of a union."""

import difflib
from collections.abc import Iterator
from typing import Any

Fault = dict[str, Any]  # type, loc and msg, as pydantic reports it
Node = dict[str, Any]  # of a JSON schema
MOST_NAMES = 20  # listed where none is near
LONGEST = 40  # characters of a name or value that the caller sent


def in_words(faults: list[Fault], schema: Node) -> list[Fault]:
    """Return the faults with known names in place of pydantic's general words.

    ``schema`` is the JSON schema that the ``loc`` of each fault begins in. An unknown field gets
    the nearest known name, or all; a missing or unknown tag is a fault of the tag's field.
    Unknown fields come first: a misspelt name explains the other faults.
    """
    found = []
    for fault in faults:
        *parents, last = fault["loc"] or ("",)
        if fault["type"] == "extra_forbidden":
            message = _unknown(str(last), _fields(schema, parents))
            found.append({**fault, "msg": message})
        elif fault["type"] in {"union_tag_invalid", "union_tag_not_found"}:
            tag = next(
                (each["discriminator"] for each in _nodes(schema, fault["loc"])
                 if "discriminator" in each), None,
            )  # fmt: skip
            found.append(_of_tag(fault, tag) if tag else fault)
        else:
            found.append(fault)
    return sorted(found, key=lambda fault: fault["type"] != "extra_forbidden")


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"There is no such field; the nearest is “{near[0]}”"
    listed = ", ".join(known[:MOST_NAMES]) + ", …" * (len(known) > MOST_NAMES)
    return f"There is no such field; there are {listed or 'none'}"


def _of_tag(fault: Fault, discriminator: Node) -> Fault:
    """Return the fault of a union as one of the field that chooses among its members."""
    name, values = discriminator["propertyName"], ", ".join(discriminator["mapping"])
    given = f"It is {fault['tag'][:LONGEST]!r}" if "tag" in fault else "It is required"
    return {**fault, "loc": (*fault["loc"], name), "msg": f"{given}; it can be {values}"}


def _fields(schema: Node, location: list[int | str]) -> list[str]:
    """Return the names of the fields of the object at a fault's location."""
    nodes = _nodes(schema, location)
    return list(dict.fromkeys(name for each in nodes for name in each.get("properties", ())))


def _nodes(schema: Node, location: list[int | str] | tuple[int | str, ...]) -> list[Node]:
    """Return the schemas at a location: of a union the union and its members.

    A step of the location is a field, an index, or the tag or class of a union's member.
    """
    definitions = schema.get("$defs", {})
    nodes = list(_expanded(schema, definitions))
    for step in location:
        if isinstance(step, int):
            inner = [each["items"] for each in nodes if "items" in each]
        else:
            inner = [
                each["properties"][step] for each in nodes if step in each.get("properties", ())
            ]
        if inner:
            nodes = [node for each in inner for node in _expanded(each, definitions)]
        else:
            nodes = [each for each in nodes if _is_member(each, step)] or nodes
    return nodes


def _is_member(node: Node, step: int | str) -> bool:
    """Return whether a member of a union has this class name or tag."""
    tags = (each.get("const") for each in node.get("properties", {}).values())
    return step == node.get("title") or step in tags


def _expanded(node: Node, definitions: Node) -> Iterator[Node]:
    """Yield a schema without references, and the members of a union."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    yield node
    for word in ("anyOf", "oneOf", "allOf"):
        for each in node.get(word, ()):
            yield from _expanded(each, definitions)
