"""Training memory per device: weights, gradients, optimiser states, activations, loss."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

from planner.catalog.engines import Engine
from planner.cost.memory import MemoryUse, StageMemory, fullest_of
from planner.cost.quantity import Flag, Ledger, Unrecorded, either, maximum, where
from planner.cost.training import (
    checkpoint_copy_bytes,
    pipeline_in_flight,
    sharded_state_bytes,
    zero_shards,
)
from planner.cost.weights import alike_stages, element_bytes, stage_vocabulary
from planner.specs.workload import TrainWorkload
from planner.workload.inference_memory import stage_weight_bytes, usable_bytes
from planner.workload.ranks import Layout
from planner.workload.setting import Setting
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
    FULL_SHARDING,
    StageBytes,
    activations_left,
    gradients_left,
    is_offloading,
    tier_bytes,
    weights_share,
)

# Memory that a caching allocator reserves beyond its tensors and frees when memory is short.
#
# Reserved memory exceeds the tensors because blocks of earlier shapes stay cached. Near the
# device's limit they are freed and reallocated, so a run needs less memory than it usually
# reserves.


CONTEXT_BYTES = float(1024**3)
# Host memory of torch's profiler for one training step: 35 MiB for
# an empty step, 35 to 40 for one of six layers and two micro-batches (torch 2.13, 2026-11-23).
MESSAGES_LOOK_BYTES = 38.0 * 1024**2
# The upper bound of each engine field without spare blocks.
BARE = {
    "training_overhead_bytes": CONTEXT_BYTES,
    "unfilled_ratio": 0.0,
    "activation_ratio": 1.0,
    "quantised_activation_ratio": 1.0,
    "loss_ratio": 1.0,
    "quantised_loss_ratio": 1.0,
    "score_ratio": 1.0,
}


def training_overhead(engine: Engine, states_bytes: float) -> float:
    """Return the runtime's memory beyond tensors: context, communicators, unfilled blocks."""
    fitted = engine.training_overhead_bytes
    fixed = engine.runtime_overhead_bytes if fitted is None else fitted
    return fixed + engine.unfilled_ratio * states_bytes


def profiler_bytes(setting: Setting) -> float:
    """Return the profiler memory with which the runner's first rank records collectives.

    Only on CPUs: the profiler allocates host memory, which counts only if the device is a CPU.
    """
    if setting.engine.role != "runner" or setting.device.kind != "cpu":
        return 0.0
    return where(setting.layout.devices > 1, MESSAGES_LOOK_BYTES, 0.0)


def bare_fields(fields: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's fields without memory that its allocator can free.

    >>> bare_fields({"loss_ratio": 3.0, "activation_ratio": 0.8, "update_copies": 1.0})
    {'loss_ratio': 1.0, 'activation_ratio': 0.8, 'update_copies': 1.0}
    """
    return {name: min(value, BARE.get(name, value)) for name, value in fields.items()}


def without_spare(setting: Setting) -> Setting:
    """Return the setting with an engine that holds only its tensors and context."""
    engine = setting.engine
    fields = {name: getattr(engine, name) for name in BARE}
    fitted = {name: value for name, value in fields.items() if value is not None}
    return replace(setting, engine=engine.model_copy(update=bare_fields(fitted)))


def given_back(setting: Setting, shown: StageMemory, bare: StageMemory) -> StageMemory:
    """Return the memory at a moment with spare blocks freed as far as needed."""
    spare = shown.peak_bytes - bare.peak_bytes
    needed = maximum(0.0, shown.peak_bytes - maximum(usable_bytes(setting), bare.peak_bytes))
    share = needed / where(spare > 0, spare, 1.0)
    by_class = {
        name: value + (bare.by_class.get(name, 0.0) - value) * share
        for name, value in shown.by_class.items()
    }
    return StageMemory(by_class)


# Memory of a background checkpoint: a copy of the written states.


ON_DEVICE = frozenset({"cpu", "uma"})  # kinds whose memory is the host's own


def is_background(setting: Setting) -> bool:
    """Return whether checkpoints are written in the background.

    By default, Slipway's runner does so only on GPUs. States on disk have no copy in memory.
    """
    default = setting.engine.counted_by_operator and setting.device.runs_cuda
    mode = setting.strategy.checkpoint_writing or ("background" if default else "in_step")
    return mode == "background" and setting.offload.optimizer != "nvme"


def host_copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> float:
    """Return the host memory of all ranks' copies; 0 if the device memory is host memory."""
    if not is_background(setting) or setting.device.kind in ON_DEVICE:
        return 0.0
    return _copy_bytes(setting, ledger, workload, 1.0)


def device_copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> float:
    """Return the device memory of the first rank's copy if device memory is host memory."""
    if not is_background(setting) or setting.device.kind not in ON_DEVICE:
        return 0.0
    layout = setting.layout
    return _copy_bytes(
        setting, ledger, workload, where(_is_sharded(layout), 1 / layout.devices, 1.0)
    )


def _copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload, parts: float) -> float:
    adapts = workload.method in ADAPTER_METHODS
    adapter_bytes = element_bytes(setting.engine.adapter_dtype)
    return ledger.term(
        checkpoint_copy_bytes,
        setting.line("memory", "Checkpoint copy in host memory", key="checkpoint_copy"),
        parameters=trained_parameters(setting, workload),
        weight_bytes_per_element=adapter_bytes if adapts else setting.weight_element_bytes,
        state_bytes_per_element=state_bytes_each(setting, workload)
        - setting.engine.extra_state_bytes,
        parts_share=parts,
        gathered_share=where(_is_sharded(setting.layout), 1.0, 0.0),
    )


def _is_sharded(layout: Layout) -> Flag:
    """Return whether states are sharded, so that the first rank gathers them."""
    split = either(layout.devices != layout.data, layout.expert > 1)
    return either(split, layout.zero_stage > 0)


GROUP = "memory"
GATHERED_LAYERS = 2  # ZeRO-3 gathers the current and the next layer


def training_memory(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> MemoryUse:
    """Return the memory of every pipeline stage; the ledger records the fullest one.

    Without a record, only stages that can be the fullest are costed: of the stages with equal
    layers, the first has the most micro-batches in flight.
    """
    first_equal = alike_stages(setting.model.num_hidden_layers, setting.layout.pipeline)
    costed = range(len(first_equal)) if ledger.records else sorted(set(first_equal))
    stages = [_Stage(setting, Unrecorded(), workload, index).memory() for index in costed]
    if ledger.records:
        fullest = max(costed, key=lambda index: stages[index].peak_bytes)
        stages[fullest] = _Stage(setting, ledger, workload, fullest).memory()
    host_bytes, disk_bytes = _offloaded_bytes(setting, workload, first_equal)
    host_bytes = host_bytes + host_copy_bytes(setting, ledger, workload)
    return MemoryUse(
        stages=tuple(stages),
        capacity_bytes=setting.device.memory_bytes,
        usable_bytes=usable_bytes(setting),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


def _offloaded_bytes(
    setting: Setting, workload: TrainWorkload, first_equal: Sequence[int]
) -> tuple[float, float]:
    """Return the offloaded bytes in host memory and on disk over all stages and ranks.

    DeepSpeed's ranks load the whole checkpoint before ZeRO-1 and 2 move it to the devices; for
    ZeRO-3 they load their shards (``zero.Init``).
    """
    if not is_offloading(setting.offload):
        return 0.0, 0.0
    ranks = setting.layout.tensor * setting.layout.state_ranks
    host = disk = loaded = 0.0
    for index in sorted(set(first_equal)):
        stage = _Stage(setting, Unrecorded(), workload, index)
        host_and_disk, equal = stage.offloaded_bytes(), first_equal.count(index)
        host = host + equal * ranks * host_and_disk[0]
        disk = disk + equal * ranks * host_and_disk[1]
        loaded = loaded + equal * ranks * stage.weights()
    if setting.engine.host_gradient_bytes and setting.offload.optimizer == "cpu":
        whole = setting.layout.zero_stage < FULL_SHARDING
        host = maximum(host, where(whole, loaded, 0.0))
    return host, disk


def micro_batch_bytes(setting: Setting, workload: TrainWorkload) -> float:
    """Return the activation bytes of one micro-batch on a device of the first stage."""
    layout = setting.layout
    saved, _, _ = _Stage(setting, Unrecorded(), workload, 0).activations()
    schedule = setting.strategy.pipeline_schedule or "1f1b"
    return saved / pipeline_in_flight(
        schedule, 0, layout.pipeline, layout.micro_batches, layout.chunks
    )


def stage_moments(setting: Setting, workload: TrainWorkload) -> tuple[StageMemory, ...]:
    """Return the memory of every stage at every moment that can be its peak."""
    stages = range(setting.layout.pipeline)
    whole = (_Stage(setting, Unrecorded(), workload, index).full_moments() for index in stages)
    return tuple(moment for moments in whole for moment in moments)


def stage_memory(
    setting: Setting, ledger: Ledger, workload: TrainWorkload, index: int
) -> StageMemory:
    """Return the peak memory of one pipeline stage."""
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
        """Return the candidate peaks, with the allocator's spare blocks freed as needed."""
        if not self.setting.engine.returns_blocks:
            return self.full_moments()
        bare_setting = without_spare(self.setting)
        bare = _Stage(bare_setting, Unrecorded(), self.workload, self.index).full_moments()
        pairs = zip(self.full_moments(), bare, strict=True)
        return tuple(given_back(self.setting, full, bare_moment) for full, bare_moment in pairs)

    def full_moments(self) -> tuple[StageMemory, ...]:
        """Return the candidate peaks: loss, backward pass, optimiser update, loading.

        Logits are freed before recomputation and activations before the optimiser update, so they
        never add up.
        """
        setting = self.setting
        factor = setting.factor("memory")
        saved, layer, loss = self.activations()
        saved = activations_left(setting, self.ledger, saved, self.layers)
        weights, gradients = self.weights(), self.gradients()
        optimizer = self.optimizer_states()
        by_class = {
            "weights": weights * (1 - weights_share(setting.offload)),
            "adapters": self.adapters(),
            "gradients": gradients_left(setting, self.ledger, gradients),
            "optimizer_states": 0.0 if setting.offload.optimizer != "none" else optimizer,
        }
        states = sum(by_class.values()) - self._extra()
        profiler = 0.0 if self.index else profiler_bytes(setting)
        by_class["runtime_overhead"] = (
            training_overhead(setting.engine, states) + profiler
        ) * factor
        copies = self.autocast_copies()
        copies = copies + self._checkpoint_copy()
        buffers = copies + self.gathered_weights(weights) + self._unbucketed_gradients(gradients)
        moments = [
            {"activations": (saved + loss) * factor, "buffers": buffers},
            {"activations": (saved + layer) * factor, "buffers": buffers},
            {"activations": 0.0, "buffers": copies + self.update_buffers()},
        ]
        peaks = [StageMemory({**by_class, **moment}) for moment in moments]
        if setting.engine.loads_before_sharding:
            peaks.append(self._loading(weights, by_class["runtime_overhead"], saved * factor))
        return tuple(peaks)

    def offloaded_bytes(self) -> tuple[float, float]:
        """Return the offloaded bytes in host memory and on disk of one device of the stage."""
        saved, _, _ = self.activations()
        stage_bytes = StageBytes(
            self.weights(),
            self.gradients(),
            self.optimizer_states(),
            saved,
            self._trained / self._shards(1),
        )
        return tier_bytes(self.setting, stage_bytes)

    def _loading(self, weights: float, overhead: float, saved: float) -> StageMemory:
        """Return the peak of a device that loads all weights before it shards them.

        The vocabulary is in the outermost FSDP unit, which stays gathered for the whole step.
        """
        shards, model, layout = self._shards(3), self.setting.model, self.setting.layout
        root = stage_vocabulary(model, self.index, layout.pipeline) / layout.tensor
        gathered = weights * shards + root * self.setting.vocabulary_element_bytes
        buffers = where(shards > 1, gathered, 0.0)
        by_class = {"weights": weights, "buffers": buffers, "runtime_overhead": overhead}
        return StageMemory({**by_class, "activations": where(shards > 1, saved, 0.0)})

    def update_buffers(self) -> float:
        """Return the temporary copies of the optimiser during its update."""
        each = self.setting.engine.update_copies * moment_bytes(self.setting)
        if not each or optimizer_of(self.workload) != "adamw":
            return 0.0
        return self._state("Copies while updating", "buffers", each, self._shards(1))

    def _checkpoint_copy(self) -> float:
        """Return the copy of a background checkpoint, which the first rank gathers."""
        if self.index:
            return 0.0
        return device_copy_bytes(self.setting, self.ledger, self.workload)

    def _extra(self) -> float:
        """Return the fitted extra state bytes, which are not in allocator blocks."""
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
        """Return the unsharded or fetched weights needed for computation.

        Sharded layers are gathered one ahead. Offloaded layers are fetched in halves, attention
        and feed-forward: one computes while the other is loaded.
        """
        shards, fetched = self._shards(3), weights_share(self.setting.offload)
        layer = sharded * shards / maximum(1, self.layers)
        return layer * where(shards > 1, 2.0 - fetched, fetched)

    def _unbucketed_gradients(self, gradients: float) -> float:
        """Return the accumulated gradients outside the DDP buckets.

        With gradient accumulation, gradients are separate from the buckets until these are
        rebuilt in the third step.
        """
        layout = self.setting.layout
        if not self.setting.engine.counted_by_operator:
            return 0.0
        whole = (layout.data > 1) & (layout.devices == layout.data) & (layout.zero_stage == 0)
        return where(whole & (layout.micro_batches > 1), gradients, 0.0)

    def autocast_copies(self) -> float:
        """Return the narrow copies that autocast makes of trained weights.

        With recomputation, copies exist for one layer at a time. Layers with 8-bit products round
        their weights on the fly: in Slipway's trainer only the output layer is copied.
        """
        setting, narrow = self.setting, self._activations.kept_bytes
        adapts = self.workload.method in ADAPTER_METHODS
        stored_bytes = element_bytes(setting.engine.adapter_dtype) if adapts else narrow
        if narrow >= max(stored_bytes, setting.plain_element_bytes):
            return 0.0
        again = setting.strategy.activation_recomputation in {"selective", "full"}
        pieces, copied = 1.0, self._trained
        shards = self._shards(3)
        if again and setting.engine.counted_by_operator:
            pieces = maximum(1, self.layers)
        if setting.strategy.compute_dtype == "fp8" and setting.engine.counted_by_operator:
            head = setting.model.output_width * setting.model.hidden_size
            pieces, copied, shards = 1.0, head / setting.layout.tensor, 1.0
        return self.ledger.term(
            sharded_state_bytes,
            setting.line(GROUP, "Autocast copies of the weights", key="buffers"),
            parameters=copied,
            bytes_per_element=narrow,
            shards=where(shards > 1, maximum(1, self.layers) / GATHERED_LAYERS, pieces),
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
        """Return the bytes of the adapter weights."""
        if self.workload.method not in ADAPTER_METHODS:
            return 0.0
        each = element_bytes(self.setting.engine.adapter_dtype)
        return self._state("Adapter weights", "adapters", each, self._shards(3))

    def gradients(self) -> float:
        """Return the bytes of gradients; a fused optimiser holds one weight's at a time."""
        each = gradient_bytes_each(self.setting, self.workload, self.layers)
        return self._state("Gradients", "gradients", each, self._shards(2))

    def optimizer_states(self) -> float:
        """Return the bytes of moments and fp32 master weights."""
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
        """Return saved activations, the working set of one layer, and the loss in bytes."""
        return self._activations.found()

    @cached_property
    def _activations(self) -> StageActivations:
        return StageActivations(self.setting, self.ledger, self.workload, self.index)
