"""What a launch asks of a host's scheduler, checked against what the host reported of it."""

from collections.abc import Sequence

from pydantic import ValidationError

from runners.launchers.scheduler import limit_minutes
from runners.plans.launch import Launch, LaunchOptionError
from runners.plans.refusals import DraftProblem
from runners.plans.spread import Spread
from runners.shared.facts import PartitionFacts, SchedulerFacts
from runners.shared.schedulers import SCHEDULER_TERMS
from webapp.hosts.models import Host

DAY_MINUTES, HOUR_MINUTES = 24 * 60, 60
SHOWN = 8
MARGIN_MINUTES = 2  # between a job's own limit and that with which it is submitted


def scheduler_of(host: Host) -> SchedulerFacts | None:
    """Return what a host reported of its scheduler; None of a host without one."""
    try:
        return SchedulerFacts.model_validate(host.facts["scheduler"])
    except (KeyError, ValidationError):
        return None


def check_scheduler(host: Host | None, launch: Launch, spread: Spread) -> float | None:
    """Check a launch against its host's scheduler; ``host`` is None of a pool.

    Return the longest duration in seconds that a partition leaves a launch that states none; None
    where the host's own limit is shorter.

    Raises:
        LaunchOptionError: an option is not one that the scheduler has, or no scheduler takes it.
        DraftProblem: the plan takes more than a node or the partition has.
    """
    facts = scheduler_of(host) if host is not None else None
    _check_options(host, facts, launch)
    if host is None or facts is None:
        return None
    _check_gpus(host, facts, spread)
    _check_host_limit(facts, launch.max_duration_seconds)
    if SCHEDULER_TERMS[facts.kind].has_classes_of_nodes:
        _check_nodes(facts, launch, spread)
        return None
    partition = launch.partition or facts.options.get("partition", "")
    named = [each for each in facts.partitions if each.name == partition]
    lines = named if partition else [each for each in facts.partitions if each.is_default]
    if not lines:  # Kubernetes' kinds of nodes are chosen by no launch, and more nodes may come
        return None
    _check_users(facts, lines[0], launch)
    _check_size(lines, spread)
    return longest_seconds_in(lines[0], facts.time_limit_minutes, launch.max_duration_seconds)


def _check_options(host: Host | None, facts: SchedulerFacts | None, launch: Launch) -> None:
    """Refuse an option that the scheduler does not take, and a value that it does not have."""
    offered = facts.offered if facts is not None else {}
    for name, value in launch.scheduler_options.items():
        words = name.replace("_", " ")
        if facts is None or name not in offered:
            raise LaunchOptionError(
                name,
                f"The field {name} is of a host whose scheduler takes it, and "
                f"{host.name if host else 'a pool'} does not. Leave it out.",
            )
        known = offered[name]
        if known is not None and value not in known:
            has = f"it has: {', '.join(known[:SHOWN])}." if known else _none_words(facts)
            raise LaunchOptionError(name, f"{facts.title} has no {words} {value!r} here; {has}")


def _none_words(facts: SchedulerFacts) -> str:
    why = f" ({'; '.join(facts.unread)})" if facts.unread else ""
    return f"it has none that the agent may list{why}. Leave it out."


def _check_gpus(host: Host, facts: SchedulerFacts, spread: Spread) -> None:
    """Refuse a plan of more devices on a node than the host's options give a job."""
    gpus, wanted = facts.gpus_per_node, spread.devices_per_host
    if not gpus or wanted <= gpus:
        return
    terms = SCHEDULER_TERMS[facts.kind]
    option, value = terms.gpus_setting, terms.gpus_value.format(gpus=wanted)
    given = terms.gpus_argument.format(gpus=gpus, value=facts.options.get(option, ""))
    raise DraftProblem(
        f"The plan takes {wanted} devices of a node, and {given} of {host.name} gives a job "
        f"{gpus}. Pin the parallel sizes to {gpus} devices a node, or state {value} as "
        f'"{option}" in the host\'s config.json.',
        "host",
    )


def _check_host_limit(facts: SchedulerFacts, requested_seconds: float | None) -> None:
    """Refuse a longer time than the host submits any job for."""
    if requested_seconds is not None and requested_seconds > facts.time_limit_minutes * 60:
        raise LaunchOptionError(
            "max_duration_seconds",
            f"The time limit is {requested_seconds / 3600:.4g} h, and the host submits no job for "
            f"more than {facts.time_limit_minutes / 60:.4g} h (--time-limit-minutes). Choose a "
            "shorter one.",
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


def _check_nodes(facts: SchedulerFacts, launch: Launch, spread: Spread) -> None:
    """Refuse more nodes than a Ray cluster has with what a job takes of each.

    Of a cluster that adds nodes by itself that number is not known, nor of one that lists none.
    """
    if not facts.partitions or facts.autoscaling:
        return
    lines, chosen = [each for each in facts.partitions if each.is_up], launch.partition
    found = [each for each in lines if (each.name == chosen if chosen else each.is_default)]
    nodes = sum(each.nodes for each in found)
    if spread.num_hosts > nodes:
        stated = {name: facts.options.get(name, "0") for name in ("gpus", "cpus", "memory")}
        share = ", ".join(f"{size} {name}" for name, size in stated.items() if size != "0")
        kind = chosen or facts.options.get("partition", "")
        of_kind = f" of {kind}" if kind else ""
        raise DraftProblem(
            f"The plan takes {spread.num_hosts} nodes{of_kind} with {share} each, and the Ray "
            f"cluster had {nodes} when its agent looked last. Choose fewer machines, or let the "
            "agent look again: Check again on the host's page.",
            "nodes",
        )


def longest_seconds_in(
    line: PartitionFacts, host_minutes: int, asked: float | None
) -> float | None:
    """Return the longest duration that a partition leaves, if it is shorter than the host's.

    Raises:
        LaunchOptionError: the launch asks for a longer one.
    """
    most = partition_minutes(line.time_limit)
    if most is None or limit_minutes(asked, host_minutes) <= most:
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
