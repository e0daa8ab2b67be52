"""How ``manage.py test`` chooses tests, and what a run prints beside their results."""

import datetime as dt
import os
import sys

import pytest

from tests.plugins import unstable
from tests.webapp.boot.conftest import run_pytest
from webapp.boot import suite


def test_arguments_go_to_pytest_unchanged(monkeypatch, tmp_path, capfd):
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    monkeypatch.setattr(suite.environment, "ensure", lambda *_, **__: None)

    assert suite.main(["-q", str(tmp_path)]) == 0
    assert capfd.readouterr().out.strip().splitlines()[-1].startswith("1 passed")


@pytest.mark.parametrize(
    ("arguments", "module", "contains", "lacks"),
    [
        ([], "pytest", ["--gate", "tests/planner", suite.JOURNEY], ["tests/system"]),
        (["--all"], "pytest", ["-n"], ["--gate", "tests/planner"]),
        (["--nightly"], "pytest", ["--nightly", "-n"], ["--gate"]),
        (["-m", "faults"], "pytest", ["-m", "faults"], ["-n"]),
        (["--mutants", "--list"], "tests.mutants.tool", ["--list"], ["--mutants"]),
    ],
)
def test_a_level_is_chosen_by_the_first_argument(monkeypatch, arguments, module, contains, lacks):
    started = []
    monkeypatch.setattr(suite.environment, "ensure", lambda *_, **__: None)
    monkeypatch.setattr(suite, "run_module", lambda *words: started.append(words) or 0)
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "")
    monkeypatch.delenv("HYPOTHESIS_PROFILE")

    assert suite.main(arguments) == 0

    ((name, *words),) = started
    assert name == module
    assert set(contains) <= set(words)
    assert not set(lacks) & set(words)
    assert (os.environ.get("HYPOTHESIS_PROFILE") == "repeatable") == (not arguments)


def test_every_test_file_belongs_to_the_gate_or_to_the_system_tests():
    folders = {*suite.GATE, "tests/system"}
    found = [path.relative_to(suite.ROOT) for path in (suite.ROOT / "tests").rglob("test_*.py")]

    assert [path for path in found if not any(path.is_relative_to(one) for one in folders)] == []


def test_the_tests_see_neither_the_users_data_nor_a_ban_on_bytecode(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://live")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    seen = suite.quiet_environment()

    assert {"DATABASE_URL", "PYTHONDONTWRITEBYTECODE"} & set(seen) == set()
    assert seen["PATH"].startswith(str(suite.Path(sys.executable).parent))


def run_one_browser_test(tmp_path, chromium: str) -> str:
    """The output of pytest for one browser test, with the given program as Chromium."""
    lines = "import pytest\n\n@pytest.mark.browser\ndef test_browser():\n    assert True\n"
    (tmp_path / "test_page.py").write_text(lines)
    words = ("-q", "-p", "tests.plugins.packages", str(tmp_path))
    return run_pytest(*words, SLIPWAY_CHROMIUM=chromium)[1]


def test_a_missing_package_is_named_with_what_is_left_out(tmp_path):
    printed = run_one_browser_test(tmp_path, "/nowhere/chromium")

    assert "LEFT OUT, for want of Debian packages: chromium (browser tests)" in printed
    assert printed.strip().splitlines()[-1].startswith("1 skipped")


def test_no_package_is_named_when_none_is_missing(tmp_path):
    printed = run_one_browser_test(tmp_path, sys.executable)

    assert "LEFT OUT" not in printed
    assert "1 passed" in printed


ORDERED = """
def test_a(): pass
def test_b(): pass
"""


def test_the_seed_of_the_order_is_printed_and_repeats_it(tmp_path):
    (tmp_path / "test_one.py").write_text(ORDERED)

    _, printed = run_pytest("-q", "-p", "tests.plugins.order", str(tmp_path))

    assert "Random seed: repeat with --randomly-seed=" in printed


UNSTABLE = """
def test_steady(): pass
def test_shaky(): assert False
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--gate"], "1 passed, 1 deselected"), ([], "1 passed, 1 xfailed")],
)
def test_an_unstable_test_is_left_out_of_the_gate_and_told_apart(tmp_path, words, expected):
    (tmp_path / "test_one.py").write_text(UNSTABLE)
    listed = tmp_path / "unstable.toml"
    name = "test_one.py::test_shaky"
    listed.write_text(f'[[test]]\nid = "{name}"\ncause = "a race"\nsince = 2026-01-01\n')
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from pathlib import Path\nfrom tests.plugins import unstable\n"
        f"unstable.LIST = Path({str(listed)!r})\n"
    )

    status, printed = run_pytest(
        "-q", "-p", "plugin", "-p", "tests.plugins.unstable", *words, f"--rootdir={tmp_path}", str(tmp_path),
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip

    assert status == 0, printed
    assert expected in printed
    assert ("UNSTABLE failed" in printed) == (not words)
    assert "Unstable for more than two weeks" in printed


def test_every_unstable_entry_names_a_test_its_cause_and_a_date():
    for name, entry in unstable.read().items():
        assert (suite.ROOT / name.partition("::")[0]).exists(), name
        assert entry["cause"]
        assert isinstance(entry["since"], dt.date)
