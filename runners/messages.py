"""Every message between the server and a host.

HTTP bodies, Celery doorbells and Redis Stream entries are JSON of these models. Instants
(``_ms``) are milliseconds since the Unix epoch by the sender's clock; liveness is decided
only by the receiver's clock. Job specs are in ``runners/jobspec/``.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AllowInfNan,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    StringConstraints,
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
from runners.wire import (
    Amount,
    Celsius,
    Figure,
    Identifier,
    Message,
    Name,
    Seconds,
    Sentence,
    Share,
    TimestampMs,
    Watts,
)

PROTOCOL_VERSION = 1
MAX_BATCH_EVENTS = 500
MAX_POINT_VALUES = 256  # of one metric point
MAX_GPUS = 256  # of one host
MAX_ATTEMPTS = 2000  # folders on one host's disk
SHA256 = "^[0-9a-f]{64}$"
FOLDER_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}$"  # part of a URL and of a file path


# Enrolment


class EnrollRequest(Message):
    """Request to exchange a one-time token for a host credential."""

    token: str = Field(max_length=255)
    protocol_version: NonNegativeInt = Field(default=PROTOCOL_VERSION, le=1000)
    # The host's display name; None: its hostname.
    name: str | None = Field(default=None, max_length=255)
    host_id: Identifier | None = (
        None  # of a host that enrols again: its credential is then rotated
    )
    facts: HostFacts
    sent_at_ms: TimestampMs


class EnrollReply(Message):
    """The host's identity: ``credential`` for HTTP, ``command_key`` for doorbells."""

    host_id: str
    name: str
    credential: str
    command_key: str
    redis_url: str | None  # without a user; None: HTTP only, which is sufficient
    redis_secret: str | None = None  # of the host's two Redis users
    redis_ca_pem: str | None = None  # Redis's certificate authority, if not a public one
    server_time_ms: int
    beat_seconds: float = 10.0


class RotateRequest(Message):
    """SHA-256 digests of new secrets that the host generated; the secrets stay on the host."""

    credential_hash: str = Field(pattern=SHA256)
    redis_secret_hash: str = Field(pattern=SHA256)


class RotateReply(Message):
    """Confirmation that the new secrets have replaced the old ones."""

    command_key: str
    redis_url: str | None
    has_redis_user: bool  # whether the host has its own Redis users


# Heartbeats


class GpuLoad(Message):
    """One GPU's state at a heartbeat."""

    uuid: Name
    memory_used_bytes: NonNegativeInt
    utilization: Share
    power_watts: Watts | None = None
    temperature_celsius: Celsius | None = None
    foreign_pids: tuple[NonNegativeInt, ...] = Field(default=(), max_length=1000, fail_fast=True)
    # Clock throttle reasons: heat, power brake.
    slowed_by: tuple[Name, ...] = Field(default=(), max_length=8, fail_fast=True)


AttemptPhase = Literal["claimed", "running", "exited"]


class AttemptStatus(Message):
    """One attempt folder on the host's disk."""

    attempt_id: Identifier
    fence: Identifier
    phase: AttemptPhase
    last_seq: NonNegativeInt
    acked_seq: NonNegativeInt
    waits_for: Sentence = ""  # the scheduler's pending reason


class EpochShown(Message):
    """A site's epoch number, with the site's proof of it."""

    number: NonNegativeInt
    proof: str = Field(pattern=SHA256)


class Beat(Message):
    """A host's heartbeat, sent every ten seconds; the reply carries its orders."""

    boot_id: Identifier
    sent_at_ms: TimestampMs
    agent_version: str = Field(max_length=40)
    cpu_utilization: Share
    memory_available_bytes: NonNegativeInt
    disk_free_bytes: NonNegativeInt
    gpus: tuple[GpuLoad, ...] = Field(default=(), max_length=MAX_GPUS, fail_fast=True)
    attempts: tuple[AttemptStatus, ...] = Field(
        default=(), max_length=MAX_ATTEMPTS, fail_fast=True
    )
    # Messages for the host's page, such as a damaged folder or a full disk.
    problems: tuple[Sentence, ...] = Field(default=(), max_length=1000, fail_fast=True)
    facts: HostFacts | None = None  # at agent start
    microbench: Microbench | None = None  # once after it ran
    is_agent_start: bool = False
    environments: tuple[EnvironmentState, ...] | None = Field(default=None, max_length=32)
    epoch: EpochShown | None = None  # the highest epoch that this host has received


class Wanted(Message):
    """An attempt that this host should claim."""

    attempt_id: str
    fence: str
    needs: Needs | None = None


class StopOrder(Message):
    """Order to end an attempt: SIGTERM to its tree, ``grace_seconds``, then SIGKILL."""

    attempt_id: str
    reason: Reason
    grace_seconds: NonNegativeFloat = scaled(15.0, least=0.5)


class BeatReply(Message):
    """The desired state of a host; sufficient without the message broker."""

    server_time_ms: int
    wanted: tuple[Wanted, ...] = ()
    stop: tuple[StopOrder, ...] = ()
    acked: dict[str, int] = Field(default_factory=dict)  # attempt id -> stored seq
    forget: tuple[str, ...] = ()  # attempts whose exit is stored: the spool may be deleted
    run_microbench: bool = False
    rotate: bool = False  # an operator requested rotation: see RotateRequest
    epoch: EpochShown | None = None
    recheck: bool = False  # an operator fixed something: report the facts again
    environments: tuple[EnvironmentOrder, ...] = ()  # builds and removals requested by an operator


# Claim and start


class ClaimRequest(Message):
    """Request for an attempt's spec: exactly one ``claim_id`` ever gets it.

    ``checks`` are the host's preflight results; if one failed, the attempt is returned to the
    queue.
    """

    fence: Identifier
    claim_id: Identifier
    boot_id: Identifier
    checks: tuple[PreflightCheck, ...] = Field(default=(), max_length=32, fail_fast=True)


class RunRequest(Message):
    """What a claimed attempt runs; stored as ``spec.json`` of the attempt folder."""

    attempt_id: str
    job_id: str
    number: PositiveInt
    fence: str
    spec: JobSpec
    devices: tuple[RunDevice, ...] = ()
    max_duration_seconds: float | None = None
    gang: Gang | None = None  # None: one process


class ClaimReply(Message):
    """The claimed attempt's spec; it starts if ``may_start``, otherwise the host claims again."""

    request: RunRequest
    may_start: bool = True  # of a gang: every host has claimed and the port is free
    secrets: dict[SecretName, SecretStr] = Field(default_factory=dict)

    @field_serializer("secrets", when_used="json")
    def _open(self, secrets: dict[str, SecretStr]) -> dict[str, str]:
        """Serialise the plain values: only the reply to the claim contains them."""
        return {name: value.get_secret_value() for name, value in secrets.items()}


class Doorbell(Message):
    """The body of a Celery wake-up message; it carries no authority."""

    command_id: str
    kind: Literal["start", "stop", "ping"]
    attempt_id: str | None = None
    fence: str | None = None
    is_echoed: bool = False  # the worker returns its id through Redis


# Events of an attempt

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
    """The job process has started."""

    pid: NonNegativeInt
    boot_id: Identifier
    argv: tuple[str, ...]


class PhaseBody(Message):
    """A named phase of the job has begun; the name is shown to users."""

    name: str


class ProgressBody(Message):
    """The job's progress; ``eta_seconds`` is its own estimate of the remaining time."""

    done: Amount
    total: Amount
    unit: str  # "steps", "tokens", "seconds", "layers"
    eta_seconds: Seconds | None = None


MetricName = Annotated[str, StringConstraints(min_length=1, max_length=60)]


class MetricPoint(Message):
    """Named values at one instant from one source of the attempt.

    Names: loss, tokens_per_second, step_seconds, learning_rate, grad_norm, and of a mixture that
    moves source<i>_weight, source<i>_loss, source<i>_reference (source "job");
    rss_bytes (sum over the attempt's processes), cpu_utilization (cores busy: 1.0 is one core
    full) (source "host"); gpu<i>_memory_bytes, gpu<i>_utilization (source "gpu").
    """

    source: str = Field(min_length=1, max_length=40)
    values: dict[MetricName, Annotated[float, AllowInfNan(True)]] = Field(  # noqa: FBT003
        max_length=MAX_POINT_VALUES
    )
    step: int | None = None


class LogBody(Message):
    """A piece of the job's output."""

    stream: Literal["stdout", "stderr", "supervisor"]
    text: str


class ResultBody(Message):
    """Final measurements, under the planner's names where it predicts them.

    ``measured`` has base units (bytes, seconds, tokens per second, ratios); ``notes`` describe
    how they were measured; ``operator_class`` is the class that a figure calibrates.
    """

    measured: dict[Name, Figure]
    notes: dict[str, str] = Field(default_factory=dict)


ArtefactKind = Literal["model", "adapter", "report"]


class ArtefactBody(Message):
    """A folder or file in the attempt's output folder."""

    name: str = Field(pattern=FOLDER_NAME)
    kind: ArtefactKind
    total_bytes: NonNegativeInt
    files: dict[str, int]  # relative path -> bytes
    sha256: dict[str, str]  # relative path -> hex digest
    facts: dict[str, Any] = Field(default_factory=dict)


class EndpointBody(Message):
    """The attempt serves requests at this address; a test request succeeded."""

    host: IpAddress
    port: Port
    model: ServedName
    has_keys: bool


class EndConditions(Message):
    """The host's condition at the attempt's end, as far as readable."""

    memory_available_bytes: NonNegativeInt | None = None
    swap_free_bytes: NonNegativeInt | None = None
    group_memory_available_bytes: NonNegativeInt | None = None  # below the cgroup's limit
    disk_free_bytes: NonNegativeInt | None = None
    load: Amount | None = None  # one-minute load average
    temperature_celsius: Celsius | None = None  # the hottest sensor of the machine
    xids: tuple[str, ...] = ()  # the GPU driver's Xid errors during the attempt
    # Disturbances; None where not measurable, as on hosts of an older release.
    usable_cores: Amount | None = None  # available to the attempt by its limits
    taken_cores: Amount | None = None  # of those, mean use by other programs
    heat_throttled_ratio: Share | None = None  # share of the time, of the most throttled core
    clock_jump_seconds: Seconds | None = None  # sum of the clock jumps
    suspended_seconds: Seconds | None = None  # total time suspended


class ExitRecord(Message):
    """How an attempt ended; ``by`` is the writer of the record."""

    exit_code: int | None
    signal: int | None
    reason: Reason
    rank: NonNegativeInt | None = None  # that reported its failure first, if its output says
    by: Literal["supervisor", "reaper"]
    started_at_ms: TimestampMs | None
    ended_at_ms: TimestampMs
    last_lines: tuple[str, ...] = Field(default=(), max_length=1000, fail_fast=True)
    dropped_log_bytes: NonNegativeInt = 0
    dropped_events: NonNegativeInt = 0
    peak_rss_bytes: NonNegativeInt | None = None
    conditions: EndConditions | None = None


class RunEvent(Message):
    """One numbered event of an attempt: ``seq`` starts at 1 without gaps."""

    seq: PositiveInt
    t_ms: TimestampMs
    kind: EventKind
    body: dict[str, Any]


class EventBatch(Message):
    """Consecutive events after the last acknowledged number."""

    attempt_id: Identifier
    fence: Identifier
    events: tuple[RunEvent, ...] = Field(max_length=MAX_BATCH_EVENTS, fail_fast=True)


class UploadState(Message):
    """How many bytes of an artefact file the server has: the offset of the next part."""

    received_bytes: NonNegativeInt


class EventAck(Message):
    """The highest event number that the server has stored without gaps."""

    attempt_id: str
    acked_seq: NonNegativeInt
