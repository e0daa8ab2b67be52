"""What passes between a client and a stage server: signed, numbered, tensors and nothing else."""

import functools
import pickle
import socket
import threading

import pytest
import torch

from runners.jobs.generate.link import (
    MAC_BYTES,
    MAGIC,
    MAX_HEADER_BYTES,
    NONCE_BYTES,
    SIZES,
    Link,
    LinkClosedError,
    _signature,
)

KEY = b"k" * 32


def pair(first, second, one: bytes = KEY, other: bytes = KEY):
    """Return both ends of a connection, each a link or why it is none."""
    met = {}

    def greet(name, connection, key, is_dialler):
        try:
            met[name] = Link._handshake(connection, key, is_dialler=is_dialler)
        except LinkClosedError as error:
            met[name] = error

    thread = threading.Thread(target=greet, args=("other", second, other, False))
    thread.start()
    greet("one", first, one, True)
    thread.join(120)
    return met["one"], met["other"]


@pytest.fixture
def sockets(monkeypatch):
    """Two ends that are no TCP: the options of TCP do not apply."""
    monkeypatch.setattr("runners.jobs.generate.link.SOCKET_OPTIONS", ())
    first, second = socket.socketpair()
    with first, second:
        yield first, second


@pytest.fixture
def ends(sockets):
    return functools.partial(pair, *sockets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.long])
def test_a_message_arrives_as_it_was_sent(ends, dtype):
    one, other = ends()
    wanted = torch.arange(6).reshape(2, 3).to(dtype)

    one.send({"order": "run", "session": 7}, {"hidden": wanted})
    said = other.receive()

    assert said.order == {"order": "run", "session": 7}
    assert torch.equal(said.tensors["hidden"], wanted)


def test_whoever_does_not_know_the_key_gets_no_link(ends):
    one, other = ends(other=b"x" * 32)

    assert isinstance(one, LinkClosedError)
    assert isinstance(other, LinkClosedError)
    assert "not signed with the chain's key" in str(other)


def test_what_speaks_another_language_gets_no_link(sockets):
    first, second = sockets
    second.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 64)

    with pytest.raises(LinkClosedError, match="no stage of this version"):
        Link._handshake(first, KEY, is_dialler=False)


def test_a_stranger_cannot_fill_the_memory_before_it_proved_the_key(sockets):
    first, second = sockets
    first.sendall(MAGIC + b"n" * NONCE_BYTES + SIZES.pack(2, 1) + b"{}" + b"x")

    with pytest.raises(LinkClosedError, match=r"2 \+ 1 bytes is too long"):
        Link.answered(second, KEY)


def forged(link: Link, header: bytes, payload: bytes, number: int) -> None:
    """Send what a program that knows the key, but not our rules, might."""
    signature = _signature(link._own, number, header, payload)
    link._send_all(SIZES.pack(len(header), len(payload)) + header + payload + signature)


def test_a_message_that_was_changed_on_its_way_ends_the_link(ends):
    one, other = ends()
    one._send_all(SIZES.pack(2, 0) + b"{}" + bytes(MAC_BYTES))

    with pytest.raises(LinkClosedError, match="not signed"):
        other.receive()


def test_a_message_that_comes_again_ends_the_link(ends):
    one, other = ends()
    for _ in range(2):
        forged(one, b"{}", b"", number=1)

    other.receive()
    with pytest.raises(LinkClosedError, match="not signed"):
        other.receive()


def test_a_pickle_is_never_opened(ends, tmp_path):
    class Opened:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    one, other = ends()
    forged(one, b"{}", pickle.dumps(Opened()), number=1)

    with pytest.raises(LinkClosedError, match="no JSON with tensors"):
        other.receive()
    assert not (tmp_path / "opened").exists()


def test_a_message_beyond_every_size_is_not_read(ends):
    one, other = ends()
    one._send_all(SIZES.pack(MAX_HEADER_BYTES + 1, 0))

    with pytest.raises(LinkClosedError, match="is too long"):
        other.receive()


def test_an_end_that_is_silent_for_too_long_counts_as_lost(ends):
    _one, other = ends()
    other.wait_at_most(0.05)

    with pytest.raises(LinkClosedError, match="no data"):
        other.receive()


def test_an_end_that_closes_is_noticed_at_once(ends):
    one, other = ends()

    one.close()

    with pytest.raises(LinkClosedError, match="closed the connection"):
        other.receive()


def test_a_port_where_nobody_listens_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(LinkClosedError, match=f"127.0.0.1 port {port}"):
        Link.dialled("127.0.0.1", port, KEY)
