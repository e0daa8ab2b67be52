"""The micro-benchmark as a child, and what the bench of fewer bits makes of its jobs."""

import os
import sys

import numpy as np
import pytest
import torch

from runners.host import bench
from runners.host.bench import (
    BETTER,
    NAMES,
    SETTINGS,
    MicrobenchRunner,
    attempt_of,
    perplexity_ratio_of,
    size_ratios,
)
from runners.jobs.evaluation import evaluate, perplexity_ratio
from runners.jobs.loading import fresh_model, ready
from runners.jobs.memory import tensor_bytes
from runners.supervision import procfs
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.runners.test_agent import MICROBENCH
from tests.runners.tools import wait_for

# The micro-benchmark as a child: its result, its failures, and that a job comes first.


def run(runner: MicrobenchRunner):
    runner.start()
    results = []
    wait_for(lambda: results.append(runner.poll()) or not runner.is_running)
    return results[-1]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_the_result_is_the_last_line_and_told_once(tmp_path):
    chatty = python(f"print('warming up'); print({MICROBENCH.model_dump_json()!r})")
    runner = MicrobenchRunner(tmp_path, chatty)
    assert run(runner) == MICROBENCH
    assert runner.poll() is None


def test_a_failed_benchmark_has_no_result_and_rests(tmp_path):
    for code in ["print('{}')", "pass", "print('fast')"]:
        runner = MicrobenchRunner(tmp_path, python(code))
        assert run(runner) is None, code
        assert runner.problem == "the micro-benchmark failed: exit code 0, no result", code
    runner = MicrobenchRunner(tmp_path, python("raise SystemExit(1)"))
    run(runner)
    runner.start()
    assert not runner.is_running


def test_a_benchmark_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TIMEOUT_SECONDS", 0.1)
    runner = MicrobenchRunner(tmp_path, python("import time; time.sleep(60)"))
    assert run(runner) is None
    assert "took more than" in runner.problem


def test_two_never_run_at_once_and_a_cancelled_one_leaves_no_process(tmp_path):
    runner = MicrobenchRunner(tmp_path, python("import time; time.sleep(60)"))
    runner.start()
    first = runner._child
    runner.start()
    assert runner._child is first
    runner.cancel()
    assert procfs.read_process(first.pid) is None
    assert not runner.is_running


def test_it_runs_at_low_priority(tmp_path):
    code = "import os, sys; sys.stderr.write(str(os.nice(0)))"
    runner = MicrobenchRunner(tmp_path, python(code))
    run(runner)
    assert runner.problem == f"the micro-benchmark failed: {os.nice(0) + bench.LOW_PRIORITY}"


# What the bench of fewer bits makes of its jobs, and the direction of two of its ratios.


@pytest.fixture
def model():
    torch.manual_seed(3)
    return ready(fresh_model(TINY_CONFIG, torch.float32))


def judged(ratio, low, high):
    return {
        "perplexity_ratio": ratio,
        "perplexity_ratio_low": low,
        "perplexity_ratio_high": high,
        "original_matrices_bytes": 800.0,
        "matrices_bytes": 400.0,
    }


def test_ratios_are_of_perplexity_and_of_bytes_codes_first():
    assert set(NAMES) <= set(SETTINGS)
    found = perplexity_ratio_of("a / b", judged(1.2, 1.1, 1.3))
    assert (found.value, found.low, found.high, found.n) == (1.2, 1.1, 1.3, 256)
    found = {each.name: each for each in size_ratios(dict.fromkeys(NAMES, judged(1.2, 1.1, 1.3)))}
    assert found["bf16 / int8 matrices"].value == 2.0
    rows = dict.fromkeys(NAMES, judged(1.2, 1.1, 1.3) | {"compressed_bytes": 200.0})
    assert next(size_ratios(rows)).value == 4.0


def test_two_ways_are_judged_on_the_same_windows_beside_each_other(monkeypatch, tmp_path):
    asked = []

    def answer(_folder, _attempt, spec):
        asked.append(spec)
        return judged(1.02, 1.01, 1.03)

    monkeypatch.setattr(bench, "run", answer)
    found = list(bench.method_perplexity_ratios(tmp_path))

    assert [each.name for each in found] == list(BETTER)
    assert {(each.low, each.high) for each in found} == {(1.01, 1.03)}
    pairs = [(each.model.attempt_id, each.original.attempt_id) for each in asked]
    assert pairs == [tuple(map(attempt_of, pair)) for pair in BETTER.values()]
    assert [each.weight_dtype for each in asked] == ["int4", "bf16", "bf16"]


@pytest.mark.proven
def test_half_as_many_bits_are_half_the_bytes(model):
    half = fresh_model(TINY_CONFIG, torch.bfloat16)
    held, less = (sum(map(tensor_bytes, each.parameters())) for each in (model, half))
    assert held == 2 * less


@pytest.mark.proven
def test_half_precision_reads_text_as_well(model):
    text = np.random.default_rng(1).integers(0, 512, 2048)
    whole = evaluate(model, text, 1024)
    half = evaluate(ready(model, dtype=torch.bfloat16), text, 1024)
    _ratio, low, high = perplexity_ratio(whole, half)
    assert 0.99 < low < high < 1.01
