"""Replies about hosts, their devices and environments, enrolments, pools and queues."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypeAliasType

from runners.client.replies.base import Open, PageReply, Reply
from runners.client.replies.jobs import PriorityWord
from runners.shared.kinds import EnvironmentStage

HostState = TypeAliasType(
    "HostState",
    Annotated[
        Open[Literal[
            "pending-enrolment", "checking", "ready", "draining", "maintenance", "retired",
        ]],
        Field(
            title="HostState",
            description="Lifecycle state of a host; contact is derived separately, from "
            "``last_seen_at``.",
        ),
    ],
)  # fmt: skip
Contact = TypeAliasType(
    "Contact",
    Annotated[
        Open[Literal["unknown", "live", "degraded", "unreachable"]],
        Field(
            title="Contact",
            description="Liveness of a host, from its heartbeats; it limits which new jobs the "
            "host gets.",
        ),
    ],
)
DeviceOfHost = Literal["gpu", "cpu", "slot"]
CheckStatus = Literal["succeeded", "failed", "checking", "queued"]


class DeviceReply(Reply):
    """A device of a host, and the job that holds it if the caller may see it."""

    id: str
    index: int
    kind: Annotated[Open[DeviceOfHost], Field(description="slot: a place in a scheduler's queue")]
    name: str
    memory_bytes: int
    is_present: Annotated[bool, Field(description="Whether the host reported it last")]
    is_held: Annotated[bool, Field(description="Whether a job holds it")]
    job: Annotated[str | None, Field(description="Id of that job, if the caller may see it")]
    jobs: Annotated[
        list[str], Field(description="Of a device that is shared by memory, all that it may see")
    ] = []
    cordoned_by: Annotated[str, Field(description="User name; empty: it takes jobs")]
    cordon_reason: str


class EnvironmentReply(Reply):
    """A named environment of a host, such as vllm, as the host reported it."""

    name: str
    stage: Open[EnvironmentStage]
    purpose: str
    size_bytes: Annotated[int, Field(description="On the disk; if it is not built, about")]
    num_packages: int
    words: Annotated[str, Field(description="The step of a build, or why it failed")]
    pending_action: Annotated[
        Open[Literal["", "build", "remove"]],
        Field(description="What it was ordered and has not done"),
    ]


class HostReply(Reply):
    """A host; operations name it by its ``slug``."""

    id: str
    slug: str
    name: str
    kind: Annotated[
        Open[Literal["agent", "slurm", "kubernetes", "ray", "virtual"]],
        Field(description="virtual: exists only in plans"),
    ]
    state: HostState
    contact: Contact
    silent_seconds: Annotated[float | None, Field(description="Since its last heartbeat")]
    pool: Annotated[str, Field(description="Name of the pool")]
    labels: dict[str, str]
    agent_version: str
    enrolled_at: datetime | None
    last_seen_at: datetime | None


class CheckReply(Reply):
    """One line of the check-list of a new host."""

    name: str
    status: Open[CheckStatus]
    sentence: str
    remedy: str
    command: Annotated[str, Field(description="To run on the host; empty: none")]


class HostDetail(HostReply):
    """A host with its devices, facts, measurements and checks."""

    address: Annotated[str, Field(description="Where a job's other hosts reach it; empty: first")]
    facts: Annotated[dict[str, Any], Field(description="What the host reported of itself")]
    planned: Annotated[
        dict[str, Any], Field(description="Of a virtual host: device, number and memory")
    ]
    keep_models_bytes: Annotated[
        int | None,
        Field(description="What the Hub's cache keeps at most: more is pruned; null: everything"),
    ] = None
    microbench: Annotated[dict[str, Any], Field(description="Rates that the host measured")]
    calibration: Annotated[
        dict[str, Any], Field(description="Factors by operator class from measured jobs")
    ]
    devices: list[DeviceReply]
    environments: Annotated[
        list[EnvironmentReply], Field(description="The agent's own first; empty before its first")
    ]
    is_ready: bool
    checks: list[CheckReply]


class HostPage(PageReply[HostReply]):
    """A page of hosts."""


class EnrolmentReply(Reply):
    """A one-time enrolment token for a host, with the command of each installation method."""

    id: str
    name: str
    token: str
    expires_at: datetime
    commands: dict[str, str]


class EnrolmentState(Reply):
    """The check-list of a host that is being enrolled."""

    id: str
    name: str
    expires_at: datetime
    used_at: datetime | None
    revoked_at: datetime | None
    host: str | None
    is_ready: bool
    checks: list[CheckReply]


class QueuedJob(Reply):
    """One turn of a queue; another team's job has neither id nor name."""

    position: Annotated[int | None, Field(description="From 1; null: held back")]
    job: Annotated[str | None, Field(description="Id of the job")]
    name: str
    owner: str
    priority: Open[PriorityWord]
    sentence: Annotated[str, Field(description="Why it waits")]
    start_at: Annotated[datetime | None, Field(description="Forecast of its start")]


class PoolReply(Reply):
    """A pool in which one of the caller's teams may launch."""

    id: str
    name: str
    team: Annotated[str, Field(description="Name of the team that owns the pool")]
    hosts: Annotated[list[str], Field(description="Slugs of its hosts that the caller may see")]


class QueueReply(PoolReply):
    """A pool with its queue in order; ``seen`` names this order when a job is moved."""

    queue: list[QueuedJob]
    seen: str


class PoolPage(PageReply[PoolReply]):
    """A page of pools."""
