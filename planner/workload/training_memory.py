"""What training holds on each device: weights, gradients, optimiser states, activations, loss."""

from collections.abc import Sequence
from functools import cached_property
from typing import cast

from planner.cost.columns import maximum, where
from planner.cost.dtypes import element_bytes
from planner.cost.equation import Ledger, Unrecorded
from planner.cost.memory import MemoryUse, StageMemory, fullest_of
from planner.cost.training_states import (
    pipeline_in_flight,
    sharded_state_bytes,
    zero_shards,
)
from planner.cost.weights import alike_stages, stage_vocabulary
from planner.specs.workload import TrainWorkload
from planner.workload.checkpoint_copy import device_copy_bytes, host_copy_bytes
from planner.workload.inference_memory import stage_weight_bytes, usable_bytes
from planner.workload.setting import Setting
from planner.workload.spare_blocks import (
    given_back,
    messages_look_bytes,
    training_overhead,
    without_spare,
)
from planner.workload.training_activations import StageActivations
from planner.workload.training_methods import (
    ADAPTER_METHODS,
    gradient_bytes_each,
    moment_bytes,
    optimizer_of,
    state_bytes_each,
    trained_parameters,
)
from planner.workload.training_tiers import (
    StageBytes,
    activations_left,
    anything_away,
    gradients_left,
    tier_bytes,
    weights_share,
)

GROUP = "memory"
GATHERED_LAYERS = 2  # ZeRO-3 holds the layer at work and the next one unsharded


def training_memory(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> MemoryUse:
    """Return what every pipeline stage holds; the fullest stage is the one in the ledger.

    Of columns only the stages that can be the fullest are costed: of those that hold the same
    layers, the first has the most micro-batches in flight.
    """
    alike = alike_stages(setting.model.num_hidden_layers, setting.layout.pipeline)
    costed = range(len(alike)) if ledger.records else sorted(set(alike))
    stages = [_Stage(setting, Unrecorded(), workload, index).memory() for index in costed]
    if ledger.records:
        fullest = max(costed, key=lambda index: stages[index].peak_bytes)
        stages[fullest] = _Stage(setting, ledger, workload, fullest).memory()
    host_bytes, disk_bytes = _bytes_away(setting, workload, alike)
    host_bytes = host_bytes + host_copy_bytes(setting, ledger, workload)
    return MemoryUse(
        stages=tuple(stages),
        capacity_bytes=setting.device.memory_bytes,
        usable_bytes=usable_bytes(setting),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


def _bytes_away(
    setting: Setting, workload: TrainWorkload, alike: Sequence[int]
) -> tuple[float, float]:
    """Return what host memory and disk hold of all stages and all ranks."""
    if not anything_away(setting.offload):
        return 0.0, 0.0
    ranks = setting.layout.tensor * setting.layout.state_ranks
    host = disk = 0.0
    for index in sorted(set(alike)):
        held = _Stage(setting, Unrecorded(), workload, index).away()
        host = host + alike.count(index) * ranks * held[0]
        disk = disk + alike.count(index) * ranks * held[1]
    return host, disk


def micro_batch_bytes(setting: Setting, workload: TrainWorkload) -> float:
    """Return the activations that one micro-batch keeps on a device of the first stage."""
    layout = setting.layout
    kept, _, _ = _Stage(setting, Unrecorded(), workload, 0).activations()
    schedule = setting.strategy.pipeline_schedule or "1f1b"
    return kept / pipeline_in_flight(
        schedule, 0, layout.pipeline, layout.micro_batches, layout.chunks
    )


def stage_moments(setting: Setting, workload: TrainWorkload) -> tuple[StageMemory, ...]:
    """Return every moment of every pipeline stage that may be the fullest."""
    stages = range(setting.layout.pipeline)
    whole = (_Stage(setting, Unrecorded(), workload, index).full_moments() for index in stages)
    return tuple(moment for moments in whole for moment in moments)


def stage_memory(
    setting: Setting, ledger: Ledger, workload: TrainWorkload, index: int
) -> StageMemory:
    """Return what one pipeline stage holds at its fullest moment."""
    return _Stage(setting, ledger, workload, index).memory()


class _Stage:
    """One pipeline stage of a training run."""

    def __init__(
        self, setting: Setting, ledger: Ledger, workload: TrainWorkload, index: int
    ) -> None:
        self.setting, self.ledger, self.workload, self.index = setting, ledger, workload, index
        self.share = setting.shares[index]
        self.layers = cast("float", self.share.layers)

    def memory(self) -> StageMemory:
        """Return the stage's bytes by tensor class at its fullest moment."""
        return fullest_of(self.moments())

    def moments(self) -> tuple[StageMemory, ...]:
        """Return what the stage shows when it is fullest, spare blocks given back where needed."""
        if not self.setting.engine.returns_blocks:
            return self.full_moments()
        alone = without_spare(self.setting)
        bare = _Stage(alone, Unrecorded(), self.workload, self.index).full_moments()
        pairs = zip(self.full_moments(), bare, strict=True)
        return tuple(given_back(self.setting, shown, least) for shown, least in pairs)

    def full_moments(self) -> tuple[StageMemory, ...]:
        """Return what the stage holds when it is fullest: loss, backward pass, update, loading.

        Logits are freed before the first layer is computed again, and activations before the
        optimiser runs, so that no moment holds all of them.
        """
        setting = self.setting
        factor = setting.factor("memory")
        kept, layer, loss = self.activations()
        kept = activations_left(setting, self.ledger, kept, self.layers)
        weights, gradients = self.weights(), self.gradients()
        optimizer = self.optimizer_states()
        held = {
            "weights": weights * (1 - weights_share(setting.offload)),
            "adapters": self.adapters(),
            "gradients": gradients_left(setting, self.ledger, gradients),
            "optimizer_states": 0.0 if setting.offload.optimizer != "none" else optimizer,
        }
        states = sum(held.values()) - self._extra()
        looked = 0.0 if self.index else messages_look_bytes(setting)
        held["runtime_overhead"] = (training_overhead(setting.engine, states) + looked) * factor
        copies = self.autocast_copies()
        copies = copies + self._checkpoint_copy()
        working = copies + self.gathered_weights(weights) + self._unexchanged(gradients)
        moments = [
            {"activations": (kept + loss) * factor, "buffers": working},
            {"activations": (kept + layer) * factor, "buffers": working},
            {"activations": 0.0, "buffers": copies + self.update_buffers()},
        ]
        found = [StageMemory({**held, **moment}) for moment in moments]
        if setting.engine.loads_before_sharding:
            found.append(self._loading(weights, held["runtime_overhead"], kept * factor))
        return tuple(found)

    def away(self) -> tuple[float, float]:
        """Return what host memory and disk hold for this stage's device."""
        kept, _, _ = self.activations()
        held = StageBytes(self.weights(), self.gradients(), self.optimizer_states(), kept)
        return tier_bytes(self.setting, held)

    def _loading(self, weights: float, overhead: float, kept: float) -> StageMemory:
        """Return what a device holds that has all weights beside its shards of them.

        The vocabulary belongs to no layer: the outermost unit gathers it anew for a whole step.
        """
        shards, model, layout = self._shards(3), self.setting.model, self.setting.layout
        root = stage_vocabulary(model, self.index, layout.pipeline) / layout.tensor
        gathered = weights * shards + root * self.setting.vocabulary_element_bytes
        whole = where(shards > 1, gathered, 0.0)
        held = {"weights": weights, "buffers": whole, "runtime_overhead": overhead}
        return StageMemory({**held, "activations": where(shards > 1, kept, 0.0)})

    def update_buffers(self) -> float:
        """Return the copies that the optimiser makes of what it updates, while it updates."""
        each = self.setting.engine.update_copies * moment_bytes(self.setting)
        if not each or optimizer_of(self.workload) != "adamw":
            return 0.0
        return self._state("Copies while updating", "buffers", each, self._shards(1))

    def _checkpoint_copy(self) -> float:
        """Return what is written beside the steps, on the first rank, which gathers it."""
        if self.index:
            return 0.0
        return device_copy_bytes(self.setting, self.ledger, self.workload)

    def _extra(self) -> float:
        """Return what measurements add to the states: no allocator's block is behind it."""
        if self.setting.offload.optimizer != "none":
            return 0.0
        return self._trained * self.setting.engine.extra_state_bytes / self._shards(1)

    def _shards(self, first_sharding_stage: int) -> float:
        layout = self.setting.layout
        return zero_shards(layout.zero_stage, first_sharding_stage, layout.shard_ranks)

    def weights(self) -> float:
        """Return the stored weights, split over data ranks from ZeRO stage 3 on."""
        whole = stage_weight_bytes(self.setting, self.ledger, self.share)
        return self.ledger.term(
            sharded_state_bytes,
            self.setting.line(GROUP, "Weights after sharding", key="sharded_weights"),
            parameters=whole,
            bytes_per_element=1.0,
            shards=self._shards(3),
        )

    def gathered_weights(self, sharded: float) -> float:
        """Return what is held whole, of sharded or fetched weights, to compute.

        Sharded layers are gathered one ahead. What comes from the host is fetched by halves of a
        layer, attention or feed-forward: one works while the other arrives.
        """
        shards, fetched = self._shards(3), weights_share(self.setting.offload)
        layer = sharded * shards / maximum(1, self.layers)
        return layer * where(shards > 1, 2.0 - fetched, fetched)

    def _unexchanged(self, gradients: float) -> float:
        """Return the gradients that gather beside the buckets of an exchange.

        Copies of a whole model add up several micro-batches before they exchange: until the
        buckets have their order, in the third step, the sum lies beside them.
        """
        layout = self.setting.layout
        if not self.setting.engine.counted_by_operator:
            return 0.0
        whole = (layout.data > 1) & (layout.devices == layout.data) & (layout.zero_stage == 0)
        return where(whole & (layout.micro_batches > 1), gradients, 0.0)

    def autocast_copies(self) -> float:
        """Return the narrow copies that autocast makes of what learns, for its products.

        What is computed again makes its copies again, a layer's at a time. Layers that multiply in
        8-bit floats round their weights as they go: in our trainer the output layer alone is
        copied.
        """
        setting, narrow = self.setting, self._activations.kept_bytes
        adapts = self.workload.method in ADAPTER_METHODS
        own = element_bytes(setting.engine.adapter_dtype) if adapts else narrow
        if narrow >= max(own, setting.plain_element_bytes):
            return 0.0
        again = setting.strategy.activation_recomputation in {"selective", "full"}
        apart, copied = 1.0, self._trained
        shards = self._shards(3)
        if again and setting.engine.counted_by_operator:
            apart = maximum(1, self.layers)
        if setting.strategy.compute_dtype == "fp8" and setting.engine.counted_by_operator:
            head = setting.model.output_width * setting.model.hidden_size
            apart, copied, shards = 1.0, head / setting.layout.tensor, 1.0
        return self.ledger.term(
            sharded_state_bytes,
            setting.line(GROUP, "Autocast copies of the weights", key="buffers"),
            parameters=copied,
            bytes_per_element=narrow,
            shards=where(shards > 1, maximum(1, self.layers) / GATHERED_LAYERS, apart),
        )

    @cached_property
    def _trained(self) -> float:
        """Return the trained parameters on one device of this stage, before ZeRO."""
        setting, model = self.setting, self.setting.model
        portion = self.layers / model.num_hidden_layers
        if self.workload.method in ADAPTER_METHODS:
            whole = trained_parameters(setting, self.workload)
            return whole * portion / setting.layout.tensor
        stored = stage_weight_bytes(setting, Unrecorded(), self.share)
        return stored / setting.weight_element_bytes

    def adapters(self) -> float:
        """Return the adapters' own weights, in the engine's format for them."""
        if self.workload.method not in ADAPTER_METHODS:
            return 0.0
        each = element_bytes(self.setting.engine.adapter_dtype)
        return self._state("Adapter weights", "adapters", each, self._shards(3))

    def gradients(self) -> float:
        """Return the gradients; a fused optimiser holds one weight's at a time."""
        each = gradient_bytes_each(self.setting, self.workload, self.layers)
        return self._state("Gradients", "gradients", each, self._shards(2))

    def optimizer_states(self) -> float:
        """Return moments, and the fp32 master weights that mixed precision keeps beside them."""
        each = state_bytes_each(self.setting, self.workload)
        return self._state("Optimiser states", "optimizer_states", each, self._shards(1))

    def _state(self, name: str, key: str, bytes_each: float, shards: float) -> float:
        return self.ledger.term(
            sharded_state_bytes,
            self.setting.line(GROUP, name, key=key),
            parameters=self._trained,
            bytes_per_element=bytes_each,
            shards=shards,
        )

    def activations(self) -> tuple[float, float, float]:
        """Return what is kept for the backward pass, one layer's working set, and the loss."""
        return self._activations.found()

    @cached_property
    def _activations(self) -> StageActivations:
        return StageActivations(self.setting, self.ledger, self.workload, self.index)
