"""What may be asked for of layout, load and Slurm, and what contradicts itself is refused."""

import argparse

import pytest
from pydantic import ValidationError

from runners.jobspec import ArtefactModel, BenchmarkSpec, DataParallel, FolderModel, TrainSpec
from runners.jobspec.base import LoraOptions
from runners.jobspec.compress import Burst, ClosedLoop, LoadOptions, OpenLoop
from runners.jobspec.train import LayoutOptions
from runners.shared import slurm
from runners.shared.slurm import SlurmArgumentError, SlurmConfig

# A layout is a product of sizes, and what contradicts itself is refused by name.

TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


def test_experts_and_shards_take_no_ranks_of_their_own():
    for asked, ranks in [
        ({}, 1),
        ({"data_parallel_size": 4, "zero_stage": 3, "zero_shard_size": 2}, 4),
        ({"data_parallel_size": 2, **TENSOR, **PIPELINE}, 8),
        ({"data_parallel_size": 4, "expert_parallel_size": 2}, 4),
        ({"context_parallel_size": 2, **PIPELINE, "virtual_pipeline_size": 2}, 4),
    ]:
        schedule = {"pipeline_schedule": "interleaved"} if "virtual_pipeline_size" in asked else {}
        assert LayoutOptions(**asked, **schedule).world_size == ranks, (asked, ranks)


def test_what_does_not_go_together_is_refused_with_the_way_out():
    for asked, why in [
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
        ({"sequence_parallel": True}, "sequence_parallel needs tensor parallelism"),
        (
            {"sequence_parallel": True, "context_parallel_size": 2, **TENSOR},
            "both divide the sequence",
        ),
        ({"virtual_pipeline_size": 2, **PIPELINE}, "which schedule 1f1b does not weave"),
        (
            {"virtual_pipeline_size": 2, "pipeline_schedule": "interleaved"},
            "virtual_pipeline_size is 2, and pipeline_parallel_size is 1",
        ),
        ({"pipeline_layers": (2, 1, 1), **PIPELINE}, "names 3 stages, but there are 2"),
        ({"gradient_compression": "fp16", **TENSOR}, "gradient_compression is fp16"),
        ({"synchronization_interval_steps": 4, **TENSOR}, "synchronization_interval_steps is 4"),
        (
            {"synchronization_interval_steps": 4, "gradient_compression": "int8"},
            "no gradients that int8 could compress",
        ),
    ]:
        with pytest.raises(ValidationError, match=why):
            LayoutOptions(**asked)


def test_a_training_refuses_what_its_layout_does_not_run():
    for fields, why in [
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
            "lora requires plain data parallelism, with an unsharded model",
        ),
        (
            {"layout": LayoutOptions(**TENSOR), "activation_offload": "disk"},
            "activation_offload disk requires plain data parallelism",
        ),
    ]:
        with pytest.raises(ValidationError, match=why):
            TrainSpec(gradient_accumulation_steps=3, **fields)


# What load may be asked for, and how much of it each point gets.

MODEL = ArtefactModel(attempt_id="a1")


def test_each_kind_sends_as_many_as_its_point_needs_and_reserves_places():
    for arrivals, requests, places in [
        (ClosedLoop(concurrency=(1, 64)), (32, 64), 64),
        (OpenLoop(request_rate_per_second=(0.5, 2.0)), (32, 32), 4),
        (Burst(burst_requests=(2, 16)), (2, 16), 16),
    ]:
        options = LoadOptions(arrivals=arrivals)
        assert tuple(options.requests_at(each) for each in arrivals.points) == requests, arrivals
        assert options.places(4) == places, (arrivals, requests, places)


def test_a_sweep_that_cannot_be_is_refused():
    for arrivals, message in [
        (
            {"kind": "closed", "concurrency": (4, 1)},
            "the points of a sweep are 4, 1; give each once",
        ),
        ({"kind": "closed", "concurrency": ()}, "at least 1 item"),
        ({"kind": "closed", "concurrency": (2000,)}, "less than or equal to 1024"),
        ({"kind": "open", "request_rate_per_second": (0.0,)}, "greater than 0"),
        ({"kind": "burst", "burst_requests": tuple(range(1, 14))}, "at most 12 items"),
        ({"kind": "flood"}, "closed"),
    ]:
        with pytest.raises(ValidationError, match=message):
            LoadOptions(arrivals=arrivals)


def test_a_search_measures_longer_and_begins_at_one_point_of_clients_or_of_a_rate():
    search = {"targets": {"ttft_p95_seconds": 1.0}, "highest": 64.0}
    options = LoadOptions(arrivals=ClosedLoop(concurrency=(4,)), search=search)
    assert [options.requests_at(each) for each in (4, 16)] == [32, 64]
    assert options.places(4) == 64
    rates = LoadOptions(arrivals=OpenLoop(request_rate_per_second=(2.0,)), search=search)
    assert [rates.requests_at(each) for each in (2.0, 8.5)] == [32, 85]
    assert rates.places(4) == 4
    for arrivals, changes, words in (
        (ClosedLoop(concurrency=(1, 2)), {}, "give one point"),
        (Burst(burst_requests=(2,)), {}, "give one point"),
        (ClosedLoop(concurrency=(65,)), {}, "up to its highest"),
        (ClosedLoop(concurrency=(1,)), {"targets": {}}, "at least 1 item"),
        (ClosedLoop(concurrency=(1,)), {"targets": {"size_seconds": 1.0}}, "match pattern"),
        (ClosedLoop(concurrency=(1,)), {"max_points": 13}, "less than or equal to 12"),
    ):
        with pytest.raises(ValidationError, match=words):
            LoadOptions(arrivals=arrivals, search=search | changes)


def test_a_profile_is_of_a_model_and_not_of_an_endpoint():
    load = {"arrivals": {"kind": "closed", "concurrency": (1,)}}
    with pytest.raises(ValidationError, match="profile and load exclude each other"):
        BenchmarkSpec(model=MODEL, load=load, profile=True)
    assert BenchmarkSpec(model=MODEL, load=load, max_batch_tokens=64).max_batch_tokens == 64
    with pytest.raises(ValidationError, match="max_batch_tokens is 64, and only the endpoint of"):
        BenchmarkSpec(model=MODEL, max_batch_tokens=64)


# What may be asked of Slurm: a closed list, whoever asks for it.


def read(*arguments: str) -> SlurmConfig | None:
    parser = argparse.ArgumentParser()
    slurm.add(parser)
    return slurm.read(parser.parse_args(arguments))


def test_named_and_other_options_and_limits_become_those_of_every_job():
    assert read() is None
    found = read("--slurm", "--partition", "gpu", "--gres", "gpu:1", "--slurm-option", "mem=8G")
    assert found.argv() == ["--gres=gpu:1", "--mem=8G", "--partition=gpu"]
    found = read("--slurm", "--time-limit-minutes", "90", "--max-jobs", "4")
    assert (found.time_limit_minutes, found.max_jobs) == (90, 4)


def test_an_option_that_names_a_program_or_a_file_is_refused():
    for name in ["wrap", "export", "output", "chdir", "uid", "prolog", "signal"]:
        with pytest.raises(SlurmArgumentError, match=f"--{name} is not among the options allowed"):
            read("--slurm", "--slurm-option", f"{name}=x")


def test_a_value_that_means_something_to_a_shell_is_refused():
    for value in ["a b", "a;b", "$(id)", "a\nb", "`id`", "'", ""]:
        with pytest.raises(ValidationError, match="is not a valid value of that option"):
            SlurmConfig(options={"partition": value})


def test_options_that_do_not_fit_are_refused_by_name():
    with pytest.raises(SlurmArgumentError, match="not of the form NAME=VALUE"):
        read("--slurm", "--slurm-option", "mem")
    with pytest.raises(SlurmArgumentError, match="partition: these hold for Slurm alone"):
        read("--partition", "gpu")
    with pytest.raises(SlurmArgumentError, match=r"max_jobs: .*greater than or equal to 1"):
        read("--slurm", "--max-jobs", "0")
