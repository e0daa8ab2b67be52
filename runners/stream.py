"""Names and fields of the Redis keys between a host's shipper and the server's consumer.

One stream and one hash per host. An entry is one ``EventBatch``: ``a`` attempt id, ``f``
fence, ``b`` the JSON list of its consecutive events. The hash holds attempt id -> the
highest sequence number that the server's database has stored.
"""

from collections.abc import Mapping

from pydantic import TypeAdapter

from runners.messages import EventBatch, RunEvent

CONSUMER_GROUP = "web"
_EVENTS = TypeAdapter(tuple[RunEvent, ...])


def events_key(host_id: str) -> str:
    """Return the name of the stream that the host's shipper writes."""
    return f"host:{host_id}:events"


def ack_key(host_id: str) -> str:
    """Return the name of the hash that the server's consumer writes."""
    return f"host:{host_id}:ack"


def encode(batch: EventBatch) -> dict[str, str]:
    """Return the fields of the stream entry that carries a batch."""
    return {
        "a": batch.attempt_id,
        "f": batch.fence,
        "b": _EVENTS.dump_json(batch.events).decode(),
    }


def decode(fields: Mapping[bytes | str, bytes | str]) -> EventBatch:
    """Return the batch of a stream entry.

    Raises:
        ValueError: a field is missing or is not what ``encode`` writes.
    """
    text = {_text(key): _text(value) for key, value in fields.items()}
    try:
        events = _EVENTS.validate_json(text["b"])
        return EventBatch(attempt_id=text["a"], fence=text["f"], events=events)
    except KeyError as missing:
        raise ValueError(f"stream entry lacks the field {missing}") from None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
