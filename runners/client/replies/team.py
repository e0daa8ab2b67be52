"""Replies about the caller, teams, members, tokens, sessions, secrets, limits and events."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypeAliasType

from runners.client.replies.base import Open, PageReply, Reply

Role = TypeAliasType(
    "Role",
    Annotated[
        Open[Literal["viewer", "practitioner", "operator", "admin"]],
        Field(
            title="Role",
            description="Permissions of a member; each role includes the ones before it.",
        ),
    ],
)
Scope = TypeAliasType(
    "Scope",
    Annotated[
        Open[Literal["read", "plan", "launch", "admin"]],
        Field(
            title="Scope",
            description="What a token permits; each scope includes the ones before it.",
        ),
    ],
)


class TeamReply(Reply):
    """A team of the caller, and the caller's role in it."""

    id: str
    name: str
    role: Role


class MeReply(Reply):
    """Who calls, with which scope, in which team."""

    user: str
    scope: Scope
    budget_gpu_hours: Annotated[float | None, Field(description="Of the token; null: no limit")]
    rest_gpu_hours: Annotated[float | None, Field(description="What is left of the budget")]
    team: TeamReply
    teams: list[TeamReply]


class MemberReply(Reply):
    """A member of the team."""

    user: str
    role: Role


class MemberPage(PageReply[MemberReply]):
    """A page of members."""


class TokenReply(Reply):
    """An access token; its text is not stored."""

    id: str
    name: str
    hint: Annotated[str, Field(description="The first characters of its text")]
    scope: Scope
    user: str
    is_service: Annotated[bool, Field(description="Whether its account is a service's")]
    budget_gpu_hours: Annotated[float | None, Field(description="Null: no limit of its own")]
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class MadeToken(TokenReply):
    """A new token with its text, which is not shown again."""

    token: str


class TokenPage(PageReply[TokenReply]):
    """A page of access tokens."""


class SecretReply(Reply):
    """A secret's name; its value is never shown."""

    id: str
    name: str
    changed_by: str
    changed_at: datetime
    last_given_at: datetime | None


class SecretPage(PageReply[SecretReply]):
    """A page of secrets."""


class SessionReply(Reply):
    """A browser in which the caller is logged in."""

    browser: str
    address: str
    began_at: datetime
    seen_at: datetime


class SessionPage(PageReply[SessionReply]):
    """A page of sessions."""


class QuotaReply(Reply):
    """The limits of a team; null means none. ``sentences`` says what of them is used."""

    max_devices: Annotated[int | None, Field(description="Held at once, over all pools")]
    max_gpu_hours_per_month: float | None
    max_duration_hours: Annotated[float | None, Field(description="Of one job")]
    max_queued_per_user: int
    share: Annotated[float, Field(description="Fair-share weight: 2 gets two turns for one of 1")]
    sentences: list[str]


class EventReply(Reply):
    """An event of the team's history."""

    id: int
    at: datetime
    kind: str
    subject: str
    from_state: str
    to_state: str
    reason: str
    actor: str
    detail: dict[str, Any]


class EventPage(PageReply[EventReply]):
    """A page of the history."""
