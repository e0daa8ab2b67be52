"""What failures cost a long training: its checkpoint interval, goodput and wall time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

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
from planner.specs.units import HOUR
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


def reliability(
    setting: Setting, outcome: Outcome, ledger: Ledger, intervals: Mapping[str, Interval]
) -> Reliability | None:
    """Return what failures cost a training; None of other work, or of one too short for them.

    A run without failures takes the outcome's ``duration_seconds``, whose interval is among
    ``intervals``. Which runs are long enough is said by the expected failures, unless the request
    states a time between them.
    """
    workload, seconds = setting.workload, outcome.performance.duration_seconds
    if not isinstance(workload, TrainWorkload) or not seconds:
        return None
    stated = setting.cluster.mean_time_between_failures_hours
    device_mtbf = stated * HOUR if stated else usual().device_mtbf_seconds
    devices = single(setting.layout.devices)
    if stated is None and seconds * devices / device_mtbf < usual().least_failures:
        return None
    duration = intervals.get("duration_seconds", (seconds, seconds))
    run = _LongRun(setting, workload, outcome, ledger)
    return run.reliability(device_mtbf, devices, duration)


class _LongRun:
    """The terms of one training over many device hours."""

    def __init__(
        self, setting: Setting, workload: TrainWorkload, outcome: Outcome, ledger: Ledger
    ) -> None:
        self.setting, self.workload, self.ledger = setting, workload, ledger
        self.solve_s = float(outcome.performance.duration_seconds or 0.0)
        self.step_s = float(outcome.performance.step_seconds or self.solve_s)

    def reliability(self, device_mtbf_s: float, devices: float, duration: Interval) -> Reliability:
        """Return the figures; goodput and wall time have 80 % intervals."""
        is_stated = self.setting.cluster.mean_time_between_failures_hours is not None
        runs = "; ".join(run["source"] for run in data_toml("failures.toml")["runs"])
        mtbf = self.ledger.term(
            job_mtbf_seconds,
            Line(
                GROUP,
                "Time between failures of the job",
                origin=STATED if is_stated else Origin("published", runs),
            ),
            device_mtbf_s=device_mtbf_s,
            num_devices=devices,
        )
        size = checkpoint_bytes(
            self.setting, self.ledger, self.workload, Line(GROUP, "Checkpoint", key="checkpoint")
        )
        write_s = self._write_seconds(size)
        stall_s = self._stall_seconds(size, write_s, devices)
        interval_s = self._whole_steps(mtbf, stall_s, write_s)
        restart_s = self.workload.restart_seconds or usual().restart_seconds
        goodput = self._goodput(interval_s, stall_s, restart_s, mtbf, self.ledger)
        wall = self.ledger.term(
            wall_seconds, Line(GROUP, "Wall time"), solve_s=self.solve_s, goodput=goodput
        )
        failures = wall / mtbf
        fewer, more = _rate_factors(failures, is_stated=is_stated)
        worst, best = (
            self._goodput(interval_s, stall_s, restart_s, mtbf / factor, NullLedger())
            for factor in (more, fewer)
        )
        return Reliability(
            mean_time_between_failures_seconds=mtbf,
            expected_failures=failures,
            checkpoint_bytes=round(size),
            checkpoint_seconds=stall_s,
            checkpoint_write_seconds=write_s,
            restart_seconds=restart_s,
            checkpoint_interval_seconds=interval_s,
            checkpoint_interval_steps=max(1, round(interval_s / self.step_s)),
            goodput_ratio=goodput,
            goodput_interval=(worst, best),
            wall_seconds=wall,
            wall_interval=(
                _moved(wall, (duration[0], self.solve_s), (goodput, best)),
                _moved(wall, (duration[1], self.solve_s), (goodput, worst)),
            ),
        )

    def _write_seconds(self, size: float) -> float:
        """Return the time to write a checkpoint: sharded states are written by every node."""
        setting, cluster = self.setting, self.setting.cluster
        nodes = math.ceil(single(setting.layout.devices) / cluster.widest_node)
        gathers = setting.engine.counted_by_operator  # Slipway's trainer: the first rank writes
        rate = cluster.disk_bandwidth_bytes_per_second
        origin = (
            STATED if rate else Origin("published", data_toml("failures.toml")["write_source"])
        )
        return self.ledger.term(
            checkpoint_write_seconds,
            Line(GROUP, "Writing a checkpoint", origin=origin),
            checkpoint_bytes=size,
            writers=float(nodes) if is_sharded(setting.layout) and not gathers else 1.0,
            writer_bytes_per_s=rate or usual().write_bytes_per_second,
        )

    def _stall_seconds(self, size: float, write_s: float, devices: float) -> float:
        """Return how long a checkpoint stops the steps: as stated, or until it is copied."""
        if self.workload.checkpoint_seconds is not None:
            return self.workload.checkpoint_seconds
        if not writes_checkpoints_in_background(self.setting):
            return write_s
        return self.ledger.term(
            snapshot_seconds,
            self.setting.line(GROUP, "Copying a checkpoint to host memory"),
            checkpoint_bytes=size,
            num_devices=devices if is_sharded(self.setting.layout) else 1.0,
            link_bytes_per_s=self.setting.host_link_bytes_per_s,
        )

    def _whole_steps(self, mtbf_s: float, stall_s: float, write_s: float) -> float:
        """Return the interval of checkpoints in whole steps, in s."""
        exact: float = self.ledger.term(
            young_interval_seconds,
            Line(GROUP, "Time between checkpoints"),
            checkpoint_s=stall_s,
            mtbf_s=mtbf_s,
            write_s=write_s,
            solve_s=self.solve_s,
        )
        return max(1, round(exact / self.step_s)) * self.step_s

    def _goodput(
        self, interval_s: float, stall_s: float, restart_s: float, mtbf_s: float, ledger: Ledger
    ) -> float:
        is_usual = self.workload.restart_seconds is None
        restart = f"; restart: {data_toml('failures.toml')['restart_source']}" if is_usual else ""
        return ledger.term(
            goodput_ratio,
            Line(GROUP, "Goodput", origin=Origin("modelled", DALY + restart)),
            interval_s=interval_s,
            checkpoint_s=stall_s,
            restart_s=restart_s,
            mtbf_s=mtbf_s,
        )


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
