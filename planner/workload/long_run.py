"""What failures cost a long training: its checkpoint interval, goodput and wall time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from planner.catalog.reading import data_toml
from planner.cost.column import single
from planner.cost.failures import (
    DALY,
    checkpoint_write_seconds,
    goodput_ratio,
    job_mtbf_seconds,
    snapshot_seconds,
    wall_seconds,
    young_interval_seconds,
)
from planner.cost.quantity import Ledger, Line, NullLedger, Origin
from planner.specs.estimate import Interval, Reliability
from planner.specs.units import HOUR, MINUTE
from planner.specs.workload import TrainWorkload
from planner.workload.outcome import Z_80, Outcome
from planner.workload.setting import Setting
from planner.workload.training_memory import (
    checkpoint_bytes,
    is_sharded,
    writes_checkpoints_in_background,
)

GROUP = "failures"
STATED = Origin("measured", "stated in the request")
LEAST_RATE = 1e-9  # of the expected failures, where an interval reaches to none
LEAST_GOODPUT = 1e-3  # below it a run does not finish
LONGEST_MTBF = 1e15  # in s, beyond which floats lose the failures


@dataclass(frozen=True)
class Usual:
    """Published failures and times, which hold where the request states no other."""

    device_mtbf_seconds: float
    rates: Interval  # lowest and highest published rate of failures over the usual one
    restart_seconds: float
    write_bytes_per_second: float  # of each node
    least_failures: float


def device_mtbf_hours(run: dict[str, Any]) -> float:
    """Return the mean time between failures of one device of a published run, in hours."""
    return float(run["devices"] * run["hours"] / run["failures"])


@cache
def usual(without: str = "") -> Usual:
    """Return the published figures, of the runs but the one of that name."""
    data = data_toml("failures.toml")
    hours = [device_mtbf_hours(run) for run in data["runs"] if run["name"] != without]
    middle = median(hours)
    return Usual(
        device_mtbf_seconds=middle * HOUR,
        rates=(middle / max(hours), middle / min(hours)),
        restart_seconds=data["restart_seconds"],
        write_bytes_per_second=data["write_bytes_per_second"],
        least_failures=data["least_failures"],
    )


class Failures(NamedTuple):
    """What failures cost a run: its figures, if it finishes, and what to warn of.

    ``trained_ratio`` is the share of its tokens that a run of a stated time still trains.
    """

    reliability: Reliability | None = None
    trained_ratio: float = 1.0
    warnings: tuple[str, ...] = ()


def failures_of(
    setting: Setting, outcome: Outcome, ledger: Ledger, intervals: Mapping[str, Interval]
) -> Failures:
    """Return what failures cost a training; nothing of other work, or of one too short for them.

    A run without failures takes the outcome's ``duration_seconds``, whose interval is among
    ``intervals``. Which runs are long enough is said by the expected failures, unless the request
    states a time between them. Devices that only generate completions fail as those that train.
    """
    workload, seconds = setting.workload, outcome.performance.duration_seconds
    if not isinstance(workload, TrainWorkload) or not seconds:
        return Failures()
    stated = setting.cluster.mean_time_between_failures_hours
    device_mtbf = min(stated * HOUR, LONGEST_MTBF) if stated else usual().device_mtbf_seconds
    devices = single(setting.devices_in_use)
    if stated is None and seconds * devices / device_mtbf < usual().least_failures:
        return Failures()
    duration = intervals.get("duration_seconds", (seconds, seconds))
    run = _LongRun(setting, workload, outcome, ledger)
    return run.failures(device_mtbf, devices, duration)


class _LongRun:
    """The terms of one training over many device hours."""

    def __init__(
        self, setting: Setting, workload: TrainWorkload, outcome: Outcome, ledger: Ledger
    ) -> None:
        self.setting, self.workload, self.ledger = setting, workload, ledger
        self.solve_s = float(outcome.performance.duration_seconds or 0.0)
        self.step_s = float(outcome.performance.step_seconds or self.solve_s)

    def failures(self, device_mtbf_s: float, devices: float, duration: Interval) -> Failures:
        """Return the figures; goodput and wall time have 80 % intervals."""
        mtbf = self._job_mtbf_seconds(device_mtbf_s, devices)
        size = checkpoint_bytes(
            self.setting, self.ledger, self.workload, Line(GROUP, "Checkpoint", key="checkpoint")
        )
        write_s = self._write_seconds(size)
        stall_s = self._stall_seconds(size, write_s)
        steps = self._steps_between(mtbf, stall_s, write_s)
        times = {
            "interval_s": steps * self.step_s,
            "checkpoint_s": stall_s,
            "lag_s": self._lag_seconds(write_s, stall_s),
            "restart_s": self.workload.restart_seconds or usual().restart_seconds,
        }
        goodput = self._goodput(times, mtbf, self.ledger)
        if not goodput >= LEAST_GOODPUT:
            return Failures(warnings=(self._endless(mtbf, times),))
        has_budget = self.workload.time_budget_seconds is not None
        wall = self.solve_s
        if not has_budget:
            wall = self.ledger.term(
                wall_seconds, Line(GROUP, "Wall time"), solve_s=self.solve_s, goodput=goodput
            )
        failures = wall / mtbf
        is_stated = self.setting.cluster.mean_time_between_failures_hours is not None
        fewer, more = _rate_factors(failures, is_stated=is_stated)
        worst, best = (
            max(LEAST_GOODPUT, self._goodput(times, mtbf / factor, NullLedger()))
            for factor in (more, fewer)
        )
        moved = (
            _moved(wall, (duration[0], self.solve_s), (goodput, best)),
            _moved(wall, (duration[1], self.solve_s), (goodput, worst)),
        )
        found = Reliability(
            mean_time_between_failures_seconds=mtbf,
            expected_failures=failures,
            checkpoint_bytes=round(size),
            checkpoint_seconds=stall_s,
            checkpoint_write_seconds=write_s,
            restart_seconds=times["restart_s"],
            checkpoint_interval_seconds=times["interval_s"],
            checkpoint_interval_steps=steps,
            goodput_ratio=goodput,
            goodput_interval=(worst, best),
            wall_seconds=wall,
            wall_interval=(wall, wall) if has_budget else moved,
        )
        warnings = self._single_writer_warning(found)
        return Failures(found, goodput if has_budget else 1.0, warnings)

    def _job_mtbf_seconds(self, device_mtbf_s: float, devices: float) -> float:
        is_stated = self.setting.cluster.mean_time_between_failures_hours is not None
        runs = "; ".join(run["source"] for run in data_toml("failures.toml")["runs"])
        line = Line(
            GROUP,
            "Time between failures of the job",
            origin=STATED if is_stated else Origin("published", runs),
        )
        return self.ledger.term(
            job_mtbf_seconds, line, device_mtbf_s=device_mtbf_s, num_devices=devices
        )

    def _endless(self, mtbf_s: float, times: Mapping[str, float]) -> str:
        """Return why a run does not finish, and what may help."""
        return (
            f"it does not finish: a failure comes every {mtbf_s:.4g} s in the mean, and after one "
            f"a restart takes {times['restart_s']:.4g} s and the way to the next checkpoint "
            f"{times['interval_s'] + times['checkpoint_s'] + times['lag_s']:.4g} s; take fewer "
            "devices or shorter steps, or correct mean_time_between_failures_hours, "
            "restart_seconds or checkpoint_seconds"
        )

    def _single_writer_warning(self, found: Reliability) -> tuple[str, ...]:
        """Return a warning where a single writer's time sets the interval of checkpoints."""
        best = math.sqrt(2 * found.checkpoint_seconds * found.mean_time_between_failures_seconds)
        nodes = self._nodes
        if self._writers > 1 or nodes == 1 or found.checkpoint_write_seconds <= best:
            return ()
        write, least = found.checkpoint_write_seconds / MINUTE, best / MINUTE
        words = (
            f"one of {nodes} nodes writes the checkpoints, {write:.3g} min each, which sets their "
            f"interval: every {least:.3g} min would lose least; take an engine and a ZeRO stage "
            "of which every node writes its part, or faster storage"
        )
        return (words,)

    @property
    def _nodes(self) -> int:
        return math.ceil(single(self.setting.layout.devices) / self.setting.cluster.widest_node)

    @property
    def _writers(self) -> int:
        """Return the nodes that write: all of sharded states, one in Slipway's own trainer."""
        gathers = self.setting.engine.counted_by_operator
        return self._nodes if is_sharded(self.setting.layout) and not gathers else 1

    def _write_seconds(self, size: float) -> float:
        """Return the time to write a checkpoint."""
        rate = self.setting.cluster.disk_bandwidth_bytes_per_second
        origin = (
            STATED if rate else Origin("published", data_toml("failures.toml")["write_source"])
        )
        return self.ledger.term(
            checkpoint_write_seconds,
            Line(GROUP, "Writing a checkpoint", origin=origin),
            checkpoint_bytes=size,
            writers=float(self._writers),
            writer_bytes_per_s=rate or usual().write_bytes_per_second,
        )

    def _stall_seconds(self, size: float, write_s: float) -> float:
        """Return how long a checkpoint stops the steps: as stated, or until it is copied."""
        if self.workload.checkpoint_seconds is not None:
            return self.workload.checkpoint_seconds
        if not writes_checkpoints_in_background(self.setting):
            return write_s
        layout = self.setting.layout
        return self.ledger.term(
            snapshot_seconds,
            self.setting.line(GROUP, "Copying a checkpoint to host memory"),
            checkpoint_bytes=size,
            num_devices=single(layout.devices) if is_sharded(layout) else 1.0,
            link_bytes_per_s=self.setting.host_link_bytes_per_s,
        )

    def _lag_seconds(self, write_s: float, stall_s: float) -> float:
        """Return how long a checkpoint is written after the steps go on."""
        if writes_checkpoints_in_background(self.setting):
            return write_s
        return max(0.0, write_s - stall_s)

    def _steps_between(self, mtbf_s: float, stall_s: float, write_s: float) -> int:
        """Return the steps between checkpoints, in which one is written, at most the run's."""
        exact: float = self.ledger.term(
            young_interval_seconds,
            Line(GROUP, "Time between checkpoints"),
            checkpoint_s=stall_s,
            mtbf_s=mtbf_s,
            write_s=write_s,
            solve_s=self.solve_s,
        )
        least = max(round(exact / self.step_s), math.ceil(write_s / self.step_s))
        return max(1, min(least, math.ceil(self.solve_s / self.step_s)))

    def _goodput(self, times: Mapping[str, float], mtbf_s: float, ledger: Ledger) -> float:
        is_usual = self.workload.restart_seconds is None
        restart = f"; restart: {data_toml('failures.toml')['restart_source']}" if is_usual else ""
        line = Line(GROUP, "Goodput", origin=Origin("modelled", DALY + restart))
        return ledger.term(goodput_ratio, line, **times, mtbf_s=mtbf_s)


def _rate_factors(failures: float, *, is_stated: bool) -> Interval:
    """Return the lowest and highest rate of failures over the expected one.

    A stated rate varies as a count does (Poisson); a published one also between runs.
    """
    low, high = (1.0, 1.0) if is_stated else usual().rates
    chance = Z_80 / math.sqrt(failures)
    return (
        max(LEAST_RATE, 1 - math.hypot(1 - low, chance)),
        1 + math.hypot(high - 1, chance),
    )


def _moved(value: float, *ends: tuple[float, float]) -> float:
    """Return a value moved by independent errors, each given as an end and its own middle."""
    logs = [math.log(end / middle) for end, middle in ends]
    return value * math.exp(math.copysign(math.hypot(*logs), sum(logs)))
