"""``manage.py test``: every check of the house, then the whole test suite.

With arguments the checks are left out and the arguments go to pytest unchanged, so that
``manage.py test -m faults`` starts at once; ``--lanes``, ``--changed [COMMIT]`` and ``--mutants``
come first where they are given. pytest always comes last and has the last word on
the screen; a failed check makes the exit status non-zero all the same.

Tests that start real processes and wait for them share two cores with each other in the whole
suite. When a few of those miss a deadline there, they have one more chance, one at a time, and
both outcomes are on the screen. A test of any other kind that fails has failed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from webapp.boot import environment, say

ROOT = Path(__file__).resolve().parents[2]
CODE = ["manage.py", "planner", "runners", "webapp", "tests"]


@dataclass(frozen=True)
class Check:
    """One check that has to be clean before a change may land."""

    title: str
    command: tuple[str, ...]


CHECKS = (
    Check("ruff check", ("ruff", "check", "--quiet", *CODE)),
    Check("ruff format", ("ruff", "format", "--check", "--quiet", *CODE)),
    Check("mypy --strict", ("mypy",)),
    Check("import contracts", ("lint-imports",)),
    Check("djlint", ("djlint", "templates", "--lint", "--quiet")),
    Check("migrations", ("python", "manage.py", "makemigrations", "--check", "--dry-run")),
)
WAITS_FOR_PROCESSES = "browser or faults or slow"
RUN_FOLDER = "tests.plugins.run_folder"  # what a run in lanes writes, and its end
MOST_FILES_AGAIN = 3  # more than these and it is no accident
TESTS_FAILED = 1  # pytest's exit status for it
WHOLE_SUITE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q")


def main(arguments: list[str]) -> int:
    """Return 0 if every check and every test passed."""
    environment.ensure(["test", *arguments], with_tests=True)
    if arguments[:1] == ["--mutants"]:
        return run_module("tests.mutants.tool", *arguments[1:])
    if arguments[:1] == ["--lanes"]:
        arguments = ["-p", RUN_FOLDER, *arguments]
    if arguments[:1] == ["--changed"]:
        since, *more = arguments[1:] or [changed_since()]
        arguments = ["--changed-since", since, *WHOLE_SUITE, *more]
    failed = [] if arguments else failed_checks()
    if failed:
        say.line(f"  ✗ Failed before the tests: {', '.join(failed)}. The tests run all the same.")
    status = pytest(*arguments) if arguments else whole_suite()
    return status or int(bool(failed))


def failed_checks() -> list[str]:
    """Run the checks, two at a time, and return the titles of those that were not clean."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(passes, CHECKS))
    return [check.title for check, is_clean in zip(CHECKS, found, strict=True) if not is_clean]


def changed_since() -> str:
    """Return the commit that work here began from, as far as git can tell.

    That is where it left the upstream branch; without one, the last commit if files have changed
    since, else the one before.
    """
    if upstream := _git("merge-base", "HEAD", "@{upstream}"):
        return upstream
    return "HEAD" if _git("status", "--porcelain") else "HEAD~1"


def _git(*words: str) -> str:
    """Return what git prints; nothing where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def pytest(*arguments: str) -> int:
    """Run pytest on the project and return its exit status."""
    return run_module("pytest", *arguments)


def run_module(name: str, *arguments: str) -> int:
    """Run a module in the environment of tests and return its exit status."""
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, env=quiet_environment(), check=False).returncode


def whole_suite() -> int:
    """Run every test; run those once more that may have missed a deadline in company."""
    with tempfile.TemporaryDirectory(prefix="slipway-suite-") as cache:
        status = pytest("-o", f"cache_dir={cache}", *WHOLE_SUITE)
        failed = last_failed(Path(cache))
        files = {name.partition("::")[0] for name in failed}
        if status != TESTS_FAILED or not 0 < len(files) <= MOST_FILES_AGAIN:
            return status
        say.line(f"  ✗ Failed in company: {', '.join(failed)}.")
        say.line("    Those of them that wait for processes are run once more, one at a time.")
        alone = ("-o", f"cache_dir={cache}", "-q", "--last-failed", "-m", WAITS_FOR_PROCESSES)
        again = pytest(*alone, *(name for name in WHOLE_SUITE if "/" in name))
        return again or int(bool(last_failed(Path(cache))))


def last_failed(cache: Path) -> list[str]:
    """Return the names of the tests that have failed and not passed since."""
    found = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(found.read_text("utf-8"))) if found.exists() else []


def passes(check: Check) -> bool:
    """Run one check, print one line for success or its whole output, and say which it was."""
    started = time.monotonic()
    done = subprocess.run(
        check.command,
        cwd=ROOT,
        env=quiet_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    say.line(f"  {'✗' if done.returncode else '✓'} {check.title} ({seconds:.1f} s)")
    if done.returncode:
        say.line(done.stdout)
    return done.returncode == 0


def quiet_environment() -> dict[str, str]:
    """Return the environment of checks and tests: one torch thread, nothing of the user's data.

    Bytecode is written whatever the user's environment says: without it, every process that a
    test starts compiles torch and transformers anew (25 s of a core instead of 8).
    """
    own = {"SLIPWAY_DATA_DIR", "DATABASE_URL", "REDIS_URL", "PYTHONDONTWRITEBYTECODE"}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return kept | {"OMP_NUM_THREADS": "1", "PATH": programs, "PYTHONUNBUFFERED": "1"}
