"""Run a function periodically until a signal arrives, whatever it raises."""

import signal
import threading
import time
from collections.abc import Callable

import structlog
from django.db import close_old_connections

log = structlog.get_logger(__name__)
FAILURE_REST_SECONDS = 1.0
CONNECTION_SECONDS = 60.0  # a new connection per round costs more than most rounds


class Stopper:
    """Stop event set by SIGTERM and SIGINT; loops check it between rounds and sleep on it."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def listen(self, *others: "Stopper") -> None:
        """Install signal handlers that stop this and others; main thread only."""

        def stop(*_: object) -> None:
            for each in (self, *others):
                each.event.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)


def run_loop(name: str, step: Callable[[], object], every_seconds: float, stop: Stopper) -> None:
    """Call ``step`` periodically; a repeated exception is logged once."""
    last_failure = ""
    renewed_at = time.monotonic()
    while not stop.event.is_set():
        if last_failure or time.monotonic() - renewed_at > CONNECTION_SECONDS:
            close_old_connections()
            renewed_at = time.monotonic()
        rest = every_seconds
        try:
            step()
            if last_failure:
                log.info("works again", loop=name)
            last_failure = ""
        except Exception as error:  # the loop survives any failure of a round
            rest = max(FAILURE_REST_SECONDS, every_seconds)
            if repr(error) != last_failure:
                log.warning("round failed", loop=name, exc_info=True)
            last_failure = repr(error)
        stop.event.wait(rest)
    close_old_connections()
