"""Training on unlike nodes: which pipeline stage takes how many layers, and at what pace.

Stages are dealt to the nodes in the cluster's order. A stage that reaches over two kinds of
device moves at the slower one's pace and has the smaller one's room. The layers are split so that
the slowest stage takes least, within the memory of each.
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
from planner.workload.dealing import devices_of, weakest
from planner.workload.inference_memory import usable_bytes
from planner.workload.outcome import Outcome
from planner.workload.peaks import peak_of
from planner.workload.setting import Setting, compute_dtype_of
from planner.workload.train import at_pace, stage_seconds
from planner.workload.training_memory import stage_memory

GROUP = "pipeline"
Table = npt.NDArray[np.float64]


def stage_devices(setting: Setting) -> tuple[DeviceSpec, ...]:
    """Return what each stage runs on: of unlike devices one as slow and small as the least."""
    line, layout = devices_of(setting), setting.layout
    width = layout.devices // layout.pipeline
    return tuple(
        weakest(setting, line[stage * width : (stage + 1) * width])
        for stage in range(layout.pipeline)
    )


def train_unlike(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return what a step costs with the layers split over unlike stages."""
    split = _Split(setting, workload)
    layers, slowest = split.layers, split.slowest
    for stage, held in enumerate(layers):
        first, *_, last = split.seconds[stage, 1:]
        each = (last - first) / max(1, len(split.seconds[stage]) - 2)
        title = f"Stage {stage + 1}: {held} layers on {split.devices[stage].id}"
        ledger.term(
            stage_time,
            setting.line(GROUP, title, key="stage"),
            layers=held,
            layer_s=float(each),
            rest_s=float(split.seconds[stage, held] - held * each),
        )
    own = replace(setting, device=split.devices[slowest], split=layers)
    outcome = at_pace(own, workload, ledger, split.memory(), split.pace)
    peaks = [peak_of(device, compute_dtype_of(setting))[0] for device in split.devices]
    reached = outcome.performance.model_flops_per_second_per_device or 0.0
    performance = outcome.performance.model_copy(update={"mfu": reached / float(np.mean(peaks))})
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
        # Where nothing fits, the split that would be fastest says what is missing.
        found = split_layers(bounded) or split_layers(self.seconds)
        self.layers = found or stage_layers(self.total, len(self.devices))
        times = [self.seconds[stage, held] for stage, held in enumerate(self.layers)]
        self.slowest = int(np.argmax(times))
        self.evenness = float(np.sum(times) / np.max(times))

    def _at(self, stage: int) -> Setting:
        return replace(self.setting, device=self.devices[stage])

    def _heads(self, stage: int) -> float:
        return float(stage == len(self.devices) - 1)

    def _seconds(self, stage: int) -> Table:
        """Return the seconds of a micro-batch by the layers of a stage, from none to all."""
        counts = np.arange(1.0, self.total + 1)
        pace = Pace(cast("float", counts), self._heads(stage), 1.0)
        found = stage_seconds(self._at(stage), self.workload, pace)
        return np.concatenate([[0.0], np.broadcast_to(found, counts.shape)])

    def _fits(self) -> npt.NDArray[np.bool_]:
        """Return whether a stage has room for so many layers, from none to all."""
        even = stage_layers(self.total, len(self.devices))
        rows = []
        for stage in range(len(self.devices)):
            counts = np.arange(1.0, self.total + 1)
            split: tuple[Quantity, ...] = (*even[:stage], counts, *even[stage + 1 :])
            at = replace(self._at(stage), split=split)
            held = stage_memory(at, Unrecorded(), self.workload, stage).peak_bytes
            room = np.broadcast_to(held, counts.shape) <= usable_bytes(at)
            rows.append(np.concatenate([[False], room]))
        return np.array(rows)

    @property
    def pace(self) -> Pace:
        """Return the pace of the slowest stage, which all others wait for."""
        model, counts = self.setting.model, self.setting.counts
        linear = counts.attention + counts.feed_forward + counts.experts_active
        head = model.vocab_size * model.hidden_size * self.total / linear
        own = self.layers[self.slowest] + head * self._heads(self.slowest)
        return Pace(
            self.layers[self.slowest],
            self._heads(self.slowest),
            self.evenness,
            (self.total + head) / own,
        )

    def memory(self) -> MemoryUse:
        """Return what each stage holds, beside what its own devices have."""
        places = [
            replace(self._at(stage), split=self.layers) for stage in range(len(self.devices))
        ]
        stages = tuple(
            stage_memory(place, Unrecorded(), self.workload, stage)
            for stage, place in enumerate(places)
        )
        limits = tuple((place.device.memory_bytes, usable_bytes(place)) for place in places)
        return MemoryUse(stages, *limits[0], limits=limits)
