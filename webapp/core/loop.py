"""Run a piece of work again and again until a signal comes, whatever it raises."""

import signal
import threading
import time
from collections.abc import Callable

import structlog
from django.db import close_old_connections

log = structlog.get_logger(__name__)
FAILURE_REST_SECONDS = 1.0
CONNECTION_SECONDS = 60.0  # a new one every round costs more than most rounds


class Stopper:
    """Set by TERM and INT; loops look at it between two rounds and sleep on it."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def listen(self) -> None:
        """Stop at TERM and INT; only the main thread may call this."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.event.set())


def run_loop(name: str, step: Callable[[], object], every_seconds: float, stop: Stopper) -> None:
    """Call ``step``, rest, and repeat; an exception is told once per kind and survived."""
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
        except Exception as error:  # a loop outlives whatever one round meets
            rest = max(FAILURE_REST_SECONDS, every_seconds)
            if repr(error) != last_failure:
                log.warning("round failed", loop=name, exc_info=True)
            last_failure = repr(error)
        stop.event.wait(rest)
    close_old_connections()
