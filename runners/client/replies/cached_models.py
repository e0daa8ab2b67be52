"""Replies about the models in the Hub's caches of hosts."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from runners.client.replies.base import PageReply, Reply


class CachedModelReply(Reply):
    """A model in the Hub's cache of a host, as the host last reported it."""

    repository: Annotated[str, Field(description="As org/name")]
    commit: Annotated[str, Field(description="Empty: a download that has not ended")]
    size_bytes: Annotated[
        int, Field(description="Of its files; of those that commits share, both count them")
    ]
    num_files: int
    used_at: Annotated[
        datetime | None, Field(description="Last use, as the host's file system recorded it")
    ]
    is_complete: Annotated[
        bool, Field(description="Whether the weights that a job reads are all there")
    ]
    pinned_by: Annotated[str, Field(description="User name; empty: not pinned")]
    is_needed: Annotated[bool, Field(description="Whether a queued or live job needs it")]
    is_deleting: Annotated[
        bool, Field(description="Whether its host is ordered to delete it, and has not yet")
    ]
    num_jobs: Annotated[int, Field(description="Jobs of the caller's teams that used it there")]
    last_job: Annotated[str | None, Field(description="Id of the newest of them")]


class CachedModelPage(PageReply[CachedModelReply]):
    """A page of the models of a host's cache."""
