"""``manage.py replay``: replay a queue of any size, and say what another policy would do."""

import json
import time
from argparse import ArgumentParser
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from django.core.management.base import BaseCommand, CommandError

from webapp.core import display
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Pool
from webapp.replay.figures import Waits, figures_of
from webapp.replay.fleet import Fleet
from webapp.replay.history import fleet_of, trace_of
from webapp.replay.replaying import POLICIES, replay
from webapp.replay.traces import Trace, even_fleet, published, read, shaped

SHOWN = 8  # pools of one name
OF_SHAPES = {"jobs": 1_000_000, "load": 1.1, "seed": 0}  # and their usual values
LEAST = {"hosts": 1, "jobs": 1, "devices": 1, "turns": 1}
HEAD = ("Policy", "Hosts", "Use", "At once", "Mean wait", "50 %", "90 %", "99 %", "Longest",
        "Fairness", "CPU")  # fmt: skip


class Command(BaseCommand):
    """Replay a trace under each policy and number of hosts that are asked for."""

    help = (
        "Replay published traces' shapes, a file or a pool's own history on any number of hosts, "
        "decided as the queue decides, and print waits, use and fairness."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add what is replayed, on what, and under which policies."""
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--shape", choices=sorted(published()), default="helios")
        what.add_argument("--trace", type=Path, help="a CSV file of jobs instead")
        what.add_argument("--pool", help="the history of the pool of this name or ID instead")
        parser.add_argument("--jobs", type=int, help="jobs of a shape (1,000,000)")
        parser.add_argument(
            "--hosts", type=int, nargs="+", help="numbers of hosts to compare (10,000)"
        )
        parser.add_argument("--devices", type=int, help="devices of a host (8)")
        parser.add_argument(
            "--load", type=float,
            help="device time that a shape's jobs ask for, of all that the first number of hosts "
            "has until the last submission (1.1; jobs that run on after it count too)",
        )  # fmt: skip
        parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=["fair-share"])
        parser.add_argument(
            "--interval", type=float, default=60.0,
            help="seconds between decisions while jobs wait (60); 0: at every event",
        )  # fmt: skip
        parser.add_argument(
            "--turns", type=int, default=100,
            help="waiting jobs for which a decision reserves devices (100)",
        )  # fmt: skip
        parser.add_argument("--seed", type=int, help="of a shape's jobs (0)")
        parser.add_argument("--json", action="store_true")

    def handle(self, *_args: object, **options: Any) -> None:
        """Replay, and print one row a policy and number of hosts."""
        try:
            rows, source, trace = _replays(options)
        except (InvalidProblem, OSError) as error:
            raise CommandError(str(error)) from error
        waited = Waits.of(np.asarray(trace.waits)) if trace.waits is not None else None
        if options["json"]:
            real = {} if waited is None else {"real_waits": asdict(waited)}
            self.stdout.write(json.dumps({"source": source, **real, "replays": rows}, indent=1))
            return
        self.stdout.write(source)
        self.stdout.write("| " + " | ".join(HEAD) + " |")
        self.stdout.write("|" + "---|" * len(HEAD))
        for row in rows:
            self.stdout.write("| " + " | ".join(_cells(row)) + " |")
        for row in rows:
            self._explain(row)
        if waited is not None:
            self.stdout.write(f"What they really waited: {_times(asdict(waited))}.")

    def _explain(self, row: dict[str, Any]) -> None:
        """Print what the table has no room for: waits by size, and what was not decided."""
        name = f"{row['policy']} on {row['hosts']:,} hosts"
        sizes = ", ".join(
            f"{size} devices {display.clock(each['mean'])}"
            for size, each in row["by_devices"].items()
        )
        self.stdout.write(
            f"{name}: mean wait by size: {sizes}; at most {row['most_waiting']:,} jobs waited; "
            f"{row['num_cut']:,} of {row['num_decisions']:,} decisions had more turns than they "
            f"looked at; {row['num_impossible']:,} jobs are too large for every host."
        )


def _replays(options: dict[str, Any]) -> tuple[list[dict[str, Any]], str, Trace]:
    """Return a row of figures per replay, the source of the trace, and the trace."""
    _check_source(options)
    usual = {**OF_SHAPES, "devices": 8}
    options |= {name: each for name, each in usual.items() if options[name] is None}
    _check(options)
    sizes = options["hosts"] or [0 if options["pool"] else 10_000]
    trace, source, pool = _trace(options, sizes[0])
    rows = []
    for policy, num_hosts in product(options["policy"], sizes):
        fleet = _fleet(pool, num_hosts, options["devices"])
        began = time.process_time()
        found = replay(trace, fleet, policy, interval=options["interval"], turns=options["turns"])
        seconds = time.process_time() - began
        figures = figures_of(trace, fleet, found)
        count = sum(len(block.ranks) for block in fleet.blocks)
        row = {"policy": policy, "hosts": count, "cpu_seconds": seconds}
        rows.append(row | figures.as_dict())
    return rows, source, trace


def _check_source(options: dict[str, Any]) -> None:
    """Refuse options of which the source of the jobs makes no use."""
    unused = {"pool": ("hosts", "devices", *OF_SHAPES), "trace": tuple(OF_SHAPES)}
    for source, names in unused.items():
        for name in names:
            if options[source] and options[name] is not None:
                own = "hosts and jobs" if source == "pool" else "jobs"
                raise InvalidProblem(
                    name,
                    f"--{name} cannot go with --{source}, whose own {own} are taken: leave one "
                    "out.",
                )


def _check(options: dict[str, Any]) -> None:
    for name, least in LEAST.items():
        given = options[name] if isinstance(options[name], list) else [options[name]]
        if any(each is not None and each < least for each in given):
            raise InvalidProblem(name, f"--{name} must be at least {least}; {given} was given.")
    if not 0 < options["load"] <= 100:  # noqa: PLR2004 -- above it nobody ever gets a turn
        raise InvalidProblem("load", "--load must be above 0 and at most 100; 1 asks for all.")
    if not 0 <= options["interval"] < float("inf"):
        raise InvalidProblem("interval", "--interval must be 0 or more seconds.")


def _trace(options: dict[str, Any], num_hosts: int) -> tuple[Trace, str, Pool | None]:
    if options["trace"]:
        return read(options["trace"], options["devices"]), f"Jobs of {options['trace'].name}", None
    if options["pool"]:
        pool = _pool(options["pool"])
        return trace_of(pool), f"Jobs of the pool {pool.name} that ran and ended", pool
    shape = published()[options["shape"]]
    trace = shaped(
        options["shape"],
        options["jobs"],
        num_hosts * options["devices"],
        devices_per_host=options["devices"],
        load=options["load"],
        seed=options["seed"],
    )
    days = trace.submitted[-1] / 86_400
    source = f"{len(trace):,} jobs in {days:.1f} days, as {shape['words']} ({shape['source']})"
    return trace, source, None


def _pool(words: str) -> Pool:
    """Return the pool of an ID, or else of a name that one pool alone has."""
    pools = list(Pool.objects.filter(pk=words) or Pool.objects.filter(name=words).order_by("pk"))
    if not pools:
        raise InvalidProblem("pool", f"No pool has the name or the ID {words}: name another one.")
    if len(pools) > 1:
        known = ", ".join(f"{each.pk} of {each.team.name}" for each in pools[:SHOWN])
        raise InvalidProblem(
            "pool", f"{len(pools)} pools are named {words}: give one's ID instead ({known})."
        )
    return pools[0]


def _fleet(pool: Pool | None, num_hosts: int, devices: int) -> Fleet:
    return even_fleet(num_hosts, devices) if pool is None else fleet_of(pool)[0]


def _times(waits: dict[str, float]) -> str:
    return " | ".join(display.clock(waits[name]) for name in ("mean", "p50", "p90", "p99", "most"))


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["policy"],
        f"{row['hosts']:,}",
        f"{row['use']:.1%}",
        f"{row['started_at_once']:.1%}",
        _times(row["waits"]),
        f"{row['fairness']:.3f}",
        f"{row['cpu_seconds']:.1f} s",
    ]
