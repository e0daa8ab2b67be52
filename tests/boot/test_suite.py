import os
import subprocess
import sys

import pytest

from webapp.boot import suite


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch) -> None:
    """Let the suites within print as they do alone, however this one was asked to print."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def test_arguments_go_to_pytest_unchanged(monkeypatch, tmp_path, capfd):
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    monkeypatch.setattr(suite.environment, "ensure", lambda *_, **__: None)

    assert suite.main(["-q", str(tmp_path)]) == 0
    assert capfd.readouterr().out.strip().splitlines()[-1].startswith("1 passed")


@pytest.mark.parametrize(
    ("arguments", "module", "first"),
    [
        ([], "pytest", ["--lanes"]),
        (["-m", "faults"], "pytest", ["-m", "faults"]),
        (["--nightly"], "pytest", ["--nightly", "--lanes"]),
        (["--changed", "HEAD~3"], "pytest", ["--changed-since", "HEAD~3", "--lanes"]),
        (["--changed"], "pytest", ["--changed-since", "abc", "--lanes"]),
        (["--mutants", "--list"], "tests.mutants.tool", ["--list"]),
    ],
)
def test_a_way_to_run_is_chosen_by_its_first_argument(monkeypatch, arguments, module, first):
    started = []
    monkeypatch.setattr(suite.environment, "ensure", lambda *_, **__: None)
    monkeypatch.setattr(suite, "changed_since", lambda: "abc")
    monkeypatch.setattr(suite, "run_module", lambda *words: started.append(words) or 0)

    assert suite.main(arguments) == 0

    (found,) = started
    assert found[0] == module
    assert list(found[1 : 1 + len(first)]) == first


def test_the_tests_see_neither_the_users_data_nor_a_ban_on_bytecode(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://live")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    seen = suite.quiet_environment()

    assert {"DATABASE_URL", "PYTHONDONTWRITEBYTECODE"} & set(seen) == set()
    assert seen["PATH"].startswith(str(suite.Path(sys.executable).parent))


def run_one_browser_test(tmp_path, chromium: str) -> str:
    """The output of pytest for one browser test, with the given program as Chromium."""
    lines = "import pytest\n\n@pytest.mark.browser\ndef test_page():\n    assert True\n"
    (tmp_path / "test_page.py").write_text(lines)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.plugins.chromium"]
    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=suite.ROOT,
        env=os.environ | {"SLIPWAY_CHROMIUM": chromium},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_a_missing_chromium_is_said_loudly_above_the_last_line(tmp_path):
    words = run_one_browser_test(tmp_path, "/nowhere/chromium").strip().splitlines()

    assert "NO CHROMIUM: the browser tests did not run" in words[-2]
    assert words[-1].startswith("1 skipped")


def test_a_present_chromium_needs_no_words(tmp_path):
    words = run_one_browser_test(tmp_path, sys.executable)

    assert "NO CHROMIUM" not in words
    assert "1 passed" in words
