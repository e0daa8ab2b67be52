"""A job in an environment: built first as its own stage, refused by name where it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runners.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.runners.environments.wheels import PINS

PROJECT = str(Path(__file__).resolve().parents[3])
# What the job prints: its interpreter's folder, a package of the environment, what pip may know.
SOURCE = """import os, sys
print(sys.prefix, any("PIP" in name for name in os.environ), sys.argv[1:])
"""


@pytest.fixture
def start(host_dir, store, tmp_path):
    """Start a module as a job in the tiny environment, and return how it ended."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "tiny_job.py").write_text(SOURCE)
    paths = os.pathsep.join([PROJECT, str(tmp_path / "modules")])

    def run(name: str = "tiny") -> subprocess.CompletedProcess:
        with (tmp_path / "events.jsonl").open("ab") as events:
            return subprocess.run(
                [sys.executable, "-m", "runners.jobs.in_environment", name, "tiny_job", "folder"],
                env=os.environ
                | {"SLIPWAY_HOST_DIR": str(host_dir.path), "PYTHONPATH": paths}
                | {"SLIPWAY_EVENT_FD": str(events.fileno())},
                pass_fds=[events.fileno()],
                capture_output=True,
                text=True,
                check=False,
            )

    return run


def events(tmp_path: Path, kind: str) -> list[dict]:
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    return [each["body"] for each in map(json.loads, lines) if each["kind"] == kind]


def test_a_missing_environment_is_built_as_a_stage_of_the_job_which_then_runs_in_it(
    start, store, tmp_path
):
    ended = start()

    folder = store.folder(store.pins("tiny"))
    assert ended.stdout.splitlines()[-1] == f"{folder} False ['folder']"
    assert events(tmp_path, "phase") == [{"name": "Building the environment tiny"}]
    assert [each["total"] for each in events(tmp_path, "progress")] == [6] * 6


def test_an_environment_that_is_there_costs_no_stage(start, built, tmp_path):
    ended = start()

    assert ended.returncode == 0, ended.stderr
    assert events(tmp_path, "phase") == []


def test_what_cannot_be_built_ends_the_job_by_its_own_reason(start, host_dir, tmp_path):
    pins = host_dir.path / "environments" / "pins" / "tiny.txt"
    pins.write_text(PINS.format(probe="tiny_whole").replace("2.0", "3.0"))

    ended = start()

    assert ended.returncode == 3
    assert "ENVIRONMENT_NOT_BUILT: tiny was not built" in ended.stderr
    found = classify(Ending(ended.returncode, None, ended.stderr))
    assert found is Reason.ENVIRONMENT_FAILED


def test_an_environment_that_nobody_pinned_is_refused_by_name(start):
    ended = start("nobody")

    assert "this host has the environments main, llamacpp" in ended.stderr
    assert classify(Ending(3, None, ended.stderr)) is Reason.ENVIRONMENT_FAILED
