"""The site's address: sockets that listen, and the two processes that answer at them."""

import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack

WEB, GATEWAY = "web", "gateway"
APPLICATIONS = {WEB: "webapp.asgi:application", GATEWAY: "webapp.gateway.asgi:application"}
BACKLOG = 2048


class Front:
    """What the web process and the gateway share (``webapp.core.handover``), kept open by us.

    A connection that arrives while one of them starts again is accepted by the other, or waits.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen; "" is every address, of IPv4 and IPv6.

        Raises:
            OSError: another program uses the port, or this machine has no such address.
        """
        self._sockets: list[socket.socket] = []
        self._ends = dict(
            zip(APPLICATIONS, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM), strict=True)
        )
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with ExitStack() as failed:
            failed.callback(self.close)
            for family, _, _, _, address in dict.fromkeys(found):
                listening = socket.create_server(address, family=family, backlog=BACKLOG)
                self._sockets.append(listening)
            failed.pop_all()

    def close(self) -> None:
        """Listen no more; the two processes have copies of their own."""
        for each in (*self._sockets, *self._ends.values()):
            each.close()

    def descriptors(self, name: str) -> tuple[int, ...]:
        """Return the open files of a process, WEB or GATEWAY."""
        return (*(each.fileno() for each in self._sockets), self._ends[name].fileno())

    def command(self, name: str, proxies: Sequence[str] = ()) -> list[str]:
        """Return the command of a process; headers of ``proxies`` are believed."""
        *listening, channel = map(str, self.descriptors(name))
        command = [sys.executable, "-m", "webapp.core.serve", APPLICATIONS[name]]
        command += ["--sockets", ",".join(listening), "--channel", channel]
        command += ["--gateway"] if name == GATEWAY else []
        return [*command, *(("--proxies", ",".join(proxies)) if proxies else ())]
