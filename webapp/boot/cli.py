"""Decide who answers a command: the set-up code, or Django inside the environment."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from webapp.boot import environment, say

ROOT = Path(__file__).resolve().parents[2]
BOOT_COMMANDS = {
    "up": "webapp.boot.up",
    "test": "webapp.boot.suite",
    "pins": "webapp.boot.pins",
}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status; a problem becomes one sentence."""
    os.chdir(ROOT)
    try:
        if arguments and arguments[0] in BOOT_COMMANDS:
            module = importlib.import_module(BOOT_COMMANDS[arguments[0]])
            return int(module.main(arguments[1:]))
        return _django(arguments)
    except say.Problem as problem:
        sys.stderr.write(f"{problem.fact} {problem.way_out}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        return 130


def _django(arguments: list[str]) -> int:
    """Run a Django command, in the environment's Python if this one has no Django."""
    if importlib.util.find_spec("django") is None:
        if environment.users_own() is not None:
            environment.ensure(arguments, with_tests=False)  # raises: it lacks at least Django
        if environment.PYTHON.exists():
            environment.enter(arguments)
        raise say.Problem(
            f"`{' '.join(['manage.py', *arguments])}` needs the environment, which does not "
            "exist yet.",
            "`python3 manage.py up` makes it and starts everything; "
            "`python3 manage.py test` makes it and runs the tests.",
        )
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
    management = importlib.import_module("django.core.management")
    management.execute_from_command_line(["manage.py", *arguments])
    return 0
