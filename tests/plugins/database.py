"""Make the test database once per run; every forked worker begins with a copy of its files."""

import os
import shutil
import traceback
from pathlib import Path

import pytest
from pytest_django.plugin import blocking_manager_key

from tests.plugins.run_folder import FOLDER
from tests.stack import MIGRATED

TEMPLATE = FOLDER / "database"


def make_template(session: pytest.Session) -> None:
    """Migrate empty databases in a process of its own, and set their files aside.

    A run that a test of another run starts copies those. PostgreSQL has no such files: there
    every worker migrates its own.
    """
    from django.conf import settings

    if any(_file_of(each) is None for each in settings.DATABASES.values()):
        return
    if made := os.environ.get(MIGRATED):
        shutil.copytree(made, TEMPLATE)
        os.environ[MIGRATED] = str(TEMPLATE)
        return
    if (pid := os.fork()) == 0:
        try:
            with session.config.stash[blocking_manager_key].unblock():
                _migrate()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    os.environ[MIGRATED] = str(TEMPLATE)
    if status:
        raise pytest.UsageError("the test database could not be made: run one test to see why")


def _file_of(database: dict) -> Path | None:
    if database["ENGINE"] != "django.db.backends.sqlite3":
        return None
    return Path(database["TEST"]["NAME"])


def _migrate() -> None:
    from django.conf import settings
    from django.db import connections
    from django.test.utils import setup_databases

    setup_databases(verbosity=0, interactive=False)
    connections.close_all()
    TEMPLATE.mkdir()
    for alias, database in settings.DATABASES.items():
        _file_of(database).replace(TEMPLATE / alias)


def take_copy(config: pytest.Config, worker: str) -> None:
    """Let pytest-django find this worker's databases made and migrated."""
    from django.conf import settings

    if not TEMPLATE.is_dir():
        return
    for alias, database in settings.DATABASES.items():
        shutil.copyfile(TEMPLATE / alias, f"{_file_of(database)}_{worker}")
    config.option.reuse_db = True
