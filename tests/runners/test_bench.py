"""The micro-benchmark as a child: its result, its failures, and that a job comes first."""

import sys

import pytest

from runners import bench
from runners.bench import MicrobenchRunner
from runners.supervision import procfs
from tests.runners.test_agent import BENCH, MICROBENCH
from tests.runners.tools import wait_for


def run(runner: MicrobenchRunner):
    runner.start()
    results = []
    wait_for(lambda: results.append(runner.poll()) or not runner.is_running)
    return results[-1]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_the_result_is_the_last_line(tmp_path):
    chatty = python(f"print('warming up'); print({MICROBENCH.model_dump_json()!r})")

    assert run(MicrobenchRunner(tmp_path, chatty)) == MICROBENCH


def test_the_result_is_told_once(tmp_path):
    runner = MicrobenchRunner(tmp_path, BENCH)
    run(runner)

    assert runner.poll() is None


@pytest.mark.parametrize("code", ["print('{}')", "pass", "print('fast')"])
def test_no_result_is_a_problem(tmp_path, code):
    runner = MicrobenchRunner(tmp_path, python(code))

    assert run(runner) is None
    assert runner.problem == "the micro-benchmark failed: exit code 0, no result"


def test_after_a_failure_it_rests(tmp_path):
    runner = MicrobenchRunner(tmp_path, python("raise SystemExit(1)"))
    run(runner)

    runner.start()

    assert not runner.is_running


def test_a_benchmark_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TIMEOUT_SECONDS", 0.1)
    runner = MicrobenchRunner(tmp_path, python("import time; time.sleep(60)"))

    assert run(runner) is None
    assert "took more than" in runner.problem


def test_a_cancelled_benchmark_leaves_no_process(tmp_path):
    runner = MicrobenchRunner(tmp_path, python("import time; time.sleep(60)"))
    runner.start()
    pid = runner._child.pid

    runner.cancel()

    assert procfs.read_process(pid) is None
    assert not runner.is_running


def test_it_runs_at_low_priority(tmp_path):
    code = "import os, sys; sys.stderr.write(str(os.nice(0)))"
    runner = MicrobenchRunner(tmp_path, python(code))
    run(runner)

    assert runner.problem == f"the micro-benchmark failed: {bench.LOW_PRIORITY}"


def test_two_never_run_at_once(tmp_path):
    runner = MicrobenchRunner(tmp_path, python("import time; time.sleep(60)"))
    runner.start()
    first = runner._child

    runner.start()

    assert runner._child is first
    runner.cancel()
