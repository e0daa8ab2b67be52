"""The site's own log, and its memory allocator."""

import contextlib
import ctypes
import gc
import logging
import sys
import time
from functools import partial
from typing import Any

import structlog
from structlog.dev import ConsoleRenderer, plain_traceback

from webapp.core.log_collector import CollectorHandler, LogCollector

# ---------------------------------------------------------------------------
# Logging of the web side: structured events, and tracebacks without local variables.
#
# If ``rich`` is installed, structlog prints the local variables of every frame by default, which
# wrote host credentials to the log when the database rejected a heartbeat.
#
# A line that cannot be written (for example on a full disk) is dropped.
# ---------------------------------------------------------------------------


class PatientLogger(structlog.PrintLogger):
    """Prints to stdout and ignores write errors, so that logging never ends a process."""

    def msg(self, message: str) -> None:
        """Print one line."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = (
        msg
    )


def configure_logs(collector: LogCollector | None = None) -> None:
    """Configure structlog's defaults with plain tracebacks, and a copy to the log collector."""
    *before, _, _ = structlog.get_config()["processors"]  # without local time and the renderer
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    # A file of terminal colours is no text; `up` writes all its parts' output to files.
    renderer = ConsoleRenderer(colors=sys.stdout.isatty(), exception_formatter=plain_traceback)
    copies = [collector.copy] if collector is not None else []
    structlog.configure(
        processors=[*before, stamp, *copies, renderer],
        logger_factory=lambda *_: PatientLogger(),
    )


class UtcFormatter(logging.Formatter):
    """Begins a line with its time in UTC."""

    converter = time.gmtime  # type: ignore[assignment]  # typeshed wants a None, too
    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"


class ShortOutage(logging.Filter):
    """Replaces the traceback of a database or disk failure by one sentence."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten the record of an outage; return True for every record."""
        from webapp.core.outages import outage_of  # the settings import this module

        if record.exc_info and (outage := outage_of(record.exc_info[1])):
            record.msg, record.args = f"{record.getMessage()}: {outage.detail}", ()
            record.exc_info = record.exc_text = None
        return True


FAULTS = {"level": "ERROR", "filters": ["outside_debugging", "short_outage"]}


def fault_logging(collector: LogCollector | None = None) -> dict[str, Any]:
    """Return Django's logging settings, extended by tracebacks of server errors without DEBUG.

    Without them, the cause of a 500 response is not logged. The web server's lines get a time.
    A log collector receives the same lines.
    """
    faults, lines, handlers = ["faults"], ["server"], {}
    if collector is not None:
        copy = {"()": partial(CollectorHandler, collector)}
        handlers = {"collected_faults": {**copy, **FAULTS}, "collected_lines": copy}
        faults, lines = [*faults, "collected_faults"], [*lines, "collected_lines"]
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {
            "outside_debugging": {"()": "django.utils.log.RequireDebugFalse"},
            "short_outage": {"()": ShortOutage},
        },
        "formatters": {
            "utc": {"()": UtcFormatter, "format": "%(asctime)s [%(levelname)s] %(message)s"}
        },
        "handlers": {
            "faults": {"class": "logging.StreamHandler", "formatter": "utc", **FAULTS},
            "server": {"class": "logging.StreamHandler", "formatter": "utc"},
            **handlers,
        },
        "loggers": {
            "django.request": {"handlers": faults},
            "uvicorn": {"handlers": lines, "propagate": False},
        },
    }


# ---------------------------------------------------------------------------
# Settings of the C library's allocator, so that freed memory returns to the system.
#
# By default glibc uses several arenas and raises the mmap threshold to the largest freed block:
# large request bodies then leave holes that are never returned. Measured with 9,000 hostile
# requests in 80 s on two cores: the web process grew from 141 to 212 MB by default, from 138 to
# 156 MB with these values, and stayed there. Of that growth, 5 MB were free pages between used
# ones, which only ``malloc_trim`` returns, and 8 MB were pages of Python's own allocator, which
# are never returned.
# ---------------------------------------------------------------------------


# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 128 * 1024  # glibc's initial value; setting it disables the dynamic threshold
_ARENAS = 2


def give_back_memory() -> bool:
    """Set the allocator options of this process; return whether the C library accepted all."""
    setter = getattr(ctypes.CDLL(None), "mallopt", None)
    if setter is None:
        return False
    values = {
        _M_ARENA_MAX: _ARENAS,
        _M_MMAP_THRESHOLD: _LARGE_BYTES,
        _M_TRIM_THRESHOLD: _LARGE_BYTES,
    }
    accepted = [bool(setter(name, value)) for name, value in values.items()]
    return all(accepted)


def freeze_loaded() -> None:
    """Exclude all loaded objects from garbage collection from now on.

    The oldest generation is collected once new objects reach a quarter of the tracked ones: with
    200,000 objects at start, the cycles of many requests would stay alive until then.
    """
    gc.collect()
    gc.freeze()


def collect_and_trim() -> None:
    """Collect the reference cycles of requests, and return free memory to the system."""
    gc.collect()
    trim()


def trim() -> bool:
    """Return free pages between used ones to the system; return whether any were released."""
    trimmer = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(trimmer and trimmer(0))
