"""Replies about observed jobs: what somebody else gave to a scheduler, and what was read of it."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from runners.client.replies.base import PageReply, Reply


class ObservedFigure(Reply):
    """A figure that the job's log or its scheduler tells, beside what the job's plan says."""

    name: Annotated[str, Field(description="With its unit at the end")]
    measured: float
    predicted: Annotated[float | None, Field(description="Modelled; null: the plan has none")]
    low: Annotated[float | None, Field(description="Of the 80 % interval")]
    high: float | None


class ObservedJobReply(Reply):
    """A job that somebody else started, as its host read it last."""

    id: str
    job_id: Annotated[str, Field(description="The scheduler's own id, or a pod's name")]
    name: Annotated[str, Field(description="In the scheduler; empty: not told")]
    host: Annotated[str, Field(description="Slug of the host whose scheduler has it")]
    team: Annotated[str, Field(description="Id of the team")]
    owner: Annotated[str, Field(description="Who added it; empty if the account is deleted")]
    plan: Annotated[str | None, Field(description="Id of the plan beside it")]
    created_at: datetime
    reported_at: Annotated[datetime | None, Field(description="Null: not read yet")]
    state: Annotated[str, Field(description="The scheduler's own word; empty: not read yet")]
    detail: Annotated[str, Field(description="Why it waits, or how it ended")]
    problem: Annotated[str, Field(description="Why nothing or less is known")]
    user: Annotated[str, Field(description="Whose it is, or what owns a pod")]
    nodes: str
    devices: Annotated[int | None, Field(description="GPUs; null: not told")]
    elapsed_seconds: int | None
    time_limit_seconds: int | None
    started_at_ms: Annotated[int | None, Field(description="Milliseconds since 1970")]
    ended_at_ms: int | None
    has_ended: bool
    exit_code: int | None
    signal: Annotated[int | None, Field(description="That ended it; null: none")]
    addresses: Annotated[list[str], Field(description="At which its log says that it serves")]
    server: Annotated[
        str | None, Field(description="Id of the observed server that it is; null: none")
    ]
    url: str


class ObservedJobDetail(ObservedJobReply):
    """An observed job with its figures, what its plan says, and its log."""

    figures: Annotated[list[ObservedFigure], Field(description="These calibrate nothing")]
    log: Annotated[list[str], Field(description="Its last lines")]
    log_path: str
    log_problem: Annotated[str, Field(description="Why there are no lines")]


class ObservedJobPage(PageReply[ObservedJobReply]):
    """A page of observed jobs."""
