"""The types of the API's requests and replies, written by ``manage.py client`` from its schema."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict

from planner.specs.estimate import PlanAnswer, PlanRequest
from planner.specs.model import ModelSpec
from runners.plans.document import (
    CompressPlan,
    FinetunePlan,
    GeneratePlan,
    PretrainPlan,
    ServePlan,
)
from runners.plans.launch import Launch


class Reply(BaseModel):
    """What the server sends: fields of a newer server are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), defer_build=True)


class Abandoning(TypedDict):
    """The confirmation to abandon a job: the names of its unreachable hosts."""

    host_name: str
    elsewhere: NotRequired[str]


class Alike(TypedDict):
    """Another host that looks like the same machine, and whether it is another one."""

    other: str
    is_apart: NotRequired[bool]


class ArtefactPage(Reply):
    """A page of artefacts."""

    items: list[ArtefactReply]
    next_cursor: str | None = None


class ArtefactReply(Reply):
    """A folder or file that the job's current attempt made; ``files`` are bytes by path."""

    name: str
    kind: Literal["model", "adapter", "report"] | str
    total_bytes: int
    is_complete: bool
    created_at: datetime
    files: dict[str, int]
    sha256: dict[str, str]


class AttemptReply(Reply):
    """One try of a job on one host; a job on several hosts has one per host and number."""

    id: str
    number: int
    rank: int
    host: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class CellReply(Reply):
    """One figure of one job in base units; null where there is none."""

    predicted: float | None
    measured: float | None
    ratio: float | None
    change: str
    state: str


class ChangeReply(Reply):
    """A change with which a job that ran out of memory would fit."""

    number: int
    title: str
    changes: dict[str, Any]


class CheckReply(Reply):
    """One line of the check-list of a new host."""

    name: str
    status: Literal["succeeded", "failed", "checking", "queued"] | str
    sentence: str
    remedy: str
    command: str


class ComparedFigure(Reply):
    """One figure of all jobs, in their order."""

    name: str
    label: str
    unit: str
    cells: list[CellReply]


class ComparedSetting(Reply):
    """One setting in which the jobs differ."""

    name: str
    values: list[str]


class Comparison(Reply):
    """Jobs side by side: their figures, and the settings in which they differ."""

    jobs: list[str]
    names: list[str]
    figures: list[ComparedFigure]
    settings: list[ComparedSetting]


Contact = Literal["unknown", "live", "degraded", "unreachable"]


class Cordon(TypedDict):
    """Why a device takes no new jobs."""

    reason: str


class DatasetPage(Reply):
    """A page of uploaded files."""

    items: list[DatasetReply]
    next_cursor: str | None = None


class DatasetReply(Reply):
    """An uploaded file of training data; ``note`` says what jobs do not learn from."""

    id: str
    name: str
    sha256: str
    size_bytes: int
    num_records: int
    format: (
        Literal["text", "chat", "sharegpt", "instruction", "completion", "classification"] | str
    )
    uploaded_by: str
    created_at: datetime
    note: str


class Decision(TypedDict):
    """Whether a measurement counts, and why."""

    decision: Literal["excluded", "included"]
    reason: str


class DevicePage(Reply):
    """A page of the hardware catalog."""

    items: list[DeviceSummary]
    next_cursor: str | None = None


class DeviceReply(Reply):
    """A device of a host, and the job that holds it if the caller may see it."""

    id: str
    index: int
    kind: Literal["gpu", "cpu", "slot"] | str
    name: str
    memory_bytes: int
    is_present: bool
    is_held: bool
    job: str | None
    cordoned_by: str
    cordon_reason: str


class DeviceSummary(Reply):
    """A device of the hardware catalog."""

    id: str
    name: str
    vendor: str
    kind: Literal["gpu", "cpu", "uma", "accelerator"] | str
    memory_bytes: int
    price_usd_per_hour: float | None


class DocumentToApprove(TypedDict):
    """A document whose launch a person is asked to approve, and why."""

    document: ServePlan | GeneratePlan | FinetunePlan | PretrainPlan | CompressPlan
    reason: NotRequired[str]


class EndpointReply(Reply):
    """The base URL of a running endpoint for OpenAI clients, and its model's name."""

    url: str
    model: str


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


class EnvironmentReply(Reply):
    """A named environment of a host, such as vllm, as the host reported it."""

    name: str
    stage: Literal["absent", "building", "ready", "failed", "outdated"] | str
    purpose: str
    size_bytes: int
    num_packages: int
    words: str
    pending_action: Literal["", "build", "remove"] | str


class EvaluationRequest(TypedDict):
    """Tasks of lm-evaluation-harness beside the perplexity; "" for none."""

    tasks: NotRequired[Literal["", "named", "folder"]]
    task_names: NotRequired[list[str]]
    task_folder: NotRequired[str]
    documents: NotRequired[int | None]


class EventPage(Reply):
    """A page of the history."""

    items: list[EventReply]
    next_cursor: str | None = None


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


class FormatReply(Reply):
    """A format that can express the plan, with notes on what it leaves out."""

    key: str
    title: str
    file_name: str
    notes: list[str]


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
    state: Literal["measured", "so_far", "warm_up", "predicted"] | str
    state_words: str
    definition: str
    how: str


class HistoryReply(Reply):
    """What happened to a job, as its page's events say it: who did it, and why."""

    at: datetime
    kind: str
    from_state: str
    to_state: str
    actor: str
    reason: str


class HostChanges(TypedDict):
    """New labels or another address; what is left out stays."""

    labels: NotRequired[dict[str, str] | None]
    address: NotRequired[str | None]


class HostReply(Reply):
    """A host; operations name it by its ``slug``."""

    id: str
    slug: str
    name: str
    kind: Literal["agent", "slurm", "virtual"] | str
    state: HostState | str
    contact: Contact | str
    silent_seconds: float | None
    pool: str
    labels: dict[str, str]
    agent_version: str
    enrolled_at: datetime | None
    last_seen_at: datetime | None


class HostPage(Reply):
    """A page of hosts."""

    items: list[HostReply]
    next_cursor: str | None = None


HostState = Literal["pending-enrolment", "checking", "ready", "draining", "maintenance", "retired"]


class Imported(Reply):
    """A draft of pasted text, and what became of each setting."""

    plan: PlanReply
    kind: str
    understood: list[dict[str, Any]]
    ignored: list[dict[str, Any]]
    unknown: list[dict[str, Any]]
    missing: list[str]


class JobReply(Reply):
    """A job in a list."""

    id: str
    name: str
    kind: (
        Literal[
            "train", "compress", "evaluate", "benchmark", "generate", "serve", "drill", "prove"
        ]
        | str
    )
    model: str
    state: JobState | str
    is_final: bool
    team: str
    owner: str
    host: str
    pool: str
    plan: str | None
    priority: Literal["low", "normal", "high"] | str
    num_hosts: int
    progress: ProgressReply
    elapsed_seconds: float
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    url: str


class JobEvents(Reply):
    """Events after a sequence number, in order; continue after ``last_seq``."""

    attempt: str | None
    events: list[StoredEvent]
    last_seq: int
    history: list[HistoryReply] = []


class JobFiguresReply(Reply):
    """Every figure of a job, as shown on its page."""

    job: str
    state: JobState | str
    as_of: datetime
    figures: list[FigureReply]
    targets: list[TargetReply]


class JobPage(Reply):
    """A page of jobs."""

    items: list[JobReply]
    next_cursor: str | None = None


class JobResult(Reply):
    """What an ended job measured, in base units (bytes, seconds, tokens per second, ratios)."""

    measured: dict[str, float]
    notes: dict[str, str]


class JobSeries(Reply):
    """The requested metrics of a job's current attempt."""

    job: str
    attempt: str | None
    series: list[SeriesReply]
    reported: list[str]


JobState = Literal[
    "draft",
    "queued",
    "preflight",
    "starting",
    "running",
    "stopping",
    "succeeded",
    "failed",
    "error",
    "stopped",
    "expired",
]


class LaunchNote(Reply):
    """Whether the plan can be launched, and what that would do."""

    can: bool
    title: str
    text: str


class LaunchRequestPage(Reply):
    """A page of launches that wait for an approval."""

    items: list[LaunchRequestReply]
    next_cursor: str | None = None


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
    state: Literal["waiting", "approved", "denied"] | str
    withdrawn: bool
    decided_by: str
    decided_at: datetime | None
    answer: str
    job: str | None
    url: str


class LaunchToApprove(TypedDict):
    """A launch that a person is asked to approve, and why."""

    launch: NotRequired[Launch]
    reason: NotRequired[str]


class Launched(Reply):
    """The job, and the key of an endpoint, which is not shown again."""

    job: JobReply
    endpoint_key: str | None


class LogLine(Reply):
    """One line of output; ``seq`` is the number of its event."""

    seq: int
    at: datetime
    stream: Literal["stdout", "stderr", "supervisor"] | str
    text: str


class LogReply(Reply):
    """Lines of a job's current attempt in order; continue after ``last_seq``."""

    attempt: str | None
    lines: list[LogLine]
    last_seq: int


class TokenReply(Reply):
    """An access token; its text is not stored."""

    id: str
    name: str
    hint: str
    scope: Scope | str
    user: str
    is_service: bool
    budget_gpu_hours: float | None
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class MeReply(Reply):
    """Who calls, with which scope, in which team."""

    user: str
    scope: Scope | str
    budget_gpu_hours: float | None
    rest_gpu_hours: float | None
    team: TeamReply
    teams: list[TeamReply]


class MeasurementPage(Reply):
    """A page of a job's measurements."""

    items: list[MeasurementReply]
    next_cursor: str | None = None


class MeasurementReply(Reply):
    """A measured figure beside its prediction; whether it calibrates its host."""

    id: int
    metric: str
    predicted: float
    measured: float
    ratio: float
    host: str
    is_counted: bool
    may_decide: bool


class MemberPage(Reply):
    """A page of members."""

    items: list[MemberReply]
    next_cursor: str | None = None


class MemberReply(Reply):
    """A member of the team."""

    user: str
    role: Role | str


class ModelChanges(TypedDict):
    """What changes of a team's model."""

    name: str


class ModelReply(Reply):
    """A model of the catalog, or of the team."""

    id: str
    name: str
    source: Literal["catalog", "config", "folder", "job"] | str
    num_parameters: int
    host: str
    created_at: datetime | None


class ModelPage(Reply):
    """A page of models."""

    items: list[ModelReply]
    next_cursor: str | None = None


class NewHost(TypedDict):
    """The host that is to be enrolled; labels are names with values, such as gpu: 4090."""

    name: str
    pool: NotRequired[str]
    labels: NotRequired[dict[str, str]]


class NewModel(TypedDict):
    """A model by its ``config.json``, as Hugging Face publishes it."""

    name: str
    config: dict[str, Any]


class NewToken(TypedDict):
    """What a new token is for, and how long it is valid."""

    name: str
    scope: Scope
    days: NotRequired[float]
    is_service: NotRequired[bool]
    budget_gpu_hours: NotRequired[float | None]


class NewVirtualHost(TypedDict):
    """A machine that the team considers buying or renting."""

    name: str
    device: str
    num_devices: NotRequired[int]
    memory_gib: NotRequired[float | None]


class OutcomeReply(Reply):
    """Why a job ended, and what to do next."""

    reason: str
    sentence: str
    next_step: str


class Pasted(TypedDict):
    """Another tool's command line or configuration, and where the plan is to run."""

    text: str
    host: NotRequired[str]
    pool: NotRequired[str]


class PlanFormats(Reply):
    """The formats that can express a plan's first proposal."""

    plan: str
    formats: list[FormatReply]


class PlanFromJob(TypedDict):
    """How a job becomes a plan.

    ``clone``: its plan with its launch options; ``need``: with the measured memory need as limit,
    of a job that ran out of memory; ``change``: with one of the changes of its post-mortem.
    """

    how: NotRequired[Literal["clone", "need", "change"]]
    change: NotRequired[int | None]


class PlanPage(Reply):
    """A page of plans."""

    items: list[PlanSummary]
    next_cursor: str | None = None


class PlanSummary(Reply):
    """A plan in a list."""

    id: str
    name: str
    state: Literal["draft", "computed"] | str
    verdict: (
        Literal[
            "fits",
            "tight",
            "narrow",
            "slow",
            "long",
            "too-long",
            "over-context",
            "does-not-fit",
            "refused",
            "computed",
            "draft",
            "incomplete",
        ]
        | str
    )
    version: int | None
    series: str
    team: str
    owner: str
    saved_at: datetime
    url: str


class PlannerRequest(TypedDict):
    """A planner's request, whole or in part, and where the plan is to run."""

    request: dict[str, Any]
    host: NotRequired[str]
    pool: NotRequired[str]
    name: NotRequired[str]


class PoolPage(Reply):
    """A page of pools."""

    items: list[PoolReply]
    next_cursor: str | None = None


class PoolReply(Reply):
    """A pool in which one of the caller's teams may launch."""

    id: str
    name: str
    team: str
    hosts: list[str]


class PostMortem(Reply):
    """Why a job failed: its exit, its last lines, and the smallest changes that would fit."""

    exit_code: int | None
    signal: int | None
    last_lines: list[str]
    changes: list[ChangeReply]


class ProgressReply(Reply):
    """How far a job is; ``share`` is between 0 and 1, ``eta_seconds`` the time that remains.

    A running job that has reported no progress for unusually long has no ``eta_seconds``.
    """

    share: float | None
    done: float | None
    total: float | None
    unit: str
    phase: str
    words: str
    eta_seconds: float | None
    quiet_seconds: float | None


class QueueMove(TypedDict):
    """A new place or priority of a queued job."""

    move: NotRequired[Literal["up", "down"] | None]
    seen: NotRequired[str]
    priority: NotRequired[Literal["low", "normal", "high"] | None]


class QueuedJob(Reply):
    """One turn of a queue; another team's job has neither id nor name."""

    position: int | None
    job: str | None
    name: str
    owner: str
    priority: Literal["low", "normal", "high"] | str
    sentence: str
    start_at: datetime | None


class QuotaChanges(TypedDict):
    """New limits; what is left out stays, null removes a limit."""

    max_devices: NotRequired[int | None]
    max_gpu_hours_per_month: NotRequired[float | None]
    max_duration_hours: NotRequired[float | None]
    max_queued_per_user: NotRequired[int | None]
    share: NotRequired[float | None]


class QuotaReply(Reply):
    """The limits of a team; null means none. ``sentences`` says what of them is used."""

    max_devices: int | None
    max_gpu_hours_per_month: float | None
    max_duration_hours: float | None
    max_queued_per_user: int
    share: float
    sentences: list[str]


Role = Literal["viewer", "practitioner", "operator", "admin"]


class Saving(TypedDict):
    """How a draft is saved."""

    name: NotRequired[str]
    save_as: NotRequired[Literal["next", "new"]]


Scope = Literal["read", "plan", "launch", "admin"]


class SearchMatch(Reply):
    """One match of a search; ``id`` is what its kind's operations take."""

    kind: Literal["plan", "job", "host", "model", "technique"] | str
    id: str
    name: str


class SearchPage(Reply):
    """A page of matches."""

    items: list[SearchMatch]
    next_cursor: str | None = None


class SecretPage(Reply):
    """A page of secrets."""

    items: list[SecretReply]
    next_cursor: str | None = None


class SecretReply(Reply):
    """A secret's name; its value is never shown."""

    id: str
    name: str
    changed_by: str
    changed_at: datetime
    last_given_at: datetime | None


class SecretValue(TypedDict):
    """The new value of a secret; its lines are kept as they are."""

    value: str


class SeriesReply(Reply):
    """One metric; a null value is a gap."""

    source: str
    metric: str
    t_ms: list[int]
    value: list[float | None]
    low: list[float | None]
    high: list[float | None]


class SessionPage(Reply):
    """A page of sessions."""

    items: list[SessionReply]
    next_cursor: str | None = None


class SessionReply(Reply):
    """A browser in which the caller is logged in."""

    browser: str
    address: str
    began_at: datetime
    seen_at: datetime


class StoredEvent(Reply):
    """One numbered event of an attempt."""

    seq: int
    at: datetime
    kind: (
        Literal[
            "started",
            "phase",
            "progress",
            "metric",
            "log",
            "result",
            "artefact",
            "endpoint",
            "exited",
        ]
        | str
    )
    body: dict[str, Any]


class StoredFilesPage(Reply):
    """A page of what ended jobs keep."""

    items: list[StoredFilesReply]
    next_cursor: str | None = None


class StoredFilesReply(Reply):
    """What one attempt of an ended job keeps on its host's disk, as the host last reported."""

    job: str
    job_name: str
    is_deleted: bool
    attempt: str
    host: str
    checkpoint_bytes: int
    output_bytes: int
    ended_at: datetime | None
    pending: Literal["", "checkpoint", "all"] | str


class SuggestionReply(Reply):
    """A change of the plan that the planner proposes."""

    number: int
    sentence: str
    changes: dict[str, Any]


class TargetReply(Reply):
    """One latency target of the plan, evaluated at a percentile of the requests."""

    figure: str
    limit_seconds: float
    percentile: int
    measured: float | None
    state: Literal["met", "missed", "unjudged"] | str
    chance: float | None


class TeamReply(Reply):
    """A team of the caller, and the caller's role in it."""

    id: str
    name: str
    role: Role | str


class TechniquePage(Reply):
    """A page of techniques."""

    items: list[TechniqueReply]
    next_cursor: str | None = None


class TechniqueReply(Reply):
    """A technique, whether a job runs it here, and what proves that."""

    id: str
    title: str
    state: Literal["planned", "runs", "proven"] | str
    headline: str
    phases: list[str]
    job_kind: str
    library: str


class Ticket(Reply):
    """A ticket that opens ``/live/`` for an hour, for its topics, in the header Live-Ticket."""

    ticket: str


class TokenPage(Reply):
    """A page of access tokens."""

    items: list[TokenReply]
    next_cursor: str | None = None


class TwoJobs(TypedDict):
    """Where the classifier's two jobs run, and the ZeRO stage that is compared with DDP."""

    host: str
    zero_stage: NotRequired[Literal[1, 2, 3]]


class VerdictReply(Reply):
    """The verdict in words, as on the plan's page."""

    tone: str
    state: str
    sentence: str
    detail: str
    warnings: list[str]


class VersionPage(Reply):
    """A page of a plan's versions."""

    items: list[VersionReply]
    next_cursor: str | None = None


class VersionReply(Reply):
    """One saved version of a plan, and what changed against the one it came from."""

    id: str
    version: int
    name: str
    verdict: (
        Literal[
            "fits",
            "tight",
            "narrow",
            "slow",
            "long",
            "too-long",
            "over-context",
            "does-not-fit",
            "refused",
            "computed",
            "draft",
            "incomplete",
        ]
        | str
    )
    saved_by: str
    saved_at: datetime
    words: str
    changes: list[str]
    num_jobs: int


class Withdrawal(TypedDict):
    """Why a request is withdrawn."""

    reason: NotRequired[str]


class ExportReply(FormatReply):
    """A plan in another tool's format, with the script that measures its predictions."""

    text: str
    measure: str


class HostDetail(HostReply):
    """A host with its devices, facts, measurements and checks."""

    address: str
    facts: dict[str, Any]
    planned: dict[str, Any]
    microbench: dict[str, Any]
    calibration: dict[str, Any]
    devices: list[DeviceReply]
    environments: list[EnvironmentReply]
    is_ready: bool
    checks: list[CheckReply]


class JobDetail(JobReply):
    """A job with its spec, its prediction and its attempts."""

    spec: dict[str, Any]
    prediction: dict[str, dict[str, Any]]
    result: JobResult
    max_duration_seconds: float | None
    max_retries: int
    num_retries: int
    waiting: str | None
    silent_seconds: float | None
    endpoint: EndpointReply | None
    outcome: OutcomeReply | None
    attempts: list[AttemptReply]
    allowed: list[Literal["stop", "run_again", "resume", "delete", "abandon"] | str]


class MadeToken(TokenReply):
    """A new token with its text, which is not shown again."""

    token: str


class ModelDetail(ModelReply):
    """A model with its shape."""

    shape: ModelSpec | None
    kv_bytes_per_token: dict[str, float]
    facts: dict[str, Any]
    aliases: list[str]


class PlanReply(PlanSummary):
    """A plan with its document, its question for the planner, and the planner's answer.

    ``answer`` is null if the draft cannot be planned; ``problem`` then says why. ``notes`` says
    what else the last change changed.
    """

    revision: int
    document: dict[str, Any]
    request: PlanRequest | None
    answer: PlanAnswer | None
    problem: str
    verdict_words: VerdictReply
    launch: LaunchNote
    suggestions: list[SuggestionReply]
    is_outdated: bool
    notes: list[str] = []


class QueueReply(PoolReply):
    """A pool with its queue in order; ``seen`` names this order when a job is moved."""

    queue: list[QueuedJob]
    seen: str
