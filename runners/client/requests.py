"""The types of the API's requests, written by ``manage.py client`` from its schema."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, NotRequired, TypedDict

from planner.specs.workload import Strategy
from runners.client.replies.team import Scope
from runners.plans.document import (
    CompressPlan,
    FinetunePlan,
    GeneratePlan,
    HardwareChoice,
    ModelChoice,
    PretrainPlan,
    ServePlan,
)
from runners.plans.launch import Launch
from runners.plans.workloads import (
    CompressWork,
    FinetuneWork,
    GenerateWork,
    PretrainWork,
    ServeWork,
)


class Abandoning(TypedDict):
    """The confirmation to abandon a job: the names of its unreachable hosts."""

    host_name: str
    elsewhere: NotRequired[str]


class Alike(TypedDict):
    """Another host that looks like the same machine, and whether it is another one."""

    other: str
    is_apart: NotRequired[bool]


class AllowedCode(TypedDict):
    """A repository at a commit whose code an administrator has read."""

    model: str
    reason: NotRequired[str]


class ChangedDeployment(TypedDict):
    """What is to change; a field that is left out stays."""

    plan: NotRequired[str | None]
    launch: NotRequired[Launch | None]
    idle_seconds: NotRequired[float | None]
    is_kept_awake: NotRequired[bool | None]
    is_paused: NotRequired[bool | None]
    aliases: NotRequired[list[str] | None]
    fallbacks: NotRequired[list[str] | None]
    warm_hours: NotRequired[str | None]
    min_replicas: NotRequired[int | None]
    max_replicas: NotRequired[int | None]


class ChangedServer(TypedDict):
    """What is to change; a field that is left out stays."""

    name: NotRequired[str | None]
    key: NotRequired[str | None]
    plan: NotRequired[str | None]
    host: NotRequired[str | None]


class CompressStep(TypedDict):
    """Make the weights smaller and measure the loss of quality."""

    goal: Literal["compress"]
    name: NotRequired[str]
    objective: NotRequired[
        Literal["throughput", "latency", "cost", "energy", "memory", "quality", "balanced"]
    ]
    latency_target: NotRequired[Literal["chat", "code", "none"]]
    percentile: NotRequired[Literal["p95", "p99", "p50", "mean"]]
    model: NotRequired[ModelChoice | str]
    workload: NotRequired[CompressWork]
    hardware: NotRequired[HardwareChoice]
    pins: NotRequired[Strategy]
    launch: NotRequired[Launch]
    sweep: NotRequired[dict[str, Any]]


class Cordon(TypedDict):
    """Why a device takes no new jobs."""

    reason: str


class Decision(TypedDict):
    """Whether a measurement counts, and why."""

    decision: Literal["excluded", "included"]
    reason: str


class DocumentToApprove(TypedDict):
    """A document whose launch a person is asked to approve, and why."""

    document: ServePlan | GeneratePlan | FinetunePlan | PretrainPlan | CompressPlan
    reason: NotRequired[str]


class EvaluateStep(TypedDict):
    """Measure the model that the last step made, beside the one which that started from."""

    goal: Literal["evaluate"]
    name: NotRequired[str]
    tasks: NotRequired[EvaluationTasks | None]


class EvaluationRequest(TypedDict):
    """Tasks of lm-evaluation-harness beside the perplexity; "" for none."""

    tasks: NotRequired[Literal["", "named", "folder"]]
    task_names: NotRequired[list[str]]
    task_folder: NotRequired[str]
    documents: NotRequired[int | None]


class EvaluationTasks(TypedDict):
    """Tasks by name, from YAML files below ``folder`` or from the host's held-out text.

    Empty ``names`` selects all tasks. ``documents`` limits the documents per task.
    """

    names: NotRequired[list[str]]
    folder: NotRequired[str | None]
    documents: NotRequired[int | None]


class FinetuneStep(TypedDict):
    """Train an existing model on your own text."""

    goal: Literal["finetune"]
    name: NotRequired[str]
    objective: NotRequired[
        Literal["throughput", "latency", "cost", "energy", "memory", "quality", "balanced"]
    ]
    latency_target: NotRequired[Literal["chat", "code", "none"]]
    percentile: NotRequired[Literal["p95", "p99", "p50", "mean"]]
    model: NotRequired[ModelChoice | str]
    workload: NotRequired[FinetuneWork]
    hardware: NotRequired[HardwareChoice]
    pins: NotRequired[Strategy]
    launch: NotRequired[Launch]
    sweep: NotRequired[dict[str, Any]]


class GenerateStep(TypedDict):
    """Process a batch of prompts at the highest throughput."""

    goal: Literal["generate"]
    name: NotRequired[str]
    objective: NotRequired[
        Literal["throughput", "latency", "cost", "energy", "memory", "quality", "balanced"]
    ]
    latency_target: NotRequired[Literal["chat", "code", "none"]]
    percentile: NotRequired[Literal["p95", "p99", "p50", "mean"]]
    model: NotRequired[ModelChoice | str]
    workload: NotRequired[GenerateWork]
    hardware: NotRequired[HardwareChoice]
    pins: NotRequired[Strategy]
    launch: NotRequired[Launch]
    sweep: NotRequired[dict[str, Any]]


class HostChanges(TypedDict):
    """New labels or another address; what is left out stays."""

    labels: NotRequired[dict[str, str] | None]
    address: NotRequired[str | None]


class KeyOptions(TypedDict):
    """What a key opens, and within which limits; None: no limit."""

    name: str
    is_service: NotRequired[bool]
    models: NotRequired[list[str]]
    requests_per_minute: NotRequired[int | None]
    max_concurrency: NotRequired[int | None]
    tokens_per_day: NotRequired[int | None]
    tokens_per_month: NotRequired[int | None]
    hold_seconds: NotRequired[float]
    days: NotRequired[float | None]


class LaunchToApprove(TypedDict):
    """A launch that a person is asked to approve, and why."""

    launch: NotRequired[Launch]
    reason: NotRequired[str]


class ModelChanges(TypedDict):
    """What changes of a team's model."""

    name: str


class ModelPin(TypedDict):
    """A model of the host's cache, and whether it is pinned."""

    model: str
    is_pinned: NotRequired[bool]


class ModelsRule(TypedDict):
    """How much a host's cache keeps."""

    keep_gib: float | None


class NewDeployment(TypedDict):
    """A name, and what it is to run: a plan, or a document that is planned now."""

    name: str
    plan: NotRequired[str | None]
    document: NotRequired[
        ServePlan | GeneratePlan | FinetunePlan | PretrainPlan | CompressPlan | None
    ]
    launch: NotRequired[Launch | None]
    idle_seconds: NotRequired[float | None]
    is_kept_awake: NotRequired[bool]
    aliases: NotRequired[list[str]]
    fallbacks: NotRequired[list[str]]
    warm_hours: NotRequired[str]
    min_replicas: NotRequired[int]
    max_replicas: NotRequired[int]


class NewHost(TypedDict):
    """The host that is to be enrolled; labels are names with values, such as gpu: 4090."""

    name: str
    pool: NotRequired[str]
    labels: NotRequired[dict[str, str]]


class NewModel(TypedDict):
    """A model by its ``config.json``, as Hugging Face publishes it."""

    name: str
    config: NotRequired[dict[str, Any] | None]
    repository: NotRequired[str | None]


class NewModelCopy(TypedDict):
    """Which model is copied: one of another host's cache, or files that the caller sends."""

    model: str
    source: NotRequired[str | None]
    revision: NotRequired[str | None]
    files: NotRequired[list[PushedFile]]


class NewObservedJob(TypedDict):
    """A job of somebody else to observe; one that is observed already gets this plan."""

    host: str
    job_id: str
    plan: NotRequired[str | None]


class NewServer(TypedDict):
    """A server to watch."""

    address: str
    name: NotRequired[str]
    key: NotRequired[str]
    plan: NotRequired[str | None]
    host: NotRequired[str | None]


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


class Pasted(TypedDict):
    """Another tool's command line or configuration, and where the plan is to run."""

    text: str
    host: NotRequired[str]
    pool: NotRequired[str]


class PlanFromJob(TypedDict):
    """How a job becomes a plan.

    ``clone``: its plan with its launch options; ``need``: with the measured memory need as limit,
    of a job that ran out of memory; ``change``: with one of the changes of its post-mortem.
    """

    how: NotRequired[Literal["clone", "need", "change"]]
    change: NotRequired[int | None]


class PlannerRequest(TypedDict):
    """A planner's request, whole or in part, and where the plan is to run."""

    request: dict[str, Any]
    host: NotRequired[str]
    pool: NotRequired[str]
    name: NotRequired[str]


class PretrainStep(TypedDict):
    """Train a model from random weights."""

    goal: Literal["pretrain"]
    name: NotRequired[str]
    objective: NotRequired[
        Literal["throughput", "latency", "cost", "energy", "memory", "quality", "balanced"]
    ]
    latency_target: NotRequired[Literal["chat", "code", "none"]]
    percentile: NotRequired[Literal["p95", "p99", "p50", "mean"]]
    model: NotRequired[ModelChoice | str]
    workload: NotRequired[PretrainWork]
    hardware: NotRequired[HardwareChoice]
    pins: NotRequired[Strategy]
    launch: NotRequired[Launch]
    sweep: NotRequired[dict[str, Any]]


class PublishRequest(TypedDict):
    """Where a model is pushed to."""

    repository: str
    revision: NotRequired[str]
    is_private: NotRequired[bool]


class PushedFile(TypedDict):
    """A file that a person sends."""

    path: str
    size_bytes: int
    etag: str


class QueueMove(TypedDict):
    """A new place or priority of a queued job."""

    move: NotRequired[Literal["up", "down"] | None]
    seen: NotRequired[str]
    priority: NotRequired[Literal["low", "normal", "high"] | None]


class QuotaChanges(TypedDict):
    """New limits; what is left out stays, null removes a limit."""

    max_devices: NotRequired[int | None]
    max_gpu_hours_per_month: NotRequired[float | None]
    max_duration_hours: NotRequired[float | None]
    max_queued_per_user: NotRequired[int | None]
    share: NotRequired[float | None]


class RollOut(TypedDict):
    """Which draft is rolled out."""

    saved_at: NotRequired[datetime | None]


class Rotation(TypedDict):
    """How long a key's present secret is still valid beside the new one."""

    overlap_hours: NotRequired[float]


class Saving(TypedDict):
    """How a draft is saved."""

    name: NotRequired[str]
    save_as: NotRequired[Literal["next", "new"]]


class SecretValue(TypedDict):
    """The new value of a secret; its lines are kept as they are."""

    value: str


class ServeStep(TypedDict):
    """Answer requests as they arrive."""

    goal: Literal["serve"]
    name: NotRequired[str]
    objective: NotRequired[
        Literal["throughput", "latency", "cost", "energy", "memory", "quality", "balanced"]
    ]
    latency_target: NotRequired[Literal["chat", "code", "none"]]
    percentile: NotRequired[Literal["p95", "p99", "p50", "mean"]]
    model: NotRequired[ModelChoice | str]
    workload: NotRequired[ServeWork]
    hardware: NotRequired[HardwareChoice]
    pins: NotRequired[Strategy]
    launch: NotRequired[Launch]
    sweep: NotRequired[dict[str, Any]]


class TuningOptions(TypedDict):
    """What a tuning may try and spend."""

    host: NotRequired[str]
    trials: NotRequired[int]
    max_seconds: NotRequired[float]
    trial_seconds: NotRequired[float]
    figure: NotRequired[
        Literal[
            "tokens_per_second",
            "ttft_seconds",
            "tpot_seconds",
            "latency_seconds",
            "step_seconds",
            "peak_memory_bytes",
        ]
        | None
    ]
    formats: NotRequired[bool]


class TwoJobs(TypedDict):
    """Where the classifier's two jobs run, and the ZeRO stage that is compared with DDP."""

    host: str
    zero_stage: NotRequired[Literal[1, 2, 3]]


class Withdrawal(TypedDict):
    """Why a request is withdrawn."""

    reason: NotRequired[str]


class WorkflowDocument(TypedDict):
    """Steps that follow one another, each with the model that the last one made."""

    name: NotRequired[str]
    steps: list[
        ServeStep | GenerateStep | FinetuneStep | PretrainStep | CompressStep | EvaluateStep
    ]
