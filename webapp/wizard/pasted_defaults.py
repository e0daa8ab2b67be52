"""What a pasted text leaves open: the lengths of requests, and what its host settles."""

import math
from typing import Any

from planner.catalog.devices import get_device
from planner.specs.cluster import ClusterSpec
from planner.specs.workload import Strategy
from runners.plans.workloads import TRAINING_GOALS, ServeWork
from webapp.core.problems import ConflictProblem
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import Host
from webapp.plans.models import Plan

# Parallel sizes of a training whose ranks hold one copy of the model together.
OF_ONE_COPY = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
OFFLOADS_TO_HOST = {"weights_cpu": 0.0, "kv_cpu": 0.0, "activations_cpu": 0.0, "optimizer": "none"}


def shorten_requests(document: dict[str, Any]) -> list[str]:
    """Fit typical requests into the longest one, where a text of a server states that alone."""
    work = document.get("workload") or {}
    longest = work.get("max_request_tokens")
    if (
        document["goal"] != "serve"
        or longest is None
        or {"input_tokens", "output_tokens"} & set(work)
    ):
        return []
    usual = ServeWork()
    typical = usual.input_tokens + usual.output_tokens
    if longest >= typical:
        return []
    answer = max(1, longest * usual.output_tokens // typical)
    work |= {"input_tokens": max(1, longest - answer), "output_tokens": answer}
    note = (
        f"The longest request of the text is {longest:,} tokens, and the usual one has "
        f"{typical:,}: planned with prompts of {work['input_tokens']:,} and answers of "
        f"{answer:,} tokens. State yours in the Workload step."
    )
    return [note]


def settle_on(plan: Plan, host: Host, *, is_batch_stated: bool) -> list[str]:
    """Settle a draft's batch and pins by the devices of its host, and return notes on both.

    A text that does not say how many devices it takes uses those of the machine that it runs on.
    """
    try:
        cluster = cluster_for_host(host)
    except ConflictProblem:  # the plan is refused by the same problem
        return []
    return [
        *_batch_of(plan, cluster, host, is_stated=is_batch_stated),
        *_unsharded(plan, cluster, host),
        *_unsharded_adapter(plan),
        *_not_offloaded(plan, cluster, host),
    ]


def _devices(cluster: ClusterSpec) -> int:
    return cluster.devices_per_node * cluster.nodes


def _batch_of(plan: Plan, cluster: ClusterSpec, host: Host, *, is_stated: bool) -> list[str]:
    """Set the global batch of sequences and accumulation per device, times the devices."""
    document = plan.document
    pins = document.pins
    micro, steps = pins.micro_batch_size, pins.gradient_accumulation_steps
    if is_stated or document.goal not in TRAINING_GOALS or micro is None or steps is None:
        return []
    each = math.prod(getattr(pins, name) or 1 for name in OF_ONE_COPY)
    ranks = pins.data_parallel_size or max(1, _devices(cluster) // each)
    records = micro * steps * ranks
    is_grpo = getattr(document.workload, "objective", "") == "grpo"
    batch = max(1, records // document.workload.num_generations) if is_grpo else records
    work = document.workload.with_values(global_batch_size=batch)
    plan.document = document.model_copy(update={"workload": work})
    note = (
        f"The text states no number of devices: its {micro} x {steps} sequences make a global "
        f"batch of {batch}{' prompts' if is_grpo else ''} on {ranks} of {host.name}."
    )
    return [note]


def _unsharded(plan: Plan, cluster: ClusterSpec, host: Host) -> list[str]:
    """Leave sharding out on one device, which has no others to share states with."""
    document = plan.document
    stage = document.pins.zero_stage
    is_alone = _devices(cluster) == 1 and (document.pins.data_parallel_size or 1) == 1
    if not stage or not is_alone:
        return []
    _pin(plan, zero_stage=None, zero_shard_size=None)
    note = (
        f"pins.zero_stage = {stage} shards states over several ranks, and {host.name} has one "
        "device: it is left out."
    )
    return [note]


def _unsharded_adapter(plan: Plan) -> list[str]:
    """Leave the sharding of an adapter's training out, which the trainer runs as copies."""
    document = plan.document
    stage, work = document.pins.zero_stage, document.workload
    if not stage or getattr(work, "method", "") not in {"lora", "qlora"}:
        return []
    _pin(plan, zero_stage=None, zero_shard_size=None)
    note = (
        f"pins.zero_stage = {stage} shards the states of an adapter, which are small: the trainer "
        "keeps a copy of them, and of the model, on each device, so that this is left out."
    )
    return [note]


def _not_offloaded(plan: Plan, cluster: ClusterSpec, host: Host) -> list[str]:
    """Leave offloading to the host's memory out on a CPU, which has no other memory."""
    device = get_device(cluster.device) if isinstance(cluster.device, str) else cluster.device
    offload = plan.document.pins.offload
    if device.kind != "cpu" or offload is None:
        return []
    kept = offload.model_copy(
        update={
            name: nothing
            for name, nothing in OFFLOADS_TO_HOST.items()
            if name != "optimizer" or offload.optimizer == "cpu"
        }
    )
    if kept == offload:
        return []
    _pin(plan, offload=kept if kept.places else None)
    note = (
        f"pins.offload moves to the host's memory ({', '.join(offload.places)}), in which "
        f"{host.name} computes already: it has no GPU, so that this is left out."
    )
    return [note]


def _pin(plan: Plan, **values: object) -> None:
    pins = Strategy.model_validate({**plan.document.pins.stated, **values})
    plan.document = plan.document.model_copy(update={"pins": pins})
