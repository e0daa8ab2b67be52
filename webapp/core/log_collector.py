"""A copy of the site's log and of its audit, sent to a syslog collector (``SLIPWAY_SYSLOG``).

Each record is one message in the format of RFC 5424 whose text is a JSON object in ASCII. A stream
(TCP, TLS) separates messages by line ends (RFC 6587, section 3.4.2). A thread of its own sends
them, so that a collector that is slow or gone neither delays nor fails what is logged: up to
``MOST_WAITING`` messages wait in memory, and later ones are dropped and counted.
"""

import atexit
import contextlib
import errno
import json
import logging
import os
import queue
import socket
import ssl
import sys
import threading
import time
from collections.abc import MutableMapping
from datetime import UTC, datetime
from logging.handlers import SysLogHandler
from pathlib import Path
from typing import Any

import structlog

from webapp.core.site_settings import SyslogAddress

MOST_WAITING = 10_000
TIMEOUT_SECONDS = 5.0  # to connect, and to send one message
RETRY_SECONDS = 2.0
EXIT_SECONDS = 2.0  # for what waits when a process ends
LONGEST_TRACEBACK = 8_000  # characters; the end says what failed
AUDIT = "audit"  # the MSGID of events of the audit; "log" otherwise
LEVELS = {"exception": logging.ERROR, "warn": logging.WARNING, "fatal": logging.CRITICAL}
log = structlog.get_logger(__name__)


class SyslogSender(SysLogHandler):
    """Sends formatted messages; a failure raises ``OSError`` in the calling thread."""

    append_nul = False

    def __init__(self, address: SyslogAddress) -> None:
        """Connect.

        Raises:
            OSError: the collector cannot be reached.
        """
        self.is_tls = address.scheme == "tls"
        self.end = "" if address.scheme == "udp" else "\n"
        is_stream = address.scheme in ("tcp", "tls")
        kind = {"udp": socket.SOCK_DGRAM, "unix": None}.get(address.scheme, socket.SOCK_STREAM)
        self.is_stream = is_stream
        place = address.path or (address.host, address.port)
        super().__init__(place, SysLogHandler.LOG_DAEMON, kind)

    def createSocket(self) -> None:  # noqa: N802 (the library's name)
        """Connect a stream with a timeout, which the library does not have."""
        if not self.is_stream or isinstance(self.address, str):
            super().createSocket()
            return
        self.unixsocket = False
        connection = socket.create_connection(self.address, TIMEOUT_SECONDS)
        if self.is_tls:
            context = ssl.create_default_context()
            connection = context.wrap_socket(connection, server_hostname=self.address[0])
        self.socket = connection

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, which is a whole message."""
        return f"{record.msg}{self.end}"

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 (the library's name)
        """Raise the failure that the library would print."""
        if (error := sys.exc_info()[1]) is not None:
            raise error


class LogCollector:
    """Takes events of any thread at once, and sends them from a thread of its own."""

    def __init__(self, address: SyslogAddress) -> None:
        self.address = address
        self.num_dropped = 0
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(MOST_WAITING)
        self._is_closed = threading.Event()
        self._starting = threading.Lock()
        self._is_down = False
        self._process = 0  # the process whose thread sends
        self._program = program_name(sys.argv)
        atexit.register(self.close)

    def put(self, fields: MutableMapping[str, Any], level: int, kind: str = "log") -> None:
        """Queue an event as JSON; it is dropped and counted if too many wait."""
        text = self._message(fields, kind)
        record = logging.LogRecord(kind, level, "", 0, text, (), None)
        with self._starting:
            if self._process != os.getpid():  # after a fork, too
                self._process = os.getpid()
                threading.Thread(target=self._send_all, daemon=True, name="log-collector").start()
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def _message(self, fields: MutableMapping[str, Any], kind: str) -> str:
        """Return a message of RFC 5424 without its priority, which the library prepends."""
        rendered = structlog.processors.format_exc_info(None, "", dict(fields))
        if "exception" in rendered:
            rendered["exception"] = str(rendered["exception"])[-LONGEST_TRACEBACK:]
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        header = f"1 {at} {socket.gethostname() or '-'} {self._program} {os.getpid()} {kind} -"
        return f"{header} {json.dumps(rendered, default=str)}"

    def _send_all(self) -> None:
        sender: SyslogSender | None = None
        while (record := self._waiting.get()) is not None:
            while not self._is_closed.is_set():
                try:
                    sender = sender or SyslogSender(self.address)
                    sender.emit(record)
                except OSError as error:
                    if sender is not None:
                        sender.close()
                        sender = None
                    if error.errno == errno.EMSGSIZE:  # larger than a datagram
                        self.num_dropped += 1
                        break
                    self._note(str(error))
                    self._is_closed.wait(RETRY_SECONDS)
                else:
                    self._note("")
                    break
            self._waiting.task_done()
            if self._is_closed.is_set():
                break
        if sender is not None:
            sender.close()

    def _note(self, cause: str) -> None:
        """Log the begin and the end of an outage, once each."""
        if bool(cause) == self._is_down:
            return
        self._is_down = bool(cause)
        if cause:
            log.warning("the log collector is unreachable", address=str(self.address), cause=cause)
        else:
            log.info("the log collector is reached again", num_dropped=self.num_dropped)

    def close(self) -> None:
        """Wait shortly for what is being sent, unless the collector is gone, and end."""
        ends_at = time.monotonic() + EXIT_SECONDS
        while self._waiting.unfinished_tasks and not self._is_down:
            if time.monotonic() > ends_at:
                break
            time.sleep(0.01)
        self._is_closed.set()
        with contextlib.suppress(queue.Full):  # then the thread is not waiting for more
            self._waiting.put_nowait(None)
        atexit.unregister(self.close)

    def copy(
        self, _logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Queue a copy of an event of structlog, as one of its processors."""
        level = LEVELS.get(method) or logging.getLevelNamesMapping().get(method.upper(), 20)
        self.put(event, level)
        return event


class CollectorHandler(logging.Handler):
    """Queues records of the standard library's logging for the collector."""

    def __init__(self, sink: LogCollector) -> None:
        super().__init__()
        self.sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record."""
        fields: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields["exc_info"] = record.exc_info
        self.sink.put(fields, record.levelno)


def program_name(arguments: list[str]) -> str:
    """Return the APP-NAME of a process: ``slipway-control``, and ``slipway-web`` for a server."""
    is_command = Path(arguments[0]).name == "manage.py" if arguments else False
    command = arguments[1] if is_command and len(arguments) > 1 else "web"
    return f"slipway-{command}" if command.isidentifier() else "slipway"


collector: LogCollector | None = None


def collector_start(address: SyslogAddress | None) -> LogCollector | None:
    """Return this process's collector, made once; None if no address is set."""
    global collector  # noqa: PLW0603 (as the root logger is)
    if collector is None and address is not None:
        collector = LogCollector(address)
    return collector


def audit_send(**fields: object) -> None:
    """Send an event of the audit to the collector, if there is one."""
    if collector is not None:
        collector.put(fields, logging.INFO, AUDIT)
