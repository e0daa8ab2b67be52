"""What `up` leaves when it is stopped while one job runs and another waits: told as it is."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from runners.supervision import procfs
from tests.stack import ROOT, copy_migrated
from tests.system.boot.test_whole_up import RunningUp, spare_the_benchmark
from tests.webapp.boot.conftest import eventually, free_port

pytestmark = [pytest.mark.slow, pytest.mark.faults]
STATES = "SELECT id, state, reason FROM jobs_job ORDER BY id"
RUNNING = "SELECT id FROM jobs_attempt WHERE ended_at IS NULL AND started_at IS NOT NULL"
STARTED = "SELECT count(*) FROM jobs_attempt WHERE ended_at IS NULL AND started_at IS NOT NULL"


class Up(RunningUp):
    """A real `up` whose host takes drills."""

    def rows(self, query: str) -> list[tuple]:
        with closing(sqlite3.connect(self.data / "slipway.sqlite3", timeout=60)) as database:
            return database.execute(query).fetchall()

    def drill(self, *words: str) -> list[str]:
        """Queue drills, wait until one runs, and return their ids."""
        subprocess.run(
            [sys.executable, "manage.py", "drill", "this-machine", *words],
            cwd=ROOT,
            env=os.environ | {"SLIPWAY_DATA_DIR": str(self.data)},
            capture_output=True,
            text=True,
            check=True,
        )
        eventually(lambda: self.rows(STARTED)[0][0])
        return [str(row[0]) for row in self.rows(STATES)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    found = tmp_path_factory.mktemp("u") / "data"
    found.mkdir(mode=0o700)
    copy_migrated(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPWAY_DRILLS", "1")
        yield found


@pytest.fixture(scope="module")
def stopped(data):
    """One Ctrl-C while one drill runs and another waits for the same processor."""
    up = Up(data, free_port())
    try:
        spare_the_benchmark(up.wait_until_ready())
        eventually(lambda: up.rows("SELECT state FROM hosts_host") == [("ready",)])
        jobs = up.drill("--count", "2", "--steps", "4000", "--step-seconds", "0.05")
        up.stop()
        yield SimpleNamespace(up=up, jobs=jobs, rows=up.rows(STATES), left=up.members())
    finally:
        up.end_by_force()


@pytest.fixture(scope="module")
def hurried(data, stopped):
    """The next `up`, with a job that ignores its end, and two Ctrl-C."""
    up = Up(data, free_port())
    try:
        up.wait_until_ready()
        eventually(lambda: up.rows(STARTED)[0][0])  # what had waited
        ((attempt,),) = up.rows(RUNNING)
        os.kill(up.process.pid, signal.SIGTERM)
        eventually(lambda: "Stopping" in up.words)
        os.kill(up.process.pid, signal.SIGTERM)
        began = time.monotonic()
        up.process.wait(60)
        seconds = time.monotonic() - began
        yield SimpleNamespace(up=up, told=up.words, seconds=seconds, attempt=attempt)
    finally:
        up.end_by_force()


def test_the_running_job_ends_with_the_site_and_says_so(stopped):
    first = stopped.jobs[0]

    assert stopped.rows[0] == (first, "stopped", "site_stopped")
    assert f"Ended with Slipway: Drill ({first})." in stopped.up.words


def test_the_job_that_waited_is_given_to_nobody(stopped):
    assert stopped.rows[1][:2] == (stopped.jobs[1], "queued")
    assert stopped.up.rows("SELECT count(*) FROM jobs_attempt") >= [(1,)]
    assert "1 job waits in the queue until Slipway runs again." in stopped.up.words


def test_nothing_is_left_on_the_machine_and_that_is_said_last(stopped):
    assert stopped.left == []
    assert stopped.up.process.returncode == 0
    assert stopped.up.words.rstrip().endswith("nothing is left running on this machine.")


def test_a_second_signal_does_not_wait_for_the_job_and_says_so(hurried):
    assert hurried.seconds < 30
    assert "Traceback" not in hurried.told
    last = hurried.told.splitlines()[-1]
    assert last.startswith("  Stopped")
    assert "nothing is left" in last or f"which are stopping: {hurried.attempt}" in last


def test_a_job_that_was_not_waited_for_ends_all_the_same(hurried):
    eventually(lambda: procfs.processes_of_attempt(hurried.attempt) == [])
    eventually(lambda: hurried.up.members() == [])
