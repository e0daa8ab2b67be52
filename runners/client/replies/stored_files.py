"""Replies about files that ended jobs keep on their hosts."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from runners.client.replies.base import Open, PageReply, Reply


class StoredFilesReply(Reply):
    """What one attempt of an ended job keeps on its host's disk, as the host last reported."""

    job: Annotated[str, Field(description="Id of the job")]
    job_name: str
    is_deleted: Annotated[bool, Field(description="Whether the job is deleted from the history")]
    attempt: Annotated[str, Field(description="Id of the attempt")]
    host: Annotated[str, Field(description="Slug of the host")]
    checkpoint_bytes: Annotated[int, Field(description="What a resumed job goes on from")]
    output_bytes: Annotated[int, Field(description="What it made, such as a model")]
    ended_at: datetime | None
    pending: Annotated[
        Open[Literal["", "checkpoint", "all"]],
        Field(description="What its host is ordered to delete, and has not yet"),
    ]


class StoredFilesPage(PageReply[StoredFilesReply]):
    """A page of what ended jobs keep."""
