"""The checks of the house: format, types, import contracts, templates and migrations."""

import subprocess

import pytest

from webapp.boot.suite import ROOT, quiet_environment

CODE = ["manage.py", "planner", "runners", "webapp", "tests"]
CHECKS = {
    "mypy": ["mypy"],
    "import contracts": ["lint-imports"],
    "ruff check": ["ruff", "check", "--quiet", *CODE],
    "ruff format": ["ruff", "format", "--check", "--quiet", *CODE],
    "djlint": ["djlint", "templates", "--lint", "--quiet"],
    "migrations": ["python", "manage.py", "makemigrations", "--check", "--dry-run"],
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_clean(name):
    done = subprocess.run(
        CHECKS[name],
        cwd=ROOT,
        env=quiet_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
