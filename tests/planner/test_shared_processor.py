"""Ranks that share one processor: its rates are divided, and nothing hides behind anything."""

import pytest

from planner.api import estimate
from planner.cost.communication import all_reduce_seconds, ring_seconds
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest

CPU = DeviceSpec(
    id="host-x",
    kind="cpu",
    memory_bytes=2**34,
    memory_bandwidth_bytes_per_second=2e10,
    peak_flops_per_second={"fp32": 1e11},
    op_overhead_seconds=2e-6,
    provenance="measured",
)
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def cluster(ranks=4, cores=2, latency=5e-3):
    shared = ClusterSpec(device=CPU).as_ranks_of_cpu(ranks, cores)
    fields = {
        "intra_node_bandwidth_bytes_per_second": 1e9,
        "collective_latency_seconds": latency,
        "hand_over_latency_seconds": latency / 2,
    }
    return shared.model_copy(update=fields)


def step(on=None, **strategy):
    fixed = {
        "micro_batch_size": 1, "weight_dtype": "fp32", "compute_dtype": "fp32",
        "activation_recomputation": "none", "attention": "eager",
    }  # fmt: skip
    asked = {
        "model": MODEL,
        "cluster": on or cluster(),
        "workload": {"kind": "train", "sequence_length": 64, "global_batch_size": 8},
        "engine": "torch",
        "strategy": {**fixed, **strategy},
    }
    return estimate(EstimateRequest.model_validate(asked)).performance.step_seconds


def test_ranks_of_a_processor_have_their_part_of_every_rate():
    device = cluster().device

    assert device.peak_flops_per_second == {"fp32": 2.5e10}
    assert device.memory_bandwidth_bytes_per_second == 5e9
    assert device.memory_bytes == 2**32
    assert device.op_overhead_seconds == 4e-6  # two ranks take turns on each core
    assert cluster().ranks_per_core == 2


def test_ranks_with_a_core_each_issue_as_fast_as_one_process():
    shared = ClusterSpec(device=CPU).as_ranks_of_cpu(2, 8)

    assert shared.device.op_overhead_seconds == CPU.op_overhead_seconds
    assert shared.ranks_per_core == 1


@pytest.mark.parametrize("device", ["h100-sxm-80gb", CPU.model_copy(update={"kind": "gpu"})])
def test_only_a_measured_processor_is_shared(device):
    with pytest.raises(ValueError, match="is not one measured processor"):
        ClusterSpec(device=device).as_ranks_of_cpu(4, 2)


def test_an_all_reduce_is_two_passes_round_the_ring_in_one_start():
    ring = {"payload_bytes": 1e6, "ranks": 4, "link_bytes_per_s": 1e9, "latency_s": 1e-3}

    assert ring_seconds(**ring, ring_passes=2, starts=1) == all_reduce_seconds(**ring)
    assert ring_seconds(**ring | {"ranks": 1}, ring_passes=2, starts=1) == 0


def test_each_zero_stage_exchanges_more_than_the_one_before():
    times = [step(data_parallel_size=4, zero_stage=stage) for stage in (1, 2, 3)]

    assert times == sorted(times)


@pytest.mark.parametrize(
    "strategy",
    [{"data_parallel_size": 4}, {"data_parallel_size": 4, "zero_stage": 3},
     {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 4, "pipeline_schedule": "1f1b"}],
)  # fmt: skip
def test_a_longer_wait_for_every_rank_makes_every_layout_slower(strategy):
    assert step(cluster(latency=1e-3), **strategy) < step(cluster(latency=1e-2), **strategy)


def test_ranks_that_wait_leave_their_cores_to_others():
    pipeline = {"pipeline_parallel_size": 4, "pipeline_schedule": "1f1b"}
    own_cores = cluster().model_copy(update={"ranks_per_core": 1.0})

    assert step(cluster(), **pipeline) < 0.8 * step(own_cores, **pipeline)


def test_what_fills_a_bubble_elsewhere_fills_nothing_here():
    pipeline = {"pipeline_parallel_size": 4}

    woven = step(pipeline_schedule="zero_bubble", **pipeline)
    assert woven == step(pipeline_schedule="1f1b", **pipeline)


def test_few_weights_make_copies_first_and_many_weights_stages():
    copies = {"data_parallel_size": 4}
    stages = {
        "data_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "1f1b",
    }  # fmt: skip
    narrow = cluster().model_copy(update={"intra_node_bandwidth_bytes_per_second": 1e8})
    wide = cluster().model_copy(update={"intra_node_bandwidth_bytes_per_second": 1e11})

    assert step(narrow, **stages) < 0.8 * step(narrow, **copies)
    assert step(wide, **copies) < 1.1 * step(wide, **stages)
