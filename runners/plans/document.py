"""The document of a plan: goal, model, workload, hardware, pins and launch.

The command line, the API, the wizard, imports and the stored draft are this one model. A field
that is left out has its default; a stored document states every value of its goal.
"""

import copy
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    WrapSerializer,
    model_validator,
)

from planner.catalog.engines import AUTO
from planner.catalog.topologies import get_topology
from planner.specs.base import UnknownTopologyError, refuse
from planner.specs.estimate import Objective
from planner.specs.workload import Strategy
from runners.jobspec.base import LONGEST_NAME, NAME_LENGTH, DataParallel
from runners.plans.fields import Part, faults_in, field
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import (
    TRAINING_GOALS,
    WORKLOADS,
    CompressWork,
    FinetuneWork,
    GenerateWork,
    PretrainWork,
    ServeWork,
)

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"
DEFAULT_DEVICE = "rtx-4090"
GOAL = Field(description="What is done with the model")
WORK = "The work; what is left out has its default"
LONGEST_CONTEXT = 100_000_000  # tokens
MOST_FAULTS = 100  # of a stored draft that is repaired
GOALS: Mapping[str, tuple[str, str]] = {
    "serve": ("Serve", "Answer requests as they arrive"),
    "generate": ("Generate in batch", "Process a batch of prompts at the highest throughput"),
    "finetune": ("Fine-tune", "Train an existing model on your own text"),
    "pretrain": ("Pre-train", "Train a model from random weights"),
    "compress": ("Compress", "Make the weights smaller and measure the loss of quality"),
}
OnLostRank = Literal["stop", "restart", "shrink"]


Source = Literal["demo", "catalog", "hub", "team", "config", "folder"]
ScalingKind = Literal["yarn", "linear", "dynamic"]


class RopeScaling(Part):
    """A rotary scaling that stretches a model's context, by the names of transformers.

    Source of what YaRN takes without its fields: transformers, ``modeling_rope_utils.py``.
    """

    rope_type: ScalingKind = field(
        ...,
        "Rotary scaling",
        "How the positions beyond the model's own context are computed",
        choices={"yarn": "YaRN", "linear": "Linear", "dynamic": "Dynamic NTK"},
    )
    factor: float = field(..., "Factor", "By which the context grows", gt=1, le=1000)
    original_max_position_embeddings: int | None = field(
        None,
        "Original context",
        "Tokens that YaRN multiplies; empty: the model's own context",
        ge=1,
        le=LONGEST_CONTEXT,
    )
    rope_theta: float | None = field(
        None,
        "Rotary base (rope_theta)",
        "Empty: as config.json or the catalog has it",
        gt=0,
        le=1e15,
    )
    attention_factor: float | None = field(
        None, "Attention factor", "Of YaRN; empty: computed from the factor", gt=0, le=1000
    )
    beta_fast: float | None = field(None, "Beta fast", "Of YaRN; empty: 32", gt=0, le=1e6)
    beta_slow: float | None = field(None, "Beta slow", "Of YaRN; empty: 1", gt=0, le=1e6)

    @property
    def stated(self) -> dict[str, Any]:
        """Return the fields that have a value, as in transformers' ``rope_parameters``."""
        return self.model_dump(mode="json", exclude_none=True)


class ModelChoice(Part):
    """A model: the demo's, of catalog, hub or team, a config.json, or a folder on the host.

    The other fields keep what was given for another source. ``name`` may stand for any of the
    first three; the site that stores the plan replaces it by the source.
    """

    source: Source | None = Field(default=None, description="Left out: what the other fields name")
    name: str | None = Field(
        default=None,
        max_length=200,
        description="A name of the catalog, “demo”, or a model of the team by its name or id",
    )
    catalog_id: str = field(
        DEFAULT_MODEL,
        "Model",
        "Type part of a name; every entry is a published configuration. A quantised checkpoint of "
        "one may be named too, such as Qwen/Qwen3-8B-FP8.",
        max_length=200,
    )
    repository: str | None = field(
        None,
        "Repository on the Hub",
        "As owner/name; “@” and a branch or commit may follow, or “:” and a type of GGUF files. "
        "Of a model of the catalog: where its weights are, if not in its own.",
        max_length=LONGEST_NAME,
    )
    revision: str | None = field(
        None,
        "Commit",
        "Of the repository; empty: the newest when the job starts",
        pattern=r"^[0-9a-f]{40}$",
    )
    team_model: str | None = field(
        None, "Model of your team", "Id or name of a model of the team", max_length=NAME_LENGTH
    )
    config: dict[str, Any] | None = field(
        None, "config.json", "Paste the file as Hugging Face publishes it."
    )
    path: str | None = field(
        None,
        "Folder on the host",
        "With config.json, safetensors and tokenizer.json, below the host's model folder, or in "
        "an object store as s3://bucket/prefix; the host checks it when the job starts.",
        max_length=400,
    )
    rope_scaling: RopeScaling | None = Field(
        default=None,
        description="Stretches the context that is planned; an endpoint of vLLM or llama.cpp is "
        "started with it, and what else runs the model refuses it",
    )

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.source is None:
            named: tuple[tuple[Source | None, object], ...] = (
                (None, self.name),
                ("team", self.team_model),
                ("folder", self.path),
                ("catalog", "catalog_id" in self.model_fields_set),
                ("hub", self.repository),
                ("config", self.config),
            )
            self.source = next((source for source, value in named if value), None)
        return self


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


def _stated(pins: Strategy, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
    return {name: value for name, value in handler(pins).items() if value is not None}


NamedModel = Annotated[
    ModelChoice, BeforeValidator(_named, json_schema_input_type=ModelChoice | str)
]
Pins = Annotated[Strategy, WrapSerializer(_stated)]


class HardwareChoice(Part):
    """Where it runs: a host or a pool by name, or catalog hardware to plan for."""

    host: str | None = field(None, "Host", "Name or id of a host", max_length=NAME_LENGTH)
    pool: str | None = field(None, "Pool", "Name or id of a pool", max_length=NAME_LENGTH)
    device: str = field(
        DEFAULT_DEVICE, "Device", "A device of the catalog, such as h200", max_length=80
    )
    devices_per_node: int = field(1, "Devices in one machine", ge=1, le=1024)
    nodes: int = field(1, "Machines", ge=1, le=10_000)
    topology: str | None = field(
        None,
        "Topology",
        "How the machines are joined: a published one by its id, such as gb200-nvl72",
        max_length=40,
    )
    nvlink_domain_devices: int | None = field(
        None,
        "Devices of an NVLink domain",
        "Across machines, such as 72 of an NVL72; empty means those of a machine",
        ge=1,
        le=100_000,
    )
    nodes_per_pod: int | None = field(
        None,
        "Machines of a pod",
        "They reach each other at full bandwidth; empty means all",
        ge=1,
        le=10_000,
    )
    oversubscription_ratio: float | None = field(
        None,
        "Oversubscription between pods",
        "Bandwidth of a pod's machines over that of its links to other pods; empty means 1",
        ge=1,
        le=1000,
    )
    engine: str | None = field(
        None,
        "Engine",
        "Automatic: what Slipway starts on a host; else the best of those compared. “auto” of an "
        "endpoint compares the engines that run on the host",
        max_length=40,
    )
    memory_limit_gib: float | None = field(
        None, "Memory limit", "GiB of each device; empty means all memory", ge=0.01, le=1_000_000
    )
    ranks_per_host: int | None = field(
        None, "Ranks on a host", "Processes that share the processor of a CPU host", ge=1, le=1024
    )
    on_lost_rank: OnLostRank = field(
        DataParallel().on_lost_rank,
        "After the loss of a rank or host",
        "A training starts again, three times at most, or goes on from its last checkpoint; of a "
        "generation with pipeline stages that goes on, another host takes the lost one's layers.",
        choices={
            "stop": "Stop the job",
            "restart": "Restart all ranks",
            "shrink": "Continue on the remaining hosts",
        },
    )

    TOPOLOGY: ClassVar = (
        "topology",
        "nvlink_domain_devices",
        "nodes_per_pod",
        "oversubscription_ratio",
    )
    # Of catalog hardware.
    DEVICES: ClassVar = frozenset({"device", "devices_per_node", "nodes", *TOPOLOGY})

    @model_validator(mode="before")
    @classmethod
    def _takes_nodes_of_topology(cls, values: object) -> object:
        """Set the devices of a machine by a topology, where they are left out.

        Raises:
            ValueError: the catalog has no such topology.
        """
        name = values.get("topology") if isinstance(values, Mapping) else None
        if not isinstance(name, str) or not isinstance(values, Mapping):
            return values
        try:
            found = get_topology(name)
        except UnknownTopologyError as error:
            refuse("topology", error.message)
        each = found.devices_per_node or values.get("devices_per_node", 1)
        return {"devices_per_node": each, **values, "topology": found.id}

    @property
    def is_catalog(self) -> bool:
        """Return whether the plan is for catalog hardware, on which nothing can be launched."""
        return self.host is None and self.pool is None


LatencyTarget = Literal["chat", "code", "none"]
Percentile = Literal["p95", "p99", "p50", "mean"]


class PlanDocument(Part):
    """What every plan's document has."""

    goal: Any
    name: str = field("", "Name", "Left out: named by its content", max_length=NAME_LENGTH)
    objective: Objective = field(
        "balanced",
        "Objective",
        choices={
            "balanced": "Balanced",
            "throughput": "Most tokens per second",
            "latency": "Shortest wait",
            "cost": "Cheapest",
            "memory": "Smallest in memory",
            "quality": "Best quality",
            "energy": "Least energy",
        },
    )
    latency_target: LatencyTarget = field(
        "chat",
        "Latency target",
        "For serving. The verdict shows whether the target is met.",
        choices={
            "chat": "Chat: first token within 1 s, then 20 tokens a second",
            "code": "Code completion: first token within 0.5 s, then 33 tokens a second",
            "none": "No target",
        },
    )
    percentile: Percentile = field(
        "p95",
        "Latency percentile",
        "The share of requests that must meet the latency target",
        choices={
            "p95": "p95: 95 of 100 requests",
            "p99": "p99: 99 of 100 requests",
            "p50": "The median: every second request",
            "mean": "The mean of all requests",
        },
    )
    model: NamedModel = Field(
        default_factory=lambda: ModelChoice(source="catalog"),
        description="A name of the catalog, “demo”, or a model of the team by its name or id",
    )
    workload: Any
    hardware: HardwareChoice = Field(
        default_factory=HardwareChoice,
        description="Where it runs; left out: the team's first host",
    )
    pins: Pins = Field(
        default_factory=Strategy,
        description="Parts of the strategy that are fixed for the planner",
    )
    launch: Launch = Field(
        default_factory=Launch,
        description="How POST /jobs and `slipway launch -f` start the plan",
    )

    @model_validator(mode="before")
    @classmethod
    def _searches_an_engine(cls, values: object) -> object:
        """Read ``launch.engine: auto`` as ``hardware.engine``: the search plans, too."""
        launch = values.get("launch") if isinstance(values, Mapping) else None
        if not isinstance(values, Mapping) or not isinstance(launch, Mapping):
            return values
        hardware = values.get("hardware") or {}
        if launch.get("engine") != AUTO or not isinstance(hardware, Mapping):
            return values
        rest = {name: value for name, value in launch.items() if name != "engine"}
        return {**values, "launch": rest, "hardware": {**hardware, "engine": AUTO}}

    @model_validator(mode="before")
    @classmethod
    def _has_one_engine(cls, values: object) -> object:
        """Refuse the engine of a workload, which ``old_names`` could not read as the hardware's.

        Raises:
            ValueError: names both.
        """
        parts = values if isinstance(values, Mapping) else {}
        workload, hardware = parts.get("workload"), parts.get("hardware")
        stated = workload.get("engine") if isinstance(workload, Mapping) else None
        chosen = hardware.get("engine") if isinstance(hardware, Mapping) else None
        beside = f", and hardware.engine is {str(chosen)[:LONGEST_NAME]!r}" if chosen else ""
        if stated is not None:
            refuse(
                "workload.engine",
                f"workload.engine is {str(stated)[:LONGEST_NAME]!r}{beside}: state the engine as "
                "hardware.engine alone, and leave workload.engine out",
            )
        return values

    @property
    def is_training(self) -> bool:
        """Return whether the goal is a training."""
        return self.goal in TRAINING_GOALS


class ServePlan(PlanDocument):
    """Answer requests as they arrive."""

    goal: Annotated[Literal["serve"], GOAL]
    workload: ServeWork = Field(default_factory=ServeWork, description=WORK)


class GeneratePlan(PlanDocument):
    """Process a batch of prompts at the highest throughput."""

    goal: Annotated[Literal["generate"], GOAL]
    workload: GenerateWork = Field(default_factory=GenerateWork, description=WORK)


class FinetunePlan(PlanDocument):
    """Train an existing model on your own text."""

    goal: Annotated[Literal["finetune"], GOAL]
    workload: FinetuneWork = Field(default_factory=FinetuneWork, description=WORK)


class PretrainPlan(PlanDocument):
    """Train a model from random weights."""

    goal: Annotated[Literal["pretrain"], GOAL]
    workload: PretrainWork = Field(default_factory=PretrainWork, description=WORK)


class CompressPlan(PlanDocument):
    """Make the weights smaller and measure the loss of quality."""

    goal: Annotated[Literal["compress"], GOAL]
    workload: CompressWork = Field(default_factory=CompressWork, description=WORK)


PLANS: Mapping[str, type[PlanDocument]] = {
    "serve": ServePlan,
    "generate": GeneratePlan,
    "finetune": FinetunePlan,
    "pretrain": PretrainPlan,
    "compress": CompressPlan,
}
AnyPlan = Annotated[
    ServePlan | GeneratePlan | FinetunePlan | PretrainPlan | CompressPlan,
    Field(discriminator="goal"),
]


@cache
def adapter() -> TypeAdapter[AnyPlan]:
    """Return the parser of plan documents of any goal."""
    return TypeAdapter(AnyPlan)


def of_goal(document: PlanDocument, goal: str, workload: Part | None = None) -> PlanDocument:
    """Return a document for another goal, with this workload or the goal's default one."""
    shared = {
        name: getattr(document, name)
        for name in PlanDocument.model_fields
        if name not in {"goal", "workload"}
    }
    return PLANS[goal].model_construct(goal=goal, workload=workload or WORKLOADS[goal](), **shared)


def repaired(draft: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored draft without the values that are not valid today."""
    valid: dict[str, Any] = copy.deepcopy(dict(draft))
    for _ in range(MOST_FAULTS):
        try:
            read_stored(valid)
        except DraftProblem as problem:
            if not problem.path:
                return {}
            part, *names = problem.path
            inner: Any = valid.get(part)
            if len(names) == 1 and isinstance(inner, dict) and names[0] in inner:
                del inner[names[0]]
            else:
                valid.pop(part, None)
        else:
            return valid
    return {}


def read_stored(draft: Mapping[str, Any]) -> PlanDocument:
    """Return a stored draft's document.

    Raises:
        DraftProblem: it has none, or one that is not valid today; the sentence names the field.
    """
    if "goal" not in draft:
        raise DraftProblem("This plan is empty. Choose Edit: each step has a proposal.", "goal")
    stated = {name: value for name, value in draft.items() if name != "wizard"}
    try:
        return adapter().validate_python(stated)
    except ValidationError as error:
        first = faults_in(error)[0]
        path = first.path[1:] or ("goal",)
        shown = "" if isinstance(first.given, Mapping) else f" (it is {str(first.given)[:40]})"
        raise DraftProblem(
            f"The stored plan's {'.'.join(path)} is not valid today: "
            f"{first.sentence.rstrip('.')}{shown}. Choose Edit, and set it.",
            path[-1],
            path=path,
        ) from error


def shared_document(part: Part) -> dict[str, Any]:
    """Return a document, or a part of one, to send: its values, but not those empty by default."""
    stated: dict[str, Any] = {}
    dumped = part.model_dump(mode="json")
    for name, info in type(part).model_fields.items():
        value, inner = dumped[name], getattr(part, name)
        if isinstance(inner, Part):
            value = shared_document(inner)
        default = info.get_default(call_default_factory=True)
        if (value in (None, "", [], {}) and default in (None, "", [])) or value == {}:
            continue
        stated[name] = value
    return stated
