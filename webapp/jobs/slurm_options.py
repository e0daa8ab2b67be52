"""What a launch asks of a host's Slurm, checked against what Slurm said of itself."""

from collections.abc import Sequence

from pydantic import ValidationError

from runners.jobspec.base import SCHEDULER_OPTIONS, SchedulerOption
from runners.plans.launch import Launch, LaunchOptionError
from runners.plans.refusals import DraftProblem
from runners.plans.spread import Spread
from runners.shared.facts import SchedulerFacts, gpus_of_gres
from webapp.hosts.models import Host

DAY_MINUTES, HOUR_MINUTES = 24 * 60, 60
SHOWN = 8


def scheduler_of(host: Host) -> SchedulerFacts | None:
    """Return what a host reported of its Slurm; None of a host without one."""
    if host.kind != "slurm":
        return None
    try:
        return SchedulerFacts.model_validate(host.facts["scheduler"])
    except (KeyError, ValidationError):
        return None


def scheduler_choices(host: Host) -> dict[SchedulerOption, tuple[str, ...]]:
    """Return the values of each option that the scheduler offers; {} of a host without one.

    An option without values may be typed: Slurm did not say which there are.
    """
    facts = scheduler_of(host)
    if facts is None:
        return {}
    qos = [name for each in facts.accounts for name in each.qos]
    found: dict[SchedulerOption, Sequence[str]] = {
        "account": [each.name for each in facts.accounts],
        "partition": [each.name for each in facts.partitions if each.is_up],
        "qos": qos,
        "reservation": [each.name for each in facts.reservations],
    }
    return {name: tuple(dict.fromkeys(found[name])) for name in SCHEDULER_OPTIONS}


def check_scheduler(host: Host | None, launch: Launch, spread: Spread) -> None:
    """Check a launch against its host's scheduler; ``host`` is None of a pool.

    Raises:
        LaunchOptionError: an option is not one that the scheduler has, or no scheduler takes it.
        DraftProblem: the plan takes more than a node or the partition has.
    """
    facts = scheduler_of(host) if host is not None else None
    if host is None or facts is None:
        for name in launch.scheduler_options:
            raise LaunchOptionError(
                name,
                f"The field {name} is of a host that submits to Slurm, and "
                f"{host.name if host else 'a pool'} does not. Leave it out.",
            )
        return
    offered = scheduler_choices(host)
    for name, value in launch.scheduler_options.items():
        if offered[name] and value not in offered[name]:
            known = ", ".join(offered[name][:SHOWN])
            raise LaunchOptionError(name, f"Slurm has no {name} {value!r} here; it has: {known}.")
    _check_gres(host, facts.options.get("gres", ""), spread)
    partition = launch.partition or facts.options.get("partition", "")
    _check_partition(facts, partition, launch, spread)


def _check_gres(host: Host, gres: str, spread: Spread) -> None:
    """Refuse a plan of more devices on a node than the host's ``--gres`` gives a job."""
    gpus = gpus_of_gres(gres)
    if gpus and spread.devices_per_host > gpus:
        raise DraftProblem(
            f"The plan takes {spread.devices_per_host} devices of a node, and --gres={gres} of "
            f"{host.name} gives a job {gpus}. Pin the parallel sizes to {gpus} devices a node, or "
            f'state gpu:{spread.devices_per_host} as "gres" in the host\'s config.json.',
            "host",
        )


def _check_partition(facts: SchedulerFacts, chosen: str, launch: Launch, spread: Spread) -> None:
    """Refuse more nodes or time than the partition allows; of several node types the largest."""
    named = [each for each in facts.partitions if each.name == chosen]
    lines = named if chosen else [each for each in facts.partitions if each.is_default]
    if not lines:
        return
    name, limits = lines[0].name, [each.max_nodes for each in lines if each.max_nodes]
    nodes = min([sum(each.nodes for each in lines), *limits])
    if spread.num_hosts > nodes:
        raise DraftProblem(
            f"The plan takes {spread.num_hosts} nodes, and a job in partition {name} gets at most "
            f"{nodes}. Choose fewer machines or another partition.",
            "nodes",
        )
    most = limit_minutes(lines[0].time_limit)
    asked = launch.max_duration_seconds
    if most is not None and asked is not None and asked > most * 60:
        raise LaunchOptionError(
            "max_duration_seconds",
            f"The time limit is {asked / 3600:g} h, and partition {name} ends a job after "
            f"{most / 60:g} h. Choose a shorter limit or another partition.",
        )


def limit_minutes(text: str) -> float | None:
    """Return a time limit as Slurm writes it, in minutes; None without a limit.

    >>> limit_minutes("1-00:30:00"), limit_minutes("30:00"), limit_minutes("infinite")
    (1470.0, 30.0, None)
    """
    days, _, clock = text.rpartition("-")
    parts = [days or "0", *clock.split(":")]
    if not all(part.isdigit() for part in parts):
        return None
    hours, minutes, seconds = ([0, 0] + [int(part) for part in parts[1:]])[-3:]
    return int(parts[0]) * DAY_MINUTES + hours * HOUR_MINUTES + minutes + seconds / 60
