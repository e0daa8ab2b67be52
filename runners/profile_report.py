"""The report of a profiled benchmark: operators of a prefill and of a decode step.

Times are self times; speed figures never come from a profiled pass.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

ARTEFACT = "operators"
MAX_ROWS = 60  # per phase; the remaining operators are summed in one row
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Bound = Literal["compute", "memory_bandwidth", "overhead"]  # the planner's operator classes


class OperatorRow(BaseModel):
    """One operator with one set of shapes in one phase."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Phase
    name: str = Field(max_length=120)
    shapes: str = Field(max_length=240)  # of its inputs; empty for a sum of operators
    calls: PositiveInt
    seconds: NonNegativeFloat
    flops: NonNegativeFloat | None = None  # None: unknown for this operator
    bound: Bound


class ProfileReport(BaseModel):
    """The profile of one workload; a phase's rows cover its whole time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: PositiveInt
    prompt_tokens: PositiveInt
    decode_steps: PositiveInt
    slowdown_ratio: NonNegativeFloat  # time with the profiler over time without
    flops_per_second: NonNegativeFloat  # of a large matrix product, and
    bytes_per_second: NonNegativeFloat  # of a large copy: the device's limits for comparison
    rows: tuple[OperatorRow, ...] = Field(max_length=2 * MAX_ROWS + 2)

    def of(self, phase: Phase) -> list[OperatorRow]:
        """Return a phase's rows, longest first."""
        rows = [row for row in self.rows if row.phase == phase]
        return sorted(rows, key=lambda row: -row.seconds)

    def seconds_by_bound(self, phase: Phase) -> dict[Bound, float]:
        """Return a phase's seconds per bound, longest first."""
        seconds: dict[Bound, float] = {}
        for row in self.of(phase):
            seconds[row.bound] = seconds.get(row.bound, 0.0) + row.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))
