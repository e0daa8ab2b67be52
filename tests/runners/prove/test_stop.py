"""A validation that is stopped or killed leaves no process and no scratch folder, and says so."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.__main__ import main
from runners.jobspec import ProveSpec
from runners.launchers import launch
from runners.prove.reaper import LOCK
from runners.prove.report import Report
from runners.prove.run import ValidationRun
from runners.shared.messages import RunRequest
from runners.shared.reasons import Reason
from runners.supervision import child, procfs
from tests.runners.programs import stop
from tests.runners.tools import ids_of, wait_for

ROOT = Path(__file__).resolve().parents[3]
A1, _ = ids_of(__name__)
FIGURE = '{"record": "figure", "name": "threads", "unit": "threads", "value": 2, "device": "cpu"}'
ENDED_SECONDS = 4.0  # two, on a machine that is busy
# A stage with the processes of the real ones: jobs by exec, ranks by fork, a daemon of an engine.
STAGE = f"""
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[2], "left").write_text("x")
for has_session in (False, True):
    subprocess.Popen(["sleep", "60"], start_new_session=has_session)
if os.fork() == 0:
    os.setsid()
    os.fork()
    time.sleep(60)
print('''{FIGURE}''', flush=True)
time.sleep(60)
"""
NUM_PROCESSES = 5  # of the stage
COMMAND = f"""
import sys
from runners.prove import run
from runners.prove.run import ValidationRun
argv = (sys.executable, "-c", {STAGE!r})
run.ValidationRun = lambda **options: ValidationRun(**options, command=argv)
sys.exit(run.main(sys.argv[1:]))
"""
JOB = f"""
import sys
from runners.jobs.prove import __main__ as job
from runners.prove.run import ValidationRun
argv = (sys.executable, "-c", {STAGE!r})
job.ValidationRun = lambda **options: ValidationRun(**options, command=argv)
job.main()
"""


@pytest.fixture(autouse=True)
def _no_processes() -> Iterator[None]:
    yield
    procfs.sweep(A1)


def start(folder: Path, *argv: str) -> subprocess.Popen[bytes]:
    """Start a validation whose processes all bear the marker of this file."""
    return subprocess.Popen(
        [sys.executable, *argv, "--output", str(folder), "--dir", str(folder / "host")],
        env=os.environ | {procfs.MARKER: A1, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )


def report_in(folder: Path) -> Report:
    return Report.model_validate_json((folder / "report.json").read_bytes())


def has_figure(folder: Path) -> bool:
    return (folder / "report.json").exists() and bool(report_in(folder).stages[0].figures)


def command_lines() -> list[bytes]:
    return [
        (procfs.PROC / str(each.pid) / "cmdline").read_bytes()
        for each in procfs.processes_of_attempt(A1)
    ]


@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_whole_tree_and_the_report_says_so(tmp_path, number, code):
    proof = start(tmp_path, "-c", COMMAND, "--stages", "identity,rates")
    wait_for(lambda: has_figure(tmp_path))
    wait_for(
        lambda: len(procfs.processes_of_attempt(A1)) == 2 + NUM_PROCESSES
    )  # with command and reaper
    proof.send_signal(number)
    assert proof.wait(ENDED_SECONDS) == code
    assert procfs.processes_of_attempt(A1) == []
    assert list(tmp_path.glob("scratch-*")) == []
    first, second = report_in(tmp_path).stages
    assert (first.state, len(first.figures), second.state) == ("cut", 1, "not run")
    assert f"stopped by {number.name}; the last that it said is: threads" in first.problem
    assert f"stopped by {number.name}" in second.problem
    assert number.name in (tmp_path / "report.html").read_text()


@pytest.mark.faults
@pytest.mark.slow
def test_a_real_stage_ends_with_the_job_that_it_launched(tmp_path):
    proof = start(
        tmp_path, "-m", "runners", "prove", "--stages", "jobs", "--small", "--device", "cpu"
    )
    wait_for(lambda: any(b"runners.jobs.train" in line for line in command_lines()))
    proof.terminate()
    assert proof.wait(ENDED_SECONDS) == 143
    assert (procfs.processes_of_attempt(A1), list(tmp_path.glob("scratch-*"))) == ([], [])
    (stage,) = report_in(tmp_path).stages
    assert (stage.state, "SIGTERM" in stage.problem, stage.checks) == ("cut", True, ())


@pytest.mark.faults
@pytest.mark.parametrize("victims", [1, 2])
def test_stages_end_when_the_command_is_killed(tmp_path, victims):
    proof = start(tmp_path, "-c", COMMAND, "--stages", "identity")
    wait_for(lambda: has_figure(tmp_path))
    reaper = next(each for each in procfs.processes_of_attempt(A1) if each.parent == proof.pid)
    stage = next(each for each in procfs.processes_of_attempt(A1) if each.parent == reaper.pid)
    for pid in (reaper.pid, proof.pid)[-victims:]:
        os.kill(pid, signal.SIGKILL)
    proof.wait()
    if victims == 1:
        wait_for(lambda: not procfs.processes_of_attempt(A1), ENDED_SECONDS)
        assert list(tmp_path.glob("scratch-*")) == []
    else:
        wait_for(lambda: not procfs.is_running(stage.pid, stage.start_ticks), ENDED_SECONDS)
        assert len(list(tmp_path.glob("scratch-*"))) == 1  # the next test removes such a one


ENDED_AT_ONCE = """
import os, subprocess, sys
from runners.prove import reaper

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

subprocess.Popen = Popen
one = reaper.Reaper()
one.start(["sh", "-c", "exit 7"])
one.reap()
sys.stderr.write(str(os.waitstatus_to_exitcode(one.status)))
"""


def test_the_status_of_a_stage_that_ends_before_it_is_waited_for_is_kept():
    done = subprocess.run(
        [sys.executable, "-c", ENDED_AT_ONCE], capture_output=True, text=True, check=True
    )
    assert done.stderr == "7"


def test_the_next_start_removes_scratch_folders_that_no_process_owns(tmp_path):
    for name in ("scratch-dead", "scratch-live", "scratch-notes"):
        (tmp_path / name / "work").mkdir(parents=True)
        (tmp_path / name / LOCK).touch()
    (tmp_path / "scratch-notes" / LOCK).unlink()  # the user's own
    with child.locked(tmp_path / "scratch-live" / LOCK):
        ValidationRun(tmp_path, stages=("identity",), command=("true",)).run()
    left = sorted(path.name for path in tmp_path.glob("scratch-*"))
    assert left == ["scratch-live", "scratch-notes"]


def test_two_proofs_do_not_write_into_one_folder(tmp_path, capsys):
    with child.locked(tmp_path / LOCK):
        assert main(["prove", "--output", str(tmp_path)]) == 2
    assert f"another validation writes into {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()


@pytest.mark.faults
def test_a_stopped_job_leaves_its_report_and_nothing_else(attempts):
    folder = attempts.make(env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)})
    request = RunRequest(attempt_id=A1, job_id="j1", number=1, fence="fence", spec=ProveSpec())
    child.write_json(folder.spec, request.model_dump(mode="json"))
    launched = child.read_json(folder.path / child.LAUNCH)
    launched["argv"] = [sys.executable, "-c", JOB, str(folder.path)]
    child.write_json(folder.path / child.LAUNCH, launched)
    assert launch.start_supervisor(folder.path) == 0
    scratch = folder.path / "scratch" / "proof"
    wait_for(lambda: has_figure(scratch))
    stop(folder, grace_seconds=30.0)
    attempts.wait(folder, 10.0)
    ended = folder.exit_record()
    assert (ended.reason, ended.signal) == (Reason.STOPPED_BY_USER, signal.SIGTERM)
    assert procfs.processes_of_attempt(A1) == []
    assert not scratch.exists()
    first = report_in(folder.output / "proof").stages[0]
    assert (first.state, len(first.figures)) == ("cut", 1)
