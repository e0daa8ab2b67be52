"""Strategies worth costing on unlike nodes.

In training the split of the layers is found strategy by strategy, which columns cannot do. They
rank the strategies on a cluster of mean devices, which an uneven split comes close to; the first
of that order are costed exactly. Served strategies are all scored: those of one layout share
which devices work together, so that a block holds one layout with whatever else is open.
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
    """Return the strategies to cost on unlike nodes, all of them where they are few.

    Raises:
        PlannerError: no strategy of this request can be costed, for the reason given.
    """
    table = Table([score(block) for block in training_blocks(_alike(question), workload)], {})
    if not len(table):
        return ()
    penalties = np.asarray(PENALTIES[question.request.objective](table.merit))
    order = np.lexsort((penalties, ~table.fits))[:MOST]
    places = (table.part_of(int(row)) for row in order)
    return tuple(part.strategy(own) for part, own in places)


def by_layout(block: Block) -> Iterator[Block]:
    """Yield the strategies of a block, those of one layout by themselves."""
    rows = block.compact
    layout = rows.setting.layout
    of_layout = [(one.name, getattr(layout, one.name)) for one in fields(layout)]
    count = len(rows.cells)
    sizes = np.stack([np.broadcast_to(getattr(layout, name), count) for name in LAYOUT_SIZES])
    kinds, kind_of = np.unique(sizes, axis=1, return_inverse=True)
    for at, kind in enumerate(kinds.T):
        own = np.flatnonzero(kind_of.reshape(-1) == at)
        chosen: JsonObject = {
            name: value[own] if isinstance(value, np.ndarray) else value
            for name, value in of_layout
        }
        chosen |= {name: int(size) for name, size in zip(LAYOUT_SIZES, kind, strict=True)}
        yield replace(
            rows,
            sizes={name: values[own] for name, values in rows.sizes.items()},
            setting=replace(rows.setting, layout=Layout(**chosen)),
            keep=np.ones(len(own), dtype=bool),
        )


def _alike(question: Question) -> Question:
    """Return the question for as many devices of one mean kind."""
    cluster, device = question.cluster, question.device
    line = [device] * (cluster.devices_per_node * cluster.nodes)
    for group in cluster.other_nodes:
        line += [resolve_device(group.device)] * group.num_devices
    mean = _mean(device, line)
    nodes = max(1, len(line) // cluster.devices_per_node)
    inside = cluster.devices_per_node if len(line) == nodes * cluster.devices_per_node else 1
    size = {"other_nodes": (), "devices_per_node": inside, "nodes": len(line) // inside}
    return replace(
        question, device=mean, cluster=cluster.model_copy(update={"device": mean, **size})
    )


def _mean(device: DeviceSpec, line: list[DeviceSpec]) -> DeviceSpec:
    """Return a device with the mean memory and the mean rates of several."""
    names = ("peak_flops_per_second", "achieved_flops_per_second")
    rates = {
        name: {
            dtype: float(np.mean([getattr(one, name)[dtype] for one in line]))
            for dtype in getattr(device, name)
            if all(dtype in getattr(one, name) for one in line)
        }
        for name in names
    }
    memory = {
        "memory_bytes": round(float(np.mean([one.memory_bytes for one in line]))),
        "memory_bandwidth_bytes_per_second": float(
            np.mean([one.memory_bandwidth_bytes_per_second for one in line])
        ),
    }
    return device.model_copy(update={**rates, **memory})
