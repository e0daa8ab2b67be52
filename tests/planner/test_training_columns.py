"""A training step costed for a whole grid of layouts is the step of each layout alone."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.quantity import Ledger, Unrecorded
from planner.specs.estimate import EstimateRequest
from planner.workload.resolve import resolve
from planner.workload.train import train
from tests.planner.asking import LLAMA_70B, MIXTRAL, TRAIN

AXES = {
    "tensor": (1, 2, 8),
    "context": (1, 4),
    "micro_batch": (1, 2, 8),
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "chunks": (1, 2),
}
DEVICES, PIPELINE, BATCH = 512, 4, 512
FIGURES = ("step_seconds", "tokens_per_second", "mfu", "bubble_ratio", "communication_ratio")


@cache
def setting_of(model, recomputation, attention, schedule, optimizer):
    strategy = {
        "pipeline_parallel_size": PIPELINE,
        "activation_recomputation": recomputation,
        "attention": attention,
        "pipeline_schedule": schedule,
        "offload": {"optimizer": optimizer},
    }
    request = {
        "model": model,
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": DEVICES // 8},
        "workload": {**TRAIN, "global_batch_size": BATCH, "tokens": 10**9},
        "strategy": strategy,
        "engine": "megatron",
    }
    return resolve(EstimateRequest.model_validate(request))


def laid_out(setting, expert=1, **sizes):
    data = DEVICES / (PIPELINE * sizes["tensor"] * sizes["context"])
    count = BATCH / data / sizes["micro_batch"]
    layout = replace(setting.layout, data=data, micro_batches=count, expert=expert, **sizes)
    return replace(setting, layout=layout)


def columns_of():
    """Return each axis along its own dimension, so that all of them make a grid."""
    shapes = np.eye(len(AXES), dtype=int) * -1 + (1 - np.eye(len(AXES), dtype=int))
    pairs = zip(AXES.items(), shapes, strict=True)
    return {name: np.array(values).reshape(shape) for (name, values), shape in pairs}


CHOICES = st.tuples(
    st.sampled_from((LLAMA_70B, MIXTRAL)),
    st.sampled_from(("none", "selective", "full")),
    st.sampled_from(("flash", "eager")),
    st.sampled_from(("gpipe", "1f1b", "interleaved")),
    st.sampled_from(("none", "cpu", "nvme")),
)


@settings(max_examples=40, deadline=None)
@given(choices=CHOICES, cell=st.tuples(*(st.integers(0, len(v) - 1) for v in AXES.values())))
def test_a_grid_of_layouts_costs_what_each_layout_costs_alone(choices, cell):
    setting, shape = setting_of(*choices), tuple(len(values) for values in AXES.values())
    experts = 4 if choices[0] == MIXTRAL else 1
    grid = laid_out(setting, expert=experts, **columns_of())
    together = train(grid, grid.workload, Unrecorded())
    own = {name: values[at] for (name, values), at in zip(AXES.items(), cell, strict=True)}
    alone = train(laid_out(setting, expert=experts, **own), setting.workload, Ledger())

    peaks = np.broadcast_to(together.memory.peak_bytes, shape)
    assert peaks[cell] == pytest.approx(alone.memory.peak_bytes, rel=1e-12)
    for name in FIGURES:
        column = np.broadcast_to(getattr(together.performance, name), shape)
        assert column[cell] == pytest.approx(getattr(alone.performance, name), rel=1e-12)


def test_what_is_offloaded_is_the_same_in_columns():
    setting = setting_of(LLAMA_70B, "none", "flash", "1f1b", "cpu")
    grid = laid_out(setting, **columns_of())
    own = {name: values[0] for name, values in AXES.items()}

    together = train(grid, grid.workload, Unrecorded()).memory.host_bytes
    alone = train(laid_out(setting, **own), setting.workload, Ledger()).memory.host_bytes

    assert np.ravel(together)[0] == pytest.approx(alone, rel=1e-12)
    assert alone > 0


def test_a_ledger_that_forgets_computes_the_same():
    setting = setting_of(LLAMA_70B, "selective", "flash", "1f1b", "none")
    forgotten, kept = Unrecorded(), Ledger()

    assert train(setting, setting.workload, forgotten).performance == (
        train(setting, setting.workload, kept).performance
    )
    assert kept.entries
    assert not forgotten.entries
