"""Requests through a tunnel: streamed, cancelled, refused, cut off, and many at once."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from runners.host import tunnel
from runners.host.tunnel import address_of
from runners.launchers.attempts import AttemptFolder
from runners.shared import tunnel as protocol
from runners.shared.tunnel import WINDOW_BYTES, FrameType, decode, encode
from runners.supervision import child
from tests.webapp.gateway.pair import ATTEMPT, HOST, MUCH_BYTES, Pair, Socket, Wire, paired, until
from webapp.core import connections
from webapp.gateway.tunnels import MAX_CONNECTIONS, TunnelError, Tunnels

ENDED = {
    "exit_code": 0, "signal": None, "reason": "ok", "by": "supervisor", "started_at_ms": 0,
    "ended_at_ms": 1,
}  # fmt: skip
Law = Callable[[Pair], Awaitable[None]]


@pytest.fixture
def hold(tmp_path) -> Callable[[Law], None]:
    """Run a law with a connected pair."""

    async def held(law: Law) -> None:
        async with paired(tmp_path / "host") as pair:
            await law(pair)

    return lambda law: asyncio.run(held(law))


async def whole(chunks: AsyncGenerator[bytes]) -> bytes:
    async with asyncio.timeout(30):
        return b"".join([chunk async for chunk in chunks])


async def failure(asking: Awaitable[object]) -> str:
    with pytest.raises(TunnelError) as caught:
        await asking
    return caught.value.code


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def test_a_request_and_its_response_come_through_without_fields_of_one_connection(hold):
    async def law(pair: Pair) -> None:
        body = bytes(range(256)) * 4096  # several windows
        headers = [
            (b"Authorization", b"Bearer k"), (b"Connection", b"x-own"), (b"X-Own", b"1"),
            (b"Host", b"slipway"), (b"Accept-Encoding", b"identity"), (b"Content-Length", b"7"),
        ]  # fmt: skip
        response = await pair.ask("/v1/echo?a=%2Fb", body, headers=headers)
        assert await whole(response.chunks()) == body
        assert response.status == 418
        found = dict(response.headers)
        assert (found[b"x-kept"], b"x-hop" in found, b"connection" in found) == (
            b"\xe4", False, False,
        )  # fmt: skip
        (scope,) = pair.endpoint.scopes
        assert (scope["method"], scope["query_string"]) == ("POST", b"a=%2Fb")
        received = dict(scope["headers"])
        assert received.pop(b"host").startswith(b"127.0.0.1:")
        assert received == {
            b"authorization": b"Bearer k", b"accept-encoding": b"identity",
            b"content-length": str(len(body)).encode(),
        }  # fmt: skip
        assert await whole((await pair.ask("/v1/echo", method="GET")).chunks()) == b""
        await until(lambda: not pair.tunnel.num_streams)

    hold(law)


def test_a_chunk_arrives_before_the_next_one_is_made(hold):
    async def law(pair: Pair) -> None:
        response = await pair.ask("/v1/steps")
        chunks = response.chunks()
        assert await anext(chunks) == b"first"
        for chunk in (b"second", b"third"):
            pair.endpoint.chunks.put_nowait(chunk)
            assert await anext(chunks) == chunk
        pair.endpoint.chunks.put_nowait(b"")
        assert await whole(chunks) == b""
        await response.close()
        assert not pair.endpoint.is_left.is_set()

    hold(law)


def test_a_request_that_is_closed_is_closed_at_the_endpoint_too(hold):
    async def law(pair: Pair) -> None:
        response = await pair.ask("/v1/steps")
        await response.close()
        await response.close()
        async with asyncio.timeout(30):
            await pair.endpoint.is_left.wait()
        pair.endpoint.is_left.clear()
        asking = asyncio.ensure_future(pair.ask("/v1/waits"))  # no head yet
        await until(lambda: len(pair.endpoint.scopes) == 2)
        asking.cancel()
        async with asyncio.timeout(30):
            await pair.endpoint.is_left.wait()
        assert pair.tunnel.num_streams == 0

    hold(law)


def test_a_slow_consumer_holds_up_its_own_stream_alone(hold):
    async def law(pair: Pair) -> None:
        slow = await pair.ask("/v1/much")
        chunks = slow.chunks()
        first = await anext(chunks)
        before = -1
        while before != pair.endpoint.num_sent:  # until all buffers are full
            before = pair.endpoint.num_sent
            for _ in range(20):
                assert await whole((await pair.ask("/v1/echo", b"quick")).chunks()) == b"quick"
        assert before < MUCH_BYTES
        assert len(first) + len(await whole(chunks)) == MUCH_BYTES

    hold(law)


def test_200_streams_run_at_once(hold):
    async def law(pair: Pair) -> None:
        async def one(number: int) -> bool:
            body = b"%d" % number * 5000
            return await whole((await pair.ask("/v1/echo", body)).chunks()) == body

        assert all(await asyncio.gather(*map(one, range(200))))
        assert pair.tunnel.num_streams == 0

    hold(law)


def test_what_a_host_does_not_pass_on_has_its_code(hold):
    async def law(pair: Pair) -> None:
        other = AttemptFolder(pair.host_dir.attempts / "other")
        other.path.mkdir()
        for attempt_id in ("unknown", "other", "../attempts/a1", ".", ""):
            asking = pair.ask("/v1/echo", attempt_id=attempt_id)
            assert await failure(asking) == "no_endpoint", attempt_id
        with child.locked(other.lock):
            assert await failure(pair.ask("/v1/echo", attempt_id="other")) == "no_endpoint"
            elsewhere = {"host": "192.0.2.1", "port": 8000, "model": "m", "has_keys": False}
            for address, code in (
                (elsewhere, "no_endpoint"),
                (elsewhere | {"host": "127.0.0.1", "port": closed_port()}, "refused"),
            ):
                child.write_json(other.path / child.ENDPOINT, address)
                assert await failure(pair.ask("/v1/echo", attempt_id="other")) == code
            child.write_json(other.path / child.EXIT_RECORD, ENDED)
            assert await failure(pair.ask("/v1/echo", attempt_id="other")) == "no_endpoint"
        for path, method in (("/admin", "GET"), ("/v1/../x", "GET"), ("/v1/x", "G T")):
            asking = pair.ask(path, method=method)
            assert await failure(asking) == "forbidden", path
        assert pair.endpoint.scopes == []

    hold(law)


def test_a_host_checks_the_path_itself(hold, monkeypatch):
    async def law(pair: Pair) -> None:
        answers = [False, True]  # the gateway's is the first, taken from the end
        monkeypatch.setattr(protocol, "is_passed_on", lambda _path: answers.pop())
        assert await failure(pair.ask("/admin/echo")) == "forbidden"
        assert (answers, pair.endpoint.scopes) == ([], [])

    hold(law)


def test_an_endpoint_that_breaks_off_is_told_from_a_complete_response(hold):
    async def law(pair: Pair) -> None:
        response = await pair.ask("/v1/breaks")
        assert await failure(whole(response.chunks())) == "failed"

    hold(law)


def test_a_cut_connection_loses_its_requests_stops_the_endpoint_and_comes_back(hold):
    async def law(pair: Pair) -> None:
        before = pair.tunnel
        response = await pair.ask("/v1/steps")
        chunks = response.chunks()
        assert await anext(chunks) == b"first"
        asking = asyncio.ensure_future(pair.ask("/v1/waits"))
        await until(lambda: len(pair.endpoint.scopes) == 2)
        pair.gateway.cut()
        assert await failure(whole(chunks)) == "lost"
        assert await failure(asking) == "lost"
        async with asyncio.timeout(30):
            await pair.endpoint.is_left.wait()
        await until(lambda: pair.tunnel)
        assert await failure(before.request(ATTEMPT, "GET", "/v1/echo", (), b"")) == "lost"
        assert await whole((await pair.ask("/v1/echo", b"again")).chunks()) == b"again"

    hold(law)


def test_both_ends_notice_that_the_other_is_gone_without_a_word(tmp_path, monkeypatch):
    for place, names in (
        (connections.WEBSOCKETS, ("ws_ping_interval", "ws_ping_timeout")),
        (tunnel.__dict__, ("TUNNEL_PING_SECONDS", "TUNNEL_PONG_SECONDS")),
    ):
        assert [place[name] for name in names] == [20.0, 20.0]  # as the documentation says
        for name in names:
            monkeypatch.setitem(place, name, 0.3)

    async def law() -> None:
        wire = Wire()
        async with paired(tmp_path / "host", wire) as pair:
            chunks = (await pair.ask("/v1/steps")).chunks()
            assert await anext(chunks) == b"first"
            wire.has_power.clear()
            assert await failure(whole(chunks)) == "lost"
            assert pair.tunnel is None
            async with asyncio.timeout(30):
                await pair.endpoint.is_left.wait()
            wire.has_power.set()
            await until(lambda: pair.tunnel)
            assert await whole((await pair.ask("/v1/echo", b"again")).chunks()) == b"again"

    asyncio.run(law())


def test_the_address_of_a_gateway_is_never_less_safe_than_the_servers():
    for gateway, server, expected in (
        ("/tunnel/", "http://127.0.0.1:8000", "ws://127.0.0.1:8000/tunnel/"),
        ("/tunnel/", "https://slipway.lan/", "wss://slipway.lan/tunnel/"),
        ("wss://gateway.lan/t/", "https://slipway.lan", "wss://gateway.lan/t/"),
        ("ws://gateway.lan/t/", "http://slipway.lan", "ws://gateway.lan/t/"),
        ("ws://127.0.0.1:9/t/", "https://slipway.lan", "ws://127.0.0.1:9/t/"),
    ):
        assert address_of(gateway, server) == expected
    for gateway in ("ws://gateway.lan/t/", "https://gateway.lan/", "ws://", "gateway.lan"):
        with pytest.raises(ValueError, match=r"TLS|is not ws"):
            address_of(gateway, "https://slipway.lan")


# A host's connections at the gateway, without a host.


async def connected(tunnels: Tunnels) -> tuple[Socket, asyncio.Task[None]]:
    link = Socket()
    serving = asyncio.create_task(tunnels.serve(HOST, link.incoming.get, link.send))
    await until(lambda: link.sent)
    return link, serving


def test_a_malformed_frame_closes_the_connection_with_a_reason():
    async def law() -> None:
        for frame, reason in (
            (b"x", "5 to 1048576"),
            (encode(FrameType.DATA, 1), "no stream 1 "),
            (encode(FrameType.WINDOW, 0), "no stream 0 "),
        ):
            tunnels = Tunnels()
            link, serving = await connected(tunnels)
            link.say(frame)
            await serving
            assert link.closed_with[0] == 1002
            assert reason in link.closed_with[1]
            assert tunnels.of(HOST) is None

    asyncio.run(law())


def test_a_frame_in_the_wrong_place_loses_the_requests_of_the_connection():
    async def law() -> None:
        head = encode(FrameType.HEAD, 1, b'{"status": 200}')
        for frames in (
            (encode(FrameType.DATA, 1, b"x"),),
            (encode(FrameType.DONE, 1),),
            (encode(FrameType.BODY, 1),),
            (head, head),
            (head, *[encode(FrameType.DATA, 1, bytes(WINDOW_BYTES)) for _ in range(2)]),
        ):
            tunnels = Tunnels()
            link, serving = await connected(tunnels)
            asking = asyncio.ensure_future(
                tunnels.of(HOST).request(ATTEMPT, "GET", "/v1/x", (), b"")
            )
            await until(lambda link=link: len(link.sent) == 3)  # accepted, OPEN, END
            for frame in frames:
                link.say(frame)
            await serving
            assert link.closed_with[0] == 1002, frames
            if frames[0] is head:
                asking = whole((await asking).chunks())
            code = await failure(asking)
            assert code == "lost"

    asyncio.run(law())


def test_a_host_that_is_slow_to_read_gets_its_streams_in_order_and_no_end_of_an_unopened_one():
    async def law() -> None:
        tunnels = Tunnels()
        link, serving = await connected(tunnels)
        tunnel = tunnels.of(HOST)

        def ask() -> asyncio.Future:
            return asyncio.ensure_future(tunnel.request(ATTEMPT, "GET", "/v1/x", (), b""))

        link.is_writable.clear()
        cancelled, first = ask(), ask()
        await asyncio.sleep(0)
        cancelled.cancel()
        link.is_writable.set()
        second = ask()
        await until(lambda: len(link.sent) == 5)  # accepted, twice OPEN and END
        opened = [decode(message["bytes"]) for message in link.sent[1:]]
        assert [(frame.type.name, frame.stream_id) for frame in opened if frame.payload] == [
            ("OPEN", 1), ("OPEN", 2),
        ]  # fmt: skip
        first.cancel()
        await until(lambda: len(link.sent) == 6)
        assert decode(link.sent[-1]["bytes"])[:2] == (FrameType.RESET, 1)
        link.incoming.put_nowait({"type": "websocket.disconnect"})
        await serving
        assert await failure(second) == "lost"

    asyncio.run(law())


def test_a_newer_connection_takes_new_requests_and_the_older_one_keeps_its_own():
    async def law() -> None:
        tunnels = Tunnels()
        older, serving_older = await connected(tunnels)
        first = tunnels.of(HOST)
        asking = asyncio.ensure_future(first.request(ATTEMPT, "GET", "/v1/x", (), b""))
        await until(lambda: len(older.sent) == 3)
        newer, serving_newer = await connected(tunnels)
        assert tunnels.of(HOST) is not first
        for frame in (
            encode(FrameType.HEAD, 1, b'{"status": 200}'),
            encode(FrameType.DATA, 1, b"on"),
            encode(FrameType.DONE, 1),
        ):
            older.say(frame)
        assert await whole((await asking).chunks()) == b"on"
        newer.incoming.put_nowait({"type": "websocket.disconnect"})
        await serving_newer
        assert tunnels.of(HOST) is first
        others = [await connected(tunnels) for _ in range(MAX_CONNECTIONS)]
        await serving_older
        assert older.closed_with[0] == 4409
        for link, serving in others:
            link.incoming.put_nowait({"type": "websocket.disconnect"})
            await serving
        assert tunnels.of(HOST) is None

    asyncio.run(law())
