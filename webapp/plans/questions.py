"""Convert a wizard draft to the planner's request."""

from typing import Any, NamedTuple

from pydantic import ValidationError

from planner.catalog.devices import get_device
from planner.catalog.engine_limits import refusal, sixteen_bit_dtype
from planner.catalog.engines import DEFAULT_ENGINE, get_engine
from planner.errors import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Bound, HostCalibration, PlanRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import (
    CompressWorkload,
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from webapp.core.problems import Problem
from webapp.hosts.device import cluster_for_host
from webapp.hosts.models import RUNS_JOBS, Host, Pool
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import catalog_shape, demo_config, shape_of
from webapp.plans.compressing import CODED_METHODS, PRUNING_METHODS, bits_of
from webapp.plans.engines import chosen_engine
from webapp.plans.errors import DraftProblem, refuse_incomplete
from webapp.plans.models import Plan
from webapp.plans.sharing import (
    TRAININGS,
    WHOLE_COPIES,
    cluster_for_pool,
    pool_of,
    shared_processor,
)
from webapp.plans.targets import SLO_SECONDS, target_limits
from webapp.plans.training import CLASSIFICATION, stages_of

Draft = dict[str, Any]

GROUPED_BITS = 4
BITS = {"int8_weight_only": 8, "int8_dynamic": 8} | dict.fromkeys(PRUNING_METHODS, 16)
OWN_FORMATS = ("fp8", "qmoe")  # formats with a fractional number of bits
GENERATE_FIELDS = ("batch_size", "input_tokens", "output_tokens")  # of the planner's workload
# Catalog hardware is planned with the engine commonly used there, and with llama.cpp where that
# one does not run.
CATALOG_ENGINES = {"serve": "vllm", "generate": "vllm"}
OTHER_ENGINE = "llama_cpp"
ALTERNATIVES = 6
GIB = 2**30
SOURCE_DTYPE = "bf16"  # dtype in which a compression job loads the original


class Question(NamedTuple):
    """The planner's request, with the rows that the draft refers to."""

    request: PlanRequest
    host: Host | None
    team_model: TeamModel | None
    pool: Pool | None = None  # ``host`` is then representative of the pool

    @property
    def is_bound(self) -> bool:
        """Return whether the model's weights exist only on this host of a pool."""
        return self.team_model is not None and self.team_model.host_id is not None


def question_of(plan: Plan) -> Question:
    """Return the planner's request for a draft.

    Raises:
        DraftProblem: a step is missing, a host or model is gone, or a value is invalid.
    """
    draft = plan.draft
    refuse_incomplete(draft)
    host = _host(plan)
    choice = draft["hardware"]["choice"]
    shared = pool_of(plan.team, choice) if choice.startswith("pool:") else None
    team_model = _team_model(plan)
    if shared is not None:
        host = _representative_host(shared[1], team_model)
    goal = draft["goal"]["goal"]
    try:
        model = _model(draft["model"], team_model)
        cluster = _cluster(plan, host, shared[1] if shared else [])
        runs_jobs = host is not None and host.kind in RUNS_JOBS
        request = PlanRequest(
            model=model,
            cluster=cluster,
            workload=_workload(goal, draft),
            engine=chosen_engine(draft) or _usual_engine(goal, cluster, model, on_host=runs_jobs),
            objective=draft["goal"]["objective"],
            constraints={**_constraints(draft["hardware"]), **target_limits(draft)},
            pins=_pins(draft, is_pool=shared is not None),
            top=ALTERNATIVES,
            host_calibration=_calibration(host, plan),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DraftProblem(
            f"{field}: {first['msg']} (it is {first['input']!r}).", field
        ) from error
    return Question(request, host, team_model, shared[0] if shared else None)


def _usual_engine(
    goal: str, cluster: ClusterSpec, model: str | dict[str, Any], *, on_host: bool
) -> str | None:
    """Return the engine of a draft that names none.

    A host's trainings name Slipway's trainer, so that only its layouts are searched.
    """
    if on_host:
        return DEFAULT_ENGINE if goal in TRAININGS else None
    return _catalog_engine(goal, cluster, model)


def _catalog_engine(goal: str, cluster: ClusterSpec, model: str | dict[str, Any]) -> str | None:
    """Return the usual engine of a goal, or llama.cpp on devices that it refuses as a whole."""
    usual = CATALOG_ENGINES.get(goal)
    shape = catalog_shape(model) if isinstance(model, str) else shape_of(model)
    if usual is None or shape is None:
        return usual
    try:
        device = get_device(cluster.device) if isinstance(cluster.device, str) else cluster.device
    except PlannerError:  # the plan is refused by the same error
        return usual
    half = sixteen_bit_dtype(device)
    refused = refusal(get_engine(usual, device.kind), device, shape, (half, half, None))
    return OTHER_ENGINE if refused and refused[0] == "engine" else usual


def _representative_host(hosts: list[Host], model: TeamModel | None) -> Host:
    """Return the host of a pool with the model's weights, else the first."""
    host_id = model.host_id if model else None
    return next((host for host in hosts if host.pk == host_id), hosts[0])


def draft_shape(plan: Plan) -> ModelSpec | None:
    """Return the shape of the draft's model, or None if it has none."""
    try:
        model = _model(plan.draft["model"], _team_model(plan))
    except DraftProblem:
        return None
    return catalog_shape(model) if isinstance(model, str) else shape_of(model)


def _host(plan: Plan) -> Host | None:
    choice = plan.draft["hardware"]["choice"]
    if not choice.startswith("host:"):
        return None
    host = Host.objects.filter(team=plan.team, pk=choice.removeprefix("host:")).first()
    if host is None:
        raise DraftProblem("This host is no longer part of your team. Choose another.", "choice")
    return host


def _team_model(plan: Plan) -> TeamModel | None:
    chosen = plan.draft["model"]
    if chosen["source"] != "team":
        return None
    model = TeamModel.objects.filter(team=plan.team, pk=chosen.get("team_model") or "").first()
    if model is None:
        raise DraftProblem("This model is no longer part of your team. Choose another.", "model")
    return model


def _model(chosen: dict[str, Any], team_model: TeamModel | None) -> str | dict[str, Any]:
    """Return a catalog id or a config.json."""
    if team_model is not None:
        config: dict[str, Any] = team_model.config
        return config
    if chosen["source"] == "demo":
        return demo_config()
    if chosen["source"] == "catalog":
        return str(chosen["catalog_id"])
    return dict(chosen["config" if chosen["source"] == "config" else "folder_config"])


def _cluster(plan: Plan, host: Host | None, together: list[Host]) -> ClusterSpec:
    draft = plan.draft
    if host is not None:
        try:
            if together:
                return cluster_for_pool(together, draft["goal"]["goal"], plan.team, draft["pins"])
            return shared_processor(cluster_for_host(host), draft["hardware"])
        except Problem as problem:
            is_passing = problem.code in {"host_unknown", "not_measured"}
            raise DraftProblem(problem.detail, "choice", is_passing=is_passing) from problem
    hardware = draft["hardware"]
    return ClusterSpec(
        device=hardware["device"],
        devices_per_node=hardware["devices_per_node"],
        nodes=hardware["nodes"],
    )


def _constraints(hardware: dict[str, Any]) -> dict[str, Bound]:
    """Return the memory limit per device, set by a person or derived from a failed job."""
    limit = hardware.get("memory_limit_gib")
    return {"per_device_peak_bytes": Bound(max=limit * GIB)} if limit else {}


def _workload(goal: str, draft: Draft) -> Workload:
    values = draft["workload"][goal]
    if goal == "serve":
        return _serve(values, draft["goal"]["slo"])
    if goal == "generate":
        return GenerateWorkload(**{name: values[name] for name in GENERATE_FIELDS})
    if goal == "compress":
        return _compress(values)
    return _train(goal, values)


def _serve(values: dict[str, Any], slo: str) -> ServeWorkload:
    ttft, tpot = SLO_SECONDS.get(slo, (None, None))
    return ServeWorkload(
        input_tokens=values["input_tokens"],
        output_tokens=values["output_tokens"],
        concurrency=values["concurrency"],
        prefix_share_ratio=values["prefix_share_percent"] / 100,
        max_request_tokens=values.get("max_request_tokens"),
        ttft_slo_seconds=ttft,
        tpot_slo_seconds=tpot,
    )


def _train(goal: str, values: dict[str, Any]) -> TrainWorkload:
    method = "pretrain" if goal == "pretrain" else values["method"]
    if method == CLASSIFICATION:
        method = "full"  # the model's head implies classification
    million = values.get("million_tokens")
    return TrainWorkload(
        sequence_length=values["sequence_length"],
        global_batch_size=values["global_batch_size"],
        method=method,
        optimizer=values["optimizer"],
        lora_rank=values["lora_rank"] if method in {"lora", "qlora"} else None,
        tokens=round(million * 1e6) if million else None,
        length_schedule=stages_of(values) if million else None,
    )


def _compress(values: dict[str, Any]) -> CompressWorkload:
    method = values["method"]
    if method in OWN_FORMATS:
        return CompressWorkload(method=method)
    if method in BITS:
        return CompressWorkload(method=method, bits=BITS[method])
    is_configurable = method in CODED_METHODS or method == "gguf"
    bits = bits_of(values) if is_configurable else GROUPED_BITS
    return CompressWorkload(method=method, bits=bits, group_size=values["group_size"])


def _pins(draft: Draft, *, is_pool: bool) -> Strategy:
    pins = {
        name: value
        for name, value in draft["pins"].items()
        if value or (name == "zero_stage" and value == 0)  # stage 0 is a valid choice
    }
    goal = draft["goal"]["goal"]
    if goal != "serve":
        pins.pop("disaggregated", None)
    values = draft["workload"][goal] if goal in TRAININGS else {}
    if values.get("attention") in {"flash", "eager", "flex"}:
        pins = {"attention": values["attention"], **pins}
    if values.get("checkpoint_writing") in {"background", "in_step"}:
        pins = {"checkpoint_writing": values["checkpoint_writing"], **pins}
    if values.get("products") == "fp8":
        pins = {"compute_dtype": "fp8", **pins}
    if is_pool and goal in TRAININGS:
        pins = {**WHOLE_COPIES.model_dump(exclude_none=True), **pins}
    if goal == "compress":
        pins = {"weight_dtype": SOURCE_DTYPE, **pins}
    return Strategy(**pins)


def _calibration(host: Host | None, plan: Plan) -> HostCalibration | None:
    """Return the host's calibration, with an anonymous name for another team's host."""
    if host is None or not host.calibration:
        return None
    calibration = HostCalibration.model_validate(host.calibration)
    if host.team_id == plan.team_id:
        return calibration
    return calibration.model_copy(update={"host": f"pool-{host.pool.slug}"})
