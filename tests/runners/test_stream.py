"""Entries of a host's stream: what the shipper writes, the server's consumer reads."""

import pytest

from runners.messages import EventBatch, RunEvent
from runners.redis_access import ack_key, decode, encode, events_key

BATCH = EventBatch(
    attempt_id="a1",
    fence="f",
    events=(
        RunEvent(seq=1, t_ms=5, kind="phase", body={"name": "ä"}),
        RunEvent(seq=2, t_ms=6, kind="metric", body={"source": "job", "values": {"loss": 0.5}}),
    ),
)


def test_a_batch_survives_the_way_through_the_stream():
    received = decode(encode(BATCH))

    assert (received.attempt_id, received.fence, received.events) == ("a1", "f", BATCH.events)


def test_fields_may_arrive_as_bytes():
    fields = {key.encode(): value.encode() for key, value in encode(BATCH).items()}

    assert decode(fields) == decode(encode(BATCH))


@pytest.mark.parametrize("fields", [{}, {"a": "1", "f": "2"}, {"a": "1", "f": "2", "b": "{"}])
def test_an_entry_that_is_none_of_ours_is_refused(fields):
    with pytest.raises(ValueError, match=r"lacks|Expecting"):
        decode(fields)


def test_all_keys_of_a_host_lie_below_its_prefix():
    assert {events_key("h1"), ack_key("h1")} == {"host:h1:events", "host:h1:ack"}
