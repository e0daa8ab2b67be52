"""The command line against a real ``up``: launched, followed, interrupted, stopped, resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.boot.test_whole_up import spare_the_benchmark
from tests.system.running_up import RunningUp
from tests.webapp.boot.conftest import eventually, free_port
from webapp.boot import up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
MAKE_TOKEN = """
from django.contrib.auth.models import User
from webapp.accounts.models import Team
from webapp.accounts.tokens import token_make
by, team = User.objects.get(username="admin"), Team.objects.get()
print("TOKEN " + token_make(team=team, by=by, name="cli", scope="launch")[1])
"""
JOB = """
goal: pretrain
model: demo
workload: {time_budget_seconds: 180}
launch: {name: long run}
"""


class Shell:
    """Runs ``slipway`` from an empty folder with folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_DATA_HOME": str(folder / "data"),
            "PYTHONPATH": str(up.ROOT),
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "runners.cli.main", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(stdin, timeout=600)
        return process.returncode, out, err


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    found = RunningUp(tmp_path_factory.mktemp("u") / "data", free_port())
    try:
        spare_the_benchmark(found.wait_until_ready())
        yield found
    finally:
        found.end_by_force()


@pytest.fixture(scope="module")
def shell(running, tmp_path_factory) -> Shell:
    made = subprocess.run(
        [sys.executable, "manage.py", "shell", "-v", "0", "-c", MAKE_TOKEN],
        cwd=up.ROOT,
        env=os.environ | {"SLIPWAY_DATA_DIR": str(running.data)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = Shell(tmp_path_factory.mktemp("empty"))
    token = re.search(r"TOKEN (\S+)", made.stdout)[1]
    code, out, err = found.run("login", running.url, stdin=f"{token}\n")
    assert (code, "as admin" in out) == (0, True), err
    (found.folder / "job.yaml").write_text(JOB)
    return found


def steps_of(shell: Shell, job: str) -> list[int]:
    """Return the steps that a job's log names."""
    return [
        int(step) for step in re.findall(r"^step (\d+)", shell.run("logs", job)[1], re.MULTILINE)
    ]


def test_a_job_outlives_the_command_that_started_it_and_runs_again(shell):
    command = shell.start("launch", "-f", "job.yaml", "--yes")
    lines: list[str] = []
    while "step" not in "".join(lines):
        line = command.stdout.readline()
        assert line, command.stderr.read()
        lines.append(line)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, "The job goes on" in err) == (130, True), err

    state = json.loads(shell.run("get", "long run", "-o", "json")[1])
    assert state["state"] == "running"
    before = shell.run("logs", "long run", "-n", "1")[1]
    eventually(lambda: shell.run("logs", "long run", "-n", "1")[1] != before, 60.0)

    follower = shell.start("logs", "-f", "long run")
    time.sleep(3.0)
    code, out, err = shell.run("stop", "long run", "--wait", "--yes")
    assert (code, "is stopped" in out) == (0, True), err
    out, err = follower.communicate(timeout=60)
    assert (follower.returncode, "step" in out) == (0, True), err

    last = steps_of(shell, state["id"])[-1]
    code, again, err = shell.run("resume", state["id"], "--detach")
    assert code == 0, err
    eventually(lambda: steps_of(shell, again.strip()), 120.0)
    log = shell.run("logs", again.strip())[1]
    (resumed_at,) = re.findall(r"^resumed from the checkpoint at step (\d+)$", log, re.MULTILINE)
    assert int(resumed_at) >= last > 1
    assert steps_of(shell, again.strip())[0] > int(resumed_at)
    shell.run("stop", again.strip(), "--wait", "--yes")
    code, out, _ = shell.run("compare", state["id"], again.strip())
    assert (code, "long run (resumed)" in out) == (0, True)
    code, anew, err = shell.run("rerun", again.strip(), "--detach")
    assert code == 0, err
    eventually(lambda: steps_of(shell, anew.strip()), 120.0)
    assert steps_of(shell, anew.strip())[0] == 1
    shell.run("stop", anew.strip(), "--wait", "--yes")
