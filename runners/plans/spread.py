"""How a plan's ranks are spread: the hosts and devices that a job takes, and how it is split."""

from typing import NamedTuple

from planner.specs.cluster import DeviceSpec
from planner.specs.estimate import PlannedStrategy
from planner.specs.workload import Strategy
from runners.jobspec import DataParallel
from runners.jobspec.generate import ExpertSplit, PipelineSplit, TensorSplit
from runners.plans.document import HardwareChoice
from runners.plans.refusals import DraftProblem
from runners.plans.training_layout import layout_of
from runners.plans.workloads import TRAINING_GOALS

SPLITS = {
    "tensor_parallel_size": "tensor parallel",
    "pipeline_parallel_size": "pipeline parallel",
    "context_parallel_size": "context parallel",
    "expert_parallel_size": "expert parallel",
}
SHARED_EXPERTS = {SPLITS["tensor_parallel_size"], SPLITS["expert_parallel_size"]}


class Spread(NamedTuple):
    """The number of hosts of a job, and of devices per host."""

    num_hosts: int = 1
    devices_per_host: int = 1


def spread_of(best: PlannedStrategy, goal: str) -> Spread:
    """Return the number of hosts and devices on which a strategy runs.

    Raises:
        DraftProblem: the strategy splits the model in a way that jobs do not support yet.
    """
    if goal in TRAINING_GOALS:
        return _training_spread(best)
    strategy = best.strategy
    split = split_of(strategy) if goal == "generate" else None
    splits = [] if split else _splits(strategy)
    copies = strategy.data_parallel_size or 1
    if copies > 1:
        splits.append("several copies side by side")
    if splits:
        raise DraftProblem(
            f"This plan needs {' and '.join(splits)}, which jobs do not support yet: a generation "
            "divides one model in one way, and an endpoint uses one device. Pin tensor and "
            "pipeline parallel to 1 (of a generation, one of them), or choose a smaller model.",
            "tensor_parallel_size",
        )
    each = best.cluster.devices_per_node
    ranks = split.size if split else copies
    if ranks <= each:
        return Spread(1, ranks)
    if split and ranks % each:
        raise DraftProblem(
            f"{ranks} ranks do not fill hosts of {each} devices evenly. Choose a number that "
            f"divides by {each}.",
            f"{split.method}_parallel_size",
        )
    return Spread(ranks // each, each)


def _training_spread(best: PlannedStrategy) -> Spread:
    layout = layout_of(best.strategy)
    each, copies = best.cluster.devices_per_node, best.strategy.data_parallel_size or 1
    ranks = layout.world_size if layout else copies
    if ranks <= each:
        return Spread(1, ranks)
    if not ranks % each:
        return Spread(ranks // each, each)
    if ranks == copies:
        raise DraftProblem(
            f"{copies} copies do not fill hosts of {each} devices evenly. Choose a global batch "
            f"that divides by {each}.",
            "global_batch_size",
        )
    raise DraftProblem(
        f"{ranks} ranks do not fill hosts of {each} devices evenly. Choose sizes whose product "
        f"divides by {each}.",
        "tensor_parallel_size",
    )


def _splits(strategy: Strategy) -> list[str]:
    return [name for field, name in SPLITS.items() if (getattr(strategy, field) or 1) > 1]


def split_of(strategy: Strategy) -> TensorSplit | ExpertSplit | PipelineSplit | None:
    """Return how a plan splits the model among ranks; None if not, or by two methods.

    Expert parallelism with tensor parallelism of the same size counts as one method.
    """
    experts, methods = strategy.expert_parallel_size, set(_splits(strategy))
    if experts == strategy.tensor_parallel_size and methods == SHARED_EXPERTS:
        return ExpertSplit(size=experts or 1)
    if len(methods) != 1:
        return None
    if (size := strategy.tensor_parallel_size or 1) > 1:
        return TensorSplit(size=size)
    if (size := strategy.pipeline_parallel_size or 1) > 1:
        return PipelineSplit(size=size)
    return None


def processes_of(best: PlannedStrategy, hardware: HardwareChoice) -> int:
    """Return the number of ranks per CPU host in a plan."""
    return hardware.ranks_per_host or 1 if is_on_processor(best) else 1


def is_on_processor(best: PlannedStrategy) -> bool:
    """Return whether a plan runs on the processors of its hosts."""
    device = best.cluster.device
    return isinstance(device, DeviceSpec) and device.kind == "cpu"


def policy_of(hardware: HardwareChoice, spread: Spread, processes: int = 1) -> DataParallel:
    """Return a job's policy on a lost rank; elastic jobs shrink down to one host."""
    requested, is_shared_out = hardware.on_lost_rank, max(*spread, processes) > 1
    if requested == "restart" and is_shared_out:
        return DataParallel(on_lost_rank="restart")
    is_elastic = requested == "shrink" and spread.num_hosts > 1
    return DataParallel(on_lost_rank="shrink" if is_elastic else "stop")
