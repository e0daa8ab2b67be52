import os
import subprocess
import sys

import pytest

from tests.plugins import order
from webapp.boot import suite


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch) -> None:
    """Let the suites within print as they do alone, however this one was asked to print."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def test_a_clean_check_prints_one_line(capsys):
    assert suite.passes(suite.Check("true", ("python", "-c", "print('noise')")))

    assert capsys.readouterr().out.startswith("  ✓ true (")


def test_a_failed_check_prints_everything_it_said(capsys):
    assert not suite.passes(suite.Check("bad", ("python", "-c", "print('reason'); exit(1)")))

    out = capsys.readouterr().out
    assert "✗ bad" in out
    assert "reason" in out


def test_a_failed_check_does_not_hide_the_tests(monkeypatch, tmp_path, capfd):
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    bad = suite.Check("bad", ("python", "-c", "exit(1)"))
    monkeypatch.setattr(suite, "CHECKS", (bad,))
    monkeypatch.setattr(suite, "WHOLE_SUITE", ("-q", str(tmp_path)))
    monkeypatch.setattr(suite.environment, "ensure", lambda *_, **__: None)

    status = suite.main([])

    last = capfd.readouterr().out.strip().splitlines()[-1]
    assert status == 1
    assert last.startswith("1 passed")


def run_whole_suite(monkeypatch, folder, marker: str, fails: str) -> int:
    """The exit status for one test file, whose test counts its runs in a file beside it."""
    lines = f"""
import pathlib, pytest
@pytest.mark.{marker}
def test_one():
    runs = pathlib.Path({str(folder / "runs")!r})
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert not ({fails}), runs.read_text()
"""
    (folder / "test_one.py").write_text(lines)
    monkeypatch.setattr(suite, "WHOLE_SUITE", ("-q", str(folder)))
    return suite.whole_suite()


def test_a_test_that_missed_a_deadline_in_company_has_one_more_chance_alone(
    monkeypatch, tmp_path, capfd
):
    status = run_whole_suite(monkeypatch, tmp_path, "faults", fails="runs.read_text() == 'x'")

    out = capfd.readouterr().out
    assert status == 0
    assert "1 failed" in out
    assert "Failed in company" in out
    assert "1 passed" in out.strip().splitlines()[-1]


def test_a_test_that_fails_alone_too_has_failed(monkeypatch, tmp_path):
    status = run_whole_suite(monkeypatch, tmp_path, "faults", fails="True")

    assert status != 0
    assert (tmp_path / "runs").read_text() == "xx"


def test_a_test_that_waits_for_no_process_has_no_second_chance(monkeypatch, tmp_path):
    status = run_whole_suite(monkeypatch, tmp_path, "equality", fails="runs.read_text() == 'x'")

    assert status != 0
    assert (tmp_path / "runs").read_text() == "x"


def test_a_suite_that_fails_in_many_files_is_not_run_again(monkeypatch, tmp_path):
    for number in range(suite.MOST_FILES_AGAIN + 1):
        lines = "import pytest\n@pytest.mark.slow\ndef test_one():\n    assert False\n"
        (tmp_path / f"test_{number}.py").write_text(lines)
    monkeypatch.setattr(suite, "WHOLE_SUITE", ("-q", str(tmp_path)))

    assert suite.whole_suite() == 1


def test_arguments_go_to_pytest_and_leave_the_checks_out(monkeypatch, tmp_path, capfd):
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    monkeypatch.setattr(suite.environment, "ensure", lambda *_, **__: None)

    status = suite.main(["-q", str(tmp_path)])

    assert status == 0
    assert "mypy" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "module", "first"),
    [
        (["--lanes", "-q"], "pytest", ["-p", suite.RUN_FOLDER, "--lanes", "-q"]),
        (["--changed", "HEAD~3"], "pytest", ["--changed-since", "HEAD~3", "-n"]),
        (["--changed"], "pytest", ["--changed-since", "abc", "-n"]),
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


def test_the_tests_of_an_area_go_to_one_worker_and_others_by_their_file():
    for area in order.AREAS:
        assert (suite.ROOT / area).is_dir()
        names = (f"{area}/test_a.py::test_one", f"{area}/test_b.py::test_two[x::y]")
        assert {order.unit_of(name) for name in names} == {area}

    deep, flat = (f"tests/runners/jobs/{name}" for name in ("serve/test_a.py", "test_a.py"))
    assert order.unit_of(deep) == "tests/runners/jobs/serve"
    assert order.unit_of(flat) == "tests/runners/jobs"
    assert order.unit_of("tests/boot/test_a.py::test_one[x::y]") == "tests/boot/test_a.py"
