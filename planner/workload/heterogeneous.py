"""Training on heterogeneous nodes: layers per pipeline stage and the resulting step time.

Stages are assigned to the nodes in the cluster's order. A stage that spans two kinds of device
has the speed of the slower and the memory of the smaller one. The layer split minimises the time
of the slowest stage within the memory of every stage.
"""

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from planner.cost.equation import Ledger, Unrecorded
from planner.cost.memory import MemoryUse
from planner.cost.partition import split_layers
from planner.cost.quantity import Quantity
from planner.cost.stages import Pace, stage_time
from planner.cost.weights import stage_layers
from planner.specs.cluster import DeviceSpec
from planner.specs.workload import TrainWorkload
from planner.workload.device_groups import devices_of, slowest_device
from planner.workload.inference_memory import usable_bytes
from planner.workload.outcome import Outcome
from planner.workload.peaks import peak_of
from planner.workload.setting import Setting, compute_dtype_of
from planner.workload.train import at_pace, stage_seconds
from planner.workload.training_memory import stage_memory

GROUP = "pipeline"
Table = npt.NDArray[np.float64]


def stage_devices(setting: Setting) -> tuple[DeviceSpec, ...]:
    """Return the device of each stage; a mixed stage has its slowest speed and least memory."""
    line, layout = devices_of(setting), setting.layout
    width = layout.devices // layout.pipeline
    return tuple(
        slowest_device(setting, line[stage * width : (stage + 1) * width])
        for stage in range(layout.pipeline)
    )


def train_unlike(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of a step with the layers split over heterogeneous stages."""
    split = _Split(setting, workload)
    layers, slowest = split.layers, split.slowest
    for stage, count in enumerate(layers):
        first, *_, last = split.seconds[stage, 1:]
        layer_s = (last - first) / max(1, len(split.seconds[stage]) - 2)
        title = f"Stage {stage + 1}: {count} layers on {split.devices[stage].id}"
        ledger.term(
            stage_time,
            setting.line(GROUP, title, key="stage"),
            layers=count,
            layer_s=float(layer_s),
            rest_s=float(split.seconds[stage, count] - count * layer_s),
        )
    split_setting = replace(setting, device=split.devices[slowest], split=layers)
    outcome = at_pace(split_setting, workload, ledger, split.memory(), split.pace)
    peaks = [peak_of(device, compute_dtype_of(setting))[0] for device in split.devices]
    flops_per_s = outcome.performance.model_flops_per_second_per_device or 0.0
    performance = outcome.performance.model_copy(
        update={"mfu": flops_per_s / float(np.mean(peaks))}
    )
    names = tuple(device.id for device in split.devices)
    return replace(outcome, performance=performance, stage_layers=layers, stage_devices=names)


class _Split:
    """The split of the layers of one training strategy."""

    def __init__(self, setting: Setting, workload: TrainWorkload) -> None:
        self.setting, self.workload = setting, workload
        self.devices = stage_devices(setting)
        self.total = setting.model.num_hidden_layers
        self.seconds = np.array([self._seconds(stage) for stage in range(len(self.devices))])
        bounded = np.where(self._fits(), self.seconds, np.inf)
        # If no split fits, the fastest one shows how much memory is missing.
        best = split_layers(bounded) or split_layers(self.seconds)
        self.layers = best or stage_layers(self.total, len(self.devices))
        times = [self.seconds[stage, layers] for stage, layers in enumerate(self.layers)]
        self.slowest = int(np.argmax(times))
        self.evenness = float(np.sum(times) / np.max(times))

    def _on_device_of(self, stage: int) -> Setting:
        return replace(self.setting, device=self.devices[stage])

    def _head_count(self, stage: int) -> float:
        return float(stage == len(self.devices) - 1)

    def _seconds(self, stage: int) -> Table:
        """Return the seconds of a micro-batch on a stage for 0 to all layers."""
        counts = np.arange(1.0, self.total + 1)
        pace = Pace(cast("float", counts), self._head_count(stage), 1.0)
        seconds = stage_seconds(self._on_device_of(stage), self.workload, pace)
        return np.concatenate([[0.0], np.broadcast_to(seconds, counts.shape)])

    def _fits(self) -> npt.NDArray[np.bool_]:
        """Return whether each stage has memory for 0 to all layers."""
        even = stage_layers(self.total, len(self.devices))
        rows = []
        for stage in range(len(self.devices)):
            counts = np.arange(1.0, self.total + 1)
            split: tuple[Quantity, ...] = (*even[:stage], counts, *even[stage + 1 :])
            stage_setting = replace(self._on_device_of(stage), split=split)
            peak_bytes = stage_memory(stage_setting, Unrecorded(), self.workload, stage).peak_bytes
            fits = np.broadcast_to(peak_bytes, counts.shape) <= usable_bytes(stage_setting)
            rows.append(np.concatenate([[False], fits]))
        return np.array(rows)

    @property
    def pace(self) -> Pace:
        """Return the pace of the slowest stage, which limits the pipeline."""
        model, counts = self.setting.model, self.setting.counts
        linear = counts.attention + counts.feed_forward + counts.experts_active
        head = model.vocab_size * model.hidden_size * self.total / linear
        own = self.layers[self.slowest] + head * self._head_count(self.slowest)
        return Pace(
            self.layers[self.slowest],
            self._head_count(self.slowest),
            self.evenness,
            (self.total + head) / own,
        )

    def memory(self) -> MemoryUse:
        """Return the memory use of each stage, with the limits of its own devices."""
        places = [
            replace(self._on_device_of(stage), split=self.layers)
            for stage in range(len(self.devices))
        ]
        stages = tuple(
            stage_memory(place, Unrecorded(), self.workload, stage)
            for stage, place in enumerate(places)
        )
        limits = tuple((place.device.memory_bytes, usable_bytes(place)) for place in places)
        return MemoryUse(stages, *limits[0], limits=limits)
