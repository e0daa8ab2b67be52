"""Duties, each at its time; loops that outlive what goes wrong."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.stack import copy_migrated
from webapp.core.loop import Stopper, run_loop
from webapp.core.ticker import Duty, Ticker, all_duties


class Clock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


def test_each_duty_is_done_at_its_own_period():
    done: list[str] = []
    clock = Clock()
    duties = [Duty("a", 1.0, lambda: done.append("a")), Duty("b", 3.0, lambda: done.append("b"))]
    ticker = Ticker(duties, clock)
    for second in range(6):
        clock.at = float(second)
        ticker.step()
    assert (done.count("a"), done.count("b")) == (6, 2)


def test_a_duty_that_fails_does_not_stop_the_others():
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("no")

    ticker = Ticker([Duty("bad", 1.0, fail), Duty("good", 1.0, lambda: done.append("x"))])
    assert (ticker.step(), done) == (1, ["x"])


@pytest.mark.django_db(databases="__all__")
def test_every_real_duty_runs_on_an_empty_database():
    assert Ticker(all_duties()).step() == len(all_duties())


@pytest.mark.django_db
def test_a_loop_survives_what_a_round_raises():
    stop = Stopper()
    rounds: list[int] = []

    def step() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            raise RuntimeError("once")
        stop.event.set()

    run_loop("test", step, 0.0, stop)
    assert len(rounds) == 2


@pytest.mark.django_db
def test_a_loop_ends_while_it_rests():
    stop = Stopper()
    thread = threading.Thread(target=run_loop, args=("test", lambda: None, 60.0, stop))
    thread.start()
    stop.event.set()
    thread.join(5)
    assert not thread.is_alive()


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
