"""Every message between the server and a host, with the placement of a job's processes.

All shapes refuse unknown fields. A host reads the server's replies with ``extra="ignore"``: a
server may be newer than its hosts.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AllowInfNan,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveInt,
    SecretStr,
    Strict,
    StringConstraints,
    ValidationError,
    field_serializer,
)

from runners.jobspec import JobDocument, JobSpec, SecretName
from runners.jobspec.base import (
    Amount,
    CachedRepository,
    Celsius,
    Figure,
    HubData,
    HubModel,
    Identifier,
    IpAddress,
    Message,
    Name,
    Port,
    RevisionText,
    Seconds,
    Sentence,
    Share,
    StoredModelRef,
    TimestampMs,
    Watts,
    excerpt,
    plain,
    truncate,
)
from runners.jobspec.references import Reference, with_references
from runners.jobspec.serve import ServedName
from runners.shared.facts import HostFacts, Microbench
from runners.shared.kinds import ArtefactKind, EnvironmentStage, EventKind
from runners.shared.observed import MOST_OBSERVED, ObservedJobReport
from runners.shared.reasons import Reason
from runners.shared.timing import LONGEST_BEAT_SECONDS, STOP_GRACE_SECONDS

# Placement of a job's processes: devices, addresses, ports and node ranks.


# Names the gang of a process whose node shares the attempt's folder with the other nodes.
GANG_VARIABLE = "SLIPWAY_GANG"


class Gang(JobDocument):
    """One host's part of a distributed job: node rank, rendezvous and addresses."""

    node_rank: NonNegativeInt
    num_nodes: PositiveInt
    num_processes: PositiveInt = 1  # ranks on this host
    master_address: IpAddress
    master_port: Port
    own_address: IpAddress
    rendezvous_id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    key: str = Field(
        default="", pattern=r"^([0-9a-f]{64})?$", repr=False
    )  # authenticates a stage chain's messages


class RunDevice(Message):
    """A device that is allocated to an attempt."""

    kind: Literal["gpu", "cpu", "slot"]
    index: NonNegativeInt
    uuid: str


# States of a host's named environments, and an operator's orders for them.


MAIN = "main"  # the interpreter that the agent itself runs in
EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]


class EnvironmentState(Message):
    """The state of one environment on the host's disk."""

    name: EnvironmentName
    stage: EnvironmentStage
    purpose: str = Field(default="", max_length=400)
    size_bytes: NonNegativeInt = 0  # measured if built, else as stated by its pins
    num_packages: NonNegativeInt = 0
    words: str = Field(default="", max_length=600)  # the step of a build, or why it failed
    done: NonNegativeInt = 0  # steps of a build
    total: NonNegativeInt = 0
    is_tried: bool = True  # False: never built by the project
    order_id: str = Field(default="", max_length=40)  # the last order that was carried out


class EnvironmentOrder(Message):
    """Order to build or remove an environment; repeated until the host confirms it."""

    name: EnvironmentName
    action: Literal["build", "remove"]
    order_id: str = Field(max_length=40)


# The files that ended attempts keep on a host's disk, and the orders to delete them.


MAX_STORED = 5000  # attempts in a report, the largest first
FilePart = Literal["checkpoint", "all"]
StoredBytes = Annotated[int, Field(ge=0, le=2**63 - 1)]  # what a column of the database holds


class StoredFiles(Message):
    """What one ended attempt keeps on the host's disk."""

    attempt_id: Identifier
    checkpoint_bytes: StoredBytes = 0  # what a resumed job goes on from
    output_bytes: StoredBytes = 0  # what it made, such as a model


class FilesOrder(Message):
    """Order to delete files of an ended attempt; repeated until a report shows it done."""

    attempt_id: str
    part: FilePart


# The models in the Hub's cache of a host, the orders to delete them, and the rule of pruning.


MAX_CACHED = 2000  # models in a report, the most recently used first
Commit = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40})?$")]


class CachedModel(Message):
    """A repository at a commit in the Hub's cache; commit "": a download that has not ended."""

    repository: CachedRepository
    commit: Commit
    size_bytes: StoredBytes
    num_files: StoredBytes = 0
    used_at_ms: TimestampMs = 0  # as far as the file system records it
    is_complete: bool = False  # the weights that a job reads are all there


class PrunedModel(Message):
    """A model that the host deleted to keep its rule."""

    repository: CachedRepository
    commit: Commit
    freed_bytes: StoredBytes
    at_ms: TimestampMs


LinkSpeed = Annotated[float, Field(gt=0, le=1e15)]  # bytes per second


class LinkReport(Message):
    """How fast files come from a source, as a host's transfers measured: see runners.hub.links."""

    link: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}$")]
    address: Annotated[str, StringConstraints(max_length=300)]
    bytes_per_second: LinkSpeed  # the median
    low: LinkSpeed
    high: LinkSpeed
    num_transfers: int = Field(ge=1, le=1000)
    is_limited: bool = False  # the host allows no more


class CacheReport(Message):
    """What the Hub's cache of a host holds, what was pruned since the last report, and the links.

    ``links``: how fast its files came; sites of an earlier release do not know them.
    """

    models: tuple[CachedModel, ...] = Field(default=(), max_length=MAX_CACHED, fail_fast=True)
    pruned: tuple[PrunedModel, ...] = Field(default=(), max_length=MAX_CACHED, fail_fast=True)
    links: tuple[LinkReport, ...] = Field(
        default=(), max_length=8, exclude_if=lambda links: not links
    )


class CacheOrders(Message):
    """What a host's cache keeps and deletes; models are named org/name@commit.

    ``delete`` is repeated until a report shows it done. ``keep_bytes``: more is pruned, the least
    recently used first, but never ``kept``, where org/name stands for every commit.
    """

    delete: tuple[str, ...] = ()
    keep_bytes: NonNegativeInt | None = None  # None: nothing is pruned
    kept: tuple[str, ...] = ()


# Copies of models over the site: from a host's cache, or a person's folder, into another cache.


MAX_COPIED_FILES = 5000
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
# The name of a blob in the Hub's cache: SHA-256 of a large file, git's SHA-1 of a small one.
Etag = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")]


class CopyFile(Message):
    """A file of a model that is copied; ``etag`` is its digest."""

    path: FilePath
    size_bytes: StoredBytes
    etag: Etag


class CopyOrder(Message):
    """Order to take part in a copy, repeated until it has ended.

    ``revision``: the branch or tag that stands for the commit; "": none.
    """

    copy_id: Identifier
    part: Literal["send", "receive"]
    repository: CachedRepository
    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
    revision: RevisionText = ""


class CopyFiles(Message):
    """What the source of a copy sends, in the order of sending.

    ``revision``: the branch or tag that stands for the commit there; "": none.
    """

    revision: RevisionText = ""
    files: tuple[CopyFile, ...] = Field(min_length=1, max_length=MAX_COPIED_FILES, fail_fast=True)


class CopiedFile(CopyFile):
    """A file of a copy, and where it is."""

    received_bytes: NonNegativeInt  # that the site holds, verified if they are all
    is_there: bool  # on the host that receives: the site holds it no longer


class CopyState(Message):
    """How far a copy is; no files: its source has not said what it sends."""

    is_active: bool
    files: tuple[CopiedFile, ...] = ()


class CopyEnd(Message):
    """A host ends a copy: all files are there, or ``problem`` says why it cannot go on."""

    problem: Sentence = ""


# The requirements that a host checks before a claim, and the check results.


_PRINTED = r"^[^\x00]*$"  # PostgreSQL rejects null bytes in text
MAX_SENTENCE = 600


class Needs(Message):
    """The requirements of an attempt, which its host checks before the claim."""

    kind: str
    weight_dtype: str = ""
    compute_dtype: str = ""  # of a training's matrix products
    attention: str = ""  # the attention implementation of a training
    environment: str = MAIN
    memory_bytes: NonNegativeInt = 0  # lower bound of the predicted peak, per device
    context_tokens: NonNegativeInt = 0  # of llama.cpp's KV cache, all slots; 0: not given
    model: StoredModelRef | None = None
    teacher: StoredModelRef | None = None  # of a distillation; hosts of earlier releases ignore it
    data: tuple[HubData, ...] = ()  # data sets that the job downloads
    packages: tuple[str, ...] = ()  # additional packages that its environment must pin
    num_gpus: NonNegativeInt = 0  # that its split engines share; 0: no split
    gpus: tuple[str, ...] = ()  # uuids of its GPUs; empty: all GPUs of the host
    ports: tuple[int, ...] = ()  # ports that it listens on
    compiles: bool = False  # it compiles kernels at start
    resume_from: str = ""  # an ended job whose checkpoint it goes on from
    trusted_code: tuple[str, ...] = Field(default=(), max_length=16)  # as of RunRequest


class PreflightCheck(Message):
    """The result of one preflight check, with its figures."""

    name: str = Field(max_length=40, pattern=_PRINTED)
    ok: bool
    sentence: str = Field(max_length=MAX_SENTENCE, pattern=_PRINTED)
    remedy: str = Field(
        default="", max_length=MAX_SENTENCE, pattern=_PRINTED
    )  # what to do if not ok, or if it is odd
    figures: dict[str, Figure] = Field(default_factory=dict, max_length=16)


def yes(name: str, sentence: str, **figures: float) -> PreflightCheck:
    """Return a passed check."""
    return PreflightCheck(name=name, ok=True, sentence=sentence, figures=figures)


def no(name: str, sentence: str, remedy: str, **figures: float) -> PreflightCheck:
    """Return a failed check with its remedy."""
    return PreflightCheck(name=name, ok=False, sentence=sentence, remedy=remedy, figures=figures)


PROTOCOL_VERSION = 1
MAX_BATCH_EVENTS = 500
MAX_POINT_VALUES = 256  # of one metric point
MAX_GPUS = 256  # of one host
MAX_NAME_CHARACTERS = 80  # of a host; the column's width
MAX_ATTEMPTS = 2000  # folders on one host's disk
MAX_FIGURES = 2000  # of one result
MAX_FILES = 20_000  # of one artefact
MAX_LAST_CHARACTERS = 64 * 1024  # of an attempt's last lines; supervisors send 8 KiB
SHA256 = "^[0-9a-f]{64}$"
Digest = Annotated[str, StringConstraints(pattern=SHA256)]
FOLDER_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}$"  # part of a URL and of a file path


# Enrolment


class EnrollRequest(Message):
    """Request to exchange a one-time token for a host credential."""

    token: str = Field(max_length=255)
    protocol_version: NonNegativeInt = Field(default=PROTOCOL_VERSION, le=1000)
    # The host's display name; None: its hostname.
    name: str | None = Field(default=None, max_length=MAX_NAME_CHARACTERS)
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
    beat_seconds: float = LONGEST_BEAT_SECONDS


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
    files: tuple[StoredFiles, ...] | None = Field(  # of ended attempts; None: as last reported
        default=None, max_length=MAX_STORED, fail_fast=True
    )
    cache: CacheReport | None = None  # of the Hub's models; None: as last reported
    epoch: EpochShown | None = None  # the highest epoch that this host has received
    # Of the jobs that the site wants observed, what is new; sites before do not know the field.
    observed: tuple[ObservedJobReport, ...] = Field(
        default=(), max_length=MOST_OBSERVED, fail_fast=True, exclude_if=lambda found: not found
    )


class WantedAttempt(Message):
    """An attempt that this host should claim."""

    attempt_id: str
    fence: str
    needs: Needs | None = None


def _known_reason(value: object) -> object:
    """Return an operator's reason for one that only a newer server knows."""
    is_newer = isinstance(value, str) and value not in frozenset(Reason)
    return Reason.STOPPED_BY_OPERATOR if is_newer else value


class StopOrder(Message):
    """Order to end an attempt: SIGTERM to its tree, ``grace_seconds``, then SIGKILL."""

    attempt_id: str
    reason: Annotated[Reason, BeforeValidator(_known_reason)]
    grace_seconds: NonNegativeFloat = STOP_GRACE_SECONDS


def _known_orders(kind: type[Message], field: str) -> BeforeValidator:
    """Return what leaves out orders whose ``field`` has a value that only a newer server knows."""
    known = get_args(kind.model_fields[field].annotation)

    def without_newer(value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        return [
            each
            for each in value
            if not isinstance(each, dict) or each.get(field, known[0]) in known
        ]

    return BeforeValidator(without_newer)


class BeatReply(Message):
    """The desired state of a host; sufficient without the message broker."""

    server_time_ms: int
    wanted: tuple[WantedAttempt, ...] = ()
    stop: tuple[StopOrder, ...] = ()
    acked: dict[str, int] = Field(default_factory=dict)  # attempt id -> stored seq
    forget: tuple[str, ...] = ()  # attempts whose exit is stored: the spool may be deleted
    run_microbench: bool = False
    rotate: bool = False  # an operator requested rotation: see RotateRequest
    epoch: EpochShown | None = None
    recheck: bool = False  # an operator fixed something: report the facts again
    environments: Annotated[
        tuple[EnvironmentOrder, ...], _known_orders(EnvironmentOrder, "action")
    ] = ()  # builds and removals requested by an operator
    delete_files: Annotated[
        tuple[FilesOrder, ...], _known_orders(FilesOrder, "part")
    ] = ()  # files of ended attempts that somebody deletes
    cache: CacheOrders | None = None  # None: nothing is deleted or pruned
    copies: Annotated[
        tuple[CopyOrder, ...], _known_orders(CopyOrder, "part")
    ] = ()  # of models, over the site
    # Gateways to which the host keeps a tunnel: ws(s):// URLs; "/..." is at the server's address.
    tunnels: tuple[str, ...] = ()
    observe: tuple[str, ...] = ()  # jobs that others gave to the host's scheduler, by its ids


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
    # Repositories of Hugging Face whose own code may run, as org/name@commit: admins allowed it.
    trusted_code: tuple[str, ...] = Field(default=(), max_length=16)


def option_paths(document: object, prefix: str = "") -> Iterator[str]:
    """Yield the path of every field of a JSON document, such as ``sources.0.path``."""
    if isinstance(document, dict):
        items = [(str(name), value) for name, value in document.items()]
    elif isinstance(document, list):
        items = [(str(index), value) for index, value in enumerate(document)]
    else:
        return
    for name, value in items:
        yield prefix + name
        yield from option_paths(value, f"{prefix}{name}.")


def _default_options(request: RunRequest) -> tuple[str, ...]:
    """Return the paths of a spec's options that change nothing for a host that lacks them.

    They have their default value, or say what such a host does anyway.
    """
    every = option_paths(request.spec.model_dump(mode="json"))
    spec = with_references(request.spec, _of_the_only_hub)
    chosen = set(option_paths(spec.model_dump(mode="json", exclude_defaults=True)))
    return tuple(path for path in every if path not in chosen)


def _of_the_only_hub(named: Reference) -> Reference:
    """Return a reference without the hub that every host knows, also before there were others."""
    if isinstance(named, HubModel) and named.hub == "huggingface":
        return named.model_copy(update={"hub": ""})
    return named


class ShownMasked(str):
    """A secret on its way into JSON: a log or traceback that shows its object shows no value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(str(SecretStr(self)))


class ClaimReply(Message):
    """The claimed attempt's spec; it starts if ``may_start``, otherwise the host claims again.

    ``default_options`` are paths within the spec: options at their default, or at what hosts did
    before there was the option. A host that does not know one of them runs the job without it;
    another unknown option is refused.
    """

    request: RunRequest
    may_start: bool = True  # of a gang: every host has claimed and the port is free
    secrets: dict[SecretName, SecretStr] = Field(default_factory=dict)
    default_options: tuple[str, ...] = Field(
        default_factory=lambda data: _default_options(data["request"])
    )

    @field_serializer("secrets")
    def _open(self, secrets: dict[str, SecretStr]) -> dict[str, str]:
        """Serialise the plain values: only the reply to the claim contains them.

        As Python values too: that is how the API takes a reply apart before it writes JSON.
        """
        return {name: ShownMasked(value.get_secret_value()) for name, value in secrets.items()}


class Doorbell(Message):
    """The body of a Celery wake-up message; it carries no authority."""

    command_id: str
    kind: Literal["start", "stop", "ping"]
    attempt_id: str | None = None
    fence: str | None = None
    is_echoed: bool = False  # the worker returns its id through Redis


# Events of an attempt


class StartedBody(Message):
    """The job process has started."""

    pid: NonNegativeInt
    boot_id: Identifier
    argv: tuple[str, ...]


class PhaseBody(Message):
    """A named phase of the job has begun; the name is shown to users.

    ``begins_anew``: the progress that was reported before was of a preparation, not of the job.
    """

    name: str
    begins_anew: bool = False


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
    moves source<i>_weight, source<i>_loss, source<i>_reference; of preferences TRL's own, such as
    rewards/chosen, rewards/margins, logps/rejected, kl, entropy, and of GRPO reward,
    completions/mean_length, clip_ratio/region_mean, generation_seconds (source "job");
    rss_bytes (sum over the attempt's processes), cpu_utilization (cores busy: 1.0 is one core
    full) (source "host"); gpu<i>_memory_bytes, gpu<i>_utilization (source "gpu").
    """

    source: str = Field(min_length=1, max_length=40)
    values: dict[
        MetricName,
        Annotated[float, AllowInfNan(True), Strict()],  # noqa: FBT003 -- no text: it is published
    ] = Field(max_length=MAX_POINT_VALUES)
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

    measured: dict[Name, Figure] = Field(max_length=MAX_FIGURES)
    notes: dict[Name, Sentence] = Field(default_factory=dict, max_length=MAX_FIGURES)


class ArtefactBody(Message):
    """A folder or file in the attempt's output folder."""

    name: str = Field(pattern=FOLDER_NAME)
    kind: ArtefactKind
    total_bytes: NonNegativeInt
    files: dict[str, NonNegativeInt] = Field(max_length=MAX_FILES)  # relative path -> bytes
    sha256: dict[str, Digest] = Field(max_length=MAX_FILES)  # relative path
    facts: dict[str, Any] = Field(default_factory=dict)


MAX_COMMAND_CHARACTERS = 32_000


class EndpointBody(Message):
    """The attempt serves requests at this address; a test request succeeded."""

    host: IpAddress
    port: Port
    model: ServedName
    has_keys: bool
    command: str = Field(default="", max_length=MAX_COMMAND_CHARACTERS)  # of the engine
    has_chat_template: bool | None = None  # of the model; None: an older host does not say


def last_lines_of(lines: object) -> object:
    """Return the last lines within ``MAX_LAST_CHARACTERS``; other types unchanged to be rejected.

    They are cut, not rejected: without its exit record a job would never end.
    """
    if not isinstance(lines, list | tuple):
        return lines
    room, kept = MAX_LAST_CHARACTERS, []
    for line in reversed(lines):
        shortened = truncate(line, room)
        room -= len(shortened) if isinstance(shortened, str) else 0
        kept.append(shortened)
        if room <= 0:
            break
    return kept[::-1]


class EndConditions(Message):
    """The host's condition at the attempt's end, as far as readable."""

    memory_available_bytes: NonNegativeInt | None = None
    swap_free_bytes: NonNegativeInt | None = None
    group_memory_available_bytes: NonNegativeInt | None = None  # below the cgroup's limit
    disk_free_bytes: NonNegativeInt | None = None
    load: Amount | None = None  # one-minute load average
    temperature_celsius: Celsius | None = None  # the hottest sensor of the machine
    # The GPU driver's Xid errors during the attempt.
    xids: Annotated[tuple[Name, ...], BeforeValidator(last_lines_of)] = ()
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
    last_lines: Annotated[tuple[str, ...], BeforeValidator(last_lines_of)] = Field(
        default=(), max_length=1000, fail_fast=True
    )
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
    """Consecutive events after the last acknowledged sequence number."""

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


# Parses an attempt's events on the server; damaged events are kept with their number.


class RefusedEvent(Message):
    """A damaged event with a readable number: it is skipped and displayed."""

    seq: PositiveInt
    reason: str
    excerpt: str


def receive_event(value: object) -> RunEvent | RefusedEvent:
    """Return a host's event, or a ``RefusedEvent`` if only its number is readable.

    A damaged event must not block later ones.

    Raises:
        ValueError: the event has no number.
    """
    if isinstance(value, RunEvent):
        return value
    try:
        return RunEvent.model_validate(plain(value))
    except ValidationError as error:
        reason = first_fault(error)
    except ValueError as error:
        reason = str(error)
    seq = value.get("seq") if isinstance(value, dict) else None
    return RefusedEvent.model_validate(
        {"seq": plain(seq), "reason": reason, "excerpt": excerpt(value)}
    )


def first_fault(error: ValidationError) -> str:
    """Return the first validation error of a message: field, without positions, and reason."""
    (fault, *_) = error.errors(include_url=False, include_input=False)
    field = ".".join(str(part) for part in fault["loc"] if isinstance(part, str)) or "body"
    return f"{field[:80]}: {fault['msg'][:200]}"


class ReceivedBatch(Message):
    """An ``EventBatch`` as parsed by the server, with damaged events as ``RefusedEvent``."""

    attempt_id: Identifier
    fence: Identifier
    events: tuple[
        Annotated[
            RunEvent | RefusedEvent,
            PlainValidator(receive_event, json_schema_input_type=RunEvent),
        ],
        ...,
    ] = Field(max_length=MAX_BATCH_EVENTS)
