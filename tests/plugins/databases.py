"""The databases of a run: migrated by the first process that needs them, copied by the others.

To migrate an empty database takes most of ten seconds. Every worker of xdist needs both
databases, and so do the products that tests start (``tests/stack.py``). On PostgreSQL
(SLIPWAY_TEST_DATABASE_URL) each worker migrates its own.
"""

import fcntl
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

FILES = {"default": "slipway.sqlite3", "metrics": "metrics.sqlite3"}


@contextmanager
def migrated_folder() -> Iterator[Path]:
    """Lock the folder of the databases that this run has migrated; until then there is none."""
    folder = Path(tempfile.gettempdir()) / "migrated"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def django_db_setup(request: pytest.FixtureRequest, django_db_modify_db_settings: None) -> None:
    """Copy the run's migrated databases, or have pytest-django migrate and leave copies."""
    from django.db import connections  # the settings are ready now

    if {each.vendor for each in connections.all()} != {"sqlite"}:
        request.getfixturevalue("django_db_setup")  # pytest-django's
        return
    with migrated_folder() as folder:
        if folder.exists():
            for alias, name in FILES.items():
                shutil.copyfile(folder / name, connections[alias].settings_dict["TEST"]["NAME"])
            request.config.option.reuse_db = True  # Django finds nothing left to migrate
        request.getfixturevalue("django_db_setup")
        names = {alias: connections[alias].settings_dict for alias in FILES}
        is_whole = all(each["NAME"] == each["TEST"]["NAME"] for each in names.values())
        if is_whole and not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            unfinished.mkdir()
            for alias, name in FILES.items():
                with (
                    closing(sqlite3.connect(names[alias]["NAME"])) as source,
                    closing(sqlite3.connect(unfinished / name)) as target,
                ):
                    source.backup(target)
            unfinished.rename(folder)
