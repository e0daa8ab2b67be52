"""Where a policy in training generates: the divisions of a cluster that a search compares."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from planner.cost.quantity import NullLedger
from planner.search.question import Question
from planner.specs.base import NotCoveredError, NotPossibleError
from planner.specs.on_policy import RolloutSpec, Sleep
from planner.specs.workload import Strategy, TrainWorkload
from planner.workload.on_policy import Generation, generation
from planner.workload.resolve import resolve
from planner.workload.rollouts import OWN_ENGINE, filled_rollout, generating_engine
from planner.workload.setting import Setting

# Shares of a cluster that generate, in eighths, where there are more devices than that.
EIGHTHS = 8
MOST_TENSOR_RANKS = 32
# What sleeps, and the shares of memory of a generating engine that shares its devices.
IN_TURN: tuple[tuple[Sleep, float], ...] = (
    ("none", 0.3),
    ("none", 0.5),
    ("generator", 0.6),
    ("both", 0.6),
    ("both", 0.85),
)


HARDLY_FASTER = 1.02  # of a like division with more memory


class _Division(NamedTuple):
    """A division of a cluster, and the seconds in which it generates the completions of a step."""

    rollout: RolloutSpec
    seconds: float


def rollout_choices(question: Question, workload: TrainWorkload) -> tuple[RolloutSpec, ...]:
    """Return the divisions to compare, each with its fastest tensor parallel size.

    Raises:
        NotPossibleError: the cluster has no such devices, or none holds a completion.
    """
    pinned = question.request.pins.rollout
    if pinned is not None:
        return (pinned,)
    base = _base_setting(question)
    found: list[_Division] = []
    refused: NotPossibleError | NotCoveredError | None = None
    for candidate in _candidates(question, workload, base):
        try:
            best = _with_best_tensor_size(base, workload, candidate)
        except (NotPossibleError, NotCoveredError) as error:
            refused = error
            continue
        found += [best] if best and not _is_beaten(best, found) else []
    if found:
        return tuple(each.rollout for each in found)
    raise refused or NotPossibleError(
        f"no division of the {question.cluster.num_devices} devices holds a copy of "
        f"{question.model.id} that generates completions of {workload.max_completion_length} "
        "tokens: choose devices with more memory, or shorter completions",
        "workload.rollout_devices",
    )


def _base_setting(question: Question) -> Setting:
    """Return a setting of the question on one device, whatever its rollout."""
    strategy = Strategy(data_parallel_size=1, micro_batch_size=1)
    request = question.estimate_request(strategy)
    anywhere = {"generator": None, "rollout_devices": None, "staleness": 0}
    workload = request.workload.model_copy(update=anywhere)
    return resolve(request.model_copy(update={"workload": workload}), leaves_layout_open=True)


def _candidates(
    question: Question, workload: TrainWorkload, base: Setting
) -> Iterator[RolloutSpec]:
    """Yield divisions without a tensor parallel size."""
    if generating_engine(RolloutSpec(), base.device) == OWN_ENGINE:
        yield RolloutSpec()
        return
    if workload.generator != "separate" and workload.rollout_devices is None:
        yield from (
            RolloutSpec(sleep=sleep, gpu_memory_utilization=share) for sleep, share in IN_TURN
        )
    if workload.generator != "colocated":
        yield from (RolloutSpec(devices=count) for count in _divisions(question, workload))


def _divisions(question: Question, workload: TrainWorkload) -> Iterator[int]:
    """Yield how many devices may generate while others train: part of a node, or whole nodes."""
    count, inside = question.cluster.num_devices, question.cluster.devices_per_node
    stated = workload.rollout_devices
    if stated is not None:
        if stated >= count:
            raise NotPossibleError(
                f"rollout_devices is {stated}, and the cluster has {count} devices, of which at "
                "least one trains: choose fewer, or set generator to colocated",
                "workload.rollout_devices",
            )
        yield stated
        return
    step = max(1, count // EIGHTHS)
    for devices in range(step, count, step):
        if devices <= inside or devices % inside == 0:
            yield devices


def _with_best_tensor_size(
    base: Setting, workload: TrainWorkload, rollout: RolloutSpec
) -> _Division | None:
    """Return a division with its fastest tensor parallel size, None if no completion fits."""
    count = rollout.devices or base.cluster.num_devices
    sizes = [size for size in _powers(min(count, MOST_TENSOR_RANKS)) if count % size == 0]
    if generating_engine(rollout, base.device) == OWN_ENGINE:
        sizes = [1]
    refused: NotPossibleError | NotCoveredError | None = None
    best: _Division | None = None
    for size in sizes:
        sized = rollout.model_copy(update={"tensor_parallel_size": size})
        try:
            filled = filled_rollout(sized, workload, base.device)
            made = _generation(base, workload, filled)
        except (NotPossibleError, NotCoveredError) as error:
            refused = error
            continue
        if made.slots >= 1 and (best is None or made.seconds < best.seconds):
            best = _Division(filled, made.seconds)
    if best is None and refused is not None:
        raise refused
    return best


def _is_beaten(new: _Division, found: list[_Division]) -> bool:
    """Return whether a division takes more memory than a like one and is hardly faster."""
    return any(
        (old.rollout.devices, old.rollout.sleep) == (new.rollout.devices, new.rollout.sleep)
        and old.seconds <= new.seconds * HARDLY_FASTER
        for old in found
    )


def _generation(base: Setting, workload: TrainWorkload, rollout: RolloutSpec) -> Generation:
    strategy = base.strategy.model_copy(update={"rollout": rollout})
    return generation(replace(base, strategy=strategy), workload, NullLedger())


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
