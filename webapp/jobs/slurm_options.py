"""What a launch asks of a host's Slurm, checked against what Slurm said of itself."""

from collections.abc import Sequence

from pydantic import ValidationError

from runners.jobspec.base import SCHEDULER_OPTIONS, SchedulerOption
from runners.launchers.scheduler import limit_minutes
from runners.plans.launch import Launch, LaunchOptionError
from runners.plans.refusals import DraftProblem
from runners.plans.spread import Spread
from runners.shared.facts import PartitionFacts, SchedulerFacts, gpus_of_gres
from webapp.hosts.models import Host

DAY_MINUTES, HOUR_MINUTES = 24 * 60, 60
SHOWN = 8
MARGIN_MINUTES = 2  # between a job's own limit and that with which it is submitted


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


def check_scheduler(host: Host | None, launch: Launch, spread: Spread) -> float | None:
    """Check a launch against its host's scheduler; ``host`` is None of a pool.

    Return the longest duration in seconds that a partition leaves a launch that states none; None
    where the host's own limit is shorter.

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
        return None
    offered = scheduler_choices(host)
    for name, value in launch.scheduler_options.items():
        if offered[name] and value not in offered[name]:
            known = ", ".join(offered[name][:SHOWN])
            raise LaunchOptionError(name, f"Slurm has no {name} {value!r} here; it has: {known}.")
    _check_gres(host, facts.options.get("gres", ""), spread)
    partition = launch.partition or facts.options.get("partition", "")
    named = [each for each in facts.partitions if each.name == partition]
    lines = named if partition else [each for each in facts.partitions if each.is_default]
    if not lines:
        return None
    _check_users(facts, lines[0], launch)
    _check_size(lines, spread)
    return _longest(facts, lines[0], launch.max_duration_seconds)


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


def _check_users(facts: SchedulerFacts, line: PartitionFacts, launch: Launch) -> None:
    """Refuse an account or a QOS that the partition does not take."""
    stated = {
        name: value
        for name in ("account", "qos")
        if (value := launch.scheduler_options.get(name) or facts.options.get(name, ""))
    }
    for name, allowed in (("account", line.accounts), ("qos", line.qos)):
        if allowed and name in stated and stated[name] not in allowed:
            known = ", ".join(allowed[:SHOWN])
            raise LaunchOptionError(
                name, f"Partition {line.name} takes no {name} {stated[name]!r}; it takes: {known}."
            )


def _check_size(lines: Sequence[PartitionFacts], spread: Spread) -> None:
    """Refuse more nodes than the partition has; of several node types all count."""
    name, limits = lines[0].name, [each.max_nodes for each in lines if each.max_nodes]
    nodes = min([sum(each.nodes for each in lines), *limits])
    if spread.num_hosts > nodes:
        raise DraftProblem(
            f"The plan takes {spread.num_hosts} nodes, and a job in partition {name} gets at most "
            f"{nodes}. Choose fewer machines or another partition.",
            "nodes",
        )


def _longest(facts: SchedulerFacts, line: PartitionFacts, asked: float | None) -> float | None:
    """Return the longest duration in a partition in seconds, or refuse one that is longer."""
    host, most = facts.time_limit_minutes, partition_minutes(line.time_limit)
    if asked is not None and asked > host * 60:
        raise LaunchOptionError(
            "max_duration_seconds",
            f"The time limit is {asked / 3600:.4g} h, and the host submits no job for more than "
            f"{host / 60:.4g} h (--time-limit-minutes). Choose a shorter one.",
        )
    if most is None or limit_minutes(asked, host) <= most:
        return None
    longest = max(1, int(most) - MARGIN_MINUTES)
    if asked is not None:
        raise LaunchOptionError(
            "max_duration_seconds",
            f"The time limit is {asked / 3600:.4g} h, and partition {line.name} ends a job after "
            f"{most / 60:g} h. Choose at most {longest} minutes, or another partition.",
        )
    return longest * 60.0


def partition_minutes(text: str) -> float | None:
    """Return a time limit as Slurm writes it, in minutes; None without a limit.

    >>> partition_minutes("1-00:30:00"), partition_minutes("30:00"), partition_minutes("infinite")
    (1470.0, 30.0, None)
    """
    days, _, clock = text.rpartition("-")
    parts = [days or "0", *clock.split(":")]
    if not all(part.isdigit() for part in parts):
        return None
    hours, minutes, seconds = ([0, 0] + [int(part) for part in parts[1:]])[-3:]
    return int(parts[0]) * DAY_MINUTES + hours * HOUR_MINUTES + minutes + seconds / 60
