"""What a replay says: waits, use of the devices, and how evenly teams are served."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from webapp.replay.fleet import Fleet
from webapp.replay.replaying import Replay
from webapp.replay.traces import Trace

PERCENTILES = (50, 90, 99)
LEAST_SECONDS = 10.0  # of a job, where its slowdown is meant
SIZES = ((1, 1), (2, 7), (8, 8), (9, 64), (65, None))  # devices, from and to

Column = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Waits:
    """Waits of some jobs, in seconds."""

    num_jobs: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, waits: Column) -> "Waits | None":
        """Return the figures of waits, None of no job."""
        if not len(waits):
            return None
        p50, p90, p99 = (float(each) for each in np.percentile(waits, PERCENTILES))
        return cls(len(waits), float(waits.mean()), p50, p90, p99, float(waits.max()))


@dataclass(frozen=True)
class Figures:
    """A replay in figures.

    ``started_at_once`` is the share of jobs that did not wait. ``use`` is the share of all
    device-seconds, from the first to the last submission, that jobs held. ``fairness`` is Jain's
    index of the teams' mean slowdowns: 1 if all are equal, 1/n if one of n bears everything. Of a
    job, the slowdown is (wait + length) / length, of lengths of at least 10 s.

    Sources: Jain, Chiu and Hawe 1984, DEC-TR-301; Feitelson and Rudolph 1998, JSSPP (bounded
    slowdown).
    """

    waits: Waits
    by_devices: dict[str, Waits]
    started_at_once: float
    use: float
    fairness: float
    slowdowns: dict[str, float]  # mean of each team
    num_impossible: int
    most_waiting: int
    num_decisions: int
    num_cut: int

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)


def figures_of(trace: Trace, fleet: Fleet, found: Replay) -> Figures:
    """Return the figures of a replay, of the jobs that some host could take."""
    starts = np.asarray(found.starts)
    has_started = np.isfinite(starts)
    submitted, seconds = np.asarray(trace.submitted), np.asarray(trace.seconds)
    devices = np.array([shape.num_devices for shape in trace.shapes])
    waits = (starts - submitted)[has_started]
    of_all = Waits.of(waits) or Waits(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    slowdowns = _slowdowns(trace, waits, seconds[has_started], has_started)
    return Figures(
        waits=of_all,
        by_devices=_by_devices(waits, devices[has_started]),
        started_at_once=float((waits == 0).mean()) if len(waits) else 1.0,
        use=_use(starts, seconds, devices, float(submitted[-1]), fleet),
        fairness=jain(list(slowdowns.values())),
        slowdowns=slowdowns,
        num_impossible=int((~has_started).sum()),
        most_waiting=found.most_waiting,
        num_decisions=found.num_decisions,
        num_cut=found.num_cut,
    )


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness.

    >>> jain([2.0, 2.0]), jain([1.0, 0.0])
    (1.0, 0.5)
    """
    squares = sum(each * each for each in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _slowdowns(
    trace: Trace, waits: Column, seconds: Column, has_started: npt.NDArray[np.bool_]
) -> dict[str, float]:
    lengths = np.maximum(seconds, LEAST_SECONDS)
    slowdown = (waits + lengths) / lengths
    teams = np.asarray(trace.teams)[has_started]
    num = np.bincount(teams, minlength=len(trace.team_names))
    sums = np.bincount(teams, weights=slowdown, minlength=len(trace.team_names))
    named = zip(trace.team_names, sums, num, strict=True)
    return {name: float(total / count) for name, total, count in named if count}


def _by_devices(waits: Column, devices: npt.NDArray[np.int64]) -> dict[str, Waits]:
    found = {}
    for least, most in SIZES:
        of_size = (devices >= least) & (devices <= (most or np.inf))
        name = f"over {least - 1}" if most is None else f"{least}" if least == most else ""
        waited = Waits.of(waits[of_size])
        if waited:
            found[name or f"{least} to {most}"] = waited
    return found


def _use(
    starts: Column, seconds: Column, devices: npt.NDArray[np.int64], last: float, fleet: Fleet
) -> float:
    """Return the share of the devices' time until the last submission that jobs hold."""
    held = np.clip(np.minimum(starts + seconds, last) - starts, 0.0, None)
    num_devices = sum(block.num_devices for block in fleet.blocks)
    return float(np.nansum(held * devices)) / (num_devices * last) if last else 0.0
