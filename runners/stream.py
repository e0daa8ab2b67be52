"""Redis keys and entry format between a host's shipper and the server's consumer.

One stream and one hash per host. An entry is one ``EventBatch``: ``a`` attempt id, ``f``
fence, ``b`` the JSON list of its consecutive events. The hash maps attempt id -> the
highest stored sequence number.
"""

from collections.abc import Mapping

from pydantic import TypeAdapter

from runners.messages import EventBatch, RunEvent
from runners.received_events import ReceivedBatch
from runners.wire import parse_json

CONSUMER_GROUP = "web"
MAX_ENTRY_BYTES = 8 * 1024**2  # of a batch's events; usual batches are far smaller
_EVENTS = TypeAdapter(tuple[RunEvent, ...])


def events_key(host_id: str) -> str:
    """Return the key of the stream that the host's shipper writes."""
    return f"host:{host_id}:events"


def ack_key(host_id: str) -> str:
    """Return the key of the hash that the server's consumer writes."""
    return f"host:{host_id}:ack"


def encode(batch: EventBatch) -> dict[str, str]:
    """Return the stream entry of a batch."""
    return {
        "a": batch.attempt_id,
        "f": batch.fence,
        "b": _EVENTS.dump_json(batch.events).decode(),
    }


def decode(fields: Mapping[bytes | str, bytes | str]) -> ReceivedBatch:
    """Return the batch of a stream entry; damaged events become ``RefusedEvent``.

    Raises:
        ValueError: a field is missing, too large or malformed.
    """
    text = {_text(key): _text(value) for key, value in fields.items()}
    try:
        body = text["b"]
        if len(body) > MAX_ENTRY_BYTES:
            msg = f"stream entry has {len(body)} bytes of events, of {MAX_ENTRY_BYTES} at most"
            raise ValueError(msg)
        given = {"attempt_id": text["a"], "fence": text["f"], "events": parse_json(body)}
        return ReceivedBatch.model_validate(given)
    except KeyError as missing:
        raise ValueError(f"stream entry lacks the field {missing}") from None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
