"""Serving costed for a whole grid of layouts is the serving of each layout alone."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.quantity import Ledger, Unrecorded
from planner.specs.estimate import EstimateRequest
from planner.workload.estimator import run
from planner.workload.resolve import resolve
from tests.planner.asking import GENERATE, LLAMA_70B, SERVE

SPARSE_MODEL = "Qwen/Qwen3-235B-A22B"
SLIDING_MODEL = "google/gemma-2-27b-it"
POOLED_MODEL = "deepseek-ai/DeepSeek-V4-Flash"
AXES = {
    "data": (1, 2, 4),
    "tensor": (1, 2, 8),
    "attention_data": (1, 4),
    "context": (1, 2),
    "batch_tokens": (512, 8192),
    "pipeline": (1, 3, 4),
    "chunked": (False, True),
    "cache_element_bytes": (1.0, 2.0),
}
FIGURES = (
    "ttft_seconds",
    "tpot_seconds",
    "latency_seconds",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "max_concurrency",
    "communication_ratio",
)
WORKLOADS = (
    {**SERVE, "concurrency": 3},
    {**SERVE, "concurrency": 4000, "prefix_share_ratio": 0.4},
    {**SERVE, "concurrency": None},
    {**SERVE, "concurrency": None, "request_rate_per_second": 2.0},
    {**SERVE, "concurrency": None, "request_rate_per_second": 500.0},
    {**GENERATE, "batch_size": 64},
)


@cache
def setting_of(model, workload, engine):
    strategy = {"weight_dtype": "fp8"}
    request = {
        "model": model,
        "cluster": {"device": "h200-sxm-141gb", "devices_per_node": 8, "nodes": 128},
        "workload": WORKLOADS[workload],
        "strategy": strategy,
        "engine": engine,
    }
    return resolve(EstimateRequest.model_validate(request))


def laid_out(setting, **sizes):
    expert = sizes["tensor"] if setting.model.is_moe else 1
    return replace(setting, layout=replace(setting.layout, expert=expert, **sizes))


def columns_of():
    """Return each axis along its own dimension, so that all of them make a grid."""
    count = len(AXES)
    return {
        name: np.array(values, dtype=float).reshape(
            [-1 if at == own else 1 for at in range(count)]
        )
        for own, (name, values) in enumerate(AXES.items())
    }


CHOICES = st.tuples(
    st.sampled_from((LLAMA_70B, SPARSE_MODEL, SLIDING_MODEL, POOLED_MODEL)),
    st.integers(0, len(WORKLOADS) - 1),
    st.sampled_from(("vllm", "vllm 0.9", "vllm 0.14", "vllm 0.22", "tensorrt_llm", "torch")),
)


@settings(max_examples=40, deadline=None)
@given(choices=CHOICES, cell=st.tuples(*(st.integers(0, len(v) - 1) for v in AXES.values())))
def test_a_grid_of_layouts_serves_as_each_layout_alone(choices, cell):
    setting, shape = setting_of(*choices), tuple(len(values) for values in AXES.values())
    together = run(laid_out(setting, **columns_of()), Unrecorded())
    own = {name: values[at] for (name, values), at in zip(AXES.items(), cell, strict=True)}
    alone = run(laid_out(setting, **own), Ledger())

    peaks = np.broadcast_to(together.memory.peak_bytes, shape)
    assert peaks[cell] == pytest.approx(alone.memory.peak_bytes, rel=1e-12)
    assert np.broadcast_to(together.fits, shape)[cell] == alone.fits
    for name in FIGURES:
        expected = getattr(alone.performance, name)
        if expected is not None:
            column = np.broadcast_to(getattr(together.performance, name), shape)
            assert column[cell] == pytest.approx(expected, rel=1e-9)


def test_a_ledger_that_forgets_serves_the_same():
    setting = setting_of(SPARSE_MODEL, 0, "vllm")

    assert run(setting, Unrecorded()).performance == run(setting, Ledger()).performance
