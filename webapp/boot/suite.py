"""``manage.py test``: the gate, one part of the tests, or all of them.

Without arguments it runs the gate: the checks (``tests/architecture/test_checks.py``), every test
outside ``tests/system``, and the journey of a new user through the real product. ``--all`` adds
the rest of ``tests/system``, ``--nightly`` also every combination and the soaks. ``--mutants``
must come first too; all other arguments are passed to pytest unchanged. Failed tests are not
retried.
"""

import os
import subprocess
import sys
from pathlib import Path

from webapp.boot import environment

ROOT = Path(__file__).resolve().parents[2]
JOURNEY = "tests/system/test_journey.py"
GATE = (
    "tests/architecture", "tests/books", "tests/planner", "tests/runners", "tests/webapp", JOURNEY,
)  # fmt: skip
TWO_WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
OPTIONS = (*TWO_WORKERS, "-q", "--durations=25")


def main(arguments: list[str]) -> int:
    """Run the tests; return 0 if all passed."""
    environment.ensure(["test", *arguments], with_tests=True)
    match arguments:
        case []:  # the same examples of properties each time: a new find must not stop a change
            os.environ.setdefault("HYPOTHESIS_PROFILE", "repeatable")
            return run_module("pytest", *OPTIONS, "--gate", *GATE)
        case ["--all", *more]:
            return run_module("pytest", *OPTIONS, *more)
        case ["--nightly", *more]:
            return run_module("pytest", *OPTIONS, "--nightly", *more)
        case ["--mutants", *more]:
            return run_module("tests.mutants.tool", *more)
        case _:
            return run_module("pytest", *arguments)


def run_module(name: str, *arguments: str) -> int:
    """Run a module with the test environment variables and return its exit status."""
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, env=quiet_environment(), check=False).returncode


def quiet_environment() -> dict[str, str]:
    """Return the environment variables of tests: one torch thread, no user settings.

    Bytecode is always written: without it, every process that a test starts compiles torch and
    transformers again (25 s of CPU time instead of 8 s).
    """
    removed = {"SLIPWAY_DATA_DIR", "DATABASE_URL", "REDIS_URL", "PYTHONDONTWRITEBYTECODE"}
    variables = {name: value for name, value in os.environ.items() if name not in removed}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return variables | {"OMP_NUM_THREADS": "1", "PATH": programs, "PYTHONUNBUFFERED": "1"}
