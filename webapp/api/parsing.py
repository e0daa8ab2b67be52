"""Request bodies of the API: JSON that every database can store, with nothing exchanged in it."""

import json
import math
import re
from typing import Any, cast

from django.http import HttpRequest
from ninja.parser import Parser

from runners.jobspec.base import MAX_KEY_CHARACTERS, parse_json, plain
from webapp.core.names import checked_name
from webapp.core.problems import JSON_TYPE, InvalidProblem, MediaTypeProblem

UNKEPT = re.compile("[\x00\ud800-\udfff]")


class LimitedParser(Parser):
    """Rejects integers beyond 64 bits, deep nesting and invalid JSON.

    A person's body is refused by the field for what would be stored otherwise than it was sent:
    NUL and half of a surrogate pair, a key that stands twice, a number that is none. Of a host,
    whose evidence must arrive, such texts are repaired. Events of an attempt are checked one by
    one (``runners.shared.messages``), so that one invalid event does not block the others.
    """

    def parse_body(self, request: HttpRequest) -> dict[str, Any]:
        """Return the body of a request; one without a Content-Type is read as JSON.

        Raises:
            MediaTypeProblem: the body is said not to be JSON.
            InvalidProblem: a text or a name in it cannot be kept as it is.
            ValueError: the body cannot be parsed; ninja answers with status 400.
        """
        kind = request.content_type or JSON_TYPE
        if kind != JSON_TYPE and not kind.endswith("+json"):
            raise MediaTypeProblem(
                "unsupported_media_type",
                f"The Content-Type is {kind[:80]}; this operation reads JSON. Send the header "
                f"Content-Type: {JSON_TYPE}, with a JSON document as the body.",
            )
        is_persons = getattr(request, "inputs", None) is not None
        if is_persons:
            sent = _parsed(request.body)
            plain(sent)  # depth, keys and integers
            return cast("dict[str, Any]", _storable(sent))
        body = parse_json(request.body)
        is_batch = request.path.startswith("/api/v1/attempts/") and request.path.endswith(
            "/events"
        )
        if is_batch:
            return cast("dict[str, Any]", body)
        body = plain(body)
        if isinstance(body, dict) and isinstance(body.get("name"), str):
            body["name"] = checked_name(body["name"], "name")
        return cast("dict[str, Any]", body)


def _parsed(body: bytes) -> Any:  # noqa: ANN401 (JSON)
    """Return a person's JSON as it was written.

    Raises:
        InvalidProblem: a key stands twice, a number is not finite, or a text cannot be stored.
        ValueError: it is not JSON, or is nested too deep.
    """
    try:
        return json.loads(
            body, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("the body is nested too deep") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _invalid(key, "It stands twice in one object. Leave one of the two out")
        found[key] = value
    return found


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(text: str) -> float:
    raise _invalid("body", f"{text[:20]} is not a number that JSON can hold. Send a finite one")


def _storable(value: Any, where: str = "") -> Any:  # noqa: ANN401 (JSON)
    """Return a person's JSON with its names trimmed.

    Raises:
        InvalidProblem: a text holds what no database keeps, or a name what does not show.
    """
    if isinstance(value, str):
        if found := UNKEPT.search(value):
            raise _invalid(
                where or "body",
                f"It holds {_words(found[0])}, which cannot be stored. Leave the character out",
            )
        is_name = where.rpartition(".")[2] == "name"
        return checked_name(value, where) if is_name else value
    if isinstance(value, dict):
        for key in value:
            if found := UNKEPT.search(key):
                raise _invalid(
                    where or "body",
                    f"The key {ascii(key)[:80]} holds {_words(found[0])}, which cannot be "
                    "stored. Leave the character out",
                )
        return {
            key: _storable(entry, f"{where}.{key}" if where else key)
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [
            _storable(entry, f"{where}.{at}" if where else str(at))
            for at, entry in enumerate(value)
        ]
    return value


def _words(character: str) -> str:
    return "a NUL character" if character == "\0" else "half of a surrogate pair"


def _invalid(field: str, message: str) -> InvalidProblem:
    field = field[:MAX_KEY_CHARACTERS].encode("ascii", "backslashreplace").decode()
    return InvalidProblem(
        "invalid",
        f"The field {field} is not valid: {message}.",
        errors=[{"field": field, "message": message}],
    )
