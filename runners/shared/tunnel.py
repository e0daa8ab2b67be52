"""The protocol between a gateway and a host: requests in frames, many at once on a WebSocket.

A binary message holds one frame: type (1 byte), stream id (4 bytes, big-endian), payload. The
gateway opens a stream for each request with the next higher id:

    gateway to host: OPEN (JSON ``RequestHead``), BODY parts, END
    host to gateway: HEAD (JSON ``ResponseHead``), DATA parts, DONE
    both ways:       RESET (JSON ``Reset``: cancelled or failed), WINDOW (credit in bytes)

BODY and DATA keep within a window for each stream, which the receiver renews as it consumes: a
slow client holds up its own stream alone. Both ends ignore frames of streams that have ended.
"""

import asyncio
import json
import re
import struct
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import unquote

from pydantic import Field, StringConstraints, ValidationError

from runners.jobspec.base import Identifier, Message

WINDOW_BYTES = 256 * 1024  # of a stream and direction: sent, but not consumed
MAX_FRAME_BYTES = 1024**2
MAX_HEAD_BYTES = 64 * 1024
PART_BYTES = 64 * 1024  # of a BODY or DATA frame: other streams get their turn after it
MAX_STREAMS = 1024  # open at once on a connection
LAST_STREAM_ID = 2**32 - 1
MAX_REASON_BYTES = 123  # of a WebSocket's close frame

CLOSE_GOING_AWAY = 1001
CLOSE_PROTOCOL_ERROR = 1002
CLOSE_REPLACED = 4409  # a host opened too many connections
CLOSE_UNAUTHORIZED = 4401
CLOSE_NOT_FOUND = 4404

# Codes of a RESET.
NO_ENDPOINT = "no_endpoint"  # the attempt does not run on the host, or is not ready
REFUSED = "refused"  # the endpoint does not accept connections
FAILED = "failed"  # the endpoint broke off
FORBIDDEN = "forbidden"  # the request is none that a tunnel passes on
BUSY = "busy"  # too many streams
CANCELLED = "cancelled"  # by the gateway

_FRAME = struct.Struct(">BI")
_CREDIT = struct.Struct(">I")
_PATH = re.compile(r"(?:/v1/[!-~]*|/(?:health|metrics)(?:\?[!-~]*)?)")
# Of one connection alone (RFC 9110, section 7.6.1), and what each end writes itself.
_HOP_BY_HOP = frozenset({
    b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip

Headers = Sequence[tuple[bytes, bytes]]


class FrameError(Exception):
    """The peer breaks the protocol: the connection is closed with this reason."""


class FrameType(IntEnum):
    """The first byte of a frame."""

    OPEN = 1
    BODY = 2
    END = 3
    HEAD = 4
    DATA = 5
    DONE = 6
    RESET = 7
    WINDOW = 8


class Frame(NamedTuple):
    """One frame of a stream."""

    type: FrameType
    stream_id: int
    payload: bytes


def encode(frame_type: FrameType, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame as a WebSocket message."""
    return _FRAME.pack(frame_type, stream_id) + payload


def decode(message: bytes | str | None) -> Frame:
    """Return the frame of a WebSocket message.

    Raises:
        FrameError: it is text, of an unknown type, or too short or too long.
    """
    if not isinstance(message, bytes):
        raise FrameError("a frame is binary")
    if not _FRAME.size <= len(message) <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame has {_FRAME.size} to {MAX_FRAME_BYTES} bytes")
    number, stream_id = _FRAME.unpack_from(message)
    try:
        return Frame(FrameType(number), stream_id, message[_FRAME.size :])
    except ValueError:
        raise FrameError(f"no frame has type {number}") from None


def close_reason(error: FrameError) -> str:
    """Return the reason of a close frame, which has room for few bytes."""
    return str(error).encode()[:MAX_REASON_BYTES].decode(errors="ignore")


# Heads, in JSON.


Text = Annotated[str, StringConstraints(max_length=MAX_HEAD_BYTES)]


class RequestHead(Message):
    """A request to an attempt's endpoint; header fields are Latin-1."""

    attempt_id: Identifier
    method: str = Field(pattern=r"^[A-Z]{1,16}$")
    path: Text
    headers: tuple[tuple[Text, Text], ...] = ()


class ResponseHead(Message):
    """Status and header fields of a response."""

    status: int = Field(ge=100, le=599)
    headers: tuple[tuple[Text, Text], ...] = ()


class Reset(Message):
    """Why a stream ends early."""

    code: str = Field(max_length=40)
    message: str = Field(default="", max_length=1000)


Head = TypeVar("Head", RequestHead, ResponseHead, Reset)


def head_frame(frame_type: FrameType, stream_id: int, head: Head) -> bytes:
    """Return the frame of a head.

    Raises:
        FrameError: it is too large.
    """
    payload = json.dumps(head.model_dump(), separators=(",", ":")).encode()
    if len(payload) > MAX_HEAD_BYTES:
        raise FrameError(f"a head has at most {MAX_HEAD_BYTES} bytes, this one {len(payload)}")
    return encode(frame_type, stream_id, payload)


def read_head(frame: Frame, kind: type[Head]) -> Head:
    """Return the head in a frame, without fields that only a newer peer knows.

    Raises:
        FrameError: it is too large or malformed.
    """
    if len(frame.payload) > MAX_HEAD_BYTES:
        raise FrameError(f"a head has at most {MAX_HEAD_BYTES} bytes")
    try:
        return kind.model_validate_json(frame.payload, extra="ignore")
    except ValidationError as error:
        raise FrameError(f"{kind.__name__}: {error.errors()[0]['msg']}") from None


def reset_frame(stream_id: int, code: str, message: str = "") -> bytes:
    """Return the frame that ends a stream early."""
    return head_frame(FrameType.RESET, stream_id, Reset(code=code, message=message[:1000]))


def text_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Return header fields as a head has them, without those of one connection alone."""
    fields = [(name.lower(), value) for name, value in headers]
    named = {
        name.strip().lower()
        for field, value in fields
        if field == b"connection"
        for name in value.split(b",")
    }
    return tuple(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in fields
        if name not in _HOP_BY_HOP | named
    )


def raw_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Return the header fields of a head as bytes, without those of one connection alone.

    Raises:
        FrameError: a field has characters beyond Latin-1.
    """
    try:
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    except UnicodeEncodeError:
        raise FrameError("header fields are Latin-1") from None
    kept = text_headers(fields)
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]


def is_passed_on(path: str) -> bool:
    """Return whether a tunnel passes requests to a path on: /v1/..., /health and /metrics."""
    names = unquote(path.partition("?")[0]).replace("\\", "/").split("/")
    return bool(_PATH.fullmatch(path)) and "#" not in path and not {".", ".."} & set(names)


# Flow control.


def credit_frame(stream_id: int, credit: int) -> bytes:
    """Return the frame that renews a window by some bytes."""
    return encode(FrameType.WINDOW, stream_id, _CREDIT.pack(credit))


def read_credit(frame: Frame) -> int:
    """Return the bytes by which a frame renews a window.

    Raises:
        FrameError: the frame is malformed.
    """
    if len(frame.payload) != _CREDIT.size:
        raise FrameError(f"a credit has {_CREDIT.size} bytes")
    credit: int = _CREDIT.unpack(frame.payload)[0]
    return credit


class SendWindow:
    """The bytes that a stream may still send."""

    def __init__(self) -> None:
        self._credit = WINDOW_BYTES
        self._is_open = asyncio.Event()
        self._is_open.set()

    async def take(self, most: int) -> int:
        """Wait until something may be sent; return how many bytes, at most ``most``."""
        while not self._credit:
            await self._is_open.wait()
        taken = min(self._credit, most, PART_BYTES)
        self._credit -= taken
        if not self._credit:
            self._is_open.clear()
        return taken

    def renew(self, credit: int) -> None:
        """Add the receiver's credit.

        Raises:
            FrameError: it is nothing, or more than was sent.
        """
        if not 0 < credit <= WINDOW_BYTES - self._credit:
            raise FrameError(f"a credit of {credit} bytes after {WINDOW_BYTES - self._credit}")
        self._credit += credit
        self._is_open.set()


class Inbox:
    """The bytes of a stream from their arrival until they are consumed."""

    def __init__(self, renew: Callable[[int], Awaitable[None]]) -> None:
        self._renew = renew  # sends a credit to the peer
        self._parts: deque[bytes] = deque()
        self._unconsumed_bytes = 0
        self._consumed_bytes = 0  # since the last credit
        self._error: Exception | None = None
        self._is_whole = False
        self._has_news = asyncio.Event()

    def feed(self, part: bytes) -> None:
        """Take what the peer sent.

        Raises:
            FrameError: it is more than the window allows, or comes after the end.
        """
        self._unconsumed_bytes += len(part)
        if self._is_whole or self._unconsumed_bytes > WINDOW_BYTES:
            raise FrameError("bytes after the end, or beyond the window")
        if part:
            self._parts.append(part)
            self._has_news.set()

    def end(self) -> None:
        """Take the end: what has arrived is all."""
        self._is_whole = True
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Let the consumer have this error after what has arrived."""
        if not self._is_whole:
            self._error = self._error or error
            self._has_news.set()

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield what arrives, joined where it came faster than it is consumed.

        Raises:
            Exception: that of ``fail``.
        """
        while True:
            if self._parts:
                part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                yield part
                await self._consume(len(part))
            elif self._is_whole:
                return
            elif self._error:
                raise self._error
            else:
                self._has_news.clear()
                await self._has_news.wait()

    async def _consume(self, num_bytes: int) -> None:
        """Renew the window by halves: a credit for each part would double the frames."""
        self._consumed_bytes += num_bytes
        if self._consumed_bytes >= WINDOW_BYTES // 2 and not (self._is_whole or self._error):
            credit, self._consumed_bytes = self._consumed_bytes, 0
            self._unconsumed_bytes -= credit
            await self._renew(credit)
