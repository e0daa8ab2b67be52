"""Assignment of a cluster's devices to replicas, and layers to their pipeline stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import cast

import numpy as np
import numpy.typing as npt

from planner.cost.column import single
from planner.cost.communication import split_in_flight
from planner.cost.quantity import NullLedger, Quantity
from planner.cost.weights import stage_layers
from planner.specs.cluster import ClusterSpec, DeviceSpec, NodeGroup
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.workload.forward import stage_passes
from planner.workload.generate import (
    MAX_SEARCHED_CONCURRENCY,
    batch_load,
    decode_work,
    generate,
    max_concurrency_by_stage,
    micro_batches,
    prefill_work,
)
from planner.workload.inference_memory import inference_memory, stage_limits
from planner.workload.layouts import Layout, StagePlace
from planner.workload.operators import ForwardPass
from planner.workload.outcome import Outcome
from planner.workload.serve import serve
from planner.workload.setting import Setting, compute_dtype_of, peak_of


@dataclass(frozen=True)
class ReplicaGroup:
    """Identical replicas: their number and the device of each stage."""

    replicas: int
    places: tuple[StagePlace, ...]

    @property
    def is_uneven(self) -> bool:
        """Return whether the stages of a replica have different devices."""
        return any(place.device != self.places[0].device for place in self.places)

    @property
    def title(self) -> str:
        """Return the device names, each once."""
        return " + ".join(dict.fromkeys(place.device.id for place in self.places))


def node_groups_of(cluster: ClusterSpec) -> tuple[NodeGroup, ...]:
    """Return all node groups of a cluster, with its main group first."""
    own = NodeGroup(
        device=cluster.device,
        devices_per_node=cluster.devices_per_node,
        nodes=cluster.nodes,
        nvlink_domain_devices=cluster.nvlink_domain_devices,
    )
    return (own, *cluster.other_nodes)


def clusters_by_node_kind(cluster: ClusterSpec) -> tuple[ClusterSpec, ...]:
    """Return one cluster per kind of node."""
    first = cluster.model_copy(update={"other_nodes": ()})
    others = (
        first.model_copy(
            update={
                "device": group.device,
                "instance": None,
                "topology": None,
                "devices_per_node": group.devices_per_node,
                "nodes": group.nodes,
                "nvlink_domain_devices": group.nvlink_domain_devices,
            }
        )
        for group in cluster.other_nodes
    )
    return (first, *others)


def devices_of(setting: Setting) -> list[DeviceSpec]:
    """Return the devices of a cluster in the order of its nodes."""
    cluster = setting.cluster
    devices = [setting.device] * (cluster.devices_per_node * cluster.nodes)
    for group in cluster.other_nodes:
        devices += [cast("DeviceSpec", group.device)] * group.num_devices
    return devices


def slowest_device(setting: Setting, devices: Sequence[DeviceSpec]) -> DeviceSpec:
    """Return a device with the lowest speed and smallest memory of several."""
    dtype = compute_dtype_of(setting)
    slowest = min(devices, key=lambda device: peak_of(device, dtype)[0])
    least = {
        name: min(getattr(device, name) for device in devices)
        for name in ("memory_bytes", "memory_bandwidth_bytes_per_second")
    }
    return slowest.model_copy(update=least)


def mean_device(setting: Setting) -> DeviceSpec:
    """Return a device with the mean price and power of the devices in use."""
    if not setting.cluster.other_nodes:
        return setting.device
    paid = None if setting.cluster.instance else single(plain_layout(setting.layout).devices)
    devices = devices_of(setting)[:paid]
    names = ("tdp_watts", "price_usd_per_hour")
    values_by_name = {name: [getattr(device, name) for device in devices] for name in names}
    means = {
        name: None if None in values else float(np.mean(values))
        for name, values in values_by_name.items()
    }
    return setting.device.model_copy(update=means)


def plain_layout(layout: Layout) -> Layout:
    """Return a layout with scalar parallel sizes, the first row of a block."""

    def one(size: object) -> int:
        return int(np.asarray(size).flat[0])

    return replace(
        layout,
        data=one(layout.data),
        tensor=one(layout.tensor),
        pipeline=one(layout.pipeline),
        expert=one(layout.expert),
        context=one(layout.context),
        attention_data=one(layout.attention_data),
    )


def group_replicas(setting: Setting) -> tuple[ReplicaGroup, ...]:
    """Return the replicas of a layout grouped by their devices, in cluster order."""
    layout = setting.layout
    count = single(layout.devices)
    size = count // single(layout.data)
    slots = list(_slots(setting))
    kinds: list[ReplicaGroup] = []
    for first in range(0, count, size):
        places = tuple(_places(setting, slots[first : first + size]))
        index = next((at for at, one in enumerate(kinds) if one.places == places), None)
        if index is None:
            kinds.append(ReplicaGroup(1, places))
        else:
            kinds[index] = replace(kinds[index], replicas=kinds[index].replicas + 1)
    return tuple(kinds)


@dataclass(frozen=True)
class _Slot:
    """One device in cluster order, with the kind of its node.

    ``domain`` is this kind and the NVLink domain among its nodes: a node, if none spans several.
    """

    device: DeviceSpec
    domain: tuple[int, int]
    kind: int


def _slots(setting: Setting) -> Iterator[_Slot]:
    devices = iter(devices_of(setting))
    for kind, group in enumerate(node_groups_of(setting.cluster)):
        for rank in range(group.num_devices):
            yield _Slot(next(devices), (kind, rank // group.domain_devices), kind)


def _places(setting: Setting, slots: Sequence[_Slot]) -> Iterator[StagePlace]:
    """Yield the place of each stage of a replica."""
    width = len(slots) // single(setting.layout.pipeline)
    kinds = clusters_by_node_kind(setting.cluster)
    apart = {"devices_per_node": 1, "nvlink_domain_devices": None, "nodes_per_pod": None}
    for first in range(0, len(slots), width):
        stage, next_slot = slots[first : first + width], slots[first + width : first + width + 1]
        is_uniform = all(slot.kind == stage[0].kind for slot in stage)
        device = (
            stage[0].device
            if is_uniform
            else slowest_device(setting, [slot.device for slot in stage])
        )
        in_one_domain = stage[0].domain == stage[-1].domain
        size = {} if in_one_domain else {**apart, "nodes": len(stage)}
        cluster = kinds[stage[0].kind].model_copy(update={"device": device, **size})
        inside = bool(next_slot) and next_slot[0].domain == stage[-1].domain
        yield StagePlace(device, cluster, inside)


# Layers per stage of a served pipeline whose stages have different devices.
#
# Dynamic programming proposes the fastest splits within the memory of each stage: for prefill,
# decode and both, at high and low concurrency. The serving or generation formulas then choose
# among these and neighbouring splits with a few layers moved.


Floats = npt.NDArray[np.float64]
Splits = npt.NDArray[np.int64]
GRID_STEP = 4.0
MOVED_LAYERS = (1, 2, 4)
MAX_ROUNDS = 6
FEW_STAGES = 4  # with more stages, layers move only between neighbours
DIGITS = 10  # significant digits of rates, so that cells and columns choose alike


@dataclass(frozen=True)
class _Times:
    """Seconds of one request and request capacity per stage and number of layers.

    Rows are stages, columns 0 to all layers, the last dimension the concurrencies in ``held``;
    ``in_flight`` is the number of micro-batches in the pipeline for each of them.
    """

    reading: Floats
    writing: Floats
    room: Floats
    held: Floats
    in_flight: Floats

    def proposals(self, known: dict[bytes, tuple[int, ...] | None]) -> Iterator[tuple[int, ...]]:
        """Yield the best splits for prefill, decode and both within memory.

        ``known`` caches results, because the cells of a block share many tables.
        """
        stages, places = self.room.shape
        yield stage_layers(places - 1, stages)
        tables = (self.reading + self.writing, self.reading, self.writing)
        for table, at in product(tables, range(len(self.held))):
            bounded = np.where(self.room >= self.held[at], table[..., at], np.inf)
            key = bounded.tobytes() + self.in_flight[at].tobytes()
            if key not in known:
                known[key] = split_in_flight(bounded, float(self.in_flight[at]))
            split = known[key]
            if split is not None:
                yield split


def split_of(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> tuple[Quantity, ...]:
    """Return the layers per stage; for a block of columns, one split per row."""
    shape = np.broadcast_shapes(*(np.shape(value) for value in vars(setting.layout).values()))
    best = _best(setting, workload, _proposed(setting, workload, shape))
    for _ in range(MAX_ROUNDS):
        better = _best(setting, workload, _neighbours(best))
        if np.array_equal(better, best):
            break
        best = better
    return tuple(one if shape else int(one) for one in best)


def _proposed(
    setting: Setting, workload: ServeWorkload | GenerateWorkload, shape: tuple[int, ...]
) -> Splits:
    """Return proposed splits with dimensions (split, stage, cells of a block)."""
    if isinstance(workload, ServeWorkload):
        times = _serving_times(setting, workload, shape)
    else:
        times = _generation_times(setting, workload, shape)
    cells, known = {}, dict[bytes, tuple[int, ...] | None]()
    for cell in np.ndindex(*shape):
        own = replace(
            times,
            reading=times.reading[(..., *cell)],
            writing=times.writing[(..., *cell)],
            room=times.room[(..., *cell)],
        )
        cells[cell] = list(dict.fromkeys(own.proposals(known)))
    most = max(map(len, cells.values()))
    proposals = np.empty((most, len(setting.places), *shape), dtype=np.int64)
    for cell, splits in cells.items():
        proposals[(slice(None), slice(None), *cell)] = splits + splits[:1] * (most - len(splits))
    return proposals


def _neighbours(split: Splits) -> Splits:
    """Return a split and its neighbours with a few layers moved between stages."""
    splits = [split]
    stages = len(split)
    pairs = permutations(range(stages), 2)
    near = [pair for pair in pairs if stages <= FEW_STAGES or abs(pair[0] - pair[1]) == 1]
    for (giver, taker), layers in product(near, MOVED_LAYERS):
        moved = split.copy()
        count = np.minimum(layers, split[giver] - 1)  # every stage keeps one
        moved[giver] -= count
        moved[taker] += count
        splits.append(moved)
    return np.stack(splits)


def _best(setting: Setting, workload: ServeWorkload | GenerateWorkload, splits: Splits) -> Splits:
    """Return the fitting split with the highest rate, then with the lowest latency."""
    shape = splits[:, 0].shape
    columns = cast("tuple[Quantity, ...]", tuple(splits[:, at] for at in range(splits.shape[1])))
    outcome = _costed(replace(setting, split=columns), workload)
    performance = outcome.performance
    overfilled = np.where(outcome.fits, 0.0, outcome.memory.filled_ratio)
    keys = (
        performance.latency_seconds,
        -cast("float", performance.requests_per_second),
        overfilled,
    )
    rounded = [_round_to_digits(np.broadcast_to(np.asarray(key), shape)) for key in keys]
    first = np.lexsort(rounded, axis=0)[0]
    chosen: Splits = np.take_along_axis(splits, first[None, None], axis=0)[0]
    return chosen


def _costed(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> Outcome:
    if isinstance(workload, ServeWorkload):
        return serve(setting, workload, NullLedger())
    return generate(setting, workload, NullLedger())


def _round_to_digits(values: Floats) -> Floats:
    size = np.where(values == 0, 1.0, np.abs(values))
    unit = 10.0 ** (np.floor(np.log10(size)) - DIGITS)
    result: Floats = np.rint(values / unit) * unit
    return result


def _serving_times(setting: Setting, workload: ServeWorkload, shape: tuple[int, ...]) -> _Times:
    stages = len(setting.places)
    free = _with_layer_column(setting, shape)
    room = _with_zero_layers(list(max_concurrency_by_stage(free, workload)), free, shape)
    held = _concurrency_grid(setting, workload, float(room.max(axis=1).min(axis=0).max()))
    along = held.reshape(-1, *(1 for _ in shape))
    context = workload.decoding_context_tokens
    cached = workload.input_tokens * workload.prefix_share_ratio
    lanes: float = setting.layout.attention_data
    prompt = prefill_work(setting, lanes, workload.input_tokens - cached, cached)
    micro = cast("float", np.maximum(1.0, along / stages))
    steps = (workload.output_tokens - 1) / micro
    whole = (len(held), *shape)
    return _Times(
        reading=_seconds(setting, prompt, 1 / lanes, whole),
        writing=_seconds(setting, decode_work(setting, micro, context), steps, whole),
        room=room,
        held=held,
        in_flight=np.minimum(held, stages),
    )


def _concurrency_grid(setting: Setting, workload: ServeWorkload, most: float) -> Floats:
    """Return the concurrencies of one replica to try, up to what is offered and fits."""
    callers = workload.callers
    offered = callers / setting.layout.data if callers else MAX_SEARCHED_CONCURRENCY
    top = max(1.0, min(float(np.max(offered)), most))
    count = int(np.ceil(np.log(top) / np.log(GRID_STEP)))
    grid = np.unique(np.maximum(1.0, top / GRID_STEP ** np.arange(count + 1)))
    # Between 1 and one request per stage, the end points suffice.
    selected: Floats = grid[(grid == top) | (grid == 1.0) | (grid >= len(setting.places))]
    return selected


def _generation_times(
    setting: Setting, workload: GenerateWorkload, shape: tuple[int, ...]
) -> _Times:
    free = _with_layer_column(setting, shape)
    memory = inference_memory(free, NullLedger(), batch_load(setting, workload))
    pairs = zip(memory.stages, stage_limits(setting), strict=True)
    room = [np.where(stage.peak_bytes <= usable, np.inf, 0.0) for stage, (_, usable) in pairs]
    batch = workload.batch_size / setting.layout.data
    micro = batch / micro_batches(setting, batch)
    context = workload.input_tokens + workload.output_tokens / 2
    steps = float(workload.output_tokens - 1)
    prompts = prefill_work(setting, micro, workload.input_tokens)
    whole = (1, *shape)
    return _Times(
        reading=_seconds(setting, prompts, 1.0, whole),
        writing=_seconds(setting, decode_work(setting, micro, context), steps, whole),
        room=_with_zero_layers(room, free, shape),
        held=np.ones(1),
        in_flight=np.ones(1),
    )


def _with_layer_column(setting: Setting, shape: tuple[int, ...]) -> Setting:
    """Return a setting whose stages hold a column of 1 to all layers."""
    counts = np.arange(1.0, setting.model.num_hidden_layers + 1)
    column = counts.reshape(-1, *(1 for _ in shape))
    return replace(setting, split=(column,) * len(setting.places))


def _with_zero_layers(rows: Sequence[object], free: Setting, shape: tuple[int, ...]) -> Floats:
    """Return the values of each stage for 0 to all layers."""
    whole = (free.model.num_hidden_layers, *shape)
    rows_by_count = np.stack([np.broadcast_to(np.asarray(row), whole) for row in rows])
    return np.concatenate([np.zeros((len(rows), 1, *shape)), rows_by_count], axis=1)


def _seconds(setting: Setting, work: ForwardPass, times: float, shape: tuple[int, ...]) -> Floats:
    """Return the seconds of a pass on each stage for 0 to all layers."""
    total = setting.model.num_hidden_layers
    counts = np.arange(0.0, total + 1).reshape(-1, *(1 for _ in shape))
    passes = list(stage_passes(setting, NullLedger(), work))
    last = len(passes) - 1
    return np.stack(
        [
            np.broadcast_to(
                times * stage_pass.of(counts, total, is_last=stage == last).total_s,
                (total + 1, *shape),
            )
            for stage, stage_pass in enumerate(passes)
        ]
    )
