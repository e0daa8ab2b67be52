"""Replies about code of repositories that jobs may run."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from runners.client.replies.base import PageReply, Reply


class TrustedCodeReply(Reply):
    """The own code of a repository at one commit, which the team's jobs may run."""

    id: str
    repository: Annotated[str, Field(description="As org/name")]
    commit: Annotated[str, Field(description="40 digits: no other commit's code runs")]
    reason: str
    allowed_by: Annotated[str, Field(description="User name of the admin")]
    created_at: datetime


class TrustedCodePage(PageReply[TrustedCodeReply]):
    """A page of the repositories whose code jobs may run."""
