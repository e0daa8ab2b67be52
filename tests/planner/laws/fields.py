"""Draws every field of a request, as its models list them: a new field is drawn too, or named."""

import types
from collections.abc import Callable, Collection
from random import Random
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from planner.catalog.devices import list_devices, list_instances
from planner.catalog.topologies import list_topologies
from planner.specs.base import SparseSpec
from planner.specs.cluster import ClusterSpec, DeviceSpec, NodeGroup
from planner.specs.estimate import (
    FIGURES,
    Bound,
    CalibrationFactor,
    EstimateRequest,
    HostCalibration,
    InverseRequest,
    PlanRequest,
)
from planner.specs.on_policy import RolloutSpec
from planner.specs.workload import (
    CompressWorkload,
    DisaggregatedSpec,
    GenerateWorkload,
    OffloadSpec,
    ServeWorkload,
    SpeculativeSpec,
    Strategy,
    TrainWorkload,
)

GIB = 1024**3
SPECS = (
    EstimateRequest,
    PlanRequest,
    InverseRequest,
    ClusterSpec,
    NodeGroup,
    DeviceSpec,
    HostCalibration,
    CalibrationFactor,
    Bound,
    ServeWorkload,
    GenerateWorkload,
    TrainWorkload,
    CompressWorkload,
    Strategy,
    OffloadSpec,
    SpeculativeSpec,
    DisaggregatedSpec,
    RolloutSpec,
)
# Fields that make a question, which are drawn with it.
BUILT = frozenset(
    {
        *(
            "model",
            "teacher_model",
            "cluster",
            "workload",
            "strategy",
            "pins",
            "engine",
            "question",
            "kind",
        ),
        *("device", "devices_per_node", "nodes", "provenance"),
        *("input_tokens", "output_tokens", "batch_size", "sequence_length", "global_batch_size"),
        *("memory_bytes", "memory_bandwidth_bytes_per_second"),
    }
)
DEVICES = tuple(device.id for device in list_devices())
INSTANCES = tuple(instance.id for instance in list_instances())
Fields = dict[str, Any]


def _choice(*values: object) -> Callable[[Random, Fields], object]:
    return lambda draw, _: draw.choice(values)


def _longest(draw: Random, workload: Fields) -> int:
    typical: int = workload["input_tokens"] + workload["output_tokens"]
    return typical * draw.choice((1, 2, 16))


def _part_of_a_row(draw: Random, workload: Fields) -> int:
    most: int = workload.get("max_completion_length") or workload["sequence_length"] // 2
    return max(1, most // draw.choice((1, 2, 8)))


def _schedule(_: Random, workload: Fields) -> list[list[float]]:
    length = workload["sequence_length"]
    return [[max(1, length // 2), 0.75], [length, 0.25]]


def _group(draw: Random, cluster: Fields) -> list[Fields]:
    count = cluster.get("devices_per_node", 1)
    other = {"device": draw.choice(DEVICES), "devices_per_node": count}
    return [other] if draw.random() < 0.7 else [other, {"device": draw.choice(DEVICES)}]


def _rates(draw: Random, _: Fields) -> Fields:
    return {name: draw.choice((1e12, 2e14)) for name in draw.sample(("bf16", "fp16", "fp8"), 2)}


def _bounds(draw: Random, _: Fields) -> Fields:
    name = draw.choice(sorted(FIGURES))
    side = draw.choice(("min", "max"))
    return {name: {side: draw.choice((0.001, 0.5, 2.0, 1000.0, 1e11))}}


def _clusters(draw: Random, _: Fields) -> list[Fields]:
    count = draw.choice((1, 2, 8))
    return [{"device": draw.choice(DEVICES), "devices_per_node": count} for _ in range(2)]


def _factors(draw: Random, _: Fields) -> Fields:
    name = draw.choice(("compute", "memory_bandwidth", "communication", "overhead", "memory"))
    return {name: {"factor": draw.choice((0.5, 1.3)), "n": draw.choice((1, 9)), "spread": 0.1}}


RANKS = _choice(1, 2, 2, 4, 8)
SIZES = _choice(8, 64, 512, 4096)
# Fields whose type alone does not say which values make a question.
DRAWERS: dict[str, Callable[[Random, Fields], object]] = {
    "id": _choice("a", 7),
    "top": _choice(1, 3),
    "repository": _choice("acme/tiny"),
    "constraints": _bounds,
    "hardware_options": _clusters,
    "job_pins": _choice((), ("rollout.engine",)),
    "host": _choice("alpha"),
    "digest": _choice("0f"),
    "factors": _factors,
    "factor": _choice(0.5, 1.3),
    "n": _choice(1, 9),
    "spread": _choice(0.0, 0.2),
    "min": _choice(0.0, 10.0),
    "max": _choice(1.0, 1e9),
    "instance": lambda draw, _: draw.choice(INSTANCES),
    "other_nodes": _group,
    "topology": _choice(*(topology.id for topology in list_topologies())),
    "nvlink_domain_devices": _choice(8, 16, 72),
    "nodes_per_pod": _choice(1, 2, 32),
    "oversubscription_ratio": _choice(1.0, 2.0, 7.0),
    "intra_node_bandwidth_bytes_per_second": _choice(16e9, 450e9),
    "inter_node_bandwidth_bytes_per_second": _choice(1e9, 50e9),
    "collective_latency_seconds": _choice(0.0, 1e-5),
    "hand_over_latency_seconds": _choice(0.0, 1e-5),
    "ranks_per_core": _choice(1.0, 2.5),
    "host_memory_bytes": _choice(32 * GIB, 512 * GIB, 4096 * GIB),
    "host_memory_bandwidth_bytes_per_second": _choice(40e9, 400e9),
    "host_to_device_bandwidth_bytes_per_second": _choice(8e9, 60e9),
    "disk_bandwidth_bytes_per_second": _choice(5e8, 7e9),
    "disk_capacity_bytes": _choice(100 * GIB, 8000 * GIB),
    "grid_gco2_per_kwh": _choice(0.0, 400.0),
    "electricity_usd_per_kwh": _choice(0.0, 0.2),
    "name": _choice("A device"),
    "vendor": _choice("NVIDIA", "AMD"),
    "peak_flops_per_second": _rates,
    "achieved_flops_per_second": _rates,
    "weight_stream_bytes_per_second": lambda draw, _: {draw.choice(("int8", "int4")): 1e11},
    "link": _choice("NVLink"),
    "tdp_watts": _choice(75.0, 700.0),
    "price_usd_per_hour": _choice(0.0, 3.0),
    "price_source": _choice("a shop"),
    "op_overhead_seconds": _choice(0.0, 2e-6, 2e-5),
    "runtime_overhead_bytes": _choice(0, GIB),
    "training_overhead_bytes": _choice(0, GIB),
    "source": _choice("a datasheet"),
    "as_of": _choice("2026-01-31"),
    "aliases": _choice(("other",)),
    "notes": _choice("a note"),
    "concurrency": _choice(1, 8, 64, 300),
    "request_rate_per_second": _choice(0.1, 1.0, 10.0),
    "burst_requests": _choice(1, 32, 500),
    "ttft_slo_seconds": _choice(0.05, 1.0, 30.0),
    "tpot_slo_seconds": _choice(0.005, 0.05, 1.0),
    "length_variation": _choice(0.06, 0.52, 1.0),
    "max_request_tokens": _longest,
    "num_generations": _choice(2, 4, 8),
    "max_completion_length": _part_of_a_row,
    "max_prompt_length": _choice(16, 128),
    "mean_completion_length": _part_of_a_row,
    "mean_prompt_length": _choice(8, 16),
    "generation_batch_size": lambda draw, row: row["global_batch_size"] * draw.choice((1, 4)),
    "num_iterations": _choice(1, 2),
    "beta": _choice(0.0, 0.04),
    "rollout_devices": RANKS,
    "staleness": _choice(0, 1, 4),
    "reward_seconds": _choice(0.0, 3.0),
    "reward_model": _choice("Qwen/Qwen3-0.6B"),
    "RolloutSpec.devices": _choice(0, 0, 1, 4),
    "lora_rank": _choice(4, 64),
    "tokens": _choice(1_000_000, 10_000_000_000),
    "document_tokens": _choice(64, 512),
    "length_schedule": _schedule,
    "time_budget_seconds": _choice(60.0, 86_400.0),
    "checkpoint_seconds": _choice(5.0, 120.0),
    "restart_seconds": _choice(60.0, 3600.0),
    "mean_time_between_failures_hours": _choice(1_000.0, 50_000.0),
    "bits": _choice(2, 4, 8),
    "group_size": _choice(32, 128),
    "calibration_tokens": _choice(0, 262_144),
    "quantization": _choice("awq", "gptq", "fp8", "nf4", "bnb.nf4", "gguf:q4_k_m", "gguf:q8_0"),
    **{
        f"{axis}_parallel_size": RANKS
        for axis in ("data", "tensor", "pipeline", "context", "expert", "attention_data")
    },
    "zero_shard_size": RANKS,
    "virtual_pipeline_size": _choice(1, 2, 3),
    "micro_batch_size": _choice(1, 2, 8),
    "gradient_accumulation_steps": _choice(1, 4),
    "gradient_compression_ratio": _choice(1.0, 100.0),
    "synchronization_interval_steps": _choice(1, 32),
    "max_batch_tokens": _choice(0, 512, 8192),
    "teacher_model": _choice("Qwen/Qwen3-0.6B"),
    "draft_model": _choice("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"),
    "SpeculativeSpec.tokens": _choice(1, 4),
    "prefill_devices": RANKS,
    "decode_devices": RANKS,
}


class NoDrawerError(TypeError):
    """A field has a type without natural values and no entry in ``DRAWERS``."""


def value_of(draw: Random, spec: type[SparseSpec], name: str, own: Fields) -> object:
    """Return a value of a field, given the fields that are drawn before it.

    Raises:
        NoDrawerError: nothing says which values the field has.
    """
    drawer = DRAWERS.get(f"{spec.__name__}.{name}") or DRAWERS.get(name)
    if drawer is not None:
        return drawer(draw, own)
    info = spec.model_fields[name]
    try:
        return _of_type(draw, info.annotation, tuple(info.metadata))
    except NoDrawerError as error:
        raise NoDrawerError(f"{spec.__name__}.{name}: {error}; add it to DRAWERS") from error


def _of_type(draw: Random, annotation: Any, metadata: tuple[object, ...]) -> object:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        more = (each.metadata if isinstance(each, FieldInfo) else [each] for each in parts[1:])
        return _of_type(draw, parts[0], (*metadata, *(one for each in more for one in each)))
    if origin in {Union, types.UnionType}:
        kinds = [part for part in parts if part is not type(None)]
        return _of_type(draw, draw.choice(kinds), metadata)
    if origin is Literal:
        return draw.choice(parts)
    if isinstance(annotation, type) and issubclass(annotation, SparseSpec):
        return some_fields(draw, annotation, most=3)[0]
    return _plain(draw, annotation, metadata)


def _plain(draw: Random, annotation: object, metadata: tuple[object, ...]) -> object:
    """Return a flag, or a number between the two limits of its type."""
    low = next((getattr(one, "ge", getattr(one, "gt", None)) for one in metadata), None)
    high = next((getattr(one, "le", getattr(one, "lt", None)) for one in metadata[::-1]), None)
    if annotation is bool:
        return draw.choice((True, False))
    if low is None or high is None:
        raise NoDrawerError(f"{annotation} has no natural values")
    return draw.randint(low, high) if annotation is int else draw.choice((0.1, 0.5, 0.9)) * high


def some_fields(
    draw: Random,
    spec: type[SparseSpec],
    own: Fields | None = None,
    *,
    most: int,
    closed: Collection[str] = (),
) -> tuple[Fields, set[str]]:
    """Return fields of a spec, the required ones and up to ``most`` others, and the names.

    Those that are ``closed`` are not drawn.
    """
    fields = dict(own or {})
    kept = {*BUILT, *fields, *closed}
    open_fields = [name for name in spec.model_fields if name not in kept]
    needed = [name for name in open_fields if spec.model_fields[name].is_required()]
    others = [name for name in open_fields if name not in needed]
    chosen = draw.sample(others, min(len(others), draw.randint(0, most)))
    names = set()
    for name in (*needed, *chosen):
        fields[name] = value_of(draw, spec, name, fields)
        names.add(f"{spec.__name__}.{name}")
        if isinstance(fields[name], dict) and fields[name]:
            names |= {f"{spec.__name__}.{name}.{part}" for part in fields[name]}
    return fields, names
