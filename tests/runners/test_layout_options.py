"""A layout is a product of sizes, and what contradicts itself is refused by name."""

import pytest
from pydantic import ValidationError

from runners.jobspec import DataParallel, FolderModel, TrainSpec
from runners.jobspec.base import LoraOptions
from runners.jobspec.train import LayoutOptions

TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [
        ({}, 1),
        ({"data_parallel_size": 4, "zero_stage": 3, "zero_shard_size": 2}, 4),
        ({"data_parallel_size": 2, **TENSOR, **PIPELINE}, 8),
        ({"data_parallel_size": 4, "expert_parallel_size": 2}, 4),
        ({"context_parallel_size": 2, **PIPELINE, "virtual_pipeline_size": 2}, 4),
    ],
)
def test_experts_and_shards_take_no_ranks_of_their_own(asked, ranks):
    schedule = {"pipeline_schedule": "interleaved"} if "virtual_pipeline_size" in asked else {}

    assert LayoutOptions(**asked, **schedule).world_size == ranks


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"data_parallel_size": 4, "zero_stage": 1, "zero_shard_size": 3}, "zero_shard_size is 3"),
        ({"expert_parallel_size": 2}, "must divide data_parallel_size, which is 1"),
        (
            {"data_parallel_size": 2, "expert_parallel_size": 2, "zero_stage": 1},
            "expert_parallel_size is 2 and zero_stage 1",
        ),
        (
            {"data_parallel_size": 2, "expert_parallel_size": 2, **TENSOR},
            "expert_parallel_size is 2 and tensor_parallel_size 2",
        ),
        (
            {"data_parallel_size": 2, "zero_stage": 2, **PIPELINE},
            "zero_stage is 2 and pipeline_parallel_size 2",
        ),
        ({"sequence_parallel": True}, "sequence_parallel divides what tensor parallel leaves"),
        (
            {"sequence_parallel": True, "context_parallel_size": 2, **TENSOR},
            "both divide the sequence",
        ),
        ({"virtual_pipeline_size": 2, **PIPELINE}, "which schedule 1f1b does not weave"),
        (
            {"virtual_pipeline_size": 2, "pipeline_schedule": "interleaved"},
            "virtual_pipeline_size is 2 on one rank",
        ),
        ({"pipeline_layers": (2, 1, 1), **PIPELINE}, "names 3 stages, but there are 2"),
        ({"gradient_compression": "fp16", **TENSOR}, "gradient_compression is fp16"),
        ({"synchronization_interval_steps": 4, **TENSOR}, "synchronization_interval_steps is 4"),
        (
            {"synchronization_interval_steps": 4, "gradient_compression": "int8"},
            "no gradients that int8 could compress",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(asked, why):
    with pytest.raises(ValidationError, match=why):
        LayoutOptions(**asked)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"layout": LayoutOptions(data_parallel_size=2)}, "data_parallel_size 2 does not divide"),
        (
            {"layout": LayoutOptions(**TENSOR), "parallel": DataParallel(on_lost_rank="shrink")},
            "on_lost_rank is shrink",
        ),
        (
            {
                "layout": LayoutOptions(**TENSOR),
                "model": FolderModel(path="m"),
                "lora": LoraOptions(),
            },
            "lora trains on whole copies",
        ),
        (
            {"layout": LayoutOptions(**TENSOR), "activation_offload": "disk"},
            "activation_offload is disk",
        ),
    ],
)
def test_a_training_refuses_what_its_layout_does_not_run(fields, why):
    with pytest.raises(ValidationError, match=why):
        TrainSpec(gradient_accumulation_steps=3, **fields)
