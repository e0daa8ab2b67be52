"""Dispatch of ``manage.py`` commands: to the boot code, or to Django in the environment."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from runners.shared.environment import escape_unknown_characters
from webapp.boot import console, environment

ROOT = Path(__file__).resolve().parents[2]
BOOT_COMMANDS = {
    "up": "webapp.boot.up",
    "test": "webapp.boot.suite",
    "pins": "webapp.boot.environment",
}
# Commands that work without the database, or must work with one of a newer version.
WITHOUT_SCHEMA = {
    *("backup", "restore", "doctor", "help", "version", "check", "makemigrations"),
    *("showmigrations", "collectstatic", "vendor", "dbshell", "techniques", "bench", "test"),
}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status; print a problem as one sentence."""
    os.chdir(ROOT)
    escape_unknown_characters()
    try:
        if arguments and arguments[0] in BOOT_COMMANDS:
            module = importlib.import_module(BOOT_COMMANDS[arguments[0]])
            return int(module.main(arguments[1:]))
        return _django(arguments)
    except console.Problem as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        return 130


def _django(arguments: list[str]) -> int:
    """Run a Django command, in the environment's Python if this one has no Django."""
    if importlib.util.find_spec("django") is None:
        if environment.users_own() is not None:
            environment.ensure(arguments, with_tests=False)  # raises, as Django is missing
        if environment.PYTHON.exists():
            environment.enter(arguments)
        raise console.Problem(
            f"`{' '.join(['manage.py', *arguments])}` needs the environment, which does not "
            "exist yet.",
            "`python3 manage.py up` creates the environment and starts everything; `python3 "
            "manage.py test` creates the environment and runs the tests.",
        )
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
    os.umask(0o077)  # as `up`: the site's files are for its user alone
    if arguments and arguments[0] not in WITHOUT_SCHEMA and not arguments[0].startswith("-"):
        _check_schema()
    management = importlib.import_module("django.core.management")
    management.execute_from_command_line(["manage.py", *arguments])
    return 0


def _check_schema() -> None:
    """Raise a problem if this version cannot work with the database's schema.

    An unavailable database is reported by the command itself.
    """
    importlib.import_module("django").setup()
    schema = importlib.import_module("webapp.core.queries")
    errors = importlib.import_module("django.db.utils")
    try:
        schema.check_schema()
    except schema.SchemaError as error:
        raise console.Problem(str(error), "") from error
    except errors.DatabaseError:
        return
