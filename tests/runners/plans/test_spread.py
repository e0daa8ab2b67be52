"""The hosts and devices that a plan's ranks take, how its model is divided, and lost ranks."""

from types import SimpleNamespace

import pytest

from planner.specs.cluster import ClusterSpec
from planner.specs.workload import Strategy
from runners.jobspec import ArtefactModel
from runners.jobspec.generate import ExpertSplit, PipelineSplit, TensorSplit
from runners.plans.document import HardwareChoice
from runners.plans.model_checks import check_model
from runners.plans.refusals import DraftProblem
from runners.plans.spread import Spread, policy_of, split_of, spread_of


def on_hosts_of_four(**sizes):
    """A strategy on hosts of four devices."""
    cluster = ClusterSpec(device="h200", devices_per_node=4, nodes=2)
    return SimpleNamespace(strategy=Strategy(**{"data_parallel_size": 1} | sizes), cluster=cluster)


def test_the_ranks_of_a_divided_model_fill_hosts_or_are_refused_by_name():
    for goal, sizes, spread in (
        ("pretrain", {"tensor_parallel_size": 4}, (1, 4)),
        ("pretrain", {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, (2, 4)),
        ("pretrain", {"data_parallel_size": 2, "zero_stage": 3}, (1, 2)),
        ("generate", {"tensor_parallel_size": 2}, (1, 2)),
        ("generate", {"tensor_parallel_size": 4}, (1, 4)),
        ("generate", {"tensor_parallel_size": 8}, (2, 4)),
    ):
        assert spread_of(on_hosts_of_four(**sizes), goal) == Spread(*spread), (goal, sizes)
    for goal, sizes, field in (
        (
            "pretrain",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            "tensor_parallel_size",
        ),
        ("pretrain", {"data_parallel_size": 6}, "global_batch_size"),
        ("generate", {"pipeline_parallel_size": 6}, "pipeline_parallel_size"),
    ):
        with pytest.raises(DraftProblem, match=r"6 .* do not fill hosts of 4 devices") as caught:
            spread_of(on_hosts_of_four(**sizes), goal)
        assert caught.value.field == field
    with pytest.raises(DraftProblem, match="several copies side by side") as caught:
        spread_of(on_hosts_of_four(data_parallel_size=2), "serve")
    assert caught.value.field == "tensor_parallel_size"


def test_a_lost_rank_ends_a_job_unless_others_can_go_on_or_start_again():
    restart, shrink = (HardwareChoice(on_lost_rank=each) for each in ("restart", "shrink"))
    for hardware, spread, processes, policy in [
        (restart, Spread(1, 1), 1, "stop"),
        (restart, Spread(1, 4), 1, "restart"),
        (restart, Spread(1, 1), 2, "restart"),
        (shrink, Spread(1, 4), 1, "stop"),
        (shrink, Spread(2, 1), 1, "shrink"),
    ]:
        found = policy_of(hardware, spread, processes).on_lost_rank
        assert found == policy, (hardware.on_lost_rank, spread, processes)


def test_a_model_is_divided_one_way_or_not_at_all():
    for sizes, split in [
        ({}, None),
        ({"tensor_parallel_size": 4}, TensorSplit(size=4)),
        ({"pipeline_parallel_size": 3}, PipelineSplit(size=3)),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, None),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 2}, ExpertSplit(size=2)),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 4}, None),
        ({"context_parallel_size": 2}, None),
    ]:
        assert split_of(Strategy(**sizes)) == split, sizes


def test_weights_that_lie_on_one_host_are_refused_for_several():
    with pytest.raises(DraftProblem, match="are on one host"):
        check_model(ArtefactModel(attempt_id="a"), Spread(2, 1))
    check_model(ArtefactModel(attempt_id="a"), Spread(1, 4))
