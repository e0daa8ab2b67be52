"""Lengths that grow: as many tokens in each step, the shares of the schedule, no gap."""

import numpy as np
import pytest
from pydantic import ValidationError

from runners.jobs.train.rows import TextBatches, with_growing_lengths
from runners.jobspec.data import FileData
from tests.runners.jobs.tiny import tiny_training

IDS = np.tile(np.arange(64, dtype=np.int32), 40)
QUARTERS = ((8, 0.25), (16, 0.25), (32, 0.25), (64, 0.25))


def batches_of(spec):
    return with_growing_lengths(spec, lambda each: TextBatches(IDS, each))


def test_each_step_has_as_many_tokens_in_longer_and_longer_rows():
    batches = batches_of(tiny_training(max_steps=8, length_schedule=QUARTERS))

    shapes = [tuple(batches.micro_batch(step, 0).input_ids.shape) for step in range(9)]

    assert shapes[:8:2] == shapes[1:8:2] == [(32, 8), (16, 16), (8, 32), (4, 64)]
    assert shapes[8] == (4, 64)


def test_without_a_schedule_nothing_grows():
    assert batches_of(tiny_training()).micro_batch(0, 0).input_ids.shape == (4, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": FileData(path="a.txt")}, "files have rows of their own; choose data host"),
        ({"max_steps": None, "time_budget_seconds": 9.0}, "give max_steps"),
        (
            {"length_schedule": ((64, 0.5), (32, 0.5))},
            r"goes \[64, 32\]; each length must be above",
        ),
        ({"length_schedule": ((16, 0.5), (32, 0.5))}, "the last one sequence_length, 64"),
        ({"length_schedule": ((16, 0.5), (64, 0.4))}, "must add up to 1"),
        ({"length_schedule": ((24, 0.5), (64, 0.5))}, "24 tokens, of which a micro-batch of 256"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_by_name(changes, words):
    with pytest.raises(ValidationError, match=words):
        tiny_training(**{"length_schedule": QUARTERS, **changes})
