"""Replies about tunings: trials of a plan's best strategies on its host."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from runners.client.replies.base import Open, PageReply, Reply

TuningStateWord = Open[Literal["running", "succeeded", "failed", "stopped"]]
CandidateStateWord = Open[
    Literal[
        "untried", "waiting", "running", "measured", "behind", "failed", "left_out"
    ]
]  # fmt: skip


class GainReply(Reply):
    """The gain over the plan's own choice, as a share of that, with its 90 % interval."""

    value: float
    low: float
    high: float


class CandidateReply(Reply):
    """One way to run the plan: what the planner says of it, and what was measured."""

    number: Annotated[int, Field(description="0 is the plan's own choice")]
    name: str
    settings: Annotated[dict[str, Any], Field(description="What differs from the plan's choice")]
    predicted: Annotated[float, Field(description="The figure as planned, in its base unit")]
    predicted_low: Annotated[float | None, Field(description="Of its 80 % interval")]
    predicted_high: float | None
    predicted_peak_memory_bytes: int
    state: CandidateStateWord
    reason: Annotated[str, Field(description="Why it failed, is behind or was left out")]
    note: Annotated[str, Field(description="What disturbed a measurement")]
    measured: Annotated[
        float | None,
        Field(description="Geometric mean of its repeated measurements, else the first"),
    ]
    error_ratio: Annotated[float | None, Field(description="Its standard error, as a share")]
    num_measured: int
    meets_targets: Annotated[bool | None, Field(description="The plan's latency targets")]
    jobs: Annotated[list[str], Field(description="Ids of its trials' jobs, in their order")]


class TuningReply(Reply):
    """A tuning with its candidates, those that were tried first."""

    id: str
    name: Annotated[str, Field(description="Of the plan")]
    state: TuningStateWord
    problem: Annotated[str, Field(description="Why it failed, or made no version")]
    plan: Annotated[str | None, Field(description="Id of the version that is tuned")]
    host: Annotated[str, Field(description="Name of the host")]
    team: Annotated[str, Field(description="Id of the team")]
    owner: Annotated[str, Field(description="User name; empty if the account is deleted")]
    created_at: datetime
    ended_at: datetime | None
    options: Annotated[dict[str, Any], Field(description="What it may try and spend")]
    figure: Annotated[str, Field(description="That decides")]
    unit: str
    num_trials: Annotated[int, Field(description="That have ended")]
    elapsed_seconds: Annotated[float, Field(description="Of all trials together")]
    planned_seconds: Annotated[
        float | None, Field(description="At most; of a dry run alone, with an assumed start")
    ]
    candidates: list[CandidateReply]
    best: Annotated[int | None, Field(description="Number of the best candidate so far")]
    chosen: Annotated[
        int | None, Field(description="The best one if it is certainly better, else the plan's")
    ]
    gain: Annotated[GainReply | None, Field(description="Of the best over the plan's own choice")]
    words: Annotated[str, Field(description="What was found, as sentences")]
    result: Annotated[str | None, Field(description="Id of the version with the best strategy")]
    url: str


class TuningPage(PageReply[TuningReply]):
    """A page of tunings."""
