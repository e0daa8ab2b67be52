"""Every shape that goes over the wire between the server and a host.

HTTP bodies, Celery doorbells and Redis Stream entries are JSON of these models. Instants
are ``_ms`` since the Unix epoch by the sender's clock; liveness is judged only by the
receiver's own. Job specs stand in ``runners/jobspec/``.
"""

from typing import Any, Literal

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    field_serializer,
)

from runners.addresses import IpAddress, Port
from runners.endpoint_spec import ServedName
from runners.environment_messages import EnvironmentOrder, EnvironmentState
from runners.facts import HostFacts, Microbench
from runners.jobspec import JobSpec, SecretName
from runners.places import Gang, RunDevice
from runners.preflight_messages import Needs, PreflightCheck
from runners.reasons import Reason
from runners.timing import scaled
from runners.wire import Message

PROTOCOL_VERSION = 1
MAX_BATCH_EVENTS = 500
SHA256 = "^[0-9a-f]{64}$"
FOLDER_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}$"  # part of an address and of a path


# Enrolment


class EnrollRequest(Message):
    """A one-time token against a credential of the host's own."""

    token: str
    protocol_version: int = PROTOCOL_VERSION
    name: str | None = None  # what the operator calls the host; None: its hostname
    host_id: str | None = None  # set by a host that enrols again: its credential is rotated
    facts: HostFacts
    sent_at_ms: int


class EnrollReply(Message):
    """Who the host is from now on: ``credential`` for HTTP, ``command_key`` for doorbells."""

    host_id: str
    name: str
    credential: str
    command_key: str
    redis_url: str | None  # without a user; None: HTTP only, which is always enough
    redis_secret: str | None = None  # of the host's own two Redis users
    redis_ca_pem: str | None = None  # who vouches for Redis, where it is no public authority
    server_time_ms: int
    beat_seconds: float = 10.0


class RotateRequest(Message):
    """New secrets that the host made itself; only their SHA-256 digests leave it."""

    credential_hash: str = Field(pattern=SHA256)
    redis_secret_hash: str = Field(pattern=SHA256)


class RotateReply(Message):
    """The new secrets hold from now on, the old ones no more."""

    command_key: str
    redis_url: str | None
    has_redis_user: bool  # whether Redis knows the host by its own users


# Beats


class GpuLoad(Message):
    """One GPU's state at a beat."""

    uuid: str
    memory_used_bytes: NonNegativeInt
    utilization: float  # 0-1
    power_watts: float | None = None
    temperature_celsius: float | None = None
    foreign_pids: tuple[int, ...] = ()


AttemptPhase = Literal["claimed", "running", "exited"]


class AttemptStatus(Message):
    """One attempt folder on the host's disk."""

    attempt_id: str
    fence: str
    phase: AttemptPhase
    last_seq: NonNegativeInt
    acked_seq: NonNegativeInt
    waits_for: str = ""  # what a scheduler says why it has not begun


class EpochShown(Message):
    """How far a site had come, with the proof that it said so itself."""

    number: NonNegativeInt
    proof: str = Field(pattern=SHA256)


class Beat(Message):
    """What a host says every ten seconds; the reply carries what it should do."""

    boot_id: str
    sent_at_ms: int
    agent_version: str
    cpu_utilization: float  # 0-1
    memory_available_bytes: NonNegativeInt
    disk_free_bytes: NonNegativeInt
    gpus: tuple[GpuLoad, ...] = ()
    attempts: tuple[AttemptStatus, ...] = ()
    problems: tuple[str, ...] = ()  # sentences for the host's page: a damaged folder, a full disk
    facts: HostFacts | None = None  # at agent start
    microbench: Microbench | None = None  # once after it ran
    is_agent_start: bool = False
    environments: tuple[EnvironmentState, ...] | None = Field(default=None, max_length=32)
    epoch: EpochShown | None = None  # the highest that this host has seen


class Wanted(Message):
    """An attempt that this host should have claimed."""

    attempt_id: str
    fence: str
    needs: Needs | None = None


class StopOrder(Message):
    """An attempt that must end: TERM to its tree, ``grace_seconds``, then KILL."""

    attempt_id: str
    reason: Reason
    grace_seconds: NonNegativeFloat = scaled(15.0, least=0.5)


class BeatReply(Message):
    """The desired state of a host: enough to work with the broker away."""

    server_time_ms: int
    wanted: tuple[Wanted, ...] = ()
    stop: tuple[StopOrder, ...] = ()
    acked: dict[str, int] = Field(default_factory=dict)  # attempt id -> stored seq
    forget: tuple[str, ...] = ()  # attempts whose exit is stored: the folder's spool may go
    run_microbench: bool = False
    rotate: bool = False  # an operator wants new secrets: see RotateRequest
    epoch: EpochShown | None = None
    recheck: bool = False  # an operator mended something: say anew what the host is
    environments: tuple[EnvironmentOrder, ...] = ()  # what an operator wants built or removed


# Claim and start


class ClaimRequest(Message):
    """Ask for the spec of an attempt: exactly one ``claim_id`` ever gets it.

    ``checks`` are those of the host's preflight; with one that failed the attempt is given back.
    """

    fence: str
    claim_id: str
    boot_id: str
    checks: tuple[PreflightCheck, ...] = Field(default=(), max_length=32)


class RunRequest(Message):
    """What a claimed attempt has to run; it becomes ``spec.json`` of the attempt folder."""

    attempt_id: str
    job_id: str
    number: PositiveInt
    fence: str
    spec: JobSpec
    devices: tuple[RunDevice, ...] = ()
    max_duration_seconds: float | None = None
    gang: Gang | None = None  # None: one process


class ClaimReply(Message):
    """The claimed attempt's spec; it starts once ``may_start``, else the host asks again."""

    request: RunRequest
    may_start: bool = True  # of a gang: every host has claimed and the port is free
    secrets: dict[SecretName, SecretStr] = Field(default_factory=dict)

    @field_serializer("secrets", when_used="json")
    def _open(self, secrets: dict[str, SecretStr]) -> dict[str, str]:
        """Write the values where the claim is answered, and nowhere else."""
        return {name: value.get_secret_value() for name, value in secrets.items()}


class Doorbell(Message):
    """The body of a Celery message: it carries no authority, only news that something waits."""

    command_id: str
    kind: Literal["start", "stop", "ping"]
    attempt_id: str | None = None
    fence: str | None = None
    is_echoed: bool = False  # the worker answers with its id through Redis


# What an attempt reports

EventKind = Literal[
    "started",  # StartedBody
    "phase",  # PhaseBody
    "progress",  # ProgressBody
    "metric",  # MetricPoint
    "log",  # LogBody
    "result",  # ResultBody
    "artefact",  # ArtefactBody
    "endpoint",  # EndpointBody
    "exited",  # ExitRecord
]


class StartedBody(Message):
    """The job process runs."""

    pid: int
    boot_id: str
    argv: tuple[str, ...]


class PhaseBody(Message):
    """A named part of the job began, in words a person reads."""

    name: str


class ProgressBody(Message):
    """How far the job is; ``eta_seconds`` is the job's own estimate of what is left."""

    done: NonNegativeFloat
    total: NonNegativeFloat
    unit: str  # "steps", "tokens", "seconds", "layers"
    eta_seconds: NonNegativeFloat | None = None


class MetricPoint(Message):
    """Named values at one instant from one source of the attempt.

    Names: loss, tokens_per_second, step_seconds, learning_rate, grad_norm, and of a mixture that
    moves source<i>_weight, source<i>_loss, source<i>_reference (source "job");
    rss_bytes (sum over the attempt's processes), cpu_utilization (cores busy: 1.0 is one core
    full) (source "host"); gpu<i>_memory_bytes, gpu<i>_utilization (source "gpu").
    """

    source: str
    values: dict[str, float]
    step: int | None = None


class LogBody(Message):
    """A piece of the job's output."""

    stream: Literal["stdout", "stderr", "supervisor"]
    text: str


class ResultBody(Message):
    """Final figures, by the planner's names where it predicts them.

    ``measured`` holds numbers in base units (bytes, seconds, tokens per second, ratios);
    ``notes`` says how they were taken; ``operator_class`` is what the figure calibrates.
    """

    measured: dict[str, float]
    notes: dict[str, str] = Field(default_factory=dict)


ArtefactKind = Literal["model", "adapter", "report"]


class ArtefactBody(Message):
    """A folder or file that the attempt leaves in its output folder."""

    name: str = Field(pattern=FOLDER_NAME)
    kind: ArtefactKind
    total_bytes: NonNegativeInt
    files: dict[str, int]  # relative path -> bytes
    sha256: dict[str, str]  # relative path -> hex digest
    facts: dict[str, Any] = Field(default_factory=dict)


class EndpointBody(Message):
    """The attempt answers requests there from now on: it was asked and answered well."""

    host: IpAddress
    port: Port
    model: ServedName
    has_keys: bool


class EndConditions(Message):
    """How the host was when the attempt ended, as far as it could be read."""

    memory_available_bytes: NonNegativeInt | None = None
    swap_free_bytes: NonNegativeInt | None = None
    group_memory_available_bytes: NonNegativeInt | None = None  # of the control group's limit
    disk_free_bytes: NonNegativeInt | None = None
    load: NonNegativeFloat | None = None  # processes that wanted to run, mean of a minute
    temperature_celsius: FiniteFloat | None = None  # the hottest of the machine's own sensors
    xids: tuple[str, ...] = ()  # the GPU driver's reports while the attempt ran


class ExitRecord(Message):
    """How an attempt ended; ``by`` says who wrote it."""

    exit_code: int | None
    signal: int | None
    reason: Reason
    by: Literal["supervisor", "reaper"]
    started_at_ms: int | None
    ended_at_ms: int
    last_lines: tuple[str, ...] = ()
    dropped_log_bytes: NonNegativeInt = 0
    dropped_events: NonNegativeInt = 0
    peak_rss_bytes: NonNegativeInt | None = None
    conditions: EndConditions | None = None


class RunEvent(Message):
    """One numbered event of an attempt: ``seq`` starts at 1 and has no gap."""

    seq: PositiveInt
    t_ms: int
    kind: EventKind
    body: dict[str, Any]


class EventBatch(Message):
    """Consecutive events, sent from the last acknowledged number on."""

    attempt_id: str
    fence: str
    events: tuple[RunEvent, ...] = Field(max_length=MAX_BATCH_EVENTS)


class UploadState(Message):
    """How much of one artefact file the server holds: where the next part starts."""

    received_bytes: NonNegativeInt


class EventAck(Message):
    """The highest number that the server's database holds without a gap."""

    attempt_id: str
    acked_seq: NonNegativeInt
