"""The solver of placements finds what a library's solver finds."""

import numpy as np
import pytest
from scipy.optimize import linprog

from planner.search import placement
from planner.search.linear import minimised
from planner.specs.estimate import EstimateRequest

HOST = {"host_memory_bytes": 64 * 2**30, "disk_capacity_bytes": 2 * 2**40}


def agrees(costs, rows, bounds, free):
    """Return our solution, once it is as good as the library's and keeps to every row.

    The library may leave a row by 1e-7, which a large cost multiplies.
    """
    found = minimised(costs, rows, bounds, free)
    known = linprog(costs, A_ub=rows, b_ub=bounds, method="highs")
    assert costs @ found == pytest.approx(known.fun, rel=1e-9, abs=1e-5)
    assert (rows @ found <= bounds + 1e-9 * (1 + np.abs(bounds))).all()
    assert (found >= 0).all()
    return found


def test_random_programmes_are_solved_as_by_the_library():
    draw = np.random.default_rng(7)
    for _ in range(200):
        moves, channels, tiers = draw.integers(1, 8), draw.integers(1, 5), draw.integers(1, 4)
        rows = np.zeros((channels + tiers + moves, moves + 2))
        rows[: channels + tiers, :moves] = draw.normal(size=(channels + tiers, moves))
        rows[:channels, moves] = rows[channels : channels + tiers, moves + 1] = -1.0
        rows[channels + tiers :, :moves] = np.eye(moves)
        bounds = np.concatenate([draw.normal(size=channels + tiers), np.ones(moves)])
        costs = np.array([*np.full(moves, 1e-4), 1.0, 10.0 ** draw.integers(0, 3)])
        agrees(costs, rows, bounds, 2)


def test_what_has_no_least_value_has_no_solution():
    assert minimised(np.array([-1.0]), np.array([[-1.0]]), np.array([1.0]), 0) is None


def test_placements_are_those_of_the_library(monkeypatch):
    asked = []
    monkeypatch.setattr(placement, "minimised", lambda *all_: asked.append(1) or agrees(*all_))
    for model, device, batch, host in (
        ("meta-llama/Llama-3.1-70B", "rtx-4090", 1, {}),
        ("meta-llama/Llama-3.1-8B", "rtx-4090", 512, HOST),
        ("facebook/opt-30b", "t4", 64, HOST),
        ("mistralai/Mixtral-8x7B-v0.1", "rtx-4090", 8, HOST),
    ):
        workload = {"kind": "generate", "batch_size": batch, "input_tokens": 512}
        request = {
            "model": model,
            "cluster": {"device": device, **host},
            "workload": {**workload, "output_tokens": 64},
        }
        assert placement.placed_strategy(EstimateRequest.model_validate(request)), model
    assert len(asked) >= 10
