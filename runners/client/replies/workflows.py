"""Replies about workflows: jobs that follow one another."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from runners.client.replies.base import Open, PageReply, Reply

WorkflowStateWord = Open[Literal["running", "succeeded", "failed", "stopped"]]
StepStateWord = Open[Literal["waiting", "running", "succeeded", "failed", "stopped"]]


class ForecastFigure(Reply):
    """A planned figure with its 80 % interval, in its base unit; of a sum the sums of the ends."""

    value: float
    low: float | None = None
    high: float | None = None
    unit: str


class StepReply(Reply):
    """One job of a workflow: what was planned, and what it has become."""

    position: Annotated[int, Field(description="From 0; the jobs of a sweep have the same")]
    variant: Annotated[int, Field(description="Of the jobs of a sweep, from 0")]
    goal: str
    name: str
    settings: Annotated[dict[str, Any], Field(description="The values of a sweep's job")]
    state: StepStateWord
    problem: Annotated[str, Field(description="Why no job is started, or why it failed")]
    job: Annotated[str | None, Field(description="Id of the job, once it is started")]
    job_state: Annotated[str, Field(description="Empty before it is started")]
    model: Annotated[str | None, Field(description="Id of the team's model that it made")]
    is_best: Annotated[bool, Field(description="Of a sweep: the next step goes on with it")]
    elapsed_seconds: float | None
    forecast: dict[str, ForecastFigure]
    measured: Annotated[dict[str, float], Field(description="Figures to compare, in base units")]


class WorkflowReply(Reply):
    """A workflow with its steps."""

    id: str
    name: str
    state: WorkflowStateWord
    team: Annotated[str, Field(description="Id of the team")]
    owner: Annotated[str, Field(description="User name; empty if the account is deleted")]
    created_at: datetime
    ended_at: datetime | None
    steps: list[StepReply]
    forecast: Annotated[
        dict[str, ForecastFigure],
        Field(description="Sums over the steps that have the figure: duration, disk, price"),
    ]
    url: str


class WorkflowPage(PageReply[WorkflowReply]):
    """A page of workflows."""


class WorkflowStarted(Reply):
    """The workflow, and the key of its endpoint, which is not shown again."""

    workflow: WorkflowReply
    endpoint_key: str | None
