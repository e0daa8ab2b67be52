"""A plan's sizes become the trainer's layout; what it does not run is refused by name."""

import pytest

from planner.specs.workload import Strategy
from runners.jobspec.train import LayoutOptions
from webapp.plans.errors import DraftProblem
from webapp.plans.training import layout_of

COPIES = {"data_parallel_size": 2}


def test_whole_copies_need_no_layout():
    for strategy in [
        {},
        COPIES,
        {"zero_stage": 3},
        {"sequence_parallel": True, "pipeline_schedule": "gpipe", "virtual_pipeline_size": 1},
    ]:
        assert layout_of(Strategy(**strategy)) is None, strategy


def test_each_size_of_a_plan_is_the_layouts():
    for strategy, layout in [
        ({**COPIES, "zero_stage": 2}, {**COPIES, "zero_stage": 2}),
        (
            {"data_parallel_size": 4, "zero_stage": 3, "zero_shard_size": 2},
            {"data_parallel_size": 4, "zero_stage": 3, "zero_shard_size": 2},
        ),
        (
            {"tensor_parallel_size": 2, "sequence_parallel": True},
            {"tensor_parallel_size": 2, "sequence_parallel": True},
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "pipeline_schedule": "interleaved",
                "virtual_pipeline_size": 2,
            },
            {
                "pipeline_parallel_size": 2,
                "pipeline_schedule": "interleaved",
                "virtual_pipeline_size": 2,
            },
        ),
        ({"context_parallel_size": 2}, {"context_parallel_size": 2}),
        ({**COPIES, "expert_parallel_size": 2}, {**COPIES, "expert_parallel_size": 2}),
        (
            {**COPIES, "gradient_compression_ratio": 4.0},
            {**COPIES, "gradient_compression": "int8"},
        ),
        (
            {**COPIES, "synchronization_interval_steps": 8},
            {**COPIES, "synchronization_interval_steps": 8},
        ),
    ]:
        assert layout_of(Strategy(**strategy)) == LayoutOptions(**layout), strategy


def test_stages_of_unlike_devices_hold_the_layers_of_the_plan():
    for planned, named in [((9, 7), (9, 7)), ((8, 8), None), ((9, 8), None), (None, None)]:
        strategy = Strategy(pipeline_parallel_size=2)
        assert layout_of(strategy, planned).pipeline_layers == named, planned


def test_what_the_trainer_does_not_run_is_told_as_the_plans_problem():
    for strategy, why, field in [
        (
            {**COPIES, "gradient_compression_ratio": 3.0},
            "gradient_compression_ratio is 3; .* 2 .bf16. or 4 .int8.",
            "gradient_compression_ratio",
        ),
        (
            {**COPIES, "zero_stage": 2, "pipeline_parallel_size": 2},
            "zero_stage is 2 and pipeline_parallel_size 2",
            "zero_stage",
        ),
        (
            {**COPIES, "tensor_parallel_size": 2, "expert_parallel_size": 2},
            "expert_parallel_size is 2 and tensor_parallel_size 2",
            "expert_parallel_size",
        ),
    ]:
        with pytest.raises(DraftProblem, match=why) as problem:
            layout_of(Strategy(**strategy))
        assert problem.value.field == field, strategy
