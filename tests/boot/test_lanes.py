"""What a run in lanes does with tests that pass, fail or die, and what it leaves: nothing."""

import os
import signal
import subprocess
import sys

import pytest

from tests.boot.conftest import eventually
from webapp.boot import suite

PLUGINS = ("tests.plugins.run_folder", "tests.plugins.lanes")


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch) -> None:
    """Let the suites within print as they do alone, however this one was asked to print."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def start(tmp_path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start pytest with our plugins on the tests in ``tmp_path / "tests"``."""
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", *plugins, *arguments,
         str(tmp_path / "tests")],
        cwd=suite.ROOT,
        env=os.environ | {"SLIPWAY_TEST_RUNS": str(tmp_path / "runs"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def run(tmp_path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run them to the end; return the exit status and everything printed."""
    process = start(tmp_path, *arguments, **environment)
    words, _ = process.communicate(timeout=300)
    return process.returncode, words


@pytest.fixture
def write(tmp_path):
    """Write one file of tests."""
    (tmp_path / "tests").mkdir()

    def written(lines: str, name: str = "test_one.py") -> None:
        (tmp_path / "tests" / name).write_text(lines)

    return written


def test_work_begins_where_it_left_the_upstream_branch(monkeypatch, tmp_path):
    def git(*words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        command = ["git", "-C", str(tmp_path), *names, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(suite, "ROOT", tmp_path)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    first = git("rev-parse", "HEAD")
    assert suite.changed_since() == "HEAD~1"
    (tmp_path / "new.txt").touch()
    assert suite.changed_since() == "HEAD"

    git("branch", "-q", "upstream")
    git("branch", "-q", "--set-upstream-to=upstream")
    git("commit", "-q", "--allow-empty", "-m", "two")
    assert suite.changed_since() == first


def test_workers_report_every_outcome_and_the_exit_status_is_pytests(tmp_path, write):
    write("import pytest\n"
          "def test_good(): pass\n"
          "def test_bad(): assert 1 == 2\n"
          "@pytest.mark.skip\n"
          "def test_left_out(): pass\n"
          "@pytest.fixture\n"
          "def broken(): raise OSError('no such thing')\n"
          "def test_stuck(broken): pass\n")  # fmt: skip
    write("def test_other(): pass\n", "test_two.py")

    status, words = run(tmp_path, "--lanes", "-q")

    assert status == 1
    assert "1 failed, 2 passed, 1 skipped, 1 error" in words.splitlines()[-1]
    assert "assert 1 == 2" in words
    assert "no such thing" in words


def test_a_worker_that_dies_fails_the_test_that_it_ran_and_the_rest_runs(tmp_path, write):
    write("import os, signal\n"
          "def test_deadly(): os.kill(os.getpid(), signal.SIGKILL)\n")  # fmt: skip
    for number in range(6):
        write("def test_fine(): pass\n", f"test_{number}.py")

    status, words = run(tmp_path, "--lanes", "-q")

    assert status == 1
    assert "test_one.py::test_deadly" in words
    assert "ended with status -9" in words
    assert "6 passed" in words.splitlines()[-1]


def test_a_fixture_of_the_session_that_cannot_be_torn_down_is_an_error(tmp_path, write):
    write("import pytest\n"
          "@pytest.fixture(scope='session')\n"
          "def shared():\n"
          "    yield\n"
          "    raise OSError('still in use')\n"
          "def test_one(shared): pass\n")  # fmt: skip

    status, words = run(tmp_path, "--lanes", "-q")

    assert status == 1
    assert "still in use" in words


def test_a_test_that_fails_has_no_second_chance(tmp_path, write):
    runs = tmp_path / "runs.txt"
    write(f"import pathlib, pytest\n"
          f"@pytest.mark.faults\n"
          f"def test_one():\n"
          f"    runs = pathlib.Path({str(runs)!r})\n"
          f"    runs.write_text(runs.read_text() + 'x' if runs.exists() else 'x')\n"
          f"    assert runs.read_text() == 'xx'\n")  # fmt: skip

    status, _ = run(tmp_path, "--lanes", "-q")

    assert status == 1
    assert runs.read_text() == "x"


LEAVES = """
import pathlib, subprocess, sys, tempfile, time
def test_one():
    folder = tempfile.mkdtemp()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                            start_new_session=True)
    pathlib.Path({told!r}).write_text(f"{{left.pid}} {{folder}}")
    time.sleep({seconds})
"""


def left_by(told) -> tuple[int, str]:
    """The process and the folder that the test told of."""
    pid, folder = eventually(lambda: told.exists() and told.read_text()).split()
    return int(pid), folder


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = suite.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_nothing_that_tests_leave_outlives_the_run(tmp_path, write):
    told = tmp_path / "told"
    write(LEAVES.format(told=str(told), seconds=0))

    _, words = run(tmp_path, "--lanes", "-q")

    pid, folder = left_by(told)
    assert not is_running(pid)
    assert not suite.Path(folder).exists()
    assert "Left running by the tests, ended now" in words
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_leaves_nothing(tmp_path, write, sent):
    told = tmp_path / "told"
    write(LEAVES.format(told=str(told), seconds=600))
    process = start(tmp_path, "--lanes", "-q")
    pid, folder = left_by(told)

    process.send_signal(sent)
    process.communicate(timeout=120)

    assert process.returncode == 2
    assert not is_running(pid)
    assert not suite.Path(folder).exists()


def test_what_a_killed_run_leaves_is_cleaned_up_by_the_next(tmp_path, write):
    told = tmp_path / "told"
    write(LEAVES.format(told=str(told), seconds=600))
    process = start(tmp_path, "--lanes", "-q")
    pid, folder = left_by(told)
    process.kill()
    process.communicate(timeout=120)
    assert is_running(pid)

    run(tmp_path, "--collect-only", "-q")

    eventually(lambda: not is_running(pid))
    assert not suite.Path(folder).exists()


def test_a_run_beside_another_leaves_it_alone(tmp_path, write):
    told = tmp_path / "told"
    write(LEAVES.format(told=str(told), seconds=600))
    process = start(tmp_path, "--lanes", "-q")
    pid, folder = left_by(told)

    run(tmp_path, "--collect-only", "-q")

    assert is_running(pid)
    assert suite.Path(folder).exists()
    process.terminate()
    process.communicate(timeout=120)


def test_the_seconds_of_each_file_are_kept_where_asked(tmp_path, write):
    from tests.plugins import lanes

    path = tmp_path / "durations.csv"
    lanes.write_durations({"tests/b.py": 2.04, "tests/a.py": 1}, path)

    assert path.read_text() == "file,seconds\ntests/a.py,1.0\ntests/b.py,2.0\n"
    assert lanes.read_durations(path) == {"tests/a.py": 1.0, "tests/b.py": 2.0}


def test_files_that_share_something_dear_are_one_unit_and_others_stand_alone():
    from tests.plugins import lanes

    for area in lanes.AREAS:
        assert (suite.ROOT / area).is_dir()
    for folder in lanes.LANE_OF_FOLDER:
        assert (suite.ROOT / folder).is_dir()
    paths = ["tests/faults/test_a.py", "tests/boot/test_b.py", "tests/faults/test_c.py"]

    units = lanes.make_units(paths, {"tests/boot/test_b.py": 99.0})

    assert [(unit.name, unit.lane, unit.items) for unit in units] == [
        ("tests/boot/test_b.py", "wait", [1]),
        ("tests/faults", "wait", [0, 2]),
    ]


def test_a_lane_without_work_takes_from_the_one_with_most_left():
    from tests.plugins import lanes

    paths = ["tests/boot/test_a.py", "tests/webapp/test_b.py", "tests/runners/jobs/test_c.py"]
    seconds = dict(zip(paths, (5.0, 9.0, 1.0), strict=True))
    queues = lanes.Queues(lanes.make_units(paths, seconds))

    assert [queues.take("wait") for _ in range(4)] == [[0], [1], [2], None]
