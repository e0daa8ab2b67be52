"""Where a policy in training generates: the divisions of a cluster that a search compares."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from planner.cost.quantity import NullLedger
from planner.search.question import Question
from planner.specs.base import NotCoveredError, NotPossibleError
from planner.specs.on_policy import OWN_ENGINE, RolloutSpec, Sleep
from planner.specs.workload import Strategy, TrainWorkload
from planner.workload.on_policy import generation, holds_a_completion
from planner.workload.resolve import resolve
from planner.workload.rollouts import filled_rollout, generating_engine, refuse_one_device
from planner.workload.setting import Setting

DIVISIONS = 8  # of a node, and of the nodes of a cluster, about evenly spaced
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

    What the pins state of a rollout holds in each of them.

    Raises:
        NotPossibleError: the cluster has no such devices, or none holds a completion.
    """
    base = _base_setting(question)
    found: list[_Division] = []
    refused: NotPossibleError | NotCoveredError | None = None
    for candidate in _candidates(question, workload, base):
        try:
            best = _with_best_tensor_size(base, workload, candidate)
        except (NotPossibleError, NotCoveredError) as error:
            refused = refused or error
            continue
        found += [best] if best and not _is_dominated(best, found) else []
    if found:
        return tuple(each.rollout for each in found)
    raise refused or NotPossibleError(
        f"no division of the {question.cluster.num_devices} devices holds a copy of "
        f"{question.model.id} that generates completions of {workload.max_completion_length} "
        "tokens: choose devices with more memory, or shorter completions",
        "workload.max_completion_length",
    )


def refuse_undivided(
    question: Question, workload: TrainWorkload, rollouts: Iterable[RolloutSpec | None]
) -> NoReturn:
    """Refuse a cluster whose rest, in every division, has no layout for the batch.

    Raises:
        NotPossibleError: names the numbers of training devices that were tried.
    """
    cluster = question.cluster
    rest = sorted({training_devices(question, each) for each in rollouts})
    raise NotPossibleError(
        f"no layout of the trainer divides the {workload.global_batch_size} completions of an "
        f"update on {_either_of(rest)} of the {cluster.num_devices} devices, which is what the "
        "divisions that were tried leave it: choose a global_batch_size that a multiple of one of "
        "these divides, or other devices",
        "workload.global_batch_size",
    )


def training_devices(question: Question, rollout: RolloutSpec | None) -> int:
    """Return the devices of a cluster that are left to train."""
    return question.cluster.num_devices - (rollout.devices if rollout else 0)


def _either_of(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


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
    """Yield divisions without a tensor parallel size, each with what the pins state."""
    pinned = question.request.pins.rollout or RolloutSpec()
    seen: list[RolloutSpec] = []
    for candidate in _open_candidates(question, workload, base, pinned):
        stated = candidate.model_copy(update=pinned.stated)
        if stated not in seen:
            seen.append(stated)
            yield stated


def _open_candidates(
    question: Question, workload: TrainWorkload, base: Setting, pinned: RolloutSpec
) -> Iterator[RolloutSpec]:
    """Yield the divisions that the workload and a pinned number of devices leave open."""
    devices = pinned.stated.get("devices", workload.rollout_devices)
    if generating_engine(pinned, base.device) == OWN_ENGINE:
        yield RolloutSpec(devices=devices or 0)
        return
    if workload.generator != "separate" and not workload.staleness and not devices:
        yield from (
            RolloutSpec(sleep=sleep, gpu_memory_utilization=share)
            for sleep, share in IN_TURN
            if sleep in base.engine.rollout_sleeps
        )
    if workload.generator == "colocated" or devices == 0:
        return
    count, stated = question.cluster.num_devices, workload.rollout_devices
    if count == 1 and (workload.generator or workload.staleness or stated):
        refuse_one_device(workload)
    if stated is not None and stated >= count:
        raise NotPossibleError(
            f"rollout_devices is {stated}, and the cluster has {count} devices, of which at least "
            "one trains: choose fewer, or leave rollout_devices out",
            "workload.rollout_devices",
        )
    if devices:
        yield RolloutSpec(devices=devices)
        return
    yield from (RolloutSpec(devices=count) for count in _divisions(question, workload))


def _divisions(question: Question, workload: TrainWorkload) -> Iterator[int]:
    """Yield how many devices may generate while others train: part of a node, or whole nodes.

    Of several nodes parts are halves, a quarter and so on. Of whole nodes about eight numbers are
    evenly spaced; those whose rest divides the completions of an update are not left out.
    """
    cluster, batch = question.cluster, workload.global_batch_size
    inside, nodes = cluster.devices_per_node, cluster.num_devices // cluster.devices_per_node
    if nodes == 1:
        yield from range(max(1, inside // DIVISIONS), inside, max(1, inside // DIVISIONS))
        return
    if nodes <= DIVISIONS // 2:
        yield from (size for size in _powers(inside - 1) if inside % size == 0)
    spaced = max(1, nodes // DIVISIONS)
    for count in range(1, nodes):
        if count % spaced == 0 or batch % ((nodes - count) * inside) == 0:
            yield count * inside


def _with_best_tensor_size(
    base: Setting, workload: TrainWorkload, rollout: RolloutSpec
) -> _Division | None:
    """Return a division with its fastest tensor parallel size, None if no completion fits."""
    count = rollout.devices or base.cluster.num_devices
    sizes = [size for size in _powers(min(count, MOST_TENSOR_RANKS)) if count % size == 0]
    if "tensor_parallel_size" in rollout.stated:
        sizes = [rollout.tensor_parallel_size]
    elif generating_engine(rollout, base.device) == OWN_ENGINE:
        sizes = [1]
    refused: NotPossibleError | NotCoveredError | None = None
    best: _Division | None = None
    for size in sizes:
        sized = rollout.model_copy(update={"tensor_parallel_size": size})
        try:
            filled = filled_rollout(sized, workload, base.device)
            seconds = _seconds(base, workload, filled)
        except (NotPossibleError, NotCoveredError) as error:
            refused = error
            continue
        if seconds is not None and (best is None or seconds < best.seconds):
            best = _Division(filled, seconds)
    if best is None and refused is not None:
        raise refused
    return best


def _is_dominated(new: _Division, found: list[_Division]) -> bool:
    """Return whether a division takes more memory than a like one and is hardly faster."""
    return any(
        (old.rollout.devices, old.rollout.sleep) == (new.rollout.devices, new.rollout.sleep)
        and old.seconds <= new.seconds * HARDLY_FASTER
        for old in found
    )


def _seconds(base: Setting, workload: TrainWorkload, rollout: RolloutSpec) -> float | None:
    """Return the seconds of a step's completions, None if the devices do not hold one.

    What sleeps meanwhile makes no difference to them.
    """
    placed = RolloutSpec(**{**dict(rollout), "sleep": "none"})

    def cost() -> float | None:
        setting = replace(base, strategy=base.strategy.model_copy(update={"rollout": placed}))
        if not holds_a_completion(setting, workload):
            return None
        return generation(setting, workload, NullLedger()).seconds

    return base.shared_cost(("seconds of completions", placed), cost)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
