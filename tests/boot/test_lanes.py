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
        preexec_fn=_restore_sigint,  # noqa: PLW1509 -- this process has no threads
    )  # fmt: skip


def _restore_sigint() -> None:
    """Undo what a shell does to commands that it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(tmp_path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run them to the end; return the exit status and everything printed."""
    process = start(tmp_path, *arguments, **environment)
    words, _ = process.communicate(timeout=300)
    return process.returncode, words


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


FILES = {
    "test_one.py": """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip
def test_left_out(): pass
@pytest.fixture
def broken(): raise OSError('no such thing')
def test_stuck(broken): pass
""",
    "test_deadly.py": """
import os, signal
def test_deadly(): os.kill(os.getpid(), signal.SIGKILL)
""",
    "test_shared.py": """
import pytest
@pytest.fixture(scope='session')
def shared():
    yield
    raise OSError('still in use')
def test_one(shared): pass
""",
    "test_first_time.py": """
import pathlib, pytest
@pytest.mark.faults
def test_one():
    runs = pathlib.Path({runs!r})
    runs.write_text(runs.read_text() + 'x' if runs.exists() else 'x')
    assert runs.read_text() == 'xx'
""",
    **{f"test_{number}.py": "def test_fine(): pass\n" for number in range(6)},
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The status, the words and the folder of one run with every outcome that a test can have."""
    folder = tmp_path_factory.mktemp("outcomes")
    (folder / "tests").mkdir()
    for name, lines in FILES.items():
        text = lines.replace("{runs!r}", repr(str(folder / "runs.txt")))
        (folder / "tests" / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        return *run(folder, "--lanes", "-q"), folder


SNAPSHOTS = """
def test_one(snapshot): assert 'one' == snapshot
def test_two(snapshot): assert 'two' == snapshot
"""


def test_snapshots_that_workers_used_are_used_and_others_fail_the_run(tmp_path):
    (tmp_path / "tests").mkdir()
    test_file = tmp_path / "tests/test_kept.py"
    test_file.write_text(SNAPSHOTS)
    (tmp_path / "tests/test_other.py").write_text("def test_fine(): pass\n")
    status, words = run(tmp_path, "-q", "--snapshot-update")
    assert status == 0, words

    status, words = run(tmp_path, "--lanes", "-q")
    assert (status, "2 snapshots passed" in words) == (0, True), words

    test_file.write_text(SNAPSHOTS.partition("def test_two")[0])
    status, words = run(tmp_path, "--lanes", "-q")
    assert (status, "1 snapshot unused" in words) == (1, True), words


def test_workers_report_every_outcome_and_the_exit_status_is_pytests(told):
    status, words, _ = told

    assert status == 1
    for counted in ("3 failed, 8 passed, 1 skipped", "2 errors"):
        assert counted in words.splitlines()[-1]
    assert "assert 1 == 2" in words
    assert "no such thing" in words


def test_a_worker_that_dies_fails_the_test_that_it_ran_and_the_rest_runs(told):
    assert "test_deadly.py::test_deadly" in told[1]
    assert "ended with status -9" in told[1]


def test_a_fixture_of_the_session_that_cannot_be_torn_down_is_an_error(told):
    assert "still in use" in told[1]


def test_a_test_that_fails_has_no_second_chance(told):
    assert (told[2] / "runs.txt").read_text() == "x"


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


def test_a_run_leaves_another_alone_and_cleans_up_after_one_that_was_killed(tmp_path, write):
    told = tmp_path / "told"
    write(LEAVES.format(told=str(told), seconds=600))
    process = start(tmp_path, "--lanes", "-q")
    pid, folder = left_by(told)

    run(tmp_path, "--collect-only", "-q")

    assert is_running(pid)
    assert suite.Path(folder).exists()
    process.kill()
    process.communicate()
    assert is_running(pid)

    run(tmp_path, "--collect-only", "-q")

    eventually(lambda: not is_running(pid))
    assert not suite.Path(folder).exists()


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
