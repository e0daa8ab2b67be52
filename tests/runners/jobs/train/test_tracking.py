"""The process of a tracker, and that of reward functions: how they begin and end with a job."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from runners.jobs import tracking
from runners.jobs.events import Emitter, read_events
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.tracker_program import TensorBoardRun
from runners.jobspec.trackers import TrackerOptions
from runners.launchers import launch
from runners.shared.environment import NETWORK, TRACKER_VARIABLE
from runners.supervision import procfs

ROOT = Path(__file__).parents[4]
ANSWER = 'import os, sys, time; sys.stdin.readline(); print(\'{"url": ""}\', flush=True)\n'
PATIENCE_SECONDS = 30.0


@pytest.fixture
def run_by(tmp_path, monkeypatch):
    """Give a job of a temporary folder a tracker whose program is some text."""
    events = tmp_path / "events"
    job = Job(
        attempt_dir=tmp_path / "attempts" / "a",
        host_dir=tmp_path,
        request=SimpleNamespace(job_id="j"),
        emitter=Emitter(os.open(events, os.O_CREAT | os.O_WRONLY), owns_fd=True),
        stop_requested=threading.Event(),
    )
    monkeypatch.setattr(tracking.Store, "pins", lambda *_: None)
    monkeypatch.setattr(tracking.Store, "python", lambda *_: sys.executable)
    monkeypatch.setattr(tracking, "PROGRAM", tmp_path / "program.py")
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 0.2)

    def tracked(text: str, settings=None):
        (tmp_path / "program.py").write_text(text)
        return tracking.tracked(job, TrackerOptions(name="mlflow"), settings or {})

    tracked.job, tracked.events = job, events
    return tracked


def test_what_a_slow_tracker_has_not_read_is_written_nowhere_else(run_by, monkeypatch):
    wait, are_of_pipe = subprocess.Popen.wait, []
    with run_by(f"{ANSWER}time.sleep(600)"):
        sink = run_by.job.emitter.tracker
        pipe = os.fstat(sink.fd).st_ino
        for step in range(3000):  # more than a pipe holds
            run_by.job.emitter.metric({"loss": float(step)}, step=step)

        def watched(process, timeout=None):
            if not are_of_pipe:  # the writer is blocked, and its number is still the pipe's
                are_of_pipe.append(sink._writer.is_alive() and os.fstat(sink.fd).st_ino == pipe)
            return wait(process, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", watched)
    assert are_of_pipe == [True]
    sink._writer.join(PATIENCE_SECONDS)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sink.fd)
    run_by.job.emitter.close()
    assert len([each for each in read_events(run_by.events) if each["kind"] == "metric"]) == 3000


def test_a_tracker_that_ends_before_it_reads_is_bad_input(run_by):
    with (
        pytest.raises(BadInputError, match="MLflow refuses: its process ended"),
        run_by("raise SystemExit(1)", {"notes": "x" * 2**20}),
    ):
        pass


def test_a_tracker_alone_gets_the_proxies_and_none_of_the_jobs_other_variables(
    run_by, tmp_path, monkeypatch
):
    proxies = {"HTTPS_PROXY": "http://u:p@proxy:1", "no_proxy": "h"}
    for name, value in {**proxies, "HF_TOKEN": "x", procfs.MARKER: "a"}.items():
        monkeypatch.setenv(name, value)
    spec = SimpleNamespace()  # of another kind
    assert launch.tracker_env(spec) == {}
    monkeypatch.setenv(TRACKER_VARIABLE, ",".join(NETWORK))
    seen = tmp_path / "seen"
    with run_by(
        f"{ANSWER}open({str(seen)!r}, 'w').write(__import__('json').dumps(dict(os.environ)))"
    ):
        assert not {*proxies} & os.environ.keys()
    got = json.loads(seen.read_text())
    assert {name: got.get(name) for name in proxies} == proxies
    assert (got[procfs.MARKER], "HF_TOKEN" in got) == ("a", False)


def test_no_name_leads_out_of_the_folder_of_a_run(tmp_path, monkeypatch):
    summary = ModuleType("tensorboard.summary")
    summary.Writer = lambda folder: folder
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    asked = {"folder": str(tmp_path), "project": "p", "run_name": "r"}
    assert TensorBoardRun(asked)._writer == str(tmp_path / "p" / "r")
    for changes in (
        {"project": "/etc"},
        {"project": "..", "run_name": "x"},
        {"run_name": "../.."},
    ):
        with pytest.raises(ValueError, match="is not below"):
            TensorBoardRun(asked | changes)


REWARDS = """
from pathlib import Path
from runners.jobs.train.trl.rewards import RewardProcess
from runners.jobspec.rewards import parse_rewards
RewardProcess(parse_rewards("{file}:f"), Path("."), timeout_seconds=1.0, memory_gib=1.0)
"""
TRACKER = """
from pathlib import Path
from types import SimpleNamespace
from runners.jobs import tracking
from runners.jobspec.trackers import TRACKERS
import sys
tracking.Store = lambda _: SimpleNamespace(pins=str, python=lambda _: sys.executable)
tracking.PROGRAM = "{file}"
process = tracking._started(SimpleNamespace(host_dir=Path(".")), TRACKERS["mlflow"], Path("."), {{}})
process.wait()
"""


def test_neither_process_outlives_a_job_that_is_killed(tmp_path):
    for at, text in enumerate((REWARDS, TRACKER)):
        file, note = tmp_path / f"hangs{at}.py", tmp_path / f"pid{at}"
        file.write_text(
            f"import os, time; open('{note}.new', 'w').write(str(os.getpid()))\n"
            f"os.rename('{note}.new', '{note}'); time.sleep(600)\n"
        )
        job = subprocess.Popen(
            [sys.executable, "-c", text.format(file=file)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), procfs.MARKER: "of-this-test"},
        )
        try:
            until(note.exists)
            pid = int(note.read_text())
            assert (
                f"{procfs.MARKER}=of-this-test".encode()
                in Path(f"/proc/{pid}/environ").read_bytes()
            )
        finally:
            job.send_signal(signal.SIGKILL)
            job.wait()
        until(lambda pid=pid: state_of(pid) in {"", "Z"})


def until(is_so) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
