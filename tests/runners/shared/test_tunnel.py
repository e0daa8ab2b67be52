"""The frames of a tunnel: they survive, damaged ones are refused, windows are kept."""

import asyncio
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.shared.tunnel import (
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    PART_BYTES,
    WINDOW_BYTES,
    Frame,
    FrameError,
    FrameType,
    Inbox,
    RequestHead,
    Reset,
    ResponseHead,
    SendWindow,
    credit_frame,
    decode,
    encode,
    head_frame,
    is_passed_on,
    raw_headers,
    read_credit,
    read_head,
    reset_frame,
    text_headers,
)

latin = st.text(st.characters(max_codepoint=255), max_size=20)


@given(st.sampled_from(FrameType), st.integers(0, 2**32 - 1), st.binary(max_size=200))
def test_a_frame_survives_the_way(frame_type, stream_id, payload):
    assert decode(encode(frame_type, stream_id, payload)) == (frame_type, stream_id, payload)


@given(st.lists(st.tuples(latin, latin)), st.integers(100, 599))
def test_heads_resets_and_credits_survive_the_way(headers, status):
    request = RequestHead(
        attempt_id="a1", method="POST", path="/v1/chat?x=1", headers=tuple(headers)
    )
    response = ResponseHead(status=status, headers=tuple(headers))
    for kind, head in ((FrameType.OPEN, request), (FrameType.HEAD, response)):
        assert read_head(decode(head_frame(kind, 7, head)), type(head)) == head
    assert read_head(decode(reset_frame(7, "failed", "ü" * 2000)), Reset).message == "ü" * 1000
    assert read_credit(decode(credit_frame(7, status))) == status


def test_a_malformed_frame_is_refused_with_its_reason():
    open_frame = Frame(FrameType.OPEN, 1, b"")
    for message, reason in (
        ("text", "binary"),
        (None, "binary"),
        (b"\x01\0\0\0", "5 to 1048576"),
        (bytes(MAX_FRAME_BYTES + 1), "5 to 1048576"),
        (b"\0\0\0\0\1", "type 0"),
        (b"\x63\0\0\0\1", "type 99"),
    ):
        with pytest.raises(FrameError, match=reason):
            decode(message)
    for payload, reason in (
        (b"{", "JSON"),
        (b"{}", "required"),
        (b'{"attempt_id": "a", "method": "GET\\n", "path": "/"}', "match"),
        (b" " * (MAX_HEAD_BYTES + 1), "at most 65536"),
    ):
        with pytest.raises(FrameError, match=reason):
            read_head(open_frame._replace(payload=payload), RequestHead)
    with pytest.raises(FrameError, match="4 bytes"):
        read_credit(Frame(FrameType.WINDOW, 1, b"123"))
    with pytest.raises(FrameError, match="Latin-1"):
        raw_headers([("x", "€")])
    large = ResponseHead(status=200, headers=(("x", "y" * MAX_HEAD_BYTES),))
    with pytest.raises(FrameError, match="at most 65536"):
        head_frame(FrameType.HEAD, 1, large)


def test_a_newer_peers_head_is_read_without_what_only_it_knows():
    frame = Frame(FrameType.HEAD, 1, b'{"status": 200, "trailers": []}')
    assert read_head(frame, ResponseHead) == ResponseHead(status=200)


def test_fields_of_one_connection_alone_are_left_out_both_ways():
    fields = [
        (b"Connection", b"keep-alive, X-Hop"), (b"Transfer-Encoding", b"chunked"), (b"TE", b"gzip"),
        (b"X-Hop", b"1"), (b"Upgrade", b"h2c"), (b"Content-Type", b"text/\xe4"),
    ]  # fmt: skip
    assert text_headers(fields) == (("content-type", "text/ä"),)
    named = [(name.decode(), value.decode("latin-1")) for name, value in fields]
    assert raw_headers(named) == [(b"content-type", b"text/\xe4")]


def test_only_paths_of_an_endpoints_interface_are_passed_on():
    for path in ("/v1/models", "/v1/chat/completions?x=..&y=%2F", "/health", "/metrics?name=a"):
        assert is_passed_on(path), path
    for path in (
        "/", "/v1", "/v2/models", "/healthz", "/health/x", "/admin", "v1/models", "//v1/x", "",
        "/v1/../admin", "/v1/%2e%2e/admin", "/v1/..%2fadmin", "/v1/..\\admin", "/v1/./x",
        "/v1/a b", "/v1/a\r\nx: y", "/v1/ä", "/v1/x#y", "http://x/v1/a", "@x/v1/",
    ):  # fmt: skip
        assert not is_passed_on(path), path


# Flow control.


@given(
    st.lists(st.integers(1, 6 * PART_BYTES), min_size=1, max_size=20),
    st.lists(st.integers(0, 3), min_size=1),
)
def test_what_is_unconsumed_never_exceeds_the_window_and_all_of_it_arrives(sizes, pauses):
    async def transfer() -> None:
        sent = arrived = 0
        window = SendWindow()

        async def renew(credit: int) -> None:
            window.renew(credit)

        inbox = Inbox(renew)

        async def produce() -> None:
            nonlocal sent
            for size in sizes:
                left = size
                while left:
                    taken = await window.take(left)
                    assert 0 < taken <= PART_BYTES
                    sent, left = sent + taken, left - taken
                    assert sent - arrived <= WINDOW_BYTES
                    inbox.feed(bytes(taken))
            inbox.end()

        async def consume() -> None:
            nonlocal arrived
            waits = cycle(pauses)
            async for part in inbox.parts():
                arrived += len(part)
                for _ in range(next(waits)):
                    await asyncio.sleep(0)

        await asyncio.gather(produce(), consume())
        assert arrived == sent == sum(sizes)

    asyncio.run(transfer())


def test_a_peer_that_breaks_the_window_is_refused_and_a_full_one_waits():
    async def laws() -> None:
        window, inbox = SendWindow(), Inbox(asyncio.Queue().put)
        for credit in (0, 1):
            with pytest.raises(FrameError, match="after 0"):
                window.renew(credit)
        taken = [await window.take(WINDOW_BYTES) for _ in range(WINDOW_BYTES // PART_BYTES)]
        assert sum(taken) == WINDOW_BYTES
        waiting = asyncio.ensure_future(window.take(9))
        await asyncio.sleep(0)
        assert not waiting.done()
        window.renew(5)
        assert await waiting == 5

        inbox.feed(bytes(WINDOW_BYTES))
        with pytest.raises(FrameError, match="beyond"):
            inbox.feed(b"x")
        inbox.end()
        with pytest.raises(FrameError, match="after the end"):
            inbox.feed(b"")

    asyncio.run(laws())


def test_what_arrived_before_a_failure_is_consumed_before_it():
    async def law() -> None:
        inbox = Inbox(asyncio.Queue().put)
        inbox.feed(b"be")
        inbox.feed(b"fore")
        inbox.fail(FrameError("first"))
        inbox.fail(FrameError("second"))
        parts = inbox.parts()
        assert await anext(parts) == b"before"
        with pytest.raises(FrameError, match="first"):
            await anext(parts)

    asyncio.run(law())
