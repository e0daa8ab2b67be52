"""The planner's request of a plan document: a pure function of the document and its surroundings.

The surroundings are what a document only names: its model and the cluster of its host or pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.catalog.models import find_model, stretched_model
from planner.specs.base import PlannerError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import Bound, HostCalibration, PlanRequest
from planner.specs.model import ModelSpec
from planner.specs.on_policy import OWN_ENGINE, ROLLOUT_ENGINE, JobPin, RolloutSpec
from planner.specs.units import GIB
from planner.specs.workload import (
    CompressWorkload,
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from runners.jobspec.compress import QUANTISED_DTYPES
from runners.jobspec.objectives import TRL
from runners.jobspec.train import SINGLE, UNSHARDED, LayoutOptions, layout_conflicts, layout_limits
from runners.plans.document import HardwareChoice, PlanDocument
from runners.plans.engine_choice import chosen_engine, default_engine, trainer_of
from runners.plans.latency_limits import SLO_SECONDS, target_limits
from runners.plans.methods import CLASSIFICATION, COMPRESSIONS, TRAININGS
from runners.plans.pins import FIELD_TITLES
from runners.plans.refusals import DraftProblem, naming_the_field
from runners.plans.training_options import LAYOUT_SIZES, chosen_options, stages_of
from runners.plans.weights import stated_repository
from runners.plans.workloads import (
    CompressWork,
    FinetuneWork,
    GenerateWork,
    PretrainWork,
    ServeWork,
)

ALTERNATIVES = 6
UNPLANNED = ("engine", "quantized", "compiled", "activation_offload", "compute_dtype")
UNDIVIDED = {f"{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "context", "expert")}
PLANNER_PLACES = {"cpu": "cpu", "disk": "nvme"}  # of the optimiser's states: document -> planner
SOURCE_DTYPE = "bf16"  # dtype in which a compression job loads the original
# Layout of multi-host jobs by default: full replicas with averaged gradients.
WHOLE_COPIES = Strategy(tensor_parallel_size=1, pipeline_parallel_size=1, zero_stage=0)


@dataclass(frozen=True)
class Surroundings:
    """What a document's names stand for.

    ``model``: a name of the catalog, or a Hugging Face config. ``cluster``: of the host or pool,
    as measured; None for catalog hardware, which the document describes. ``runs_jobs``: whether
    the host starts jobs. ``is_pool``: whether the cluster is a pool's. ``calibration``: the
    host's factors of the planner, if it has any. ``teacher``: of a distillation, as ``model``;
    None for the catalog's model of the name in the document.
    """

    model: str | dict[str, Any]
    cluster: ClusterSpec | None = None
    runs_jobs: bool = False
    is_pool: bool = False
    calibration: HostCalibration | None = None
    teacher: str | dict[str, Any] | None = None


def request_of(document: PlanDocument, surroundings: Surroundings) -> PlanRequest:
    """Return the planner's request for a document.

    Raises:
        DraftProblem: the planner's documents do not take a value, or the trainer does not run
            what is pinned with the options; ``field`` is the document's.
    """
    with naming_the_field():
        pins = _pins(document, surroundings)
        return PlanRequest(
            model=_model(document, surroundings),
            repository=stated_repository(document.model),
            cluster=surroundings.cluster or catalog_cluster(document.hardware),
            workload=workload_of(document, surroundings.teacher),
            engine=chosen_engine(document)
            or default_engine(
                document.goal,
                runs_jobs=surroundings.runs_jobs,
                by_trl=trainer_of(document) == TRL,
            ),
            objective=document.objective,
            constraints={**_memory_limit(document.hardware), **target_limits(document)},
            pins=pins,
            job_pins=_job_pins(document, pins),
            top=ALTERNATIVES,
            host_calibration=surroundings.calibration,
        )


def _model(document: PlanDocument, surroundings: Surroundings) -> str | dict[str, Any] | ModelSpec:
    """Return the model; with a rotary scaling its shape, of which the context is stretched."""
    scaling, model = document.model.rope_scaling, surroundings.model
    return stretched_model(model, scaling.stated) if scaling else model


def planned_shape(document: PlanDocument, model: str | dict[str, Any]) -> ModelSpec | None:
    """Return the shape with which a model is planned, None if the planner has none for it."""
    scaling = document.model.rope_scaling
    try:
        return stretched_model(model, scaling.stated) if scaling else find_model(model)
    except PlannerError:
        return None


def catalog_cluster(hardware: HardwareChoice) -> ClusterSpec:
    """Return the catalog hardware that a document describes."""
    topology = {name: getattr(hardware, name) for name in HardwareChoice.TOPOLOGY}
    return ClusterSpec(
        device=hardware.device,
        devices_per_node=hardware.devices_per_node,
        nodes=hardware.nodes,
        **{name: value for name, value in topology.items() if value is not None},
    )


def shared_processor(cluster: ClusterSpec, hardware: HardwareChoice) -> ClusterSpec:
    """Return a host's CPU as several equal devices, if ranks share it."""
    ranks, device = hardware.ranks_per_host or 1, cluster.device
    if ranks == 1 or not isinstance(device, DeviceSpec) or device.kind != "cpu":
        return cluster
    speed, flops = device.memory_bandwidth_bytes_per_second, device.peak_flops_per_second
    share = device.model_copy(
        update={
            "memory_bytes": device.memory_bytes // ranks,
            "memory_bandwidth_bytes_per_second": speed / ranks,
            "peak_flops_per_second": {name: each / ranks for name, each in flops.items()},
        }
    )
    return cluster.model_copy(update={"device": share, "devices_per_node": ranks})


def _memory_limit(hardware: HardwareChoice) -> dict[str, Bound]:
    """Return the limit in bytes per device, set by a person or derived from a failed job."""
    limit = hardware.memory_limit_gib
    return {"per_device_peak_bytes": Bound(max=limit * GIB)} if limit else {}


# The workload in the planner's fields.


def workload_of(document: PlanDocument, teacher: str | dict[str, Any] | None = None) -> Workload:
    """Return the planner's workload of a document; ``teacher``: of its distillation."""
    values = document.workload
    if isinstance(values, ServeWork):
        return _serve(values, document.latency_target)
    if isinstance(values, GenerateWork):
        return GenerateWorkload(**values.fields_of(GenerateWorkload))
    if isinstance(values, CompressWork):
        return _compress(values)
    return _train(values, teacher)


def _serve(values: ServeWork, latency_target: str) -> ServeWorkload:
    ttft, tpot = SLO_SECONDS.get(latency_target, (None, None))
    return ServeWorkload(
        **values.fields_of(ServeWorkload), ttft_slo_seconds=ttft, tpot_slo_seconds=tpot
    )


def _train(values: PretrainWork, teacher: str | dict[str, Any] | None) -> TrainWorkload:
    method = values.method if isinstance(values, FinetuneWork) else "pretrain"
    is_adapter = method in TRAININGS and TRAININGS[method].adapter_base is not None
    return TrainWorkload(
        sequence_length=values.sequence_length,
        global_batch_size=values.sequences_per_step,
        # The model's head implies classification.
        method="full" if method == CLASSIFICATION else method,
        optimizer=values.optimizer,
        lora_rank=values.lora_rank if isinstance(values, FinetuneWork) and is_adapter else None,
        tokens=values.tokens,
        length_schedule=stages_of(values) if values.tokens else None,
        **_objective_of(values, teacher),
    )


COSTED = ("objective", "precompute_reference")
COSTED_OF_GRPO = (  # under the same names in the planner
    "num_generations",
    "max_completion_length",
    "max_prompt_length",
    "num_iterations",
    "generator",
)
COSTED_OF_DISTILLATION = ("max_completion_length", "max_prompt_length", "generator")


def _objective_of(values: PretrainWork, teacher: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return what a fine-tuning's loss compares; a pre-training's is supervised."""
    if not isinstance(values, FinetuneWork):
        return {}
    fields = {name: getattr(values, name) for name in COSTED}
    if values.is_rewarded:
        fields |= {name: getattr(values, name) for name in COSTED_OF_GRPO}
        return fields | {"beta": values.beta or 0.0}
    if values.generates:
        fields |= {name: getattr(values, name) for name in COSTED_OF_DISTILLATION}
        return fields | {"teacher_model": teacher or values.teacher_model.strip()}
    return fields


def _compress(values: CompressWork) -> CompressWorkload:
    method = COMPRESSIONS[values.method]
    bits = values.bits if "bits" in method.options else method.planned_bits
    group = values.group_size if {"bits", "group_size"} & set(method.options) else None
    return CompressWorkload(method=values.method, bits=bits, group_size=group)


# The fixed parts of the strategy: a person's own, and those that options leave.


def _pins(document: PlanDocument, surroundings: Surroundings) -> Strategy:
    """Return the fixed parts of the strategy.

    Raises:
        DraftProblem: Slipway's trainer does not run the person's own with the options.
    """
    pins: dict[str, Any] = dict(document.pins.stated)
    if document.goal != "serve":
        pins.pop("disaggregated", None)
    values = document.workload
    options: dict[str, Any] = {}
    if isinstance(values, PretrainWork):
        options = chosen_options(values, trainer_of(document))
        pins = {**_pinned_by_options(values), **pins}
        if surroundings.runs_jobs:
            _refuse_contradiction(Strategy(**pins), options)
            if isinstance(values, FinetuneWork) and values.generates:
                pins["rollout"] = _rollout_of_jobs(document.pins.rollout)
    if not surroundings.runs_jobs:  # TRL itself trains on several devices, its jobs here on one
        options.pop("engine", None)
    pins = {**_layout_of_options(options), **pins}
    if surroundings.is_pool and document.is_training:
        pins = {**WHOLE_COPIES.model_dump(exclude_none=True), **pins}
    if document.goal == "compress":
        pins = {"weight_dtype": SOURCE_DTYPE, **pins}
    is_answering = document.goal in {"serve", "generate"}
    if is_answering and surroundings.runs_jobs and "weight_dtype" not in pins:
        pins["weight_dtype"] = _compressed_dtype(surroundings.model)
    return Strategy(**pins)


def _rollout_of_jobs(pinned: RolloutSpec | None) -> RolloutSpec:
    """Return where a job generates answers: by the trained weights, unless a person pins else."""
    stated = pinned.stated if pinned else {}
    return RolloutSpec(**{"engine": OWN_ENGINE, **stated})


def _job_pins(document: PlanDocument, pins: Strategy) -> tuple[JobPin, ...]:
    """Return which of the pins a person left to the job."""
    stated, found = document.pins.rollout, pins.rollout
    is_stated = stated is not None and stated.engine is not None
    return (ROLLOUT_ENGINE,) if found and found.engine and not is_stated else ()


def _compressed_dtype(model: str | dict[str, Any]) -> str | None:
    """Return the dtype of a model that is stored compressed: a job loads it as that alone."""
    shape = find_model(model)
    stored = shape.weight_dtype if shape else None
    return stored if stored in QUANTISED_DTYPES else None


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
    sizes = {name: value for name in LAYOUT_SIZES if (value := getattr(pins, name))}
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
    if SINGLE in limits.values():
        return {**UNDIVIDED, "data_parallel_size": 1, "zero_stage": 0}
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
