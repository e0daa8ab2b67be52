"""Duties, each at its time; loops that outlive what goes wrong."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.stack import copy_migrated


def caught_signals(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, str]:
    """The environment of an installation that ``prepare`` has made, and that has no broker."""
    folder = tmp_path_factory.mktemp("prepared")
    copy_migrated(folder)
    environment = os.environ | {"SLIPWAY_DATA_DIR": str(folder)}
    subprocess.run([sys.executable, "manage.py", "prepare"], env=environment, check=True)
    return environment


@pytest.mark.parametrize("command", ["control", "ticker"])
def test_a_worker_ends_on_term_without_a_broker(command, prepared):
    worker = subprocess.Popen([sys.executable, "manage.py", command], env=prepared)
    handles_term = 1 << (signal.SIGTERM - 1)
    while not caught_signals(worker.pid) & handles_term:
        assert worker.poll() is None
        time.sleep(0.1)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0
