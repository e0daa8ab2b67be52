"""What it takes to see the messages of a step is planned where it fills the ranks' own memory."""

import pytest

from planner.workload.training_memory import MESSAGES_LOOK_BYTES
from tests.planner.asking import CPU, TINY, TRAIN, ask


def overhead(count, strategy, **fields):
    asked = {"device": CPU, "model": TINY, "workload": TRAIN, **fields}
    found = ask(**asked, devices=count, strategy={"weight_dtype": "fp32", **strategy})
    return found.memory.breakdown_bytes["runtime_overhead"]


@pytest.mark.parametrize("strategy", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_the_first_of_several_ranks_on_processors_looks(strategy):
    assert overhead(2, strategy) == overhead(1, {}) + MESSAGES_LOOK_BYTES


@pytest.mark.parametrize("fields", [{"device": "rtx-4090"}, {"engine": "deepspeed"}])
def test_gpus_and_engines_of_others_hold_no_more_of_it(fields):
    pair = {"data_parallel_size": 2, "zero_stage": 1}

    assert overhead(2, pair, **fields) == overhead(1, {}, **fields)
