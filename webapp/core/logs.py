"""Logging of the web side: structured events, and tracebacks without local variables.

If ``rich`` is installed, structlog prints the local variables of every frame by default, which
wrote host credentials to the log when the database rejected a heartbeat.

A line that cannot be written (for example on a full disk) is dropped.
"""

import contextlib
import logging
from typing import Any

import structlog
from structlog.dev import ConsoleRenderer, plain_traceback


class PatientLogger(structlog.PrintLogger):
    """Prints to stdout and ignores write errors, so that logging never ends a process."""

    def msg(self, message: str) -> None:
        """Print one line."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = (
        msg
    )


def configure_logs() -> None:
    """Configure structlog's defaults with plain tracebacks."""
    *before, _ = structlog.get_config()["processors"]
    renderer = ConsoleRenderer(exception_formatter=plain_traceback)
    structlog.configure(processors=[*before, renderer], logger_factory=lambda *_: PatientLogger())


class ShortOutage(logging.Filter):
    """Replaces the traceback of a database or disk failure by one sentence."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten the record of an outage; return True for every record."""
        from webapp.core.outages import outage_of  # the settings import this module

        if record.exc_info and (outage := outage_of(record.exc_info[1])):
            record.msg, record.args = f"{record.getMessage()}: {outage.detail}", ()
            record.exc_info = record.exc_text = None
        return True


def fault_logging() -> dict[str, Any]:
    """Return Django's logging settings, extended by tracebacks of server errors without DEBUG.

    Without them, the cause of a 500 response is not logged.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {
            "outside_debugging": {"()": "django.utils.log.RequireDebugFalse"},
            "short_outage": {"()": ShortOutage},
        },
        "handlers": {
            "faults": {
                "class": "logging.StreamHandler",
                "level": "ERROR",
                "filters": ["outside_debugging", "short_outage"],
            }
        },
        "loggers": {"django.request": {"handlers": ["faults"]}},
    }
