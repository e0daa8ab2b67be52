"""Parses an attempt's events on the server; damaged events are kept with their number."""

from typing import Annotated

from pydantic import Field, PlainValidator, PositiveInt, ValidationError

from runners.messages import MAX_BATCH_EVENTS, RunEvent
from runners.wire import Identifier, Message, excerpt, plain


class RefusedEvent(Message):
    """A damaged event with a readable number: it is skipped and displayed."""

    seq: PositiveInt
    reason: str
    excerpt: str


def receive_event(value: object) -> RunEvent | RefusedEvent:
    """Return a host's event, or a ``RefusedEvent`` if only its number is readable.

    A damaged event must not block later ones.

    Raises:
        ValueError: the event has no number.
    """
    if isinstance(value, RunEvent):
        return value
    try:
        return RunEvent.model_validate(plain(value))
    except ValidationError as error:
        reason = first_fault(error)
    except ValueError as error:
        reason = str(error)
    seq = value.get("seq") if isinstance(value, dict) else None
    return RefusedEvent.model_validate(
        {"seq": plain(seq), "reason": reason, "excerpt": excerpt(value)}
    )


def first_fault(error: ValidationError) -> str:
    """Return the first validation error of a message: field, without positions, and reason."""
    (fault, *_) = error.errors(include_url=False, include_input=False)
    field = ".".join(str(part) for part in fault["loc"] if isinstance(part, str)) or "body"
    return f"{field[:80]}: {fault['msg'][:200]}"


class ReceivedBatch(Message):
    """An ``EventBatch`` as parsed by the server, with damaged events as ``RefusedEvent``."""

    attempt_id: Identifier
    fence: Identifier
    events: tuple[
        Annotated[
            RunEvent | RefusedEvent,
            PlainValidator(receive_event, json_schema_input_type=RunEvent),
        ],
        ...,
    ] = Field(max_length=MAX_BATCH_EVENTS)
