"""The planner is asked after every change in the wizard: it has to feel instant.

Limits are ten times what was measured on two shared cores of an x86-64 server (2026-11), so that
only a change of kind, not a busy machine, breaks them. `manage.py bench` prints the figures.
"""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from planner.api import estimate, plan
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.workload.arrivals import Batching, Traffic, simulate
from planner.workload.generate import max_concurrency
from planner.workload.under_load import simulated_requests
from tests.planner.test_disaggregate import GROWING
from tests.planner.test_offload import found
from tests.planner.test_under_load import LOADS, setting_of
from webapp.boot.suite import ROOT

SERVE = {
    "model": "meta-llama/Llama-3.1-8B",
    "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 1},
    "workload": {"kind": "serve", "input_tokens": 2048, "output_tokens": 128},
}


def quickest(run: Callable[[], object], rounds: int = 5) -> float:
    """The shortest of some runs in seconds of processor time, which other work barely moves."""

    def once() -> float:
        began = time.process_time()
        run()
        return time.process_time() - began

    return min(once() for _ in range(rounds))


def test_one_estimate_takes_less_than_a_tenth_of_a_second():
    """An explained estimate of serving simulates its arrivals: 11 ms of processor time."""
    request = EstimateRequest.model_validate(SERVE | {"strategy": {"tensor_parallel_size": 2}})

    assert quickest(lambda: estimate(request)) < 0.1


def test_a_whole_search_takes_less_than_half_a_second():
    request = PlanRequest.model_validate(SERVE)

    assert quickest(lambda: plan(request)) < 0.5


def test_a_search_costs_its_strategies_at_the_price_of_estimates():
    """A search that costs n strategies takes at most three times n single estimates."""
    request = PlanRequest.model_validate(SERVE)
    fixed = EstimateRequest.model_validate(SERVE | {"strategy": {"tensor_parallel_size": 2}})
    num_strategies = plan(request).searched.strategies

    ratio = quickest(lambda: plan(request)) / quickest(lambda: estimate(fixed), rounds=50)

    assert ratio < 3 * num_strategies


def test_a_simulation_takes_milliseconds():
    traffic = Traffic(1024.0, 1024, [0.0] * 256, 8, 0.05)

    assert quickest(lambda: simulate(Batching(256, 8192), traffic, GROWING)) < 0.25


def test_three_placements_of_flexgen_are_ranked_in_a_fifth_of_a_second():
    assert quickest(lambda: found(engine="flexgen")) < 0.2


@pytest.mark.parametrize("load", LOADS)
def test_a_simulation_of_an_estimate_takes_less_than_fifty_milliseconds(load):
    setting = setting_of(**load)
    most = max_concurrency(setting, setting.workload)

    assert quickest(lambda: simulated_requests(setting, setting.workload, most, 10.0)) < 0.05


def test_importing_the_planner_takes_less_than_three_tenths_of_a_second():
    code = "import time; t = time.process_time(); import planner; print(time.process_time() - t)"
    command = [sys.executable, "-c", code]

    def once() -> float:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert min(once() for _ in range(3)) < 0.3
