"""``manage.py test``: run the test suite, which includes the code checks.

Without arguments, all tests run in lanes (``tests/plugins/lanes.py``). ``--nightly``,
``--changed [COMMIT]`` and ``--mutants`` must come first; all other arguments are passed to pytest
unchanged. Failed tests are not retried.
"""

import os
import subprocess
import sys
from pathlib import Path

from webapp.boot import environment

ROOT = Path(__file__).resolve().parents[2]
WHOLE_SUITE = ("--lanes", "-q")


def main(arguments: list[str]) -> int:
    """Run the tests; return 0 if all passed."""
    environment.ensure(["test", *arguments], with_tests=True)
    if arguments[:1] == ["--mutants"]:
        return run_module("tests.mutants.tool", *arguments[1:])
    if arguments[:1] == ["--nightly"]:
        arguments = [*arguments, *WHOLE_SUITE]
    if arguments[:1] == ["--changed"]:
        since, *more = arguments[1:] or [changed_since()]
        arguments = ["--changed-since", since, *WHOLE_SUITE, *more]
    return run_module("pytest", *(arguments or WHOLE_SUITE))


def changed_since() -> str:
    """Return the commit from which the current work began.

    That is the merge base with the upstream branch; without one, HEAD if files have changed since,
    else HEAD~1.
    """
    if upstream := _git("merge-base", "HEAD", "@{upstream}"):
        return upstream
    return "HEAD" if _git("status", "--porcelain") else "HEAD~1"


def _git(*words: str) -> str:
    """Return the output of git, or "" if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


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
