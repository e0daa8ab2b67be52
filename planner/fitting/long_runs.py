"""The goodput of three published trainings beside that of the formula."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.catalog.reading import data_toml
from planner.cost.failures import (
    checkpoint_write_seconds,
    goodput_ratio,
    job_mtbf_seconds,
    young_interval_seconds,
)
from planner.specs.units import HOUR, MINUTE
from planner.workload.long_run import device_mtbf_hours, usual

WORDS = """## Failures of long trainings

Goodput, the share of the wall time in which a training moves on, of three runs whose failures were
published (`planner/catalog/data/failures.toml`), by the formula of Daly 2006. *By its own figures*
takes what the authors say of failures, checkpoints and restarts; what they do not say is what the
plan takes for any run: 11 minutes for a restart, the interval of Young 1974. *By the plan's* takes
nothing of the run but its devices and the size of its checkpoint; the time between failures is the
middle of the other two runs. Llama 3's goodput is a lower bound. OPT-175B's restart, a mean of
5 hours, is read from a plot of the first half of the same run, so its row shows that the formula
adds up, and is no prediction; its last column shows what a plan says that does not know it: who
repairs a cluster by hand should state `restart_seconds`. BLOOM lost time to hangs, too, which are
not among its failures.
"""


class Run(NamedTuple):
    """A published run: its goodput, and the formula's with and without the run's own figures."""

    name: str
    published: float
    mtbf_seconds: float
    interval_seconds: float
    restart_seconds: float
    own: float
    blind: float

    @property
    def error(self) -> float:
        """Return the relative error of the formula with the run's own figures."""
        return self.own / self.published - 1

    @property
    def blind_error(self) -> float:
        """Return the relative error of the formula without them."""
        return self.blind / self.published - 1


def runs() -> Iterator[Run]:
    """Yield the published runs."""
    for run in data_toml("failures.toml")["runs"]:
        mtbf, interval, restart, own = _goodput(run, device_mtbf_hours(run) * HOUR)
        name = run["name"]
        known = {each: run[each] for each in ("hours", "devices", "nodes", "checkpoint_bytes")}
        *_, blind = _goodput(known, usual(without=name).device_mtbf_seconds)
        yield Run(name, run["goodput_ratio"], mtbf, interval, restart, own, blind)


def _goodput(run: dict[str, Any], device_mtbf_s: float) -> tuple[float, float, float, float]:
    """Return time between failures, interval and restart in s, and the goodput."""
    mtbf = job_mtbf_seconds(device_mtbf_s=device_mtbf_s, num_devices=run["devices"])
    write = checkpoint_write_seconds(
        checkpoint_bytes=run["checkpoint_bytes"],
        writers=run["nodes"],
        writer_bytes_per_s=run.get("write_bytes_per_second", usual().write_bytes_per_second),
    )
    stall = run.get("checkpoint_seconds", write)
    best = young_interval_seconds(
        checkpoint_s=stall, mtbf_s=mtbf, write_s=write, solve_s=run["hours"] * HOUR
    )
    interval = run.get("checkpoint_interval_seconds", best)
    restart = run.get("restart_seconds", usual().restart_seconds)
    goodput = goodput_ratio(
        interval_s=interval,
        checkpoint_s=stall,
        lag_s=max(0.0, write - stall),
        restart_s=restart,
        mtbf_s=mtbf,
    )
    return float(mtbf), float(interval), float(restart), float(goodput)


def section() -> str:
    """Return the runs as a section of the accuracy page."""
    head = "| Run | Time between failures | Checkpoint every | Restart | Published | By its own figures | Error | By the plan's | Error |"  # noqa: E501 -- a row of a table
    rows = (
        f"| {run.name} | {run.mtbf_seconds / HOUR:.1f} h | {run.interval_seconds / MINUTE:.0f} min"
        f" | {run.restart_seconds / MINUTE:.0f} min | {run.published:.1%} | {run.own:.1%}"
        f" | {run.error:+.1%} | {run.blind:.1%} | {run.blind_error:+.1%} |"
        for run in runs()
    )
    sources = (
        f"- {run['name']}: {run['source']}. Goodput: {run['goodput_words']}."
        for run in data_toml("failures.toml")["runs"]
    )
    return (
        "\n".join((WORDS, head, "|---|---|---|---|---|---|---|---|---|", *rows, "", *sources))
        + "\n"
    )
