"""Authenticated messages between a client and its stage servers; without pickle.

A message is a JSON object and tensors in safetensors' format. Both ends have a shared key. From it
and both ends' nonces they derive one key per direction, which signs every message with its
sequence number: a forged, repeated or changed message closes the connection. Nothing is encrypted:
anyone on the network path can read the hidden states.
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
# Keepalive detects a vanished host after about a minute, even without traffic.
SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class LinkClosedError(Exception):
    """The other end disconnected, did not respond in time, or failed authentication."""


class LinkMessage(NamedTuple):
    """One message."""

    order: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Link:
    """A connection whose two ends have authenticated each other."""

    def __init__(self, connection: socket.socket, own: bytes, other: bytes) -> None:
        self._socket = connection
        self._own, self._other = own, other
        self._sent = self._received = 0
        self.is_closed = False

    @classmethod
    def dialled(cls, address: str, port: int, key: bytes) -> Self:
        """Connect to a listener and authenticate.

        Raises:
            LinkClosedError: nothing listens there, or the key is wrong.
        """
        try:
            connection = socket.create_connection((address, port), GREETING_SECONDS)
        except OSError as error:
            raise LinkClosedError(f"{address} port {port}: {error}") from error
        return cls._handshake(connection, key, is_dialler=True)

    @classmethod
    def answered(cls, connection: socket.socket, key: bytes) -> Self:
        """Authenticate an accepted connection.

        Raises:
            LinkClosedError: the other end has a wrong key.
        """
        return cls._handshake(connection, key, is_dialler=False)

    @classmethod
    def _handshake(cls, connection: socket.socket, key: bytes, *, is_dialler: bool) -> Self:
        """Exchange nonces, and authenticate with a first message."""
        connection.settimeout(GREETING_SECONDS)
        for level, option, value in SOCKET_OPTIONS:
            connection.setsockopt(level, option, value)
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        link = cls(connection, b"", b"")
        try:
            link._send_all(MAGIC + own_nonce)
            other_nonce = link._take_nonce()
            nonces = own_nonce + other_nonce if is_dialler else other_nonce + own_nonce
            names = (b"dialler", b"listener") if is_dialler else (b"listener", b"dialler")
            link._own, link._other = (hmac.digest(key, name + nonces, "sha256") for name in names)
            link.send({"greeting": True})
            link.receive(most_bytes=0)  # an unauthenticated end cannot make us allocate memory
        except LinkClosedError:
            link.close()
            raise
        return link

    def wait_at_most(self, seconds: float | None) -> None:
        """Set the time after which a silent end counts as lost; None: never."""
        self._socket.settimeout(seconds)

    def send(
        self, order: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Send one message.

        Raises:
            LinkClosedError: the other end has disconnected.
        """
        header = json.dumps(order).encode()
        contiguous = {
            name: each.detach().cpu().contiguous() for name, each in (tensors or {}).items()
        }
        payload = save(contiguous) if contiguous else b""
        signature = _signature(self._own, self._sent, header, payload)
        self._sent += 1
        self._send_all(SIZES.pack(len(header), len(payload)) + header)
        self._send_all(payload)
        self._send_all(signature)

    def receive(self, most_bytes: int = MAX_PAYLOAD_BYTES) -> LinkMessage:
        """Return the next message, with at most ``most_bytes`` of tensors.

        Raises:
            LinkClosedError: none came, or it failed authentication.
        """
        header_bytes, payload_bytes = SIZES.unpack(self._take(SIZES.size))
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > most_bytes:
            raise LinkClosedError(
                f"a message of {header_bytes} + {payload_bytes} bytes is too long"
            )
        header, payload = self._take(header_bytes), self._take(payload_bytes)
        expected = _signature(self._other, self._received, header, payload)
        if not hmac.compare_digest(self._take(MAC_BYTES), expected):
            raise LinkClosedError("a message is not signed with the chain's key")
        self._received += 1
        try:
            return LinkMessage(json.loads(header), load(payload) if payload else {})
        except (ValueError, SafetensorError) as error:
            raise LinkClosedError(f"a message is no JSON with tensors: {error}") from error

    def close(self) -> None:
        """Close the connection, and interrupt any thread that waits on it."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_all(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise LinkClosedError(f"the other end is gone: {error}") from error

    def _take_nonce(self) -> bytes:
        greeting = self._take(len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise LinkClosedError("what answers there is no stage of this version")
        return greeting[len(MAGIC) :]

    def _take(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                piece = self._socket.recv(min(count - len(data), PIECE_BYTES))
            except OSError as error:
                raise LinkClosedError(f"no data: {error}") from error
            if not piece:
                raise LinkClosedError("the other end has closed the connection")
            data += piece
        return bytes(data)


def _signature(key: bytes, number: int, header: bytes, payload: bytes) -> bytes:
    sizes = SIZES.pack(len(header), len(payload))
    signed = hmac.new(key, NUMBER.pack(number) + sizes + header, hashlib.sha256)
    signed.update(payload)
    return signed.digest()
