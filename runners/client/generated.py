"""The operations and types of the API, written by ``manage.py client`` from its schema."""

# ruff: noqa: E501, W505
from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict

from planner.specs.estimate import (
    Estimate,
    EstimateRequest,
    InverseAnswer,
    InverseRequest,
    PlanAnswer,
    PlanRequest,
)
from planner.specs.model import ModelSpec
from runners.client.transport import AsyncCaller, Call, Caller, Event, part


class Reply(BaseModel):
    """What the server sends: fields of a newer server are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Abandoning(BaseModel):
    """The confirmation to abandon a job: the names of its unreachable hosts."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    host_name: str
    elsewhere: str = ""


class Alike(BaseModel):
    """Another host that looks like the same machine, and whether it is another one."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    other: str
    is_apart: bool = True


class ArtefactReply(Reply):
    """A folder or file that the job's current attempt made; ``files`` are bytes by path."""

    name: str
    kind: str
    total_bytes: int
    is_complete: bool
    created_at: datetime
    files: dict[str, int]
    sha256: dict[str, str]


class AttemptReply(Reply):
    """One try of a job on one host; a job on several hosts has one per host and number."""

    id: str
    number: int
    node_rank: int
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
    status: str
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


class CompressPlanDocument(BaseModel):
    """Make the weights smaller and measure the loss of quality."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str = ""
    objective: (
        Literal["balanced", "throughput", "latency", "cost", "memory", "quality", "energy"] | None
    ) = None
    latency_target: Literal["chat", "code", "none"] | None = None
    percentile: Literal["p95", "p99", "p50", "mean"] | None = None
    model: str | ModelDocument | None = None
    hardware: HardwareDocument | None = None
    pins: PinsDocument | None = None
    launch: LaunchDocument | None = None
    goal: Literal["compress"]
    workload: CompressWorkloadDocument | None = None


class CompressWorkloadDocument(BaseModel):
    """Compression workload: quantisation and pruning methods."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    method: (
        Literal[
            "int8_weight_only",
            "int8_dynamic",
            "fp8",
            "int4_weight_only",
            "nf4",
            "gguf",
            "gptq",
            "norm_tweaking",
            "quantease",
            "awq",
            "finequant",
            "fptq",
            "sparsegpt",
            "llm_pruner",
            "sheared_llama",
            "qmoe",
        ]
        | None
    ) = None
    bits: Literal[4, 3, 2, 8] | None = None
    group_size: int | None = None
    sparsity: Literal["50", "20", "30", "60", "2:4"] | None = None
    recovery_steps: int | None = None


class Cordon(BaseModel):
    """Why a device takes no new jobs."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    reason: str


class DatasetReply(Reply):
    """An uploaded file of training data; ``note`` says what jobs do not learn from."""

    id: str
    name: str
    sha256: str
    size_bytes: int
    num_records: int
    format: str
    uploaded_by: str
    created_at: datetime
    note: str


class Decision(BaseModel):
    """Whether a measurement counts, and why."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    decision: Literal["excluded", "included"]
    reason: str


class DeviceReply(Reply):
    """A device of a host, and the job that holds it if the caller may see it."""

    id: str
    index: int
    kind: str
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
    kind: str
    memory_bytes: int
    price_usd_per_hour: float | None


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


class EvaluationRequest(BaseModel):
    """Tasks of lm-evaluation-harness beside the perplexity; "" for none."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    tasks: Literal["", "named", "folder"] = ""
    task_names: list[str] = []
    task_folder: str = ""
    documents: int | None = None


class EventPage(Reply):
    """Events, newest first; continue with ``before`` = the last event's id."""

    items: list[EventReply]
    has_more: bool


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


class ExportReply(Reply):
    """A plan in another tool's format, with the script that measures its predictions."""

    key: str
    title: str
    file_name: str
    notes: list[str]
    text: str
    measure: str


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
    state: Literal["measured", "so_far", "warm_up", "predicted"]
    state_words: str
    definition: str
    how: str


class FinetunePlanDocument(BaseModel):
    """Train an existing model on your own text."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str = ""
    objective: (
        Literal["balanced", "throughput", "latency", "cost", "memory", "quality", "energy"] | None
    ) = None
    latency_target: Literal["chat", "code", "none"] | None = None
    percentile: Literal["p95", "p99", "p50", "mean"] | None = None
    model: str | ModelDocument | None = None
    hardware: HardwareDocument | None = None
    pins: PinsDocument | None = None
    launch: LaunchDocument | None = None
    goal: Literal["finetune"]
    workload: FinetuneWorkloadDocument | None = None


class FinetuneWorkloadDocument(BaseModel):
    """Fine-tuning workload: a training run that starts from trained weights."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    method: (
        Literal["full", "lora", "qlora", "lomo", "adalomo", "qft", "classification", "alphatuning"]
        | None
    ) = None
    lora_rank: int | None = None
    data_source: Literal["host", "file", "upload", "mixed"] | None = None
    data_path: str | None = None
    data_format: (
        Literal["text", "chat", "sharegpt", "instruction", "classification", "completion"] | None
    ) = None
    dataset: str | None = None
    rows: Literal["packed", "padded"] | None = None
    too_long: Literal["cut", "leave_out"] | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    optimizer: (
        Literal["adamw", "adamw_8bit", "adafactor", "lion", "sgd", "lomo", "adalomo"] | None
    ) = None
    time_budget_minutes: float | None = None
    million_tokens: float | None = None
    activation_offload: Literal["none", "cpu", "disk"] | None = None
    optimizer_offload: Literal["none", "cpu", "disk"] | None = None
    lengths: Literal["fixed", "grow"] | None = None
    rounding: Literal["none", "8", "4"] | None = None
    attention: Literal["auto", "flash", "eager", "flex"] | None = None
    products: Literal["auto", "fp8"] | None = None
    training_step: Literal["plain", "compiled"] | None = None
    early_stop: Literal["never", "2", "3"] | None = None
    exported_weights: Literal["best", "last"] | None = None
    checkpoint_writing: Literal["auto", "background", "in_step"] | None = None
    text_samples: Literal["none", "20", "100", "500"] | None = None
    sample_prompts: str | None = None
    on_spike: Literal["stop", "skip"] | None = None
    mix_weights: Literal["fixed", "dynamic"] | None = None
    mix_every: int | None = None
    mixture: list[SourceDocument] | None = None


class FormatReply(Reply):
    """A format that can express the plan, with notes on what it leaves out."""

    key: str
    title: str
    file_name: str
    notes: list[str]


class GeneratePlanDocument(BaseModel):
    """Process a batch of prompts at the highest throughput."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str = ""
    objective: (
        Literal["balanced", "throughput", "latency", "cost", "memory", "quality", "energy"] | None
    ) = None
    latency_target: Literal["chat", "code", "none"] | None = None
    percentile: Literal["p95", "p99", "p50", "mean"] | None = None
    model: str | ModelDocument | None = None
    hardware: HardwareDocument | None = None
    pins: PinsDocument | None = None
    launch: LaunchDocument | None = None
    goal: Literal["generate"]
    workload: GenerateWorkloadDocument | None = None


class GenerateWorkloadDocument(BaseModel):
    """Offline generation workload: batches of prompts."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    batch_size: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompts_path: str | None = None
    batching: Literal["given", "sorted", "turbo", "packed", "continuous"] | None = None
    kv_cache: Literal["plain", "fp8", "int4", "int2"] | None = None
    guessing: Literal["lookup"] | None = None
    decode_step: Literal["compiled"] | None = None


class HardwareDocument(BaseModel):
    """Where it runs: a host or a pool by name, or catalog hardware to plan for."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    host: str | None = None
    pool: str | None = None
    device: str | None = None
    devices_per_node: int | None = None
    nodes: int | None = None
    engine: str | None = None
    memory_limit_gib: float | None = None
    on_lost_rank: Literal["stop", "restart", "shrink"] | None = None


class HostChanges(BaseModel):
    """New labels or another address; what is left out stays."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    labels: dict[str, str] | None = None
    address: str | None = None


class HostDetail(Reply):
    """A host with its devices, facts, measurements and checks."""

    id: str
    slug: str
    name: str
    kind: str
    state: HostState
    contact: str
    silent_seconds: float | None
    pool: str
    labels: dict[str, str]
    agent_version: str
    enrolled_at: datetime | None
    last_seen_at: datetime | None
    address: str
    facts: dict[str, Any]
    planned: dict[str, Any]
    microbench: dict[str, Any]
    calibration: dict[str, Any]
    devices: list[DeviceReply]
    is_ready: bool
    checks: list[CheckReply]


class HostReply(Reply):
    """A host; ``contact`` is live, degraded, unreachable or unknown."""

    id: str
    slug: str
    name: str
    kind: str
    state: HostState
    contact: str
    silent_seconds: float | None
    pool: str
    labels: dict[str, str]
    agent_version: str
    enrolled_at: datetime | None
    last_seen_at: datetime | None


HostState = Literal["pending-enrolment", "checking", "ready", "draining", "maintenance", "retired"]


class Imported(Reply):
    """A draft of pasted text, and what became of each setting."""

    plan: PlanReply
    kind: str
    understood: list[dict[str, Any]]
    ignored: list[dict[str, Any]]
    unknown: list[dict[str, Any]]
    missing: list[str]


class JobDetail(Reply):
    """A job with its spec, its prediction and its attempts."""

    id: str
    name: str
    kind: str
    model: str
    state: JobState
    is_final: bool
    team: str
    owner: str
    host: str
    pool: str
    plan: str | None
    priority: int
    num_hosts: int
    progress: ProgressReply
    elapsed_seconds: float
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    url: str
    spec: dict[str, Any]
    prediction: dict[str, Any]
    result: dict[str, Any]
    max_duration_seconds: float | None
    max_retries: int
    num_retries: int
    waiting: str | None
    silent_seconds: float | None
    endpoint: EndpointReply | None
    outcome: OutcomeReply | None
    attempts: list[AttemptReply]
    allowed: list[str]


class JobEvents(Reply):
    """Events after a sequence number, in order; continue after ``last_seq``."""

    attempt: str | None
    events: list[StoredEvent]
    last_seq: int


class JobFiguresReply(Reply):
    """Every figure of a job, as shown on its page."""

    job: str
    state: str
    as_of: datetime
    figures: list[FigureReply]
    targets: list[TargetReply]


class JobPage(Reply):
    """A page of jobs."""

    items: list[JobReply]
    next_cursor: str | None = None


class JobReply(Reply):
    """A job in a list."""

    id: str
    name: str
    kind: str
    model: str
    state: JobState
    is_final: bool
    team: str
    owner: str
    host: str
    pool: str
    plan: str | None
    priority: int
    num_hosts: int
    progress: ProgressReply
    elapsed_seconds: float
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    url: str


class JobSeries(Reply):
    """The requested metrics of a job's current attempt."""

    job: str
    attempt: str | None
    series: list[SeriesReply]


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


class LaunchDocument(BaseModel):
    """The launch form: what is started, for how long, and the options of the program."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    run: Literal["job", "endpoint", "load"] = "job"
    name: str = ""
    save_as: Literal["next", "new"] = "next"
    hours: float | None = None
    retries: int = 0
    priority: Literal["normal", "low"] = "normal"
    secrets: list[str] = []
    engine: Literal["slipway", "llamacpp", "vllm", "sglang"] = "slipway"
    idle_minutes: float | None = None
    prefix_cache: bool | None = None
    draft: str = ""
    adapters: bool = False
    adapter: str = ""
    profile: bool = False
    arrivals: Literal["closed", "open", "burst"] = "closed"
    points: list[float] = []
    requests: int = 32
    repetitions: int = 3


class LaunchNote(Reply):
    """Whether the plan can be launched, and what that would do."""

    can: bool
    title: str
    text: str


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
    state: str
    decided_by: str
    decided_at: datetime | None
    answer: str
    job: str | None
    url: str


class LaunchToApprove(BaseModel):
    """A launch that a person is asked to approve, and why."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    launch: LaunchDocument | None = None
    reason: str = ""


class Launched(Reply):
    """The job, and the key of an endpoint, which is not shown again."""

    job: JobReply
    endpoint_key: str | None


class LogLine(Reply):
    """One line of output; ``seq`` is the number of its event."""

    seq: int
    at: datetime
    stream: str
    text: str


class LogReply(Reply):
    """Lines of a job's current attempt in order; continue after ``last_seq``."""

    attempt: str | None
    lines: list[LogLine]
    last_seq: int


class MadeToken(Reply):
    """A new token with its text, which is not shown again."""

    id: str
    name: str
    hint: str
    scope: Scope
    user: str
    is_service: bool
    budget_gpu_hours: float | None
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None
    token: str


class MeReply(Reply):
    """Who calls, with which scope, in which team."""

    user: str
    scope: Scope
    budget_gpu_hours: float | None
    rest_gpu_hours: float | None
    team: TeamReply
    teams: list[TeamReply]


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


class MemberReply(Reply):
    """A member of the team."""

    user: str
    role: Role


class ModelDetail(Reply):
    """A model with its shape; ``kv_bytes_per_token`` by dtype of the KV cache."""

    id: str
    name: str
    source: Literal["catalog", "config", "folder", "job"]
    num_parameters: int
    host: str
    created_at: datetime | None
    shape: ModelSpec | None
    kv_bytes_per_token: dict[str, float]
    facts: dict[str, Any]
    aliases: list[str]


class ModelDocument(BaseModel):
    """A model by other means than its name: a team's model, a config.json, a folder on a host."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    catalog_id: str | None = None
    team_model: str | None = None
    config: dict[str, Any] | None = None
    path: str | None = None


class ModelReply(Reply):
    """A model of the catalog, or of the team."""

    id: str
    name: str
    source: Literal["catalog", "config", "folder", "job"]
    num_parameters: int
    host: str
    created_at: datetime | None


class NewHost(BaseModel):
    """The host that is to be enrolled; labels are names with values, such as gpu: 4090."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str
    pool: str = "default"
    labels: dict[str, str] | None = None


class NewModel(BaseModel):
    """A model by its ``config.json``, as Hugging Face publishes it."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str
    config: dict[str, Any]


class NewToken(BaseModel):
    """What a new token is for; ``days`` is how long it is valid."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str
    scope: Scope
    days: float = 90
    is_service: bool = False
    budget_gpu_hours: float | None = None


class NewVirtualHost(BaseModel):
    """A machine that the team considers buying or renting."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str
    device: str
    num_devices: int = 8
    memory_gib: float | None = None


class OutcomeReply(Reply):
    """Why a job ended, and what to do next."""

    reason: str
    sentence: str
    next_step: str


class Pasted(BaseModel):
    """Another tool's command line or configuration, and where the plan is to run."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    text: str
    host: str = ""
    pool: str = ""


class PinsDocument(BaseModel):
    """Parts of the strategy that are fixed for the planner."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    weight_dtype: Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4", "nf4", "nvfp4"] | None = (
        None
    )
    kv_cache_dtype: Literal["bf16", "fp16", "fp8", "int8"] | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    micro_batch_size: int | None = None
    activation_recomputation: Literal["none", "selective", "full"] | None = None
    prefill_devices: int | None = None
    decode_devices: int | None = None


class PlanFormats(Reply):
    """The formats that can express a plan's first proposal."""

    plan: str
    formats: list[FormatReply]


class PlanFromJob(BaseModel):
    """How a job becomes a plan.

    ``clone``: its plan with its launch options; ``need``: with the measured memory need as limit;
    ``change``: with one of the changes of its post-mortem.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    how: Literal["clone", "need", "change"] = "clone"
    change: int | None = None


class PlanPage(Reply):
    """A page of plans."""

    items: list[PlanSummary]
    next_cursor: str | None = None


class PlanReply(Reply):
    """A plan with its document, its question for the planner, and the planner's answer.

    ``answer`` is null if the draft cannot be planned; ``problem`` then says why. ``notes`` says
    what else the last change changed.
    """

    id: str
    name: str
    state: Literal["draft", "computed"]
    verdict: str
    version: int | None
    series: str
    team: str
    owner: str
    saved_at: datetime
    url: str
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


class PlanSummary(Reply):
    """A plan in a list; ``verdict`` is a key such as fits, tight, slow, does-not-fit, draft."""

    id: str
    name: str
    state: Literal["draft", "computed"]
    verdict: str
    version: int | None
    series: str
    team: str
    owner: str
    saved_at: datetime
    url: str


class PlannerRequest(BaseModel):
    """A planner's request, whole or in part, and where the plan is to run."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    request: dict[str, Any]
    host: str = ""
    pool: str = ""
    name: str = ""


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


class PretrainPlanDocument(BaseModel):
    """Train a model from random weights."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str = ""
    objective: (
        Literal["balanced", "throughput", "latency", "cost", "memory", "quality", "energy"] | None
    ) = None
    latency_target: Literal["chat", "code", "none"] | None = None
    percentile: Literal["p95", "p99", "p50", "mean"] | None = None
    model: str | ModelDocument | None = None
    hardware: HardwareDocument | None = None
    pins: PinsDocument | None = None
    launch: LaunchDocument | None = None
    goal: Literal["pretrain"]
    workload: PretrainWorkloadDocument | None = None


class PretrainWorkloadDocument(BaseModel):
    """Training workload: sequence length, batch size, duration, and training options."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    data_source: Literal["host", "file", "upload", "mixed"] | None = None
    data_path: str | None = None
    data_format: (
        Literal["text", "chat", "sharegpt", "instruction", "classification", "completion"] | None
    ) = None
    dataset: str | None = None
    rows: Literal["packed", "padded"] | None = None
    too_long: Literal["cut", "leave_out"] | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    optimizer: (
        Literal["adamw", "adamw_8bit", "adafactor", "lion", "sgd", "lomo", "adalomo"] | None
    ) = None
    time_budget_minutes: float | None = None
    million_tokens: float | None = None
    activation_offload: Literal["none", "cpu", "disk"] | None = None
    optimizer_offload: Literal["none", "cpu", "disk"] | None = None
    lengths: Literal["fixed", "grow"] | None = None
    rounding: Literal["none", "8", "4"] | None = None
    attention: Literal["auto", "flash", "eager", "flex"] | None = None
    products: Literal["auto", "fp8"] | None = None
    training_step: Literal["plain", "compiled"] | None = None
    early_stop: Literal["never", "2", "3"] | None = None
    exported_weights: Literal["best", "last"] | None = None
    checkpoint_writing: Literal["auto", "background", "in_step"] | None = None
    text_samples: Literal["none", "20", "100", "500"] | None = None
    sample_prompts: str | None = None
    on_spike: Literal["stop", "skip"] | None = None
    mix_weights: Literal["fixed", "dynamic"] | None = None
    mix_every: int | None = None
    mixture: list[SourceDocument] | None = None


class ProgressReply(Reply):
    """How far a job is; ``share`` is between 0 and 1, ``eta_seconds`` the time that remains."""

    share: float | None
    done: float | None
    total: float | None
    unit: str
    phase: str
    words: str
    eta_seconds: float | None


class QueueMove(BaseModel):
    """A new place or priority of a queued job."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    move: Literal["up", "down"] | None = None
    seen: str = ""
    priority: Literal["low", "normal", "high"] | None = None


class QueueReply(Reply):
    """A pool with its queue in order; ``seen`` names this order when a job is moved."""

    id: str
    name: str
    team: str
    hosts: list[str]
    queue: list[QueuedJob]
    seen: str


class QueuedJob(Reply):
    """One turn of a queue; another team's job has neither id nor name."""

    position: int | None
    job: str | None
    name: str
    owner: str
    priority: int
    sentence: str
    start_at: datetime | None


class QuotaChanges(BaseModel):
    """New limits; what is left out stays, null removes a limit."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    max_devices: int | None = None
    max_gpu_hours_per_month: float | None = None
    max_duration_hours: float | None = None
    max_queued_per_user: int | None = None
    share: float | None = None


class QuotaReply(Reply):
    """The limits of a team; null means none. ``sentences`` says what of them is used."""

    max_devices: int | None
    max_gpu_hours_per_month: float | None
    max_duration_hours: float | None
    max_queued_per_user: int
    share: float
    sentences: list[str]


Role = Literal["viewer", "practitioner", "operator", "admin"]


class Saving(BaseModel):
    """How a draft is saved."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str = ""
    save_as: Literal["next", "new"] = "next"


Scope = Literal["read", "plan", "launch", "admin"]


class SearchMatch(Reply):
    """One match of a search; ``id`` is what its kind's operations take."""

    kind: Literal["plan", "job", "host", "model", "technique"]
    id: str
    name: str


class SecretReply(Reply):
    """A secret's name; its value is never shown."""

    id: str
    name: str
    changed_by: str
    changed_at: datetime
    last_given_at: datetime | None


class SecretValue(BaseModel):
    """The new value of a secret; its lines are kept as they are."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    value: str


class SeriesReply(Reply):
    """One metric; a null value is a gap."""

    source: str
    metric: str
    t_ms: list[int]
    value: list[float | None]
    low: list[float | None]
    high: list[float | None]


class ServePlanDocument(BaseModel):
    """Answer requests as they arrive."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str = ""
    objective: (
        Literal["balanced", "throughput", "latency", "cost", "memory", "quality", "energy"] | None
    ) = None
    latency_target: Literal["chat", "code", "none"] | None = None
    percentile: Literal["p95", "p99", "p50", "mean"] | None = None
    model: str | ModelDocument | None = None
    hardware: HardwareDocument | None = None
    pins: PinsDocument | None = None
    launch: LaunchDocument | None = None
    goal: Literal["serve"]
    workload: ServeWorkloadDocument | None = None


class ServeWorkloadDocument(BaseModel):
    """Serving workload: online requests."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    input_tokens: int | None = None
    output_tokens: int | None = None
    max_request_tokens: int | None = None
    concurrency: int | None = None
    prefix_share_percent: int | None = None


class SessionReply(Reply):
    """A browser in which the caller is logged in."""

    browser: str
    address: str
    began_at: datetime
    seen_at: datetime


class SourceDocument(BaseModel):
    """One source of a data mixture: the host's own text, a file on it, or an upload's id."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    source: str
    path: str = ""
    weight: float = 1.0
    reference: float | None = None


class StoredEvent(Reply):
    """One numbered event of an attempt."""

    seq: int
    t_ms: int
    kind: str
    body: dict[str, Any]


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
    state: Literal["met", "missed", "unjudged"]
    chance: float | None


class TeamReply(Reply):
    """A team of the caller, and the caller's role in it."""

    id: str
    name: str
    role: Role


class TechniqueReply(Reply):
    """A technique, whether a job runs it here, and what proves that."""

    id: str
    title: str
    state: str
    headline: str
    phases: list[str]
    job_kind: str
    library: str


class Ticket(Reply):
    """A ticket that opens ``/live/`` for an hour, for its topics, in the header Live-Ticket."""

    ticket: str


class TokenReply(Reply):
    """An access token; its text is not stored."""

    id: str
    name: str
    hint: str
    scope: Scope
    user: str
    is_service: bool
    budget_gpu_hours: float | None
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class TwoJobs(BaseModel):
    """Where the classifier's two jobs run, and the ZeRO stage that is compared with DDP."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    host: str
    zero_stage: Literal[1, 2, 3] = 2


class VerdictReply(Reply):
    """The verdict in words, as on the plan's page."""

    tone: str
    state: str
    sentence: str
    detail: str
    warnings: list[str]


class VersionReply(Reply):
    """One saved version of a plan, and what changed against the one it came from."""

    id: str
    version: int
    name: str
    verdict: str
    saved_by: str
    saved_at: datetime
    words: str
    changes: list[str]
    num_jobs: int


class Slipway(Caller):
    """Every operation of the API, one after the other."""

    def list_plans(self, *, limit: int = 50, cursor: str = "", q: str = "") -> PlanPage:
        """Return the teams' saved plans and the caller's own drafts, the last saved first."""
        result: PlanPage = self._call(
            Call("GET", "/plans", {"limit": limit, "cursor": cursor, "q": q}), PlanPage
        )
        return result

    def create_plan(
        self,
        body: ServePlanDocument
        | GeneratePlanDocument
        | FinetunePlanDocument
        | PretrainPlanDocument
        | CompressPlanDocument
        | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> PlanReply:
        """Make a plan from a document, plan it, and save it as its first version.

        What the document leaves out has the wizard's default. A plan that nothing fits is saved too:
        its answer holds the reasons. One that the planner refuses stays a draft.
        """
        result: PlanReply = self._call(
            Call("POST", "/plans", {}, body, idempotency_key), PlanReply
        )
        return result

    def create_plan_from_request(
        self, body: PlannerRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Make a plan from a planner's request, such as the one of a plan that was made offline.

        ``notes`` names what the wizard has no field for.
        """
        result: PlanReply = self._call(
            Call("POST", "/plans/from-request", {}, body, idempotency_key), PlanReply
        )
        return result

    def import_plan(
        self, body: Pasted | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Imported:
        """Make a draft of a command line of an engine or a trainer, or of one of their files."""
        result: Imported = self._call(
            Call("POST", "/plans/import", {}, body, idempotency_key), Imported
        )
        return result

    def get_plan_schema(self) -> dict[str, Any]:
        """Return the JSON schema of plan documents, for editors of ``job.yaml``."""
        result: dict[str, Any] = self._call(Call("GET", "/plans/schema", {}), dict[str, Any])
        return result

    def get_plan(self, plan_id: str) -> PlanReply:
        """Return a plan with the planner's answer."""
        result: PlanReply = self._call(Call("GET", f"/plans/{part(plan_id)}", {}), PlanReply)
        return result

    def change_plan(
        self, plan_id: str, body: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Change a plan's document by a JSON merge patch, plan it, and save the next version.

        A draft that the planner refuses stays a draft; a plan that was saved stays as it is, and the
        reply is its next version.
        """
        result: PlanReply = self._call(
            Call("PATCH", f"/plans/{part(plan_id)}", {}, body, idempotency_key), PlanReply
        )
        return result

    def delete_plan(self, plan_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete a draft, or a plan with all its versions; its jobs remain."""
        self._call(Call("DELETE", f"/plans/{part(plan_id)}", {}, None, idempotency_key), None)

    def compute_plan(self, plan_id: str, *, idempotency_key: str | None = None) -> PlanReply:
        """Plan again with the host's current measurements; a changed answer is the next version."""
        result: PlanReply = self._call(
            Call("POST", f"/plans/{part(plan_id)}/compute", {}, None, idempotency_key), PlanReply
        )
        return result

    def apply_suggestion(
        self, plan_id: str, number: int, *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Apply one of the plan's suggestions, plan it, and save the next version."""
        result: PlanReply = self._call(
            Call(
                "POST",
                f"/plans/{part(plan_id)}/suggestions/{part(number)}",
                {},
                None,
                idempotency_key,
            ),
            PlanReply,
        )
        return result

    def clone_plan(self, plan_id: str, *, idempotency_key: str | None = None) -> PlanReply:
        """Return a draft copy, to be saved as a separate plan."""
        result: PlanReply = self._call(
            Call("POST", f"/plans/{part(plan_id)}/clone", {}, None, idempotency_key), PlanReply
        )
        return result

    def save_plan(
        self, plan_id: str, body: Saving | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Save a draft as a version; a saved plan is returned unchanged."""
        result: PlanReply = self._call(
            Call("POST", f"/plans/{part(plan_id)}/save", {}, body, idempotency_key), PlanReply
        )
        return result

    def list_plan_versions(self, plan_id: str) -> list[VersionReply]:
        """Return every version of a saved plan, newest first."""
        result: list[VersionReply] = self._call(
            Call("GET", f"/plans/{part(plan_id)}/versions", {}), list[VersionReply]
        )
        return result

    def launch_plan(
        self,
        plan_id: str,
        body: LaunchDocument | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> Launched:
        """Launch a plan as a job; with an ``Idempotency-Key`` a repetition launches nothing more.

        A token with a budget launches only what its rest suffices for.
        """
        result: Launched = self._call(
            Call("POST", f"/plans/{part(plan_id)}/launch", {}, body, idempotency_key), Launched
        )
        return result

    def request_launch(
        self,
        plan_id: str,
        body: LaunchToApprove | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> LaunchRequestReply:
        """Ask a person of the team to approve a launch; they decide on the page Approvals."""
        result: LaunchRequestReply = self._call(
            Call("POST", f"/plans/{part(plan_id)}/launch-requests", {}, body, idempotency_key),
            LaunchRequestReply,
        )
        return result

    def list_exports(self, plan_id: str) -> PlanFormats:
        """Return the formats that a plan can be exported to."""
        result: PlanFormats = self._call(
            Call("GET", f"/plans/{part(plan_id)}/exports", {}), PlanFormats
        )
        return result

    def export_plan(self, plan_id: str, key: str) -> ExportReply:
        """Return a plan in one format, with its notes and the script that measures it."""
        result: ExportReply = self._call(
            Call("GET", f"/plans/{part(plan_id)}/exports/{part(key)}", {}), ExportReply
        )
        return result

    def get_plan_limit(
        self,
        plan_id: str,
        question: Literal[
            "longest_context",
            "largest_batch",
            "most_users",
            "longest_sequence",
            "largest_model",
            "fewest_devices",
            "cheapest_instance",
        ],
    ) -> dict[str, Any]:
        """Return a limit of a plan, such as ``longest_context`` or ``most_users``."""
        result: dict[str, Any] = self._call(
            Call("GET", f"/plans/{part(plan_id)}/limits/{part(question)}", {}), dict[str, Any]
        )
        return result

    def list_launch_requests(self) -> list[LaunchRequestReply]:
        """Return the teams' launches that wait for an approval, the oldest first."""
        result: list[LaunchRequestReply] = self._call(
            Call("GET", "/launch-requests", {}), list[LaunchRequestReply]
        )
        return result

    def get_launch_request(self, request_id: str) -> LaunchRequestReply:
        """Return a request with its decision, and the job of an approved one."""
        result: LaunchRequestReply = self._call(
            Call("GET", f"/launch-requests/{part(request_id)}", {}), LaunchRequestReply
        )
        return result

    def get_post_mortem(self, job_id: str) -> PostMortem:
        """Return what is known of a job's failure, and what would fit."""
        result: PostMortem = self._call(
            Call("GET", f"/jobs/{part(job_id)}/post-mortem", {}), PostMortem
        )
        return result

    def plan_from_job(
        self,
        job_id: str,
        body: PlanFromJob | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> PlanReply:
        """Make a draft plan from a job."""
        result: PlanReply = self._call(
            Call("POST", f"/jobs/{part(job_id)}/plan", {}, body, idempotency_key), PlanReply
        )
        return result

    def launch_classification(
        self, body: TwoJobs | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> list[JobReply]:
        """Launch the same classifier with DDP and with ZeRO on one host, to be compared."""
        result: list[JobReply] = self._call(
            Call("POST", "/templates/classification", {}, body, idempotency_key), list[JobReply]
        )
        return result

    def ask_plan(
        self, body: PlanRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> PlanAnswer:
        """Answer a planner question in the planner's own contract."""
        result: PlanAnswer = self._call(
            Call("POST", "/planner/plan", {}, body, idempotency_key), PlanAnswer
        )
        return result

    def ask_estimate(
        self, body: EstimateRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Estimate:
        """Return the estimate of one strategy."""
        result: Estimate = self._call(
            Call("POST", "/planner/estimate", {}, body, idempotency_key), Estimate
        )
        return result

    def ask_inverse(
        self, body: InverseRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> InverseAnswer:
        """Return a limit, such as the longest context or the cheapest instance."""
        result: InverseAnswer = self._call(
            Call("POST", "/planner/inverse", {}, body, idempotency_key), InverseAnswer
        )
        return result

    def list_jobs(
        self,
        *,
        limit: int = 50,
        cursor: str = "",
        state: str = "",
        kind: str = "",
        host: str = "",
        owner: str = "",
        plan: str = "",
        q: str = "",
    ) -> JobPage:
        """Return the teams' jobs, newest first."""
        result: JobPage = self._call(
            Call(
                "GET",
                "/jobs",
                {
                    "limit": limit,
                    "cursor": cursor,
                    "state": state,
                    "kind": kind,
                    "host": host,
                    "owner": owner,
                    "plan": plan,
                    "q": q,
                },
            ),
            JobPage,
        )
        return result

    def get_job(self, job_id: str) -> JobDetail:
        """Return a job with its spec, its attempts and why it waits or ended."""
        result: JobDetail = self._call(Call("GET", f"/jobs/{part(job_id)}", {}), JobDetail)
        return result

    def delete_job(self, job_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete an ended job from the history; its measurements still calibrate its host."""
        self._call(Call("DELETE", f"/jobs/{part(job_id)}", {}, None, idempotency_key), None)

    def stop_job(self, job_id: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Stop a job; its supervisor lets it save its results first."""
        result: JobDetail = self._call(
            Call("POST", f"/jobs/{part(job_id)}/stop", {}, None, idempotency_key), JobDetail
        )
        return result

    def run_job_again(self, job_id: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Queue a job with the same spec, owned by the caller."""
        result: JobDetail = self._call(
            Call("POST", f"/jobs/{part(job_id)}/run-again", {}, None, idempotency_key), JobDetail
        )
        return result

    def abandon_job(
        self,
        job_id: str,
        body: Abandoning | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> JobDetail:
        """Count the devices of a job's unreachable hosts as free, and end the job.

        With ``elsewhere`` a copy of it starts on another host; the reply is then the copy.
        """
        result: JobDetail = self._call(
            Call("POST", f"/jobs/{part(job_id)}/abandon", {}, body, idempotency_key), JobDetail
        )
        return result

    def get_job_log(
        self,
        job_id: str,
        *,
        after: int | None = None,
        limit: int = 200,
        q: str = "",
        host: int = 0,
    ) -> LogReply:
        """Return the last lines of a job's log, or those after an event, in order."""
        result: LogReply = self._call(
            Call(
                "GET",
                f"/jobs/{part(job_id)}/log",
                {"after": after, "limit": limit, "q": q, "host": host},
            ),
            LogReply,
        )
        return result

    def get_job_series(
        self,
        job_id: str,
        *,
        metrics: str,
        since: int = 0,
        until: int = 4611686018427387904,
        points: int = 600,
        host: int = 0,
    ) -> JobSeries:
        """Return the comma-separated ``metrics`` between two instants in ms, down-sampled.

        For a job on several hosts, the series are those reported by host number ``host``.
        """
        result: JobSeries = self._call(
            Call(
                "GET",
                f"/jobs/{part(job_id)}/series",
                {
                    "metrics": metrics,
                    "since": since,
                    "until": until,
                    "points": points,
                    "host": host,
                },
            ),
            JobSeries,
        )
        return result

    def get_job_figures(self, job_id: str) -> JobFiguresReply:
        """Return a job's predicted and measured figures, as shown on its page."""
        result: JobFiguresReply = self._call(
            Call("GET", f"/jobs/{part(job_id)}/figures", {}), JobFiguresReply
        )
        return result

    def list_job_events(
        self, job_id: str, *, after: int = 0, kind: str = "", host: int = 0
    ) -> JobEvents:
        """Return events of the current attempt after a sequence number, at most 1000 or 256 KiB.

        Request again after ``last_seq`` until the list is empty. For a job on several hosts, the
        events are those reported by host number ``host``.
        """
        result: JobEvents = self._call(
            Call(
                "GET", f"/jobs/{part(job_id)}/events", {"after": after, "kind": kind, "host": host}
            ),
            JobEvents,
        )
        return result

    def list_artefacts(self, job_id: str) -> list[ArtefactReply]:
        """Return the artefacts of a job's current attempt."""
        result: list[ArtefactReply] = self._call(
            Call("GET", f"/jobs/{part(job_id)}/artefacts", {}), list[ArtefactReply]
        )
        return result

    def download_artefact(self, job_id: str, name: str, sink: BinaryIO) -> int:
        """Return a complete artefact as a .tar file."""
        return self._download(
            Call("GET", f"/jobs/{part(job_id)}/artefacts/{part(name)}", {}), sink
        )

    def follow_job(
        self, job_id: str, *, kinds: str = "log,state", after: int = 0, host: int = 0
    ) -> Iterator[Event]:
        """Return a job's events as they come, until it ends; ``Last-Event-ID`` resumes the log."""
        return self._events(
            Call(
                "GET",
                f"/jobs/{part(job_id)}/stream",
                {"kinds": kinds, "after": after, "host": host},
            )
        )

    def get_ticket(self, *, topics: str) -> Ticket:
        """Return a new ticket for those of the comma-separated topics that the caller may see."""
        result: Ticket = self._call(Call("GET", "/tickets", {"topics": topics}), Ticket)
        return result

    def list_hosts(self, *, q: str = "") -> list[HostReply]:
        """Return the teams' hosts by name; ``q`` is part of the name."""
        result: list[HostReply] = self._call(Call("GET", "/hosts", {"q": q}), list[HostReply])
        return result

    def add_host(
        self, body: NewHost | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> EnrolmentReply:
        """Make a one-time token, valid for an hour, with which a machine enrols itself."""
        result: EnrolmentReply = self._call(
            Call("POST", "/hosts/enrolments", {}, body, idempotency_key), EnrolmentReply
        )
        return result

    def get_enrolment(self, token_id: str) -> EnrolmentState:
        """Return what is known of a host that is being enrolled, check by check."""
        result: EnrolmentState = self._call(
            Call("GET", f"/hosts/enrolments/{part(token_id)}", {}), EnrolmentState
        )
        return result

    def revoke_enrolment(self, token_id: str, *, idempotency_key: str | None = None) -> None:
        """Revoke an unused enrolment token; a used or revoked one stays as it is."""
        self._call(
            Call("DELETE", f"/hosts/enrolments/{part(token_id)}", {}, None, idempotency_key), None
        )

    def add_virtual_host(
        self, body: NewVirtualHost | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Make a planning-only host, on which no job runs."""
        result: HostDetail = self._call(
            Call("POST", "/hosts/virtual", {}, body, idempotency_key), HostDetail
        )
        return result

    def get_host(self, slug: str) -> HostDetail:
        """Return a host with its devices, facts and measurements."""
        result: HostDetail = self._call(Call("GET", f"/hosts/{part(slug)}", {}), HostDetail)
        return result

    def change_host(
        self,
        slug: str,
        body: HostChanges | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> HostDetail:
        """Change a host's labels, and the address at which a job's other hosts reach it."""
        result: HostDetail = self._call(
            Call("PATCH", f"/hosts/{part(slug)}", {}, body, idempotency_key), HostDetail
        )
        return result

    def act_on_host(
        self,
        slug: str,
        action: Literal[
            "drain", "undrain", "recheck", "rotate", "revoke", "maintenance", "retire"
        ],
        *,
        idempotency_key: str | None = None,
    ) -> HostDetail:
        """Change a host, as an operator.

        ``drain``: it finishes its jobs and takes no new ones; ``undrain``: it takes jobs again;
        ``recheck``: it reports new facts; ``rotate``: it replaces its secrets; ``revoke``: its
        credential ends until it is enrolled again; ``maintenance`` and ``retire``: it is taken out.
        """
        result: HostDetail = self._call(
            Call("POST", f"/hosts/{part(slug)}/actions/{part(action)}", {}, None, idempotency_key),
            HostDetail,
        )
        return result

    def mark_host_apart(
        self, slug: str, body: Alike | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Say that a host that looks like the same machine is another one, or undo it."""
        result: HostDetail = self._call(
            Call("POST", f"/hosts/{part(slug)}/apart", {}, body, idempotency_key), HostDetail
        )
        return result

    def validate_host(self, slug: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Queue a validation of every device of a host; the reply is its job."""
        result: JobDetail = self._call(
            Call("POST", f"/hosts/{part(slug)}/validate", {}, None, idempotency_key), JobDetail
        )
        return result

    def cordon_device(
        self,
        slug: str,
        device_id: str,
        body: Cordon | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> HostDetail:
        """Cordon a device: it takes no new jobs."""
        result: HostDetail = self._call(
            Call(
                "PUT",
                f"/hosts/{part(slug)}/devices/{part(device_id)}/cordon",
                {},
                body,
                idempotency_key,
            ),
            HostDetail,
        )
        return result

    def uncordon_device(
        self, slug: str, device_id: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Uncordon a device: it takes jobs again."""
        result: HostDetail = self._call(
            Call(
                "DELETE",
                f"/hosts/{part(slug)}/devices/{part(device_id)}/cordon",
                {},
                None,
                idempotency_key,
            ),
            HostDetail,
        )
        return result

    def build_environment(
        self, slug: str, name: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Let a host build an environment, such as vllm, before a job needs it."""
        result: HostDetail = self._call(
            Call(
                "PUT", f"/hosts/{part(slug)}/environments/{part(name)}", {}, None, idempotency_key
            ),
            HostDetail,
        )
        return result

    def remove_environment(
        self, slug: str, name: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Let a host delete an environment that no job runs in."""
        result: HostDetail = self._call(
            Call(
                "DELETE",
                f"/hosts/{part(slug)}/environments/{part(name)}",
                {},
                None,
                idempotency_key,
            ),
            HostDetail,
        )
        return result

    def list_pools(self) -> list[PoolReply]:
        """Return the pools in which the caller's teams may launch."""
        result: list[PoolReply] = self._call(Call("GET", "/pools", {}), list[PoolReply])
        return result

    def get_queue(self, pool_id: str) -> QueueReply:
        """Return a pool's queue in order, with the reason and forecast of each wait."""
        result: QueueReply = self._call(Call("GET", f"/pools/{part(pool_id)}", {}), QueueReply)
        return result

    def reorder_queue(
        self,
        pool_id: str,
        job_id: str,
        body: QueueMove | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> QueueReply:
        """Move a queued job by one turn, or change its priority, as an operator of the pool's team."""
        result: QueueReply = self._call(
            Call(
                "PATCH", f"/pools/{part(pool_id)}/jobs/{part(job_id)}", {}, body, idempotency_key
            ),
            QueueReply,
        )
        return result

    def list_models(self, *, q: str = "") -> list[ModelReply]:
        """Return the teams' models, then the catalog's; ``q`` is part of the name."""
        result: list[ModelReply] = self._call(Call("GET", "/models", {"q": q}), list[ModelReply])
        return result

    def add_model(
        self, body: NewModel | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> ModelDetail:
        """Register a model of the team by its config."""
        result: ModelDetail = self._call(
            Call("POST", "/models", {}, body, idempotency_key), ModelDetail
        )
        return result

    def get_model(self, model_id: str) -> ModelDetail:
        """Return a model of the team by its id, or one of the catalog by any of its names."""
        result: ModelDetail = self._call(Call("GET", f"/models/{part(model_id)}", {}), ModelDetail)
        return result

    def evaluate_model(
        self,
        model_id: str,
        body: EvaluationRequest | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> JobDetail:
        """Queue an evaluation of one of the team's models; the reply is its job."""
        result: JobDetail = self._call(
            Call("POST", f"/evaluations/{part(model_id)}", {}, body, idempotency_key), JobDetail
        )
        return result

    def list_data(self) -> list[DatasetReply]:
        """Return the teams' uploaded files, newest first."""
        result: list[DatasetReply] = self._call(Call("GET", "/data", {}), list[DatasetReply])
        return result

    def add_data(self, file: Path, *, idempotency_key: str | None = None) -> DatasetReply:
        """Upload a file of training data: JSON lines, Parquet or text; it is checked at once."""
        result: DatasetReply = self._call(
            Call("POST", "/data", {}, file, idempotency_key), DatasetReply
        )
        return result

    def get_data(self, dataset_id: str) -> DatasetReply:
        """Return one uploaded file's facts."""
        result: DatasetReply = self._call(
            Call("GET", f"/data/{part(dataset_id)}", {}), DatasetReply
        )
        return result

    def delete_data(self, dataset_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete an uploaded file, unless a job that has not ended uses it."""
        self._call(Call("DELETE", f"/data/{part(dataset_id)}", {}, None, idempotency_key), None)

    def list_devices(self, *, q: str = "") -> list[DeviceSummary]:
        """Return the devices of the hardware catalog; ``q`` is part of the name."""
        result: list[DeviceSummary] = self._call(
            Call("GET", "/devices", {"q": q}), list[DeviceSummary]
        )
        return result

    def list_techniques(self) -> list[TechniqueReply]:
        """Return every technique that the planner knows."""
        result: list[TechniqueReply] = self._call(
            Call("GET", "/techniques", {}), list[TechniqueReply]
        )
        return result

    def get_technique(self, key: str) -> TechniqueReply:
        """Return one technique."""
        result: TechniqueReply = self._call(
            Call("GET", f"/techniques/{part(key)}", {}), TechniqueReply
        )
        return result

    def search(self, *, q: str) -> list[SearchMatch]:
        """Return plans, jobs, hosts, models and techniques whose name contains ``q``."""
        result: list[SearchMatch] = self._call(Call("GET", "/search", {"q": q}), list[SearchMatch])
        return result

    def compare_jobs(self, *, job: list[str]) -> Comparison:
        """Compare the figures and settings of two or more jobs."""
        result: Comparison = self._call(Call("GET", "/compare", {"job": job}), Comparison)
        return result

    def list_measurements(self, job_id: str) -> list[MeasurementReply]:
        """Return the measurements of a job that calibrate its host, or were excluded."""
        result: list[MeasurementReply] = self._call(
            Call("GET", f"/jobs/{part(job_id)}/measurements", {}), list[MeasurementReply]
        )
        return result

    def decide_measurement(
        self,
        job_id: str,
        measurement_id: int,
        body: Decision | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> MeasurementReply:
        """Exclude a measurement from the calibration of its host, or include it again."""
        result: MeasurementReply = self._call(
            Call(
                "PUT",
                f"/jobs/{part(job_id)}/measurements/{part(measurement_id)}",
                {},
                body,
                idempotency_key,
            ),
            MeasurementReply,
        )
        return result

    def get_me(self) -> MeReply:
        """Return who calls: for a token its account, scope, team and what is left of its budget."""
        result: MeReply = self._call(Call("GET", "/me", {}), MeReply)
        return result

    def list_members(self) -> list[MemberReply]:
        """Return the members of the current team; an administrator of the site changes them."""
        result: list[MemberReply] = self._call(Call("GET", "/team/members", {}), list[MemberReply])
        return result

    def list_tokens(self) -> list[TokenReply]:
        """Return the caller's tokens in the current team; an admin gets the team's."""
        result: list[TokenReply] = self._call(Call("GET", "/tokens", {}), list[TokenReply])
        return result

    def make_token(
        self, body: NewToken | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> MadeToken:
        """Make an access token of at most the caller's own scope."""
        result: MadeToken = self._call(
            Call("POST", "/tokens", {}, body, idempotency_key), MadeToken
        )
        return result

    def revoke_token(self, token_id: str, *, idempotency_key: str | None = None) -> None:
        """Revoke a token: an own one, or another's as an admin of the team.

        With a token of a lower scope than admin it can be that token alone.
        """
        self._call(Call("DELETE", f"/tokens/{part(token_id)}", {}, None, idempotency_key), None)

    def list_secrets(self) -> list[SecretReply]:
        """Return the names of the current team's secrets."""
        result: list[SecretReply] = self._call(Call("GET", "/secrets", {}), list[SecretReply])
        return result

    def set_secret(
        self,
        name: str,
        body: SecretValue | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> SecretReply:
        """Store a secret under a name, or replace its value."""
        result: SecretReply = self._call(
            Call("PUT", f"/secrets/{part(name)}", {}, body, idempotency_key), SecretReply
        )
        return result

    def delete_secret(self, name: str, *, idempotency_key: str | None = None) -> None:
        """Delete a secret of the current team; jobs that name it no longer start."""
        self._call(Call("DELETE", f"/secrets/{part(name)}", {}, None, idempotency_key), None)

    def list_sessions(self) -> list[SessionReply]:
        """Return the browsers in which the caller is logged in."""
        result: list[SessionReply] = self._call(Call("GET", "/sessions", {}), list[SessionReply])
        return result

    def get_limits(self) -> QuotaReply:
        """Return the limits of the current team."""
        result: QuotaReply = self._call(Call("GET", "/team/limits", {}), QuotaReply)
        return result

    def change_limits(
        self, body: QuotaChanges | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> QuotaReply:
        """Change the limits of the current team, as an operator."""
        result: QuotaReply = self._call(
            Call("PATCH", "/team/limits", {}, body, idempotency_key), QuotaReply
        )
        return result

    def list_audit(
        self,
        *,
        limit: int = 100,
        before: int | None = None,
        kind: str = "",
        actor: str = "",
        subject: str = "",
        since: date | None = None,
        until: date | None = None,
    ) -> EventPage:
        """Return the history of the current team, newest first, for its admins."""
        result: EventPage = self._call(
            Call(
                "GET",
                "/audit",
                {
                    "limit": limit,
                    "before": before,
                    "kind": kind,
                    "actor": actor,
                    "subject": subject,
                    "since": since,
                    "until": until,
                },
            ),
            EventPage,
        )
        return result


class AsyncSlipway(AsyncCaller):
    """Every operation of the API, for asyncio."""

    async def list_plans(self, *, limit: int = 50, cursor: str = "", q: str = "") -> PlanPage:
        """Return the teams' saved plans and the caller's own drafts, the last saved first."""
        result: PlanPage = await self._call(
            Call("GET", "/plans", {"limit": limit, "cursor": cursor, "q": q}), PlanPage
        )
        return result

    async def create_plan(
        self,
        body: ServePlanDocument
        | GeneratePlanDocument
        | FinetunePlanDocument
        | PretrainPlanDocument
        | CompressPlanDocument
        | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> PlanReply:
        """Make a plan from a document, plan it, and save it as its first version.

        What the document leaves out has the wizard's default. A plan that nothing fits is saved too:
        its answer holds the reasons. One that the planner refuses stays a draft.
        """
        result: PlanReply = await self._call(
            Call("POST", "/plans", {}, body, idempotency_key), PlanReply
        )
        return result

    async def create_plan_from_request(
        self, body: PlannerRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Make a plan from a planner's request, such as the one of a plan that was made offline.

        ``notes`` names what the wizard has no field for.
        """
        result: PlanReply = await self._call(
            Call("POST", "/plans/from-request", {}, body, idempotency_key), PlanReply
        )
        return result

    async def import_plan(
        self, body: Pasted | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Imported:
        """Make a draft of a command line of an engine or a trainer, or of one of their files."""
        result: Imported = await self._call(
            Call("POST", "/plans/import", {}, body, idempotency_key), Imported
        )
        return result

    async def get_plan_schema(self) -> dict[str, Any]:
        """Return the JSON schema of plan documents, for editors of ``job.yaml``."""
        result: dict[str, Any] = await self._call(Call("GET", "/plans/schema", {}), dict[str, Any])
        return result

    async def get_plan(self, plan_id: str) -> PlanReply:
        """Return a plan with the planner's answer."""
        result: PlanReply = await self._call(Call("GET", f"/plans/{part(plan_id)}", {}), PlanReply)
        return result

    async def change_plan(
        self, plan_id: str, body: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Change a plan's document by a JSON merge patch, plan it, and save the next version.

        A draft that the planner refuses stays a draft; a plan that was saved stays as it is, and the
        reply is its next version.
        """
        result: PlanReply = await self._call(
            Call("PATCH", f"/plans/{part(plan_id)}", {}, body, idempotency_key), PlanReply
        )
        return result

    async def delete_plan(self, plan_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete a draft, or a plan with all its versions; its jobs remain."""
        await self._call(
            Call("DELETE", f"/plans/{part(plan_id)}", {}, None, idempotency_key), None
        )

    async def compute_plan(self, plan_id: str, *, idempotency_key: str | None = None) -> PlanReply:
        """Plan again with the host's current measurements; a changed answer is the next version."""
        result: PlanReply = await self._call(
            Call("POST", f"/plans/{part(plan_id)}/compute", {}, None, idempotency_key), PlanReply
        )
        return result

    async def apply_suggestion(
        self, plan_id: str, number: int, *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Apply one of the plan's suggestions, plan it, and save the next version."""
        result: PlanReply = await self._call(
            Call(
                "POST",
                f"/plans/{part(plan_id)}/suggestions/{part(number)}",
                {},
                None,
                idempotency_key,
            ),
            PlanReply,
        )
        return result

    async def clone_plan(self, plan_id: str, *, idempotency_key: str | None = None) -> PlanReply:
        """Return a draft copy, to be saved as a separate plan."""
        result: PlanReply = await self._call(
            Call("POST", f"/plans/{part(plan_id)}/clone", {}, None, idempotency_key), PlanReply
        )
        return result

    async def save_plan(
        self, plan_id: str, body: Saving | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> PlanReply:
        """Save a draft as a version; a saved plan is returned unchanged."""
        result: PlanReply = await self._call(
            Call("POST", f"/plans/{part(plan_id)}/save", {}, body, idempotency_key), PlanReply
        )
        return result

    async def list_plan_versions(self, plan_id: str) -> list[VersionReply]:
        """Return every version of a saved plan, newest first."""
        result: list[VersionReply] = await self._call(
            Call("GET", f"/plans/{part(plan_id)}/versions", {}), list[VersionReply]
        )
        return result

    async def launch_plan(
        self,
        plan_id: str,
        body: LaunchDocument | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> Launched:
        """Launch a plan as a job; with an ``Idempotency-Key`` a repetition launches nothing more.

        A token with a budget launches only what its rest suffices for.
        """
        result: Launched = await self._call(
            Call("POST", f"/plans/{part(plan_id)}/launch", {}, body, idempotency_key), Launched
        )
        return result

    async def request_launch(
        self,
        plan_id: str,
        body: LaunchToApprove | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> LaunchRequestReply:
        """Ask a person of the team to approve a launch; they decide on the page Approvals."""
        result: LaunchRequestReply = await self._call(
            Call("POST", f"/plans/{part(plan_id)}/launch-requests", {}, body, idempotency_key),
            LaunchRequestReply,
        )
        return result

    async def list_exports(self, plan_id: str) -> PlanFormats:
        """Return the formats that a plan can be exported to."""
        result: PlanFormats = await self._call(
            Call("GET", f"/plans/{part(plan_id)}/exports", {}), PlanFormats
        )
        return result

    async def export_plan(self, plan_id: str, key: str) -> ExportReply:
        """Return a plan in one format, with its notes and the script that measures it."""
        result: ExportReply = await self._call(
            Call("GET", f"/plans/{part(plan_id)}/exports/{part(key)}", {}), ExportReply
        )
        return result

    async def get_plan_limit(
        self,
        plan_id: str,
        question: Literal[
            "longest_context",
            "largest_batch",
            "most_users",
            "longest_sequence",
            "largest_model",
            "fewest_devices",
            "cheapest_instance",
        ],
    ) -> dict[str, Any]:
        """Return a limit of a plan, such as ``longest_context`` or ``most_users``."""
        result: dict[str, Any] = await self._call(
            Call("GET", f"/plans/{part(plan_id)}/limits/{part(question)}", {}), dict[str, Any]
        )
        return result

    async def list_launch_requests(self) -> list[LaunchRequestReply]:
        """Return the teams' launches that wait for an approval, the oldest first."""
        result: list[LaunchRequestReply] = await self._call(
            Call("GET", "/launch-requests", {}), list[LaunchRequestReply]
        )
        return result

    async def get_launch_request(self, request_id: str) -> LaunchRequestReply:
        """Return a request with its decision, and the job of an approved one."""
        result: LaunchRequestReply = await self._call(
            Call("GET", f"/launch-requests/{part(request_id)}", {}), LaunchRequestReply
        )
        return result

    async def get_post_mortem(self, job_id: str) -> PostMortem:
        """Return what is known of a job's failure, and what would fit."""
        result: PostMortem = await self._call(
            Call("GET", f"/jobs/{part(job_id)}/post-mortem", {}), PostMortem
        )
        return result

    async def plan_from_job(
        self,
        job_id: str,
        body: PlanFromJob | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> PlanReply:
        """Make a draft plan from a job."""
        result: PlanReply = await self._call(
            Call("POST", f"/jobs/{part(job_id)}/plan", {}, body, idempotency_key), PlanReply
        )
        return result

    async def launch_classification(
        self, body: TwoJobs | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> list[JobReply]:
        """Launch the same classifier with DDP and with ZeRO on one host, to be compared."""
        result: list[JobReply] = await self._call(
            Call("POST", "/templates/classification", {}, body, idempotency_key), list[JobReply]
        )
        return result

    async def ask_plan(
        self, body: PlanRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> PlanAnswer:
        """Answer a planner question in the planner's own contract."""
        result: PlanAnswer = await self._call(
            Call("POST", "/planner/plan", {}, body, idempotency_key), PlanAnswer
        )
        return result

    async def ask_estimate(
        self, body: EstimateRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Estimate:
        """Return the estimate of one strategy."""
        result: Estimate = await self._call(
            Call("POST", "/planner/estimate", {}, body, idempotency_key), Estimate
        )
        return result

    async def ask_inverse(
        self, body: InverseRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> InverseAnswer:
        """Return a limit, such as the longest context or the cheapest instance."""
        result: InverseAnswer = await self._call(
            Call("POST", "/planner/inverse", {}, body, idempotency_key), InverseAnswer
        )
        return result

    async def list_jobs(
        self,
        *,
        limit: int = 50,
        cursor: str = "",
        state: str = "",
        kind: str = "",
        host: str = "",
        owner: str = "",
        plan: str = "",
        q: str = "",
    ) -> JobPage:
        """Return the teams' jobs, newest first."""
        result: JobPage = await self._call(
            Call(
                "GET",
                "/jobs",
                {
                    "limit": limit,
                    "cursor": cursor,
                    "state": state,
                    "kind": kind,
                    "host": host,
                    "owner": owner,
                    "plan": plan,
                    "q": q,
                },
            ),
            JobPage,
        )
        return result

    async def get_job(self, job_id: str) -> JobDetail:
        """Return a job with its spec, its attempts and why it waits or ended."""
        result: JobDetail = await self._call(Call("GET", f"/jobs/{part(job_id)}", {}), JobDetail)
        return result

    async def delete_job(self, job_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete an ended job from the history; its measurements still calibrate its host."""
        await self._call(Call("DELETE", f"/jobs/{part(job_id)}", {}, None, idempotency_key), None)

    async def stop_job(self, job_id: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Stop a job; its supervisor lets it save its results first."""
        result: JobDetail = await self._call(
            Call("POST", f"/jobs/{part(job_id)}/stop", {}, None, idempotency_key), JobDetail
        )
        return result

    async def run_job_again(self, job_id: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Queue a job with the same spec, owned by the caller."""
        result: JobDetail = await self._call(
            Call("POST", f"/jobs/{part(job_id)}/run-again", {}, None, idempotency_key), JobDetail
        )
        return result

    async def abandon_job(
        self,
        job_id: str,
        body: Abandoning | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> JobDetail:
        """Count the devices of a job's unreachable hosts as free, and end the job.

        With ``elsewhere`` a copy of it starts on another host; the reply is then the copy.
        """
        result: JobDetail = await self._call(
            Call("POST", f"/jobs/{part(job_id)}/abandon", {}, body, idempotency_key), JobDetail
        )
        return result

    async def get_job_log(
        self,
        job_id: str,
        *,
        after: int | None = None,
        limit: int = 200,
        q: str = "",
        host: int = 0,
    ) -> LogReply:
        """Return the last lines of a job's log, or those after an event, in order."""
        result: LogReply = await self._call(
            Call(
                "GET",
                f"/jobs/{part(job_id)}/log",
                {"after": after, "limit": limit, "q": q, "host": host},
            ),
            LogReply,
        )
        return result

    async def get_job_series(
        self,
        job_id: str,
        *,
        metrics: str,
        since: int = 0,
        until: int = 4611686018427387904,
        points: int = 600,
        host: int = 0,
    ) -> JobSeries:
        """Return the comma-separated ``metrics`` between two instants in ms, down-sampled.

        For a job on several hosts, the series are those reported by host number ``host``.
        """
        result: JobSeries = await self._call(
            Call(
                "GET",
                f"/jobs/{part(job_id)}/series",
                {
                    "metrics": metrics,
                    "since": since,
                    "until": until,
                    "points": points,
                    "host": host,
                },
            ),
            JobSeries,
        )
        return result

    async def get_job_figures(self, job_id: str) -> JobFiguresReply:
        """Return a job's predicted and measured figures, as shown on its page."""
        result: JobFiguresReply = await self._call(
            Call("GET", f"/jobs/{part(job_id)}/figures", {}), JobFiguresReply
        )
        return result

    async def list_job_events(
        self, job_id: str, *, after: int = 0, kind: str = "", host: int = 0
    ) -> JobEvents:
        """Return events of the current attempt after a sequence number, at most 1000 or 256 KiB.

        Request again after ``last_seq`` until the list is empty. For a job on several hosts, the
        events are those reported by host number ``host``.
        """
        result: JobEvents = await self._call(
            Call(
                "GET", f"/jobs/{part(job_id)}/events", {"after": after, "kind": kind, "host": host}
            ),
            JobEvents,
        )
        return result

    async def list_artefacts(self, job_id: str) -> list[ArtefactReply]:
        """Return the artefacts of a job's current attempt."""
        result: list[ArtefactReply] = await self._call(
            Call("GET", f"/jobs/{part(job_id)}/artefacts", {}), list[ArtefactReply]
        )
        return result

    async def download_artefact(self, job_id: str, name: str, sink: BinaryIO) -> int:
        """Return a complete artefact as a .tar file."""
        return await self._download(
            Call("GET", f"/jobs/{part(job_id)}/artefacts/{part(name)}", {}), sink
        )

    def follow_job(
        self, job_id: str, *, kinds: str = "log,state", after: int = 0, host: int = 0
    ) -> AsyncIterator[Event]:
        """Return a job's events as they come, until it ends; ``Last-Event-ID`` resumes the log."""
        return self._events(
            Call(
                "GET",
                f"/jobs/{part(job_id)}/stream",
                {"kinds": kinds, "after": after, "host": host},
            )
        )

    async def get_ticket(self, *, topics: str) -> Ticket:
        """Return a new ticket for those of the comma-separated topics that the caller may see."""
        result: Ticket = await self._call(Call("GET", "/tickets", {"topics": topics}), Ticket)
        return result

    async def list_hosts(self, *, q: str = "") -> list[HostReply]:
        """Return the teams' hosts by name; ``q`` is part of the name."""
        result: list[HostReply] = await self._call(
            Call("GET", "/hosts", {"q": q}), list[HostReply]
        )
        return result

    async def add_host(
        self, body: NewHost | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> EnrolmentReply:
        """Make a one-time token, valid for an hour, with which a machine enrols itself."""
        result: EnrolmentReply = await self._call(
            Call("POST", "/hosts/enrolments", {}, body, idempotency_key), EnrolmentReply
        )
        return result

    async def get_enrolment(self, token_id: str) -> EnrolmentState:
        """Return what is known of a host that is being enrolled, check by check."""
        result: EnrolmentState = await self._call(
            Call("GET", f"/hosts/enrolments/{part(token_id)}", {}), EnrolmentState
        )
        return result

    async def revoke_enrolment(self, token_id: str, *, idempotency_key: str | None = None) -> None:
        """Revoke an unused enrolment token; a used or revoked one stays as it is."""
        await self._call(
            Call("DELETE", f"/hosts/enrolments/{part(token_id)}", {}, None, idempotency_key), None
        )

    async def add_virtual_host(
        self, body: NewVirtualHost | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Make a planning-only host, on which no job runs."""
        result: HostDetail = await self._call(
            Call("POST", "/hosts/virtual", {}, body, idempotency_key), HostDetail
        )
        return result

    async def get_host(self, slug: str) -> HostDetail:
        """Return a host with its devices, facts and measurements."""
        result: HostDetail = await self._call(Call("GET", f"/hosts/{part(slug)}", {}), HostDetail)
        return result

    async def change_host(
        self,
        slug: str,
        body: HostChanges | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> HostDetail:
        """Change a host's labels, and the address at which a job's other hosts reach it."""
        result: HostDetail = await self._call(
            Call("PATCH", f"/hosts/{part(slug)}", {}, body, idempotency_key), HostDetail
        )
        return result

    async def act_on_host(
        self,
        slug: str,
        action: Literal[
            "drain", "undrain", "recheck", "rotate", "revoke", "maintenance", "retire"
        ],
        *,
        idempotency_key: str | None = None,
    ) -> HostDetail:
        """Change a host, as an operator.

        ``drain``: it finishes its jobs and takes no new ones; ``undrain``: it takes jobs again;
        ``recheck``: it reports new facts; ``rotate``: it replaces its secrets; ``revoke``: its
        credential ends until it is enrolled again; ``maintenance`` and ``retire``: it is taken out.
        """
        result: HostDetail = await self._call(
            Call("POST", f"/hosts/{part(slug)}/actions/{part(action)}", {}, None, idempotency_key),
            HostDetail,
        )
        return result

    async def mark_host_apart(
        self, slug: str, body: Alike | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Say that a host that looks like the same machine is another one, or undo it."""
        result: HostDetail = await self._call(
            Call("POST", f"/hosts/{part(slug)}/apart", {}, body, idempotency_key), HostDetail
        )
        return result

    async def validate_host(self, slug: str, *, idempotency_key: str | None = None) -> JobDetail:
        """Queue a validation of every device of a host; the reply is its job."""
        result: JobDetail = await self._call(
            Call("POST", f"/hosts/{part(slug)}/validate", {}, None, idempotency_key), JobDetail
        )
        return result

    async def cordon_device(
        self,
        slug: str,
        device_id: str,
        body: Cordon | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> HostDetail:
        """Cordon a device: it takes no new jobs."""
        result: HostDetail = await self._call(
            Call(
                "PUT",
                f"/hosts/{part(slug)}/devices/{part(device_id)}/cordon",
                {},
                body,
                idempotency_key,
            ),
            HostDetail,
        )
        return result

    async def uncordon_device(
        self, slug: str, device_id: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Uncordon a device: it takes jobs again."""
        result: HostDetail = await self._call(
            Call(
                "DELETE",
                f"/hosts/{part(slug)}/devices/{part(device_id)}/cordon",
                {},
                None,
                idempotency_key,
            ),
            HostDetail,
        )
        return result

    async def build_environment(
        self, slug: str, name: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Let a host build an environment, such as vllm, before a job needs it."""
        result: HostDetail = await self._call(
            Call(
                "PUT", f"/hosts/{part(slug)}/environments/{part(name)}", {}, None, idempotency_key
            ),
            HostDetail,
        )
        return result

    async def remove_environment(
        self, slug: str, name: str, *, idempotency_key: str | None = None
    ) -> HostDetail:
        """Let a host delete an environment that no job runs in."""
        result: HostDetail = await self._call(
            Call(
                "DELETE",
                f"/hosts/{part(slug)}/environments/{part(name)}",
                {},
                None,
                idempotency_key,
            ),
            HostDetail,
        )
        return result

    async def list_pools(self) -> list[PoolReply]:
        """Return the pools in which the caller's teams may launch."""
        result: list[PoolReply] = await self._call(Call("GET", "/pools", {}), list[PoolReply])
        return result

    async def get_queue(self, pool_id: str) -> QueueReply:
        """Return a pool's queue in order, with the reason and forecast of each wait."""
        result: QueueReply = await self._call(
            Call("GET", f"/pools/{part(pool_id)}", {}), QueueReply
        )
        return result

    async def reorder_queue(
        self,
        pool_id: str,
        job_id: str,
        body: QueueMove | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> QueueReply:
        """Move a queued job by one turn, or change its priority, as an operator of the pool's team."""
        result: QueueReply = await self._call(
            Call(
                "PATCH", f"/pools/{part(pool_id)}/jobs/{part(job_id)}", {}, body, idempotency_key
            ),
            QueueReply,
        )
        return result

    async def list_models(self, *, q: str = "") -> list[ModelReply]:
        """Return the teams' models, then the catalog's; ``q`` is part of the name."""
        result: list[ModelReply] = await self._call(
            Call("GET", "/models", {"q": q}), list[ModelReply]
        )
        return result

    async def add_model(
        self, body: NewModel | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> ModelDetail:
        """Register a model of the team by its config."""
        result: ModelDetail = await self._call(
            Call("POST", "/models", {}, body, idempotency_key), ModelDetail
        )
        return result

    async def get_model(self, model_id: str) -> ModelDetail:
        """Return a model of the team by its id, or one of the catalog by any of its names."""
        result: ModelDetail = await self._call(
            Call("GET", f"/models/{part(model_id)}", {}), ModelDetail
        )
        return result

    async def evaluate_model(
        self,
        model_id: str,
        body: EvaluationRequest | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> JobDetail:
        """Queue an evaluation of one of the team's models; the reply is its job."""
        result: JobDetail = await self._call(
            Call("POST", f"/evaluations/{part(model_id)}", {}, body, idempotency_key), JobDetail
        )
        return result

    async def list_data(self) -> list[DatasetReply]:
        """Return the teams' uploaded files, newest first."""
        result: list[DatasetReply] = await self._call(Call("GET", "/data", {}), list[DatasetReply])
        return result

    async def add_data(self, file: Path, *, idempotency_key: str | None = None) -> DatasetReply:
        """Upload a file of training data: JSON lines, Parquet or text; it is checked at once."""
        result: DatasetReply = await self._call(
            Call("POST", "/data", {}, file, idempotency_key), DatasetReply
        )
        return result

    async def get_data(self, dataset_id: str) -> DatasetReply:
        """Return one uploaded file's facts."""
        result: DatasetReply = await self._call(
            Call("GET", f"/data/{part(dataset_id)}", {}), DatasetReply
        )
        return result

    async def delete_data(self, dataset_id: str, *, idempotency_key: str | None = None) -> None:
        """Delete an uploaded file, unless a job that has not ended uses it."""
        await self._call(
            Call("DELETE", f"/data/{part(dataset_id)}", {}, None, idempotency_key), None
        )

    async def list_devices(self, *, q: str = "") -> list[DeviceSummary]:
        """Return the devices of the hardware catalog; ``q`` is part of the name."""
        result: list[DeviceSummary] = await self._call(
            Call("GET", "/devices", {"q": q}), list[DeviceSummary]
        )
        return result

    async def list_techniques(self) -> list[TechniqueReply]:
        """Return every technique that the planner knows."""
        result: list[TechniqueReply] = await self._call(
            Call("GET", "/techniques", {}), list[TechniqueReply]
        )
        return result

    async def get_technique(self, key: str) -> TechniqueReply:
        """Return one technique."""
        result: TechniqueReply = await self._call(
            Call("GET", f"/techniques/{part(key)}", {}), TechniqueReply
        )
        return result

    async def search(self, *, q: str) -> list[SearchMatch]:
        """Return plans, jobs, hosts, models and techniques whose name contains ``q``."""
        result: list[SearchMatch] = await self._call(
            Call("GET", "/search", {"q": q}), list[SearchMatch]
        )
        return result

    async def compare_jobs(self, *, job: list[str]) -> Comparison:
        """Compare the figures and settings of two or more jobs."""
        result: Comparison = await self._call(Call("GET", "/compare", {"job": job}), Comparison)
        return result

    async def list_measurements(self, job_id: str) -> list[MeasurementReply]:
        """Return the measurements of a job that calibrate its host, or were excluded."""
        result: list[MeasurementReply] = await self._call(
            Call("GET", f"/jobs/{part(job_id)}/measurements", {}), list[MeasurementReply]
        )
        return result

    async def decide_measurement(
        self,
        job_id: str,
        measurement_id: int,
        body: Decision | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> MeasurementReply:
        """Exclude a measurement from the calibration of its host, or include it again."""
        result: MeasurementReply = await self._call(
            Call(
                "PUT",
                f"/jobs/{part(job_id)}/measurements/{part(measurement_id)}",
                {},
                body,
                idempotency_key,
            ),
            MeasurementReply,
        )
        return result

    async def get_me(self) -> MeReply:
        """Return who calls: for a token its account, scope, team and what is left of its budget."""
        result: MeReply = await self._call(Call("GET", "/me", {}), MeReply)
        return result

    async def list_members(self) -> list[MemberReply]:
        """Return the members of the current team; an administrator of the site changes them."""
        result: list[MemberReply] = await self._call(
            Call("GET", "/team/members", {}), list[MemberReply]
        )
        return result

    async def list_tokens(self) -> list[TokenReply]:
        """Return the caller's tokens in the current team; an admin gets the team's."""
        result: list[TokenReply] = await self._call(Call("GET", "/tokens", {}), list[TokenReply])
        return result

    async def make_token(
        self, body: NewToken | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> MadeToken:
        """Make an access token of at most the caller's own scope."""
        result: MadeToken = await self._call(
            Call("POST", "/tokens", {}, body, idempotency_key), MadeToken
        )
        return result

    async def revoke_token(self, token_id: str, *, idempotency_key: str | None = None) -> None:
        """Revoke a token: an own one, or another's as an admin of the team.

        With a token of a lower scope than admin it can be that token alone.
        """
        await self._call(
            Call("DELETE", f"/tokens/{part(token_id)}", {}, None, idempotency_key), None
        )

    async def list_secrets(self) -> list[SecretReply]:
        """Return the names of the current team's secrets."""
        result: list[SecretReply] = await self._call(
            Call("GET", "/secrets", {}), list[SecretReply]
        )
        return result

    async def set_secret(
        self,
        name: str,
        body: SecretValue | Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
    ) -> SecretReply:
        """Store a secret under a name, or replace its value."""
        result: SecretReply = await self._call(
            Call("PUT", f"/secrets/{part(name)}", {}, body, idempotency_key), SecretReply
        )
        return result

    async def delete_secret(self, name: str, *, idempotency_key: str | None = None) -> None:
        """Delete a secret of the current team; jobs that name it no longer start."""
        await self._call(Call("DELETE", f"/secrets/{part(name)}", {}, None, idempotency_key), None)

    async def list_sessions(self) -> list[SessionReply]:
        """Return the browsers in which the caller is logged in."""
        result: list[SessionReply] = await self._call(
            Call("GET", "/sessions", {}), list[SessionReply]
        )
        return result

    async def get_limits(self) -> QuotaReply:
        """Return the limits of the current team."""
        result: QuotaReply = await self._call(Call("GET", "/team/limits", {}), QuotaReply)
        return result

    async def change_limits(
        self, body: QuotaChanges | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> QuotaReply:
        """Change the limits of the current team, as an operator."""
        result: QuotaReply = await self._call(
            Call("PATCH", "/team/limits", {}, body, idempotency_key), QuotaReply
        )
        return result

    async def list_audit(
        self,
        *,
        limit: int = 100,
        before: int | None = None,
        kind: str = "",
        actor: str = "",
        subject: str = "",
        since: date | None = None,
        until: date | None = None,
    ) -> EventPage:
        """Return the history of the current team, newest first, for its admins."""
        result: EventPage = await self._call(
            Call(
                "GET",
                "/audit",
                {
                    "limit": limit,
                    "before": before,
                    "kind": kind,
                    "actor": actor,
                    "subject": subject,
                    "since": since,
                    "until": until,
                },
            ),
            EventPage,
        )
        return result
