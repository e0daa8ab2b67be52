"""What a host reports of its Slurm cluster: partitions, limits, accounts, QOS, reservations."""

import getpass
import time
from collections.abc import Iterator, Mapping, Sequence

from runners.launchers.other_jobs import slurm_jobs
from runners.launchers.scheduler import read_or_note
from runners.launchers.slurm_commands import (
    Partition,
    SlurmError,
    everybodys_queue,
    partitions,
    run,
    version,
)
from runners.launchers.slurm_end import read_fields
from runners.shared.facts import AccountFacts, PartitionFacts, ReservationFacts, SchedulerFacts
from runners.shared.slurm import SlurmConfig

MOST = 256  # partitions, reservations and accounts each
NUM_FIELDS = 3  # of an association
ALL = frozenset({"ALL", "(null)", "N/A", ""})


def scheduler_facts(config: SlurmConfig) -> SchedulerFacts:
    """Return the facts of the cluster and this host's job options; on failure the problem.

    What only some sites have, such as accounting, may be missing: ``unread`` says so.
    """
    facts = SchedulerFacts(
        options=config.options,
        time_limit_minutes=config.time_limit_minutes,
        max_jobs=config.max_jobs,
    )
    try:
        listed, release = partitions(), version()
    except SlurmError as error:
        return facts.model_copy(update={"problem": str(error)})
    unread: list[str] = []
    limits = read_or_note(unread, "limits of partitions", partition_limits) or {}
    found = {
        "version": release,
        "partitions": tuple(_partition(each, limits) for each in listed[:MOST]),
        "reservations": tuple(read_or_note(unread, "reservations", reservations) or ())[:MOST],
        "accounts": tuple(read_or_note(unread, "accounts", accounts) or ())[:MOST],
    }
    queue = read_or_note(unread, "jobs of others", everybodys_queue) or {}
    others = slurm_jobs(queue, time.time())
    return facts.model_copy(update={**found, **others, "unread": tuple(unread)})


def _partition(each: Partition, limits: Mapping[str, Mapping[str, str]]) -> PartitionFacts:
    own = limits.get(each.name, {})
    most = own.get("MaxNodes", "")
    return PartitionFacts(
        **each._asdict(),
        is_default=own.get("Default") == "YES",
        max_nodes=int(most) if most.isdigit() and int(most) else None,
        accounts=tuple(_names(own.get("AllowAccounts", ""))),
        qos=tuple(_names(own.get("AllowQos", ""))),
    )


def _stated(text: str) -> str:
    return "" if text in ALL else text


def _names(text: str) -> list[str]:
    return [] if text in ALL else text.split(",")[:MOST]


def partition_limits() -> dict[str, dict[str, str]]:
    """Return what ``scontrol`` says of each partition, by name.

    Raises:
        SlurmError: there is no answer.
    """
    return dict(_lines(run("scontrol", "show", "partition", "--oneliner"), "PartitionName"))


def _lines(text: str, key: str) -> Iterator[tuple[str, dict[str, str]]]:
    for line in text.splitlines():
        fields = read_fields(line)
        if key in fields:
            yield fields[key], fields


def reservations() -> list[ReservationFacts]:
    """Return the cluster's reservations.

    Raises:
        SlurmError: there is no answer.
    """
    return read_reservations(run("scontrol", "show", "reservation", "--oneliner"))


def read_reservations(text: str) -> list[ReservationFacts]:
    """Return the reservations of scontrol's output; without any it is a sentence."""
    return [
        ReservationFacts(
            name=name,
            starts=fields.get("StartTime", ""),
            ends=fields.get("EndTime", ""),
            partition=_stated(fields.get("PartitionName", "")),
            nodes=_stated(fields.get("Nodes", "")),
        )
        for name, fields in _lines(text, "ReservationName")
    ]


def accounts() -> list[AccountFacts]:
    """Return the accounts that this user may charge.

    Raises:
        SlurmError: there is no answer, or no accounting here.
    """
    return read_accounts(
        run(
            "sacctmgr", "--noheader", "--parsable2", "--readonly", "show", "associations",
            f"user={getpass.getuser()}", "format=Account,Partition,QOS",
        )
    )  # fmt: skip


def read_accounts(text: str) -> list[AccountFacts]:
    """Return the accounts of sacctmgr's output."""
    rows: Sequence[list[str]] = [line.split("|") for line in text.splitlines()]
    return [
        AccountFacts(name=row[0], partition=row[1], qos=tuple(_names(row[2])))
        for row in rows
        if len(row) == NUM_FIELDS and row[0]
    ]
