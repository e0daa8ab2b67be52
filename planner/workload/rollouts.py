"""Where a strategy generates the completions of a policy in training, with its defaults."""

from collections.abc import Iterator
from typing import NoReturn

from planner.catalog.engines import Engine
from planner.specs.base import NotPossibleError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.specs.on_policy import GENERATED_BY, OWN_ENGINE, ROLLOUT_ENGINE, RolloutSpec
from planner.specs.workload import TrainWorkload
from planner.workload.setting import Setting

FIELD = "strategy.rollout"
# Usual shares of memory of an engine beside a trainer: TRL's vllm_gpu_memory_utilization, and
# NeMo RL's (examples/configs/grpo_math_1B.yaml) where one of them sleeps.
SHARE_BESIDE, SHARE_IN_TURN, SHARE_ALONE = 0.3, 0.6, 0.9


def generating_engine(rollout: RolloutSpec, device: DeviceSpec) -> str:
    """Return the engine of the completions: a server on GPUs, else the trainer's own model."""
    return rollout.engine or ("vllm" if device.kind == "gpu" else OWN_ENGINE)


def filled_rollout(
    given: RolloutSpec | None, workload: TrainWorkload, device: DeviceSpec
) -> RolloutSpec:
    """Return where completions are generated, with its defaults.

    Raises:
        NotPossibleError: it contradicts the workload, or itself.
    """
    rollout = _placed(given, workload, device)
    engine = generating_engine(rollout, device)
    changed: dict[str, object] = {"engine": engine}
    if engine == OWN_ENGINE:
        _refuse_as_own_model(rollout, device)
    elif rollout.gpu_memory_utilization is None:
        beside = SHARE_BESIDE if rollout.sleep == "none" else SHARE_IN_TURN
        changed["gpu_memory_utilization"] = SHARE_ALONE if rollout.devices else beside
    return RolloutSpec(**{**dict(rollout), **changed})  # which states all of its fields


def refuse_unsupported_rollout(request: EstimateRequest, engine: Engine) -> None:
    """Refuse what the trainer's library cannot let sleep, or does not generate with.

    Raises:
        NotPossibleError: names the field, its value and what the library has.
    """
    rollout = request.strategy.rollout
    if rollout is None:
        return
    for name, known in (("sleep", engine.rollout_sleeps), ("engine", engine.rollout_engines)):
        if (value := getattr(rollout, name)) not in known:
            raise NotPossibleError(
                f"{name} of the rollout is {value}, and {engine.title} has {' and '.join(known)}: "
                f"choose one of these, or another engine than {engine.key}",
                f"{FIELD}.{name}",
            )


def rollout_warnings(setting: Setting) -> Iterator[str]:
    """Yield what a plan of completions assumes of the trainer's library.

    Source: huggingface/trl, docs/source/vllm_integration.md (one replica of dense models from vLLM
    0.14 on), docs/source/async_grpo_trainer.md (FSDP2 alone), trl/generation/vllm_generation.py.
    """
    rollout, workload = setting.strategy.rollout, setting.workload
    if rollout is None or not isinstance(workload, TrainWorkload):
        return
    if rollout.engine == OWN_ENGINE or not setting.engine.one_rollout_server:
        return
    if workload.staleness:
        yield (
            "staleness is that of TRL's AsyncGRPOTrainer, which shards with FSDP2 alone: set its "
            f"max_staleness to {workload.staleness}"
        )
    copies = rollout.devices // rollout.tensor_parallel_size
    if copies > 1 and not setting.model.is_moe:
        yield (
            f"{copies} copies generate: a server of TRL has them as --data-parallel-size, which "
            "vLLM from 0.14 on refuses for dense models; take an older one, or pin a "
            "tensor_parallel_size of all generating devices"
        )
    if rollout.weight_dtype == "fp8":
        yield (
            "weight_dtype of the rollout is fp8: TRL has no option for it, so that changing the "
            "engine's start by hand is assumed"
        )


def generator_reason(rollout: RolloutSpec, request: PlanRequest, device: DeviceSpec) -> str:
    """Return which engine generates the completions of a plan, and why."""
    pinned = request.pins.rollout
    if ROLLOUT_ENGINE in request.job_pins:
        why = "as jobs here do"
    elif pinned and pinned.engine:
        why = f"as pins.{ROLLOUT_ENGINE} states"
    elif rollout.engine == OWN_ENGINE:
        why = f"no server of completions is planned on {device.name or device.id}"
    else:
        why = "no engine is pinned, and on GPUs a server generates"
    who = f"{rollout.engine}, the trainer's own model" if rollout.engine == OWN_ENGINE else ""
    return f"{GENERATED_BY}{who or rollout.engine}: {why}"


def refuse_one_device(workload: TrainWorkload) -> NoReturn:
    """Refuse separate generation on a cluster of one device.

    Raises:
        NotPossibleError: names what asks for it.
    """
    name = "staleness" if workload.staleness else "generator"
    name = "rollout_devices" if workload.rollout_devices else name
    raise NotPossibleError(
        f"{name} is {getattr(workload, name)}, which needs devices of their own to generate, and "
        "the cluster has one device, which trains: choose at least two devices, or let it do both "
        "in turn (generator colocated, staleness 0, no rollout_devices)",
        f"workload.{name}",
    )


def _placed(given: RolloutSpec | None, workload: TrainWorkload, device: DeviceSpec) -> RolloutSpec:
    """Return the stated devices, or those that the workload names.

    Raises:
        NotPossibleError: strategy and workload name different ones, or none are named.
    """
    stated, wants = workload.rollout_devices, workload.generator
    _refuse_separate_own_model(given or RolloutSpec(), workload, device)
    if given is None and stated is None and (wants == "separate" or workload.staleness):
        name = "generator" if wants else "staleness"
        raise NotPossibleError(
            f"{name} is {getattr(workload, name)}, and nothing says how many devices generate: "
            "set rollout_devices, or ask for a plan, which divides them",
            "workload.rollout_devices",
        )
    rollout = given or RolloutSpec(devices=stated or 0)
    if stated is not None and rollout.devices != stated:
        raise NotPossibleError(
            f"rollout.devices is {rollout.devices}, but rollout_devices of the workload is "
            f"{stated}: leave one of them out",
            f"{FIELD}.devices",
        )
    if (wants == "colocated") != (rollout.devices == 0) and wants is not None:
        raise NotPossibleError(
            f"rollout.devices is {rollout.devices}, but generator is {wants}: leave one of them "
            "out, or make them agree (0 devices of their own are colocated)",
            f"{FIELD}.devices",
        )
    if workload.staleness and not rollout.devices:
        raise NotPossibleError(
            f"staleness is {workload.staleness}, but rollout.devices is 0, with which all devices "
            "generate and train in turn: set rollout.devices to some of them, or staleness to 0",
            "workload.staleness",
        )
    if rollout.devices and rollout.sleep != "none":
        raise NotPossibleError(
            f"sleep is {rollout.sleep}, but {rollout.devices} devices only generate, which leaves "
            "nothing to sleep: leave it out, or set devices to 0",
            f"{FIELD}.sleep",
        )
    return rollout


def _refuse_separate_own_model(
    rollout: RolloutSpec, workload: TrainWorkload, device: DeviceSpec
) -> None:
    """Reject a workload that asks for generating devices where the trainer's own model generates.

    Raises:
        NotPossibleError: names what asks for them.
    """
    if generating_engine(rollout, device) != OWN_ENGINE:
        return
    asked = {
        "rollout_devices": workload.rollout_devices,
        "staleness": workload.staleness,
        "generator": workload.generator == "separate",
    }
    for name in (name for name, value in asked.items() if value):
        raise NotPossibleError(
            f"{name} is {getattr(workload, name)}, which needs devices that only generate, but "
            f"{_why_own_model(device)}: let all generate and train in turn (generator colocated, "
            f"staleness 0, no rollout_devices){_or_a_server(device)}",
            f"workload.{name}",
        )


def _why_own_model(device: DeviceSpec) -> str:
    """Return why the trainer's own model generates."""
    own = f"with engine {OWN_ENGINE} of the rollout the trainer's own model generates where it is"
    if device.kind == "gpu":
        return own
    return f"{own}, and no server of completions is planned on {device.name or device.id}"


def _or_a_server(device: DeviceSpec) -> str:
    return ", or set engine to vllm" if device.kind == "gpu" else ", or choose GPUs"


def _refuse_as_own_model(rollout: RolloutSpec, device: DeviceSpec) -> None:
    """Reject options of a server where the trainer's own model generates.

    Raises:
        NotPossibleError: names the option.
    """
    given = {
        "devices": rollout.devices,
        "tensor_parallel_size": rollout.tensor_parallel_size > 1,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "sleep": rollout.sleep != "none",
        "weight_dtype": rollout.weight_dtype,
    }
    for name in (name for name, value in given.items() if value):
        raise NotPossibleError(
            f"{name} of the rollout is {getattr(rollout, name)!r}, but {_why_own_model(device)}: "
            f"leave it out{_or_a_server(device)}",
            f"{FIELD}.{name}",
        )


def with_rollout(request: EstimateRequest, device: DeviceSpec) -> EstimateRequest:
    """Return a request that says where completions are generated, if it has any.

    Raises:
        NotPossibleError: it contradicts itself, or says where nothing generates.
    """
    given, workload = request.strategy.rollout, request.workload
    if not isinstance(workload, TrainWorkload) or not workload.generates:
        if given is not None:
            raise NotPossibleError(
                "rollout says where a policy in training generates its completions, which "
                "objective grpo of a training has: leave it out, or choose that objective",
                FIELD,
            )
        return request
    rollout = filled_rollout(given, workload, device)
    if rollout.devices and request.cluster.num_devices == 1 and given is None:
        refuse_one_device(workload)
    if rollout.devices >= request.cluster.num_devices:
        raise NotPossibleError(
            f"{rollout.devices} devices generate, and the cluster has "
            f"{request.cluster.num_devices}, of which at least one trains: choose fewer, or 0 for "
            "all in turn",
            f"{FIELD}.devices" if given else "workload.rollout_devices",
        )
    strategy = request.strategy.model_copy(update={"rollout": rollout})
    return request.model_copy(update={"strategy": strategy})


def part_of(cluster: ClusterSpec, devices: int, field: str) -> ClusterSpec:
    """Return so many devices of a cluster: some of a node, or whole nodes.

    Raises:
        NotPossibleError: they are neither.
    """
    inside = cluster.devices_per_node
    if devices > inside and devices % inside:
        raise NotPossibleError(
            f"{devices} devices are no whole nodes of {inside}: choose a multiple of {inside}, or "
            f"at most {inside}",
            field,
        )
    nodes, each = max(1, devices // inside), min(devices, inside)
    return cluster.model_copy(
        update={"devices_per_node": each, "nodes": nodes, "instance": None, "other_nodes": ()}
    )
