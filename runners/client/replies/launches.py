"""Replies about launches of plans, and requests for them."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from runners.client.replies.base import Open, PageReply, Reply
from runners.client.replies.jobs import JobReply


class Launched(Reply):
    """The job, and the key of an endpoint, which is not shown again."""

    job: JobReply
    endpoint_key: str | None
    command: Annotated[
        str,
        Field(
            description="The engine's command line of an endpoint, with words in capitals for "
            "what the host fills in; empty for other jobs"
        ),
    ] = ""
    notes: Annotated[
        list[str],
        Field(description="What else of the document changed, and why an engine was chosen"),
    ] = []


class LaunchRequestReply(Reply):
    """A launch that waits for a person, or what was decided."""

    id: str
    plan: str
    plan_name: str
    launch: dict[str, Any]
    reason: str
    asked_by: str
    token: str
    asked_at: datetime
    state: Annotated[
        Open[Literal["waiting", "approved", "denied"]],
        Field(description="A withdrawn request is denied, and withdrawn is true"),
    ]
    withdrawn: Annotated[bool, Field(description="By the one who asked")]
    decided_by: str
    decided_at: datetime | None
    answer: str
    job: str | None
    url: str


class LaunchRequestPage(PageReply[LaunchRequestReply]):
    """A page of launches that wait for an approval."""
