"""Replies about jobs: lists, details, logs, events, series, figures, artefacts."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypeAliasType

from runners.client.replies.base import Open, PageReply, Reply
from runners.jobspec.kinds import KindName
from runners.shared.kinds import ArtefactKind, EventKind

JobState = TypeAliasType(
    "JobState",
    Annotated[
        Open[Literal[
            "draft", "queued", "preflight", "starting", "running", "stopping", "succeeded",
            "failed", "error", "stopped", "expired",
        ]],
        Field(title="JobState", description="The states of a job; the last five are final."),
    ],
)  # fmt: skip
Action = Literal["stop", "run_again", "resume", "delete", "abandon"]


PriorityWord = Literal["low", "normal", "high"]


class ProgressReply(Reply):
    """How far a job is; ``share`` is between 0 and 1, ``eta_seconds`` the time that remains.

    A running job that has reported no progress for unusually long has no ``eta_seconds``.
    """

    share: float | None
    done: Annotated[float | None, Field(description="Of ``total``, in ``unit``")]
    total: float | None
    unit: Annotated[str, Field(description="Such as steps or tokens")]
    phase: Annotated[str, Field(description="What the job does now, such as Training")]
    words: Annotated[str, Field(description="All of it as a text")]
    eta_seconds: float | None
    quiet_seconds: Annotated[
        float | None,
        Field(description="Since the last report, if unusually long for a running job"),
    ]


class OutcomeReply(Reply):
    """Why a job ended, and what to do next."""

    reason: Annotated[str, Field(description="A stable key, such as out_of_memory")]
    sentence: str
    next_step: str


class JobReply(Reply):
    """A job in a list."""

    id: str
    name: str
    kind: Open[KindName]
    model: Annotated[str, Field(description="Display name of the model")]
    state: JobState
    is_final: Annotated[bool, Field(description="Whether the job has ended")]
    team: Annotated[str, Field(description="Id of the team")]
    owner: Annotated[str, Field(description="User name; empty if the account is deleted")]
    host: Annotated[str, Field(description="Slug of the host; empty while none is chosen")]
    pool: Annotated[str, Field(description="Name of the pool")]
    plan: Annotated[str | None, Field(description="Id of the plan it was launched from")]
    priority: Open[PriorityWord]
    num_hosts: int
    progress: ProgressReply
    elapsed_seconds: Annotated[float, Field(description="Since it started, until it ended")]
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    url: str


class JobPage(PageReply[JobReply]):
    """A page of jobs."""


class AttemptReply(Reply):
    """One try of a job on one host; a job on several hosts has one per host and number."""

    id: str
    number: Annotated[int, Field(description="Of the try, from 1")]
    rank: Annotated[int, Field(description="Of the host among the job's hosts, from 0")]
    host: Annotated[str, Field(description="Slug of the host")]
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class EndpointReply(Reply):
    """The base URL of a running endpoint for OpenAI clients, and its model's name."""

    url: str
    model: str


class JobResult(Reply):
    """What an ended job measured, in base units (bytes, seconds, tokens per second, ratios)."""

    measured: Annotated[dict[str, float], Field(description="Figures by the planner's names")]
    notes: Annotated[dict[str, str], Field(description="How a figure was measured")]


class LoadLimitReply(Reply):
    """What a search for the highest load within the latency targets found: from met to missed."""

    figure: Annotated[str, Field(description="The limit's name among the figures of the result")]
    unit: Annotated[str, Field(description="Of met and missed: clients or requests/s")]
    targets: Annotated[dict[str, float], Field(description="Longest seconds of each figure")]
    met: Annotated[float | None, Field(description="Highest level within the targets, if any")]
    missed: Annotated[float | None, Field(description="Lowest level above it, if any misses")]
    ending: Annotated[
        Open[Literal["found", "highest", "lowest", "points", "seconds"]],
        Field(
            description="Found within 7 %; at the highest or lowest level that there is; or out "
            "of measurements or time"
        ),
    ]
    words: Annotated[str, Field(description="All of it as a sentence")]
    predicted: Annotated[float | None, Field(description="The plan's limit at launch")]


class JobDetail(JobReply):
    """A job with its spec, its prediction and its attempts."""

    spec: dict[str, Any]  # as it was stored; ``openapi`` documents it as a JobSpec
    prediction: Annotated[
        dict[str, dict[str, Any]],
        Field(description="By figure: value, low and high of the 80 % interval, and unit"),
    ]
    result: Annotated[JobResult, Field(description="Empty until the job has ended")]
    load_limit: Annotated[
        LoadLimitReply | None, Field(description="Of a load test that searched for its levels")
    ] = None
    max_duration_seconds: Annotated[float | None, Field(description="Null: no limit")]
    max_retries: Annotated[int, Field(description="After a failure of the host")]
    num_retries: int
    waiting: Annotated[str | None, Field(description="Why a queued job waits, as a sentence")]
    silent_seconds: Annotated[
        float | None, Field(description="Since the host was last heard, if it is silent")
    ]
    endpoint: EndpointReply | None
    outcome: OutcomeReply | None
    attempts: list[AttemptReply]
    allowed: Annotated[
        list[Open[Action]],
        Field(description="What the caller may do with the job as it is now"),
    ]


class LogLine(Reply):
    """One line of output; ``seq`` is the number of its event."""

    seq: int
    at: datetime
    stream: Open[Literal["stdout", "stderr", "supervisor"]]
    text: str


class LogReply(Reply):
    """Lines of a job's current attempt in order; continue after ``last_seq``."""

    attempt: str | None
    lines: list[LogLine]
    last_seq: int


class SeriesReply(Reply):
    """One metric; a null value is a gap."""

    source: Annotated[str, Field(description="Who reported it: job, host or a device")]
    metric: str
    t_ms: Annotated[
        list[int], Field(description="Instants in milliseconds since 1970-01-01 UTC, rising")
    ]
    value: Annotated[list[float | None], Field(description="In the metric's base unit")]
    low: Annotated[list[float | None], Field(description="Least of the points in each value")]
    high: Annotated[list[float | None], Field(description="Greatest of the points in each value")]


class JobSeries(Reply):
    """The requested metrics of a job's current attempt."""

    job: str
    attempt: str | None
    series: list[SeriesReply]
    reported: Annotated[
        list[str], Field(description="Names of every metric that the attempt has reported")
    ]


class FigureReply(Reply):
    """One figure in base units; ``state`` says whether it is measured, and final."""

    name: str
    label: str
    unit: str
    measured: float | None
    predicted: float | None
    predicted_low: float | None
    predicted_high: float | None
    ratio: float | None
    state: Open[Literal["measured", "so_far", "warm_up", "predicted"]]
    state_words: str
    definition: str
    how: str


class TargetReply(Reply):
    """One latency target of the plan, evaluated at a percentile of the requests."""

    figure: str
    limit_seconds: float
    percentile: int
    measured: float | None
    state: Open[Literal["met", "missed", "unjudged"]]
    chance: float | None


class JobFiguresReply(Reply):
    """Every figure of a job, as shown on its page."""

    job: Annotated[str, Field(description="Id of the job")]
    state: JobState
    as_of: datetime
    figures: list[FigureReply]
    targets: list[TargetReply]


class StoredEvent(Reply):
    """One numbered event of an attempt."""

    seq: int
    at: datetime
    kind: Open[EventKind]
    body: Annotated[dict[str, Any], Field(description="Fields of the kind")]


class HistoryReply(Reply):
    """What happened to a job, as its page's events say it: who did it, and why."""

    at: datetime
    kind: Annotated[str, Field(description="Such as job.state or job.created")]
    from_state: str
    to_state: str
    actor: Annotated[str, Field(description="A user name, host:SLUG or system:PART")]
    reason: str


class JobEvents(Reply):
    """Events after a sequence number, in order; continue after ``last_seq``."""

    attempt: str | None
    events: list[StoredEvent]
    last_seq: int
    history: Annotated[
        list[HistoryReply],
        Field(description="Of the job, oldest first; empty unless ``after`` is 0"),
    ] = []


class Ticket(Reply):
    """A ticket that opens ``/live/`` for an hour, for its topics, in the header Live-Ticket."""

    ticket: str


class ArtefactReply(Reply):
    """A folder or file that the job's current attempt made; ``files`` are bytes by path."""

    name: str
    kind: Open[ArtefactKind]
    total_bytes: int
    is_complete: Annotated[bool, Field(description="Whether all of its bytes have arrived")]
    created_at: datetime
    files: Annotated[dict[str, int], Field(description="Bytes by path")]
    sha256: Annotated[dict[str, str], Field(description="Hexadecimal digest by path")]


class ArtefactPage(PageReply[ArtefactReply]):
    """A page of artefacts."""
