"""The strategy space of mixed clusters (nodes with different devices).

In training, the layer split is computed per strategy, which columns cannot do. Columns therefore
rank the strategies on a cluster of mean devices, which approximates an uneven split, and the first
ones of that order are costed exactly. Serving strategies are all scored: strategies of one layout
share their device groups, so each block holds one layout.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from planner.search.block import Block
from planner.search.question import Question
from planner.search.rank import PENALTIES
from planner.search.scoring import score
from planner.search.select import Table
from planner.search.training_space import training_blocks
from planner.specs.base import JsonObject
from planner.specs.cluster import DeviceSpec
from planner.specs.strategy import Strategy
from planner.specs.workload import TrainWorkload
from planner.workload.ranks import Layout
from planner.workload.resolve import resolve_device

MOST = 120  # exact estimates, of a few milliseconds each
LAYOUT_SIZES = ("data", "tensor", "pipeline", "expert", "context", "attention_data")


def unlike_strategies(question: Question, workload: TrainWorkload) -> tuple[Strategy, ...]:
    """Return the strategies to cost on mixed nodes, at most ``MOST`` of them.

    Raises:
        PlannerError: no strategy of this request can be costed, for the reason given.
    """
    table = Table(
        [score(block) for block in training_blocks(_homogeneous_question(question), workload)], {}
    )
    if not len(table):
        return ()
    penalties = np.asarray(PENALTIES[question.request.objective](table.merit))
    order = np.lexsort((penalties, ~table.fits))[:MOST]
    places = (table.part_of(int(row)) for row in order)
    return tuple(part.strategy(own) for part, own in places)


def by_layout(block: Block) -> Iterator[Block]:
    """Yield the strategies of a block, one block per layout."""
    rows = block.compact
    layout = rows.setting.layout
    of_layout = [
        (layout_field.name, getattr(layout, layout_field.name)) for layout_field in fields(layout)
    ]
    count = len(rows.cells)
    sizes = np.stack([np.broadcast_to(getattr(layout, name), count) for name in LAYOUT_SIZES])
    kinds, kind_of = np.unique(sizes, axis=1, return_inverse=True)
    for index, kind in enumerate(kinds.T):
        rows_of_kind = np.flatnonzero(kind_of.reshape(-1) == index)
        chosen: JsonObject = {
            name: value[rows_of_kind] if isinstance(value, np.ndarray) else value
            for name, value in of_layout
        }
        chosen |= {name: int(size) for name, size in zip(LAYOUT_SIZES, kind, strict=True)}
        yield replace(
            rows,
            sizes={name: values[rows_of_kind] for name, values in rows.sizes.items()},
            setting=replace(rows.setting, layout=Layout(**chosen)),
            keep=np.ones(len(rows_of_kind), dtype=bool),
        )


def _homogeneous_question(question: Question) -> Question:
    """Return the question for the same number of mean devices."""
    cluster, device = question.cluster, question.device
    devices = [device] * (cluster.devices_per_node * cluster.nodes)
    for group in cluster.other_nodes:
        devices += [resolve_device(group.device)] * group.num_devices
    mean = _mean_device(device, devices)
    nodes = max(1, len(devices) // cluster.devices_per_node)
    per_node = cluster.devices_per_node if len(devices) == nodes * cluster.devices_per_node else 1
    size = {"other_nodes": (), "devices_per_node": per_node, "nodes": len(devices) // per_node}
    return replace(
        question, device=mean, cluster=cluster.model_copy(update={"device": mean, **size})
    )


def _mean_device(device: DeviceSpec, devices: list[DeviceSpec]) -> DeviceSpec:
    """Return a device with the mean memory and mean rates of several."""
    names = ("peak_flops_per_second", "achieved_flops_per_second")
    rates = {
        name: {
            dtype: float(np.mean([getattr(each, name)[dtype] for each in devices]))
            for dtype in getattr(device, name)
            if all(dtype in getattr(each, name) for each in devices)
        }
        for name in names
    }
    memory = {
        "memory_bytes": round(float(np.mean([each.memory_bytes for each in devices]))),
        "memory_bandwidth_bytes_per_second": float(
            np.mean([each.memory_bandwidth_bytes_per_second for each in devices])
        ),
    }
    return device.model_copy(update={**rates, **memory})
