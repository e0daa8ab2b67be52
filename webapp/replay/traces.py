"""What is replayed: the jobs of a trace, with the shape of published ones or from a file."""

import csv
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from webapp.core.problems import InvalidProblem
from webapp.jobs.quotas import MARGIN, START_SECONDS
from webapp.replay.blocks import FOREVER, Block
from webapp.replay.fleet import Fleet, Shape

DATA = Path(__file__).with_name("shapes.toml")
COLUMNS = ("submitted_seconds", "seconds", "devices", "team")
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """Jobs in the order of their submission; times in seconds from the first instant.

    ``lengths`` are the forecasts that the queue has, ``FOREVER`` where it has none, and ``waits``
    how long each waited in reality, if that is known.
    """

    submitted: Sequence[float]
    seconds: Sequence[float]
    lengths: Sequence[float]
    shapes: Sequence[Shape]
    teams: Sequence[int]
    team_names: Sequence[str]
    weights: Sequence[float]
    priorities: Sequence[int]
    waits: Sequence[float] | None = None

    def __len__(self) -> int:
        """Return the number of jobs."""
        return len(self.submitted)

    @property
    def device_seconds(self) -> float:
        """Return the device-seconds that the jobs hold in all."""
        return math.fsum(
            shape.num_devices * each for shape, each in zip(self.shapes, self.seconds, strict=True)
        )


def even_fleet(num_hosts: int, devices_per_host: int) -> Fleet:
    """Return hosts that are all alike."""
    return Fleet([Block(range(num_hosts), [devices_per_host] * num_hosts)])


def forecast(seconds: float) -> float:
    """Return the forecast of the queue for a job that stated its length."""
    return seconds * MARGIN + START_SECONDS


def shape_of(num_devices: int, devices_per_host: int) -> Shape:
    """Return hosts and devices of each for a number of devices: whole hosts if one is small."""
    if num_devices <= devices_per_host:
        return Shape(1, num_devices, (0,))
    return Shape(math.ceil(num_devices / devices_per_host), devices_per_host, (0,))


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the shapes of published traces by name."""
    return {each["name"]: each for each in tomllib.loads(DATA.read_text())["traces"]}


def shaped(
    name: str,
    num_jobs: int,
    num_devices: int,
    *,
    devices_per_host: int = 8,
    load: float = 0.9,
    seed: int = 0,
) -> Trace:
    """Return a trace with lengths, sizes and teams as a published one.

    Jobs arrive independently at a constant rate (a Poisson process), so many that they would keep
    the share ``load`` of ``num_devices`` busy. The lengths have the published distribution, the
    sizes too, and jobs of a size are longer or shorter than others as far as its share of the
    device time says.
    """
    shape, dice = published()[name], np.random.default_rng(seed)
    sizes = np.array(shape["devices"])
    picked = dice.choice(len(sizes), num_jobs, p=_parts(shape["jobs_percent"]))
    score = np.array(shape["length_shift"])[picked] + dice.standard_normal(num_jobs)
    seconds = np.ceil(quantile(shape, (_ranks(score) + 0.5) / num_jobs))
    devices = sizes[picked]
    span = float((devices * seconds).sum()) / (load * num_devices)
    submitted = np.sort(np.floor(dice.random(num_jobs) * span))
    weights = shape["team_devices"]
    teams = dice.choice(len(weights), num_jobs, p=_parts(np.cumsum(weights) / sum(weights) * 100))
    kinds = {int(size): shape_of(int(size), devices_per_host) for size in sizes}
    lengths = seconds.tolist()
    return Trace(
        submitted=submitted.tolist(),
        seconds=lengths,
        lengths=[forecast(each) for each in lengths],
        shapes=[kinds[each] for each in devices.tolist()],
        teams=teams.tolist(),
        team_names=[f"team {number + 1}" for number in range(len(weights))],
        weights=[float(each) for each in weights],
        priorities=[0] * num_jobs,
    )


def quantile(shape: dict[str, Any], part: Seconds) -> Seconds:
    """Return the length in s below which a part of the jobs is, between points even in its log."""
    points = np.log(np.array(shape["seconds"], dtype=np.float64))
    percents = np.array(shape["seconds_percent"], dtype=np.float64)
    found: Seconds = np.exp(np.interp(part * 100, percents, points))
    return found


def _parts(percents: Sequence[float] | Seconds) -> Seconds:
    """Return the share of each class from the shares up to it."""
    parts = np.diff(np.concatenate([[0.0], percents])) / percents[-1]
    return np.asarray(parts, dtype=np.float64)


def _ranks(values: Seconds) -> Seconds:
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def read(path: Path, devices_per_host: int) -> Trace:
    """Return the trace of a CSV file with the columns ``COLUMNS``.

    Raises:
        InvalidProblem: a column or value is missing or not a number, or there is no job.
    """
    rows: list[tuple[float, float, int, str]] = []
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            raise InvalidProblem(
                "trace",
                f"{path.name} has no column {', '.join(missing)}: its first line must name "
                f"{', '.join(COLUMNS)}.",
            )
        for number, row in enumerate(table, 2):
            rows.append(_row(path, number, row))
    if not rows:
        raise InvalidProblem("trace", f"{path.name} has no job: give a line for each.")
    rows.sort(key=lambda row: row[0])
    names = sorted({row[3] for row in rows})
    numbers = {name: number for number, name in enumerate(names)}
    first = rows[0][0]
    return Trace(
        submitted=[row[0] - first for row in rows],
        seconds=[row[1] for row in rows],
        lengths=[forecast(row[1]) for row in rows],
        shapes=[shape_of(row[2], devices_per_host) for row in rows],
        teams=[numbers[row[3]] for row in rows],
        team_names=names,
        weights=[1.0] * len(names),
        priorities=[0] * len(rows),
    )


def _row(path: Path, number: int, row: dict[str, str]) -> tuple[float, float, int, str]:
    try:
        at, seconds, devices = (float(row[name] or "") for name in COLUMNS[:3])
    except ValueError as error:
        raise InvalidProblem(
            "trace", f"{path.name}, line {number}: {error}. Give numbers for {COLUMNS[:3]}."
        ) from error
    is_good = math.isfinite(at) and 0 < seconds < math.inf and devices >= 1 and devices % 1 == 0
    if not is_good:
        raise InvalidProblem(
            "trace",
            f"{path.name}, line {number}: seconds must be above 0 and devices a whole number from "
            "1; leave out jobs that never ran.",
        )
    return at, seconds, int(devices), row["team"] or ""


def without_forecasts(trace: Trace) -> list[float]:
    """Return the lengths of a queue that knows none."""
    return [FOREVER] * len(trace)
