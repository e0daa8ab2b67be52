"""One address, two processes: each takes connections, and hands over those of the other.

The site's web process and its gateway accept from the same listening sockets. The first bytes of
a request say whose it is; a connection with a request of the other process is handed over: its
descriptor, with what was read, goes through a channel, a pair of sockets. From then on it lives in
that process alone. Nothing is copied between them, and the end of one breaks no connection of the
other. ``manage.py up`` keeps sockets and channel open: what arrives while a process starts again
waits there.
"""

import asyncio
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from webapp.core.connections import HeaderDeadlineProtocol

OF_GATEWAY = re.compile(rb"\r*\n?[!-~]+ (?:https?://[^/ ]*)?(?:/v1[/? ]|/tunnel/)", re.IGNORECASE)
WHOLE_TARGET = re.compile(rb"\s*[!-~]+ [!-~]+\s")
DECIDING_BYTES = 512  # of a request, in which its target begins at the latest
MESSAGE_BYTES = 32 * 1024  # with a descriptor; a longer beginning of a request goes as a file
HANDOVER_SECONDS = 20.0  # that a full channel is tried again
RETRY_SECONDS = 0.01
RELIEF_SECONDS = 30.0  # that a server without its parent serves on, until the next one relieves it
NOT_TAKEN = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"retry-after: 5\r\nconnection: close\r\ncontent-length: 65\r\n\r\n"
    b"This part of the site does not answer yet. Try again in a moment."
)
log = structlog.get_logger(__name__)


class Channel:
    """One end of the pair of sockets between the two processes."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)  # noqa: FBT003 -- the library's
        self._end = end
        self._turn = asyncio.Lock()  # of those that give: one tries, the others wait behind it

    def fileno(self) -> int:
        """Return the descriptor, for an event loop."""
        return self._end.fileno()

    async def give(self, connection: int, data: bytes) -> None:
        """Hand a connection over with what was read of it; the descriptor here is closed then.

        Raises:
            OSError: the other process has not taken what was given to it before.
        """
        with ExitStack() as stack:
            stack.callback(os.close, connection)
            descriptors = [connection]
            if len(data) > MESSAGE_BYTES:
                file = stack.enter_context(tempfile.TemporaryFile())
                file.write(data)
                file.seek(0)
                data, descriptors = b"", [connection, file.fileno()]
            deadline = asyncio.get_running_loop().time() + HANDOVER_SECONDS
            async with self._turn:
                while True:
                    try:
                        socket.send_fds(self._end, [data], descriptors)
                    except BlockingIOError:
                        if asyncio.get_running_loop().time() > deadline:
                            raise
                        await asyncio.sleep(RETRY_SECONDS)
                    else:
                        return

    def given(self) -> Iterator[tuple[socket.socket, bytes]]:
        """Yield the connections that the other process has handed over."""
        while True:
            try:
                data, found, *_ = socket.recv_fds(self._end, MESSAGE_BYTES, 2)
            except BlockingIOError:
                return
            connection, *files = found
            for each in files:
                with os.fdopen(each, "rb") as file:
                    data = file.read()
            yield socket.socket(fileno=connection), data


class Side(NamedTuple):
    """Which of the two processes this one is."""

    channel: Channel
    is_gateway: bool


def is_decided(begun: bytes) -> bool:
    """Return whether the first bytes of a request say whose it is."""
    return bool(WHOLE_TARGET.match(begun)) or len(begun) >= DECIDING_BYTES


class SharedProtocol(HeaderDeadlineProtocol):
    """A connection on which each request is answered here, or which the other process gets."""

    def __init__(self, *arguments: Any, side: Side, begun: bytes = b"", **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._side = side
        self._begun = begun  # of a request whose target is not there yet, or handed over with it
        self._is_in_request = False
        self._is_ending = False  # after the answers that are due

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin with what was read before it was handed over."""
        super().connection_made(transport)
        if self._begun:
            self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        """Answer a request of this process; hand over one of the other."""
        if self._is_ending:
            return
        if self._is_in_request or not self._is_idle:
            super().data_received(data)
            return
        data, self._begun = self._begun + data, b""
        if not is_decided(data):
            self._begun = data
        elif bool(OF_GATEWAY.match(data)) is self._side.is_gateway:
            super().data_received(data)
        else:
            self._unset_keepalive_if_required()
            self._end_deadline()
            self.transport.pause_reading()
            task = self.loop.create_task(self._hand_over(data))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    @property
    def _is_idle(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete

    def on_message_begin(self) -> None:
        """Take all bytes up to the end of the request."""
        self._is_in_request = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Answer the request; one of the other process, sent before its turn, ends the connection.

        It cannot be handed over while answers to those before it are due. A client that gets no
        answer to a request which it sent ahead repeats it (RFC 9112, 9.3.2).
        """
        is_own = bool(OF_GATEWAY.match(b"GET " + self.url + b" ")) is self._side.is_gateway
        if self._is_ending:
            return
        if is_own:
            super().on_headers_complete()
            return
        self._is_ending = True
        self._end_deadline()
        if self._is_idle:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Take a part of a request that is answered here."""
        if not self._is_ending:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Decide again at the next one."""
        self._is_in_request = False
        if not self._is_ending:
            super().on_message_complete()

    async def _hand_over(self, data: bytes) -> None:
        deadline = self.loop.time() + HANDOVER_SECONDS
        while self.transport.get_write_buffer_size():  # of the answer before
            if self.loop.time() > deadline:
                self.transport.abort()
            if self.transport.is_closing():
                return
            await asyncio.sleep(RETRY_SECONDS)
        if self.transport.is_closing():
            return
        try:
            own: socket.socket = self.transport.get_extra_info("socket")
            await self._side.channel.give(os.dup(own.fileno()), data)
        except OSError as error:
            log.warning("a connection is not handed over", cause=str(error))
            self.transport.write(NOT_TAKEN)
            self.transport.close()
        else:
            self.transport.abort()  # closes the descriptor of this process alone


class Fork(NamedTuple):
    """What a server knows that is a fork of a process which has loaded everything.

    ``parent`` is the end of a pipe whose other end that process has; ``starter`` is the process
    that started it, ``relieves`` the process group of an earlier server without its parent.
    """

    parent: int
    starter: int
    relieves: int | None


class SharingServer(uvicorn.Server):
    """A server that also takes the connections which the other process hands over."""

    def __init__(self, config: uvicorn.Config, side: Side, fork: Fork | None = None) -> None:
        """Set the server up, of a process by itself or of a fork."""
        super().__init__(config)
        self._side, self._fork = side, fork

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and take those that were handed over."""
        loop = asyncio.get_running_loop()
        if self._fork is not None:
            loop.add_reader(self._fork.parent, self._outlive, self._fork)
        await super().startup(sockets)
        loop.add_reader(self._side.channel, self._take)
        if self._fork is not None and self._fork.relieves is not None and self.started:
            with suppress(ProcessLookupError):  # it did not last so long
                os.killpg(self._fork.relieves, signal.SIGTERM)

    def _outlive(self, fork: Fork) -> None:
        """Serve on until another one takes over, but not without what started our parent."""
        loop, end = asyncio.get_running_loop(), partial(os.kill, os.getpid(), signal.SIGKILL)
        loop.remove_reader(fork.parent)
        loop.call_later(RELIEF_SECONDS, end)
        try:
            loop.add_reader(os.pidfd_open(fork.starter), end)
        except (AttributeError, OSError):  # not on this system, or it has ended
            end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take none any more, and end."""
        asyncio.get_running_loop().remove_reader(self._side.channel)
        await super().shutdown(sockets)

    def _take(self) -> None:
        for connection, data in self._side.channel.given():
            task = asyncio.get_running_loop().create_task(self._serve_given(connection, data))
            self.server_state.tasks.add(task)
            task.add_done_callback(self.server_state.tasks.discard)

    async def _serve_given(self, connection: socket.socket, data: bytes) -> None:
        protocol = SharedProtocol(
            self.config, self.server_state, self.lifespan.state, side=self._side, begun=data
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client has left
            connection.close()
