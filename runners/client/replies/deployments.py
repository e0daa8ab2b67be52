"""Replies about deployments: models under a lasting name, clients' keys, and usage."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from runners.client.replies.base import Open, PageReply, Reply

DeploymentStateWord = Open[Literal["asleep", "loading", "ready", "silent", "failing", "paused"]]


class ReplicaReply(Reply):
    """A job that serves a deployment, or loads its model."""

    job: Annotated[str, Field(description="Id of the job")]
    job_state: str
    host: Annotated[str, Field(description="Slug of its host; empty while it is queued")]
    plan: Annotated[str, Field(description="Id of the plan's version that it runs")]
    is_leaving: Annotated[bool, Field(description="It gets no new requests, and is stopped")]
    created_at: datetime
    ready_at: datetime | None
    silent_since: Annotated[
        datetime | None,
        Field(description="A gateway found that nothing listens there; null: it answers"),
    ]


class DeploymentReply(Reply):
    """A deployment: what it runs, and how it is."""

    id: str
    name: Annotated[str, Field(description="That clients give as their model")]
    aliases: Annotated[list[str], Field(description="Further names that it answers to")]
    fallbacks: Annotated[
        list[str], Field(description="Deployments that answer when it cannot, in their order")
    ]
    state: DeploymentStateWord
    problem: Annotated[str, Field(description="Why its last start failed")]
    seconds_to_go: Annotated[
        float | None, Field(description="Until it is loaded, by its own last loads")
    ]
    load_seconds: Annotated[float | None, Field(description="Median of its last loads")]
    team: Annotated[str, Field(description="Id of the team")]
    owner: Annotated[str, Field(description="User name; empty if the account is deleted")]
    plan: Annotated[str, Field(description="Id of the version that it runs from its next start")]
    plan_name: str
    launch: Annotated[
        dict[str, Any], Field(description="Options of its jobs, other than the usual ones")
    ]
    idle_seconds: Annotated[
        float | None, Field(description="Without a request, until it sleeps; null: never")
    ]
    is_kept_awake: Annotated[bool, Field(description="It is started again whenever it ends")]
    warm_hours: Annotated[str, Field(description="Hours in which it is kept awake; empty: none")]
    min_replicas: Annotated[int, Field(description="Jobs that serve it, while it is awake")]
    max_replicas: Annotated[int, Field(description="Jobs that serve it, with many requests")]
    is_paused: Annotated[bool, Field(description="No request wakes it")]
    replicas: list[ReplicaReply]
    base_url: Annotated[str, Field(description="Of the gateway, for OpenAI's clients")]
    created_at: datetime
    url: str


class DeploymentPage(PageReply[DeploymentReply]):
    """A page of deployments."""


class DifferenceReply(Reply):
    """What a draft changes, in words."""

    label: str
    running: Annotated[str, Field(description="What counts now")]
    drafted: Annotated[str, Field(description="What would count")]


class DeploymentDraftReply(Reply):
    """A change of a deployment that is not rolled out."""

    deployment: Annotated[str, Field(description="Id of the deployment")]
    plan: Annotated[str | None, Field(description="Id of the plan's version; null: it stays")]
    fields: Annotated[dict[str, Any], Field(description="Other fields that it changes")]
    by: Annotated[str, Field(description="Who kept it; empty if the account is deleted")]
    saved_at: datetime
    differences: Annotated[
        list[DifferenceReply],
        Field(description="Also what follows from another plan: memory, limits, load"),
    ]


class KeyAlarmReply(Reply):
    """A share of a key's tokens of a day or a month that was used; told once."""

    period: Annotated[str, Field(description="Day (2026-11-30) or month (2026-11), UTC")]
    percent: Annotated[int, Field(description="Of the limit: 80 or 100")]
    used_tokens: Annotated[int, Field(description="When it was seen")]
    limit_tokens: int
    at: datetime


class KeyReply(Reply):
    """A client's key; its text is shown when it is made, and never again."""

    id: str
    name: str
    hint: Annotated[str, Field(description="Its first characters")]
    is_service: Annotated[
        bool, Field(description="Of a program of the team; it outlasts who made it")
    ]
    owner: Annotated[
        str, Field(description="User name; empty: a service's, or the account is deleted")
    ]
    models: Annotated[list[str], Field(description="Names of deployments; empty: all")]
    requests_per_minute: int | None
    max_concurrency: int | None
    tokens_per_day: int | None
    tokens_per_month: Annotated[int | None, Field(description="Of the calendar, UTC; null: any")]
    hold_seconds: float
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    rotated_at: Annotated[datetime | None, Field(description="When it last got a new secret")]
    earlier_until: Annotated[
        datetime | None, Field(description="Until then the secret before also opens")
    ]
    tokens_today: Annotated[int, Field(description="Of prompts and answers, since midnight UTC")]
    tokens_this_month: Annotated[int, Field(description="As today, since the first of the month")]
    alarms: Annotated[list[KeyAlarmReply], Field(description="Of today and of this month")]


class KeyPage(PageReply[KeyReply]):
    """A page of keys."""


class MadeKey(KeyReply):
    """A new or rotated key with its text, which is not shown again."""

    key: str


class UsageReply(Reply):
    """What a key used of a deployment on a day (UTC)."""

    day: Annotated[str, Field(description="As 2026-11-30")]
    key: Annotated[str, Field(description="Id of the key")]
    key_name: str
    owner: Annotated[
        str, Field(description="User name of the key's owner; empty: a service's, or deleted")
    ]
    team: Annotated[str, Field(description="Id of the key's team")]
    deployment: Annotated[str, Field(description="Id of the deployment")]
    deployment_name: str
    requests: int
    failed: Annotated[int, Field(description="Of the requests: answered with 500 or above")]
    cut: Annotated[int, Field(description="Of the requests: ended before their answer's end")]
    prompt_tokens: int
    cached_tokens: Annotated[int, Field(description="Of the prompt tokens, where engines tell")]
    completion_tokens: int
    usd: Annotated[
        float | None,
        Field(
            description="Share of the day's device time by tokens, at what the hosts' labels "
            "usd_per_hour said; null where one says nothing; of today: so far"
        ),
    ]


class UsagePage(PageReply[UsageReply]):
    """A page of usage."""
