"""Whether ``manage.py prepare`` of this version has run: migrations and static files are there.

A process that starts before keeps what it found then: static files are listed once, at the start.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from django.contrib.staticfiles.storage import staticfiles_storage
from django.db import DatabaseError, connections
from django.db.migrations.executor import MigrationExecutor

WAIT_SECONDS = 2.0
_is_prepared = threading.Event()


def missing_preparation() -> str:
    """Return what ``manage.py prepare`` has still to do, in words; "" if it has done all.

    Raises:
        DatabaseError: a database is unavailable.
    """
    name = getattr(staticfiles_storage, "manifest_name", "")
    if name and not staticfiles_storage.exists(name):
        return "static files are not collected"
    for alias in connections:
        executor = MigrationExecutor(connections[alias])
        if plan := executor.migration_plan(executor.loader.graph.leaf_nodes()):
            first = plan[0][0]
            return f"{len(plan)} migrations are not applied, the first of them {first}"
    return ""


def is_prepared() -> bool:
    """Return whether nothing is missing; once that is so, it is not asked again."""
    if not _is_prepared.is_set() and not _missing(without_database="the database"):
        _is_prepared.set()
    return _is_prepared.is_set()


def await_preparation(sleep: Callable[[float], object] = time.sleep) -> None:
    """Return once all is prepared; say once on stderr what is waited for.

    Without a database it returns too, because pages then say why they cannot be shown. SIGTERM
    ends the process, also where it is the first of a container, which has no default for it.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        sys.exit(0)

    before, said = signal.signal(signal.SIGTERM, end), ""
    try:
        while missing := _missing():
            if missing != said:
                sys.stderr.write(f"Waiting for `manage.py prepare`: {missing}.\n")
                said = missing
            sleep(WAIT_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)
        connections.close_all()


def _missing(without_database: str = "") -> str:
    try:
        return missing_preparation()
    except DatabaseError:
        return without_database
