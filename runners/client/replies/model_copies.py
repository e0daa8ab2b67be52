"""Replies about copies of models into the Hub's caches of hosts."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from runners.client.replies.base import Open, PageReply, Reply


class ModelCopyReply(Reply):
    """A model on its way over the site into the Hub's cache of a host."""

    id: str
    host: Annotated[str, Field(description="Slug of the host that receives it")]
    source: Annotated[
        str | None, Field(description="Slug of the host that sends it; null: a person's folder")
    ]
    repository: Annotated[str, Field(description="As org/name")]
    commit: str
    state: Open[Literal["active", "done", "failed", "stopped"]]
    problem: Annotated[str, Field(description="Why it ended; empty: it did not, or is done")]
    size_bytes: Annotated[int, Field(description="Of all files; 0: not known yet")]
    received_bytes: Annotated[
        int, Field(description="Held by the site, and not yet taken by the host")
    ]
    there_bytes: Annotated[int, Field(description="Of the files that the host has verified")]
    asked_by: Annotated[str, Field(description="User name")]
    created_at: datetime
    ended_at: datetime | None


class CopiedFileReply(Reply):
    """A file of a copy, and where it is."""

    path: str
    size_bytes: int
    received_bytes: Annotated[int, Field(description="Held by the site: where to go on")]
    is_there: Annotated[bool, Field(description="Whether the host has verified it")]


class ModelCopyDetail(ModelCopyReply):
    """A copy with its files, in the order of sending."""

    files: list[CopiedFileReply]


class PartReply(Reply):
    """Where the next part of a file goes on."""

    received_bytes: Annotated[int, Field(description="Held by the server, or by the host")]


class ModelCopyPage(PageReply[ModelCopyReply]):
    """A page of the copies to a host."""
