"""What a benchmark with a profile leaves: the operators of a prefill and of a decode step.

Seconds are an operator's own, without what it calls; speed is never read from a profiled pass.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

ARTEFACT = "operators"
MAX_ROWS = 60  # a phase; what is beyond them is summed up in one row
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Bound = Literal["compute", "memory_bandwidth", "overhead"]  # the planner's operator classes


class OperatorRow(BaseModel):
    """One operator with one set of shapes in one phase."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Phase
    name: str = Field(max_length=120)
    shapes: str = Field(max_length=240)  # of its inputs; empty where it is several
    calls: PositiveInt
    seconds: NonNegativeFloat
    flops: NonNegativeFloat | None = None  # None: not known of such an operator
    bound: Bound


class ProfileReport(BaseModel):
    """The profile of one workload; ``seconds`` of a phase are those of all its rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: PositiveInt
    prompt_tokens: PositiveInt
    decode_steps: PositiveInt
    slowdown_ratio: NonNegativeFloat  # the profiled pass over the same one without a profiler
    flops_per_second: NonNegativeFloat  # of a large product, and
    bytes_per_second: NonNegativeFloat  # of a large copy on the same device, to judge by
    rows: tuple[OperatorRow, ...] = Field(max_length=2 * MAX_ROWS + 2)

    def of(self, phase: Phase) -> list[OperatorRow]:
        """Return a phase's rows, the longest first."""
        rows = [row for row in self.rows if row.phase == phase]
        return sorted(rows, key=lambda row: -row.seconds)

    def seconds_by_bound(self, phase: Phase) -> dict[Bound, float]:
        """Return a phase's seconds by what bounds them, the longest first."""
        found: dict[Bound, float] = {}
        for row in self.of(phase):
            found[row.bound] = found.get(row.bound, 0.0) + row.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))
