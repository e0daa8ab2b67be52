"""Messages between a client and its stage servers: framed, signed, numbered; never pickled.

A message is a JSON object and tensors in safetensors' form. Both ends know a key. From it and
from what each end threw in they derive a key for each direction, with which every message is
signed together with its number: a stranger's, a repeated or a changed message ends the
connection. Nothing is encrypted: who can listen on the network can read hidden states.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

MAGIC = b"slipway-stage-1\n"
NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
SIZES = struct.Struct(">IQ")  # of the JSON, of the tensors
NUMBER = struct.Struct(">Q")
MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 8 * 1024**3
GREETING_SECONDS = 30.0
PIECE_BYTES = 1024**2
# A host that vanished without a word is noticed after about a minute, even while nothing is sent.
SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class LinkLostError(Exception):
    """The other end is gone, silent for too long, or is not who it should be."""


class Said(NamedTuple):
    """One message."""

    order: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Link:
    """A connection whose two ends have proven that they know the key."""

    def __init__(self, connection: socket.socket, own: bytes, other: bytes) -> None:
        self._socket = connection
        self._own, self._other = own, other
        self._sent = self._received = 0
        self.is_closed = False

    @classmethod
    def dialled(cls, address: str, port: int, key: bytes) -> Self:
        """Return a link to whoever listens there.

        Raises:
            LinkLostError: nobody does, or it does not know the key.
        """
        try:
            connection = socket.create_connection((address, port), GREETING_SECONDS)
        except OSError as error:
            raise LinkLostError(f"{address} port {port}: {error}") from error
        return cls._met(connection, key, is_dialler=True)

    @classmethod
    def answered(cls, connection: socket.socket, key: bytes) -> Self:
        """Return a link to who has connected.

        Raises:
            LinkLostError: it does not know the key.
        """
        return cls._met(connection, key, is_dialler=False)

    @classmethod
    def _met(cls, connection: socket.socket, key: bytes, *, is_dialler: bool) -> Self:
        """Exchange nonces, and prove with a first message that the key is known."""
        connection.settimeout(GREETING_SECONDS)
        for level, option, value in SOCKET_OPTIONS:
            connection.setsockopt(level, option, value)
        mine = secrets.token_bytes(NONCE_BYTES)
        link = cls(connection, b"", b"")
        try:
            link._send_all(MAGIC + mine)
            theirs = link._take_nonce()
            nonces = mine + theirs if is_dialler else theirs + mine
            names = (b"dialler", b"listener") if is_dialler else (b"listener", b"dialler")
            link._own, link._other = (hmac.digest(key, name + nonces, "sha256") for name in names)
            link.send({"greeting": True})
            link.receive(most_bytes=0)  # who has not proven anything fills no memory
        except LinkLostError:
            link.close()
            raise
        return link

    def wait_at_most(self, seconds: float | None) -> None:
        """Count the other end as lost when it is silent for longer; None: never."""
        self._socket.settimeout(seconds)

    def send(
        self, order: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Send one message.

        Raises:
            LinkLostError: the other end is gone.
        """
        header = json.dumps(order).encode()
        held = {name: each.detach().cpu().contiguous() for name, each in (tensors or {}).items()}
        payload = save(held) if held else b""
        signature = _signature(self._own, self._sent, header, payload)
        self._sent += 1
        self._send_all(SIZES.pack(len(header), len(payload)) + header)
        self._send_all(payload)
        self._send_all(signature)

    def receive(self, most_bytes: int = MAX_PAYLOAD_BYTES) -> Said:
        """Return the next message, with tensors of so many bytes at most.

        Raises:
            LinkLostError: none came, or not from the other end as it was sent.
        """
        header_bytes, payload_bytes = SIZES.unpack(self._take(SIZES.size))
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > most_bytes:
            raise LinkLostError(f"a message of {header_bytes} + {payload_bytes} bytes is too long")
        header, payload = self._take(header_bytes), self._take(payload_bytes)
        wanted = _signature(self._other, self._received, header, payload)
        if not hmac.compare_digest(self._take(MAC_BYTES), wanted):
            raise LinkLostError("a message is not signed with the chain's key")
        self._received += 1
        try:
            return Said(json.loads(header), load(payload) if payload else {})
        except (ValueError, SafetensorError) as error:
            raise LinkLostError(f"a message is no JSON with tensors: {error}") from error

    def close(self) -> None:
        """End the connection, whoever waits on it."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_all(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise LinkLostError(f"the other end is gone: {error}") from error

    def _take_nonce(self) -> bytes:
        greeting = self._take(len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise LinkLostError("what answers there is no stage of this version")
        return greeting[len(MAGIC) :]

    def _take(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            try:
                piece = self._socket.recv(min(count - len(found), PIECE_BYTES))
            except OSError as error:
                raise LinkLostError(f"nothing comes: {error}") from error
            if not piece:
                raise LinkLostError("the other end has closed the connection")
            found += piece
        return bytes(found)


def _signature(key: bytes, number: int, header: bytes, payload: bytes) -> bytes:
    sizes = SIZES.pack(len(header), len(payload))
    signed = hmac.new(key, NUMBER.pack(number) + sizes + header, hashlib.sha256)
    signed.update(payload)
    return signed.digest()
