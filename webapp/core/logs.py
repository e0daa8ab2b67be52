"""How the web side logs: events with their values, tracebacks without anybody's variables.

Where ``rich`` is installed, structlog prints the local variables of every frame by default: a
host's credential stood in the log of each beat that the database did not take.
"""

import structlog
from structlog.dev import ConsoleRenderer, plain_traceback


def configure_logs() -> None:
    """Log as structlog does out of the box, but with plain tracebacks."""
    *before, _ = structlog.get_config()["processors"]
    renderer = ConsoleRenderer(exception_formatter=plain_traceback)
    structlog.configure(processors=[*before, renderer])
