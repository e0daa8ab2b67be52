"""The databases of a run: migrated once, in a process of their own, and copied.

To migrate empty databases takes two seconds of a core. Every worker of xdist needs both of them,
and so do the products that tests start (``tests/stack.py``). On PostgreSQL
(SLIPWAY_TEST_DATABASE_URL) each worker migrates its own.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {"default": "slipway.sqlite3", "metrics": "metrics.sqlite3"}


MIGRATE = "from webapp.core.queries import migrate_databases; migrate_databases()"


@contextmanager
def migrated_folder() -> Iterator[Path]:
    """Lock the folder of the databases that this run has migrated, after it has made it."""
    folder = Path(tempfile.gettempdir()) / "migrated"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            variables = os.environ | {"SLIPWAY_DATA_DIR": str(unfinished)}
            variables.pop("DATABASE_URL", None)
            command = [sys.executable, "manage.py", "shell", "-c", MIGRATE]
            subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True)
            unfinished.rename(folder)
        yield folder


@pytest.fixture(scope="session")
def django_db_setup(request: pytest.FixtureRequest, django_db_modify_db_settings: None) -> None:
    """Use a copy of the run's migrated databases; on PostgreSQL, have pytest-django migrate."""
    from django.db import connections  # the settings are ready now

    if {each.vendor for each in connections.all()} != {"sqlite"}:
        request.getfixturevalue("django_db_setup")  # pytest-django's
        return
    with migrated_folder() as folder:
        for alias, name in FILES.items():
            connection = connections[alias]
            connection.close()
            path = connection.settings_dict["TEST"]["NAME"]
            shutil.copyfile(folder / name, path)
            connection.settings_dict["NAME"] = connections.databases[alias]["NAME"] = path
