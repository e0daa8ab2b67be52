"""Published speeds that no factor was fitted to: every row is answered, and enough are covered."""

import csv
from pathlib import Path

import pytest

from planner.api import estimate
from planner.catalog.devices import get_device
from planner.catalog.models import get_entry
from planner.specs.estimate import EstimateRequest

VALIDATION = Path("planner/validation")
FITTED = ("serving_dense.csv", "serving_sparse.csv", "inference_other.csv")
COVERED_AT_LEAST = 23
MARGIN_ROWS = 2


def rows_of(name):
    with (VALIDATION / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


ROWS = rows_of("published_speeds.csv")


def strategy_of(row):
    """Return the row's parallel degrees; copies within one tensor group share the attention."""
    tensor, data = int(row["tensor_parallel_size"]), int(row["data_parallel_size"])
    shared = tensor == int(row["gpus"])
    return {
        "tensor_parallel_size": tensor,
        "attention_data_parallel_size" if shared else "data_parallel_size": data,
        "expert_parallel_size": int(row["expert_parallel_size"]),
        "kv_cache_dtype": row["kv_cache_dtype"] or None,
    }


def estimate_of(row):
    question = {
        "model": row["model"],
        "cluster": {"device": row["gpu"], "devices_per_node": int(row["gpus"]), "nodes": 1},
        "workload": {
            "kind": "serve",
            "input_tokens": int(row["input_tokens"]),
            "output_tokens": int(row["output_tokens"]),
            "concurrency": int(row["concurrency"]),
        },
        "strategy": strategy_of(row),
        "engine": row["engine"],
    }
    return estimate(EstimateRequest.model_validate(question))


def is_covered(row):
    """Return whether the interval of the predicted figure holds the published one."""
    answer = estimate_of(row)
    if row["tpot_ms"]:
        measured, (low, high) = float(row["tpot_ms"]) / 1e3, answer.interval["tpot_seconds"]
    else:
        measured = float(row["output_tokens_per_second"])
        low, high = answer.interval["output_tokens_per_second"]
    return low <= measured <= high


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_row_states_its_conditions(row):
    assert get_entry(row["model"])
    assert get_device(row["gpu"])
    degrees = ("gpus", "tensor_parallel_size", "data_parallel_size", "expert_parallel_size")
    assert all(int(row[name]) > 0 for name in degrees)
    assert all(int(row[name]) > 0 for name in ("input_tokens", "output_tokens", "concurrency"))
    figures = [row[name] for name in ("tpot_ms", "output_tokens_per_second") if row[name]]
    assert figures
    assert all(float(figure) > 0 for figure in figures)
    assert all(row[name] for name in ("source", "date", "engine", "release", "checkpoint_format"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_row_fits_in_the_published_format(row):
    answer = estimate_of(row)
    assert answer.fits
    assert answer.strategy.weight_dtype == row["checkpoint_format"]


def test_no_source_was_fitted():
    fitted = {row["source_id"] for name in FITTED for row in rows_of(name)}
    fitted |= {row["source"] for row in rows_of("inference_other.csv")}
    assert not {row["source"] for row in ROWS} & fitted
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_as_many_rows_are_covered_as_were_found():
    assert sum(is_covered(row) for row in ROWS) >= COVERED_AT_LEAST - MARGIN_ROWS
