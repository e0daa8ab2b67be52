"""Validates the events of a job's event pipe before they enter the spool.

The server must accept every event in the spool, because a rejected one would block all later
ones: unknown fields and non-finite numbers are dropped, and a line that is not an event of
the protocol is rejected with a message. Standard library only.
"""

import ipaddress
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_LINE_BYTES = 1024**2
JOB_SOURCES = ("job", "gpu")
ARTEFACT_KINDS = ("model", "adapter", "report")  # messages.ArtefactKind; a test holds them equal
_PORTS = range(1024, 65536)
_SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,119}")

Body = dict[str, Any]


class EventRefusedError(ValueError):
    """A line on the event pipe is not a valid event; the text gives the reason."""


def parse_line(line: bytes) -> tuple[str, Body]:
    """Return kind and body of one job event.

    Raises:
        EventRefusedError: the line is not an event that a job may send.
    """
    try:
        event = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise EventRefusedError(f"not JSON ({error})") from None
    kind = event.get("kind") if isinstance(event, dict) else None
    body = event.get("body") if isinstance(event, dict) else None
    if not isinstance(kind, str) or not isinstance(body, dict):
        raise EventRefusedError('an event is an object {"kind": text, "body": object}')
    if kind not in _BODIES:
        raise EventRefusedError(f"a job sends no {kind!r} events, only {', '.join(_BODIES)}")
    return kind, _BODIES[kind](body)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _take(body: Body, name: str, test: Callable[[object], bool], meaning: str) -> object:
    value = body.get(name)
    if not test(value):
        raise EventRefusedError(f"{name} is {value!r}, expected {meaning}")
    return value


def _text(body: Body, name: str) -> str:
    return str(_take(body, name, lambda value: isinstance(value, str), "text"))


def _mapping(body: Body, name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise EventRefusedError(f"{name} is {value!r}, expected an object")
    return value


def _numbers(body: Body, name: str) -> dict[str, float]:
    return {key: value for key, value in _mapping(body, name).items() if _is_number(value)}


def _phase(body: Body) -> Body:
    return {"name": _text(body, "name")}


def _progress(body: Body) -> Body:
    amount = "a number from 0 up"
    eta = body.get("eta_seconds")
    return {
        "done": _take(body, "done", _is_amount, amount),
        "total": _take(body, "total", _is_amount, amount),
        "unit": _text(body, "unit"),
        "eta_seconds": eta if _is_amount(eta) else None,
    }


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _metric(body: Body) -> Body:
    values = _numbers(body, "values")
    if not values:
        raise EventRefusedError("a metric event holds no finite number")
    step = body.get("step")
    source = body.get("source")
    source = source if source in JOB_SOURCES else "job"  # "host" is reserved for the supervisor
    return {"source": source, "values": values, "step": step if _is_whole(step) else None}


def _log(body: Body) -> Body:
    stream = "stderr" if body.get("stream") == "stderr" else "stdout"
    return {"stream": stream, "text": _text(body, "text")}


def _result(body: Body) -> Body:
    notes = _mapping(body, "notes") if "notes" in body else {}
    return {
        "measured": _numbers(body, "measured"),
        "notes": {key: str(value) for key, value in notes.items()},
    }


def _artefact(body: Body) -> Body:
    files, digests = _mapping(body, "files"), _mapping(body, "sha256")
    if not all(_is_whole(size) for size in files.values()):
        raise EventRefusedError("files maps each relative path to its size in bytes")
    if set(files) != set(digests):
        raise EventRefusedError("files and sha256 must name the same paths")
    return {
        "name": _text(body, "name"),
        "kind": _take(
            body, "kind", ARTEFACT_KINDS.__contains__, f"one of {', '.join(ARTEFACT_KINDS)}"
        ),
        "total_bytes": _take(body, "total_bytes", _is_whole, "a size in bytes"),
        "files": files,
        "sha256": {path: str(digest) for path, digest in digests.items()},
        "facts": _mapping(body, "facts") if "facts" in body else {},
    }


def _endpoint(body: Body) -> Body:
    return {
        "host": str(_take(body, "host", _is_address, "a numeric address")),
        "port": _take(body, "port", lambda port: port in _PORTS, "a port from 1024 up"),
        "model": str(_take(body, "model", _is_served_name, "the name of a model")),
        "has_keys": body.get("has_keys") is True,
    }


def _is_address(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def _is_served_name(value: object) -> bool:
    return isinstance(value, str) and bool(_SERVED_NAME.fullmatch(value))


_BODIES: dict[str, Callable[[Body], Body]] = {
    "phase": _phase,
    "progress": _progress,
    "metric": _metric,
    "log": _log,
    "result": _result,
    "artefact": _artefact,
    "endpoint": _endpoint,
}
