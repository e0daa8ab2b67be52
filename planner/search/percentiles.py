"""Percentiles of single strategies of a block, from costs that the block computes at once.

Each strategy is simulated as in ``planner.workload.under_load``. The engine steps, which dominate
the work, are costed for the whole block at once.
"""

from collections.abc import Callable, Collection
from functools import cached_property

import numpy as np

from planner.cost.equation import Unrecorded
from planner.cost.queueing import ArrivalHabits
from planner.search.block import Block, Numbers
from planner.specs.estimate import Performance
from planner.specs.workload import ServeWorkload
from planner.workload.serve import arrival_habits, intake_seconds, saturation_rate
from planner.workload.setting import Setting
from planner.workload.step_costs import StepColumns
from planner.workload.under_load import Replica, percentiles

# Means that the simulation is centred on, and the number of requests that fit in memory.
MEANS = ("ttft_seconds", "tpot_seconds", "latency_seconds", "max_concurrency")
Read = Callable[[str], Numbers | None]


class BlockPercentiles:
    """The strategies of a serving block, with the means that ``read`` returns."""

    def __init__(self, block: Block, workload: ServeWorkload, read: Read) -> None:
        self._block, self._workload, self._read = block.compact, workload, read
        self._cache: dict[tuple[int, frozenset[str]], dict[str, float]] = {}

    def percentiles(self, row: int, names: Collection[str]) -> dict[str, float]:
        """Return the named percentiles of one strategy, in s; empty if it has none.

        Names are those of ``under_load.ALL_PERCENTILES``, such as ``ttft_p95_seconds``.
        """
        key = row, frozenset(names)
        if key not in self._cache:
            self._cache[key] = self._simulated(row, names)
        return self._cache[key]

    def _simulated(self, row: int, names: Collection[str]) -> dict[str, float]:
        max_requests, rate = int(self._max_requests[row]), self._workload.request_rate_per_second
        if max_requests < 1 or (rate is not None and rate >= self._saturation[row]):
            return {}
        row_means = {name: float(column[row]) for name, column in self._means.items()}
        means = Performance.model_construct(**row_means)  # type: ignore[arg-type]  # figures of a row
        replica = self._replica(row)
        in_flight = (rate or 0.0) / replica.number * (means.latency_seconds or 0.0)
        simulated = replica.serve(self._workload, max_requests, in_flight)
        return percentiles(means, simulated, Unrecorded(), self._intake[row], names)

    def _replica(self, row: int) -> Replica:
        return Replica(
            number=int(self._data[row]),
            habits=ArrivalHabits(*(float(column[row]) for column in self._habits)),
            budget_tokens=float(self._budgets[row] or self._workload.input_tokens),
            costs=lambda slots, budget: self._steps.costs(row, slots, budget),
        )

    @property
    def _setting(self) -> Setting:
        return self._block.setting

    @cached_property
    def _means(self) -> dict[str, Numbers]:
        columns = {name: self._read(name) for name in MEANS}
        return {name: column for name, column in columns.items() if column is not None}

    @cached_property
    def _data(self) -> Numbers:
        return self._block.column(self._setting.layout.data)

    @cached_property
    def _budgets(self) -> Numbers:
        return self._block.column(self._setting.layout.batch_tokens)

    @cached_property
    def _max_requests(self) -> Numbers:
        """Return the number of requests that fit on one replica of each strategy."""
        room = self._means.get("max_concurrency")
        return np.zeros(len(self._data)) if room is None else room // self._data

    @cached_property
    def _saturation(self) -> Numbers:
        max_requests = np.maximum(self._max_requests, 1.0)
        return self._block.column(saturation_rate(self._setting, self._workload, max_requests))  # type: ignore[arg-type]  # a column

    @cached_property
    def _intake(self) -> list[float]:
        seconds: list[float] = self._block.column(intake_seconds(self._setting)).tolist()
        return seconds

    @cached_property
    def _habits(self) -> tuple[Numbers, ...]:
        return tuple(map(self._block.column, arrival_habits(self._setting, self._workload)))

    @cached_property
    def _steps(self) -> StepColumns:
        """Return the step costs up to the largest batch of any strategy."""
        return StepColumns(self._setting, self._workload, int(self._max_requests.max()))
