"""A draft as a question to the planner, and its targets."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

from pydantic import ValidationError

from planner.catalog.devices import get_device
from planner.catalog.engines import DEFAULT_ENGINE, get_engine, refusal, sixteen_bit_dtype
from planner.specs.base import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Bound, Estimate, HostCalibration, PlanRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import (
    CompressWorkload,
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from runners.jobspec.train import UNSHARDED, LayoutOptions, layout_conflicts, layout_limits
from runners.plans.document import HardwareChoice, ModelChoice, PlanDocument
from runners.plans.methods import CLASSIFICATION, COMPRESSIONS, TRAININGS
from runners.plans.pins import FIELD_TITLES
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import (
    TRAINING_GOALS,
    CompressWork,
    FinetuneWork,
    GenerateWork,
    PretrainWork,
    ServeWork,
)
from webapp.core.display import quantity
from webapp.core.problems import Problem
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import RUNS_JOBS, Host, Pool
from webapp.modelhub.models import TeamModel, catalog_shape, demo_config, shape_of
from webapp.plans.models import Plan
from webapp.plans.serving import chosen_engine
from webapp.plans.sharing import (
    WHOLE_COPIES,
    cluster_for_pool,
    pool_of,
    shared_processor,
)
from webapp.plans.training import WAYS, chosen_options, stages_of

# ---------------------------------------------------------------------------
# Latency targets of a plan, evaluated at the chosen percentile.
# ---------------------------------------------------------------------------


SLO_SECONDS = {"chat": (1.0, 0.05), "code": (0.5, 0.03)}  # first token, each further token
PERCENTILES = {"p95": "p95", "p99": "p99", "p50": "median", "mean": "mean"}
NAMES = {"ttft": "First token", "tpot": "Each further token"}
INTERVAL_Z = NormalDist().inv_cdf(0.9)  # an 80 % interval has 10 % on each side
RARE = 0.02  # rarer outcomes are not mentioned
MOST_RUNS = 0.5
TENS = 10  # more runs than these are rounded to tens
SAFE = 0.7  # a lower chance of meeting a target is called narrow


class Target(NamedTuple):
    """One target: the predicted value, whether it is met, and how likely."""

    figure: str  # ttft or tpot
    percentile: str
    value: str
    limit: str
    is_met: bool
    ratio: float  # value over limit
    chance: float | None  # probability of meeting it, from the interval; None without one
    interval: str = ""

    @property
    def name(self) -> str:
        """Return the figure's name with the percentile."""
        return f"{NAMES[self.figure]}, {PERCENTILES[self.percentile]}"

    @property
    def missed_words(self) -> str:
        """Return how the target is missed, with both numbers."""
        at = "on average" if self.percentile == "mean" else f"at {PERCENTILES[self.percentile]}"
        subject = {"ttft": "the first token", "tpot": "each further token"}[self.figure]
        return f"{subject} takes {self.value} {at}; the target is {self.limit}"

    @property
    def is_narrow(self) -> bool:
        """Return whether it is met, but likely to be missed in many runs."""
        return self.is_met and self.chance is not None and self.chance < SAFE

    @property
    def word(self) -> str:
        """Return the status in a word."""
        return "met" if self.is_met else "missed"

    @property
    def odds(self) -> str:
        """Return how often a run would end otherwise than predicted, unless that is rare."""
        if self.chance is None:
            return ""
        other = 1 - self.chance if self.is_met else self.chance
        if other < RARE:
            return ""
        return f"{odds_words(other)} would {'miss' if self.is_met else 'meet'} it"


def figure_name(figure: str, percentile: str) -> str:
    """Return the planner's name of a figure at a percentile.

    >>> figure_name("ttft", "p95"), figure_name("tpot", "mean")
    ('ttft_p95_seconds', 'tpot_seconds')
    """
    return f"{figure}_seconds" if percentile == "mean" else f"{figure}_{percentile}_seconds"


def target_limits(document: PlanDocument) -> dict[str, Bound]:
    """Return the percentile limits of a serving draft; empty for means.

    Disaggregated plans have no percentiles: they are evaluated by the mean.
    """
    limits, percentile = SLO_SECONDS.get(document.latency_target), document.percentile
    if document.goal != "serve" or limits is None or percentile == "mean":
        return {}
    if document.pins.disaggregated:
        return {}
    return {
        figure_name(figure, percentile): Bound(max=limit)
        for figure, limit in zip(NAMES, limits, strict=True)
    }


def targets_of(estimate: Estimate, document: PlanDocument) -> tuple[Target, ...]:
    """Return the targets of a serving draft, each evaluated at its percentile.

    If an estimate has no percentiles, the mean is used, and named so.
    """
    limits = SLO_SECONDS.get(document.latency_target)
    if document.goal != "serve" or limits is None:
        return ()
    targets = (
        _target_result(estimate, figure, limit, document.percentile)
        for figure, limit in zip(NAMES, limits, strict=True)
    )
    return tuple(target for target in targets if target is not None)


def _target_result(
    estimate: Estimate, figure: str, limit: float, percentile: str
) -> Target | None:
    value = getattr(estimate.performance, figure_name(figure, percentile))
    mean = getattr(estimate.performance, f"{figure}_seconds")
    if value is None:
        value, percentile = mean, "mean"
    if value is None:
        return None
    bounds = _interval(estimate, figure, percentile, value / mean if mean else 1.0)
    return Target(
        figure=figure,
        percentile=percentile,
        value=str(quantity(value, "seconds")),
        limit=str(quantity(limit, "seconds")),
        is_met=value <= limit,
        ratio=value / limit,
        chance=chance_below(value, *bounds, limit) if bounds else None,
        interval=f"{quantity(bounds[0], 'seconds')} to {quantity(bounds[1], 'seconds')}"
        if bounds
        else "",
    )


def _interval(
    estimate: Estimate, figure: str, percentile: str, ratio: float
) -> tuple[float, float] | None:
    """Return a percentile's 80 % interval: its own, else scaled from the mean's."""
    own = estimate.interval.get(figure_name(figure, percentile))
    mean = estimate.interval.get(f"{figure}_seconds")
    if own is None and mean is not None:
        return mean[0] * ratio, mean[1] * ratio
    return own


def chance_below(value: float, low: float, high: float, limit: float) -> float:
    """Return the probability that a figure is at most a limit, from its 80 % interval.

    The figure's logarithm is modelled as normal on each side of the prediction.

    >>> round(chance_below(1.0, 0.8, 1.25, 1.25), 3)
    0.9
    """
    if not (value > 0 and low > 0 and limit > 0):
        return 1.0 if value <= limit else 0.0
    edge = high if limit >= value else low
    spread = abs(math.log(edge / value)) / INTERVAL_Z
    if not spread:
        return 1.0 if value <= limit else 0.0
    return NormalDist().cdf(math.log(limit / value) / spread)


def odds_words(chance: float) -> str:
    """Return a probability as text, with coarse precision.

    >>> odds_words(0.2), odds_words(0.5), odds_words(0.9), odds_words(0.034)
    ('about 1 run in 5', 'about 1 run in 2', 'about 9 runs in 10', 'about 1 run in 30')
    """
    if chance <= MOST_RUNS:
        runs = max(2, round(1 / chance))
        return f"about 1 run in {runs if runs < TENS else round(runs, -1)}"
    return f"about {max(6, min(9, round(chance * 10)))} runs in 10"


# ---------------------------------------------------------------------------
# Convert a wizard draft to the planner's request.
# ---------------------------------------------------------------------------


GENERATE_FIELDS = ("batch_size", "input_tokens", "output_tokens")  # of the planner's workload
# Catalog hardware is planned with the engine commonly used there, and with llama.cpp where that
# one does not run.
CATALOG_ENGINES = {"serve": "vllm", "generate": "vllm"}
OTHER_ENGINE = "llama_cpp"
ALTERNATIVES = 6
GIB = 2**30
UNPLANNED = ("quantized", "compiled", "activation_offload", "compute_dtype")
UNDIVIDED = {f"{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "context", "expert")}
PLANNER_PLACES = {"cpu": "cpu", "disk": "nvme"}  # of the optimiser's states, wizard -> planner
SOURCE_DTYPE = "bf16"  # dtype in which a compression job loads the original


class Question(NamedTuple):
    """The planner's request, with the rows that the draft refers to."""

    request: PlanRequest
    host: Host | None
    team_model: TeamModel | None
    pool: Pool | None = None  # ``host`` is then representative of the pool

    @property
    def shape(self) -> ModelSpec | None:
        """Return the shape of the model, None if the catalog does not know its family."""
        model = self.request.model
        if isinstance(model, ModelSpec):
            return model
        return catalog_shape(model) if isinstance(model, str) else shape_of(model)

    @property
    def is_bound(self) -> bool:
        """Return whether the model's weights exist only on this host of a pool."""
        return self.team_model is not None and self.team_model.host_id is not None


def question_of(plan: Plan) -> Question:
    """Return the planner's request for a draft.

    Raises:
        DraftProblem: a step is missing, a host or model is gone, or a value is invalid.
    """
    document = plan.document
    host = _host(plan, document.hardware)
    pool_id = document.hardware.pool
    shared = pool_of(plan.team, pool_id) if pool_id and host is None else None
    team_model = _team_model(plan, document.model)
    if shared is not None:
        holder = team_model.host_id if team_model else None  # of the model's weights
        host = next((each for each in shared[1] if each.pk == holder), shared[1][0])
    try:
        model = _model(document.model, team_model)
        cluster = _cluster(plan, document, host, shared[1] if shared else [])
        runs_jobs = host is not None and host.kind in RUNS_JOBS
        request = PlanRequest(
            model=model,
            cluster=cluster,
            workload=_workload(document),
            engine=chosen_engine(document)
            or _usual_engine(document.goal, cluster, model, on_host=runs_jobs),
            objective=document.objective,
            constraints={**_constraints(document.hardware), **target_limits(document)},
            pins=_pins(document, is_pool=shared is not None, is_on_host=runs_jobs),
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
        return DEFAULT_ENGINE if goal in TRAINING_GOALS else None
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


def draft_shape(plan: Plan) -> ModelSpec | None:
    """Return the shape of the draft's model, or None if it has none."""
    try:
        chosen = plan.document.model
        model = _model(chosen, _team_model(plan, chosen))
    except DraftProblem:
        return None
    return catalog_shape(model) if isinstance(model, str) else shape_of(model)


def _host(plan: Plan, hardware: HardwareChoice) -> Host | None:
    if hardware.host is None:
        return None
    host = Host.objects.filter(team=plan.team, pk=hardware.host).first()
    if host is None:
        raise DraftProblem("This host is no longer part of your team. Choose another.", "choice")
    return host


def _team_model(plan: Plan, chosen: ModelChoice) -> TeamModel | None:
    if chosen.source != "team":
        return None
    model = TeamModel.objects.filter(team=plan.team, pk=chosen.team_model or "").first()
    if model is None:
        raise DraftProblem("This model is no longer part of your team. Choose another.", "model")
    return model


def _model(chosen: ModelChoice, team_model: TeamModel | None) -> str | dict[str, Any]:
    if team_model is not None:
        config: dict[str, Any] = team_model.config
        return config
    if chosen.source == "demo":
        return demo_config()
    return chosen.catalog_id if chosen.source == "catalog" else dict(chosen.config or {})


def _cluster(
    plan: Plan, document: PlanDocument, host: Host | None, together: list[Host]
) -> ClusterSpec:
    hardware = document.hardware
    if host is not None:
        try:
            if together:
                return cluster_for_pool(together, document.goal, plan.team, document.pins)
            return shared_processor(cluster_for_host(host), hardware)
        except Problem as problem:
            is_passing = problem.code in {"host_unknown", "not_measured"}
            raise DraftProblem(problem.detail, "choice", is_passing=is_passing) from problem
    return ClusterSpec(
        device=hardware.device, devices_per_node=hardware.devices_per_node, nodes=hardware.nodes
    )


def _constraints(hardware: HardwareChoice) -> dict[str, Bound]:
    """Return the memory limit per device, set by a person or derived from a failed job."""
    limit = hardware.memory_limit_gib
    return {"per_device_peak_bytes": Bound(max=limit * GIB)} if limit else {}


def _workload(document: PlanDocument) -> Workload:
    values = document.workload
    if isinstance(values, ServeWork):
        return _serve(values, document.latency_target)
    if isinstance(values, GenerateWork):
        return GenerateWorkload(**{name: getattr(values, name) for name in GENERATE_FIELDS})
    if isinstance(values, CompressWork):
        return _compress(values)
    return _train(values)


def _serve(values: ServeWork, latency_target: str) -> ServeWorkload:
    ttft, tpot = SLO_SECONDS.get(latency_target, (None, None))
    return ServeWorkload(**values.model_dump(), ttft_slo_seconds=ttft, tpot_slo_seconds=tpot)


def _train(values: PretrainWork) -> TrainWorkload:
    method = values.method if isinstance(values, FinetuneWork) else "pretrain"
    is_adapter = method in TRAININGS and TRAININGS[method].adapter_base is not None
    return TrainWorkload(
        sequence_length=values.sequence_length,
        global_batch_size=values.global_batch_size,
        # The model's head implies classification.
        method="full" if method == CLASSIFICATION else method,
        optimizer=values.optimizer,
        lora_rank=values.lora_rank if isinstance(values, FinetuneWork) and is_adapter else None,
        tokens=values.tokens,
        length_schedule=stages_of(values) if values.tokens else None,
    )


def _compress(values: CompressWork) -> CompressWorkload:
    method = COMPRESSIONS[values.method]
    bits = values.bits if "bits" in method.options else method.planned_bits
    group = values.group_size if {"bits", "group_size"} & set(method.options) else None
    return CompressWorkload(method=values.method, bits=bits, group_size=group)


def _pins(document: PlanDocument, *, is_pool: bool, is_on_host: bool) -> Strategy:
    """Return the fixed parts of the strategy: a person's own, and those that options leave.

    Raises:
        DraftProblem: Slipway's trainer does not run the person's own with the options.
    """
    pins: dict[str, Any] = dict(document.pins.stated)
    if document.goal != "serve":
        pins.pop("disaggregated", None)
    values = document.workload
    options: dict[str, Any] = {}
    if isinstance(values, PretrainWork):
        options = chosen_options(values)
        pins = {**_pinned_by_options(values), **pins}
        if is_on_host:
            _refuse_contradiction(Strategy(**pins), options)
    pins = {**_layout_of_options(options), **pins}
    if is_pool and document.is_training:
        pins = {**WHOLE_COPIES.model_dump(exclude_none=True), **pins}
    if document.goal == "compress":
        pins = {"weight_dtype": SOURCE_DTYPE, **pins}
    return Strategy(**pins)


def _pinned_by_options(values: PretrainWork) -> dict[str, Any]:
    """Return the parts of the strategy that options of a training state."""
    pins: dict[str, Any] = {
        name: value
        for name in ("attention", "checkpoint_writing", "compute_dtype")
        if (value := getattr(values, name)) != "auto"
    }
    if offload := _training_offload(values):
        pins["offload"] = offload
    return pins


def _refuse_contradiction(pins: Strategy, options: Mapping[str, Any]) -> None:
    sizes = {name: value for name in WAYS if (value := getattr(pins, name))}
    layout = LayoutOptions.model_construct(**sizes)
    for why in layout_conflicts(options, layout):
        fixed = ", ".join(f"{FIELD_TITLES.get(name, name)} {each}" for name, each in sizes.items())
        raise DraftProblem(
            f"The trainer does not run what is fixed on the step “Hardware” ({fixed}) with the "
            f"options of the training: {why}.",
            next(iter(sizes)),
            is_refused=True,
        )


def _layout_of_options(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the parallel sizes that those options leave which the planner does not know."""
    limits = layout_limits({name: options[name] for name in UNPLANNED if name in options})
    if UNSHARDED in limits.values():
        return {**UNDIVIDED, "zero_stage": 0}
    return UNDIVIDED if limits else {}


def recomputations_of(document: PlanDocument) -> tuple[str, ...]:
    """Return what a training may recompute if its options leave a choice out, else nothing.

    Compiled layers and FlexAttention do not go with selective recomputation, and a pin names one
    value only: the planner is asked for each, the faster one first.
    """
    values = document.workload
    if not isinstance(values, PretrainWork):
        return ()
    is_narrow = values.compiled or values.attention == "flex"
    is_open = not document.pins.activation_recomputation
    return ("none", "full") if is_open and is_narrow else ()


def _training_offload(values: PretrainWork) -> dict[str, Any]:
    """Return the planner's fields of a training's offload; it costs no activations on disk."""
    fields: dict[str, Any] = {}
    if (place := values.optimizer_offload) in PLANNER_PLACES:
        fields["optimizer"] = PLANNER_PLACES[place]
    if values.activation_offload == "cpu":
        fields["activations_cpu"] = 1.0
    return fields


def _calibration(host: Host | None, plan: Plan) -> HostCalibration | None:
    """Return the host's calibration, with an anonymous name for another team's host."""
    if host is None or not host.calibration:
        return None
    calibration = HostCalibration.model_validate(host.calibration)
    if host.team_id == plan.team_id:
        return calibration
    return calibration.model_copy(update={"host": f"pool-{host.pool.slug}"})
