"""What training holds on each device: weights, gradients, optimiser states, activations, loss."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

from planner.cost.activations import (
    LOSS_FP32_COPIES,
    UNFUSED_LOSS_FP32_COPIES,
    Kept,
    attention_width,
    eager_attention_width,
    feed_forward_width,
    hidden_tensors,
    kept_activation_bytes,
    kept_token_bytes,
    loss_bytes,
    score_bytes,
    score_copies,
)
from planner.cost.columns import maximum, where
from planner.cost.dtypes import WIDE, element_bytes
from planner.cost.equation import Ledger, Unrecorded
from planner.cost.memory import MemoryUse, StageMemory, fullest_of
from planner.cost.training_states import (
    pipeline_in_flight,
    sharded_state_bytes,
    zero_shards,
)
from planner.cost.weights import alike_stages, stage_vocabulary
from planner.specs.workload import TrainWorkload
from planner.workload.inference_memory import stage_weight_bytes, usable_bytes
from planner.workload.setting import Setting
from planner.workload.spare_blocks import given_back, training_overhead, without_spare
from planner.workload.training_methods import (
    ADAPTER_METHODS,
    adapts_every_matrix,
    filled_ratio,
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
BACKWARD_SCORES = 2.0  # scores and probabilities, and the gradients of both beside them


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
        weights, optimizer = self.weights(), self.optimizer_states()
        held = {
            "weights": weights * (1 - weights_share(setting.offload)),
            "adapters": self.adapters(),
            "gradients": gradients_left(setting, self.ledger, self.gradients()),
            "optimizer_states": 0.0 if setting.offload.optimizer != "none" else optimizer,
        }
        states = sum(held.values()) - self._extra()
        held["runtime_overhead"] = training_overhead(setting.engine, states) * factor
        copies = self.autocast_copies()
        working = copies + self.gathered_weights(weights)
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

    def autocast_copies(self) -> float:
        """Return the 16-bit copies of the weights that autocast makes for its products."""
        narrower = self._kept_bytes() < self.setting.plain_element_bytes
        if not narrower:
            return 0.0
        return self.ledger.term(
            sharded_state_bytes,
            self.setting.line(GROUP, "Autocast copies of the weights", key="buffers"),
            parameters=self._trained,
            bytes_per_element=self._kept_bytes(),
            shards=where(self._shards(3) > 1, maximum(1, self.layers) / GATHERED_LAYERS, 1.0),
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
        """Return what is kept for the backward pass, one layer's working set, and the loss.

        The working set is what recomputation rebuilds of one layer at a time.
        """
        setting, strategy = self.setting, self.setting.strategy
        layout = setting.layout
        rows = layout.micro_batch * filled_ratio(self.setting, self.workload)
        tokens = rows * self.workload.sequence_length / layout.context
        in_flight = pipeline_in_flight(
            strategy.pipeline_schedule or "1f1b",
            self.index,
            layout.pipeline,
            layout.micro_batches,
            layout.chunks,
        )
        each, scores, loss = self._token_bytes(), self._scores(tokens), self._loss(tokens)
        if strategy.activation_recomputation == "full":
            checkpoint = setting.model.hidden_size * self._hidden_bytes() / layout.sequence_ranks
            kept_scores = 0.0 if setting.engine.recomputes_in_slack else BACKWARD_SCORES * scores
            working = tokens * each + kept_scores
            return self._kept(tokens, checkpoint, in_flight), working, loss
        kept = self._kept(tokens, each, in_flight)
        if strategy.activation_recomputation == "selective":
            return kept, BACKWARD_SCORES * scores, loss
        return kept + scores * self.layers * in_flight, scores, loss

    @property
    def _kept_ratio(self) -> float:
        """Return what measurements of the engine multiply the activations with."""
        engine = self.setting.engine
        quantised = self.setting.weight_dtype not in WIDE
        return engine.activation_ratio * (engine.quantised_activation_ratio if quantised else 1.0)

    def _token_bytes(self) -> float:
        """Return the bytes that one layer keeps per token."""
        setting, model = self.setting, self.setting.model
        eager = setting.engine.ops_per_layer > 0
        attention = eager_attention_width(model) if eager else attention_width(model)
        kept = self._keeping
        return self.ledger.term(
            kept_token_bytes,
            replace(setting.line(GROUP, "Kept per token and layer"), factor=self._kept_ratio),
            hidden_width=hidden_tensors(model, kept) * model.hidden_size,
            sequence_ranks=setting.layout.sequence_ranks,
            hidden_bytes_per_element=self._hidden_bytes(),
            inner_width=attention + feed_forward_width(model, kept),
            tensor_parallel_size=setting.layout.tensor,
            inner_bytes_per_element=self._kept_bytes(),
        )

    @property
    def _keeping(self) -> Kept:
        """Return which tensors the layers keep beside the operands of attention.

        A frozen 16-bit matrix needs no input for its backward pass; a quantised one keeps it.
        """
        setting, workload = self.setting, self.workload
        adapters = workload.method in ADAPTER_METHODS
        frozen = adapters and not adapts_every_matrix(setting, workload)
        keeps = not frozen or (setting.weight_dtype not in WIDE and not self._in_fp32)
        return Kept(wide_norms=not (setting.strategy.fused_norms or self._in_fp32), inputs=keeps)

    @property
    def _in_fp32(self) -> bool:
        """Return whether an fp32 embedding beside packed weights makes all that follows fp32."""
        packed = self.setting.weight_dtype not in WIDE
        return packed and self.setting.engine.fp32_embeddings_beside_packed

    def _hidden_bytes(self) -> float:
        """Return the bytes of a residual element: autocast leaves it as wide as the weights."""
        return max(self._kept_bytes(), self.setting.plain_element_bytes)

    def _kept_bytes(self) -> float:
        dtype = self.setting.strategy.compute_dtype or "bf16"
        dtype = "fp32" if self._in_fp32 else dtype
        return element_bytes(dtype if dtype in WIDE else "bf16")

    def _kept(self, tokens: float, token_bytes: float, in_flight: float) -> float:
        return self.ledger.term(
            kept_activation_bytes,
            self.setting.line(GROUP, "Activations", key="activations"),
            num_tokens=tokens,
            num_layers=self.layers,
            token_bytes=token_bytes,
            in_flight=in_flight,
        )

    def _scores(self, tokens: float) -> float:
        """Return the scores of one layer; flash attention keeps none."""
        if self.setting.strategy.attention != "eager":
            return 0.0
        line = self.setting.line(GROUP, "Eager attention scores per layer", key="scores")
        return self.ledger.term(
            score_bytes,
            replace(line, factor=self.setting.engine.score_ratio),
            num_heads=self.setting.model.num_attention_heads,
            tensor_parallel_size=self.setting.layout.tensor,
            num_tokens=tokens,
            sequence_length=self.workload.sequence_length,
            bytes_per_element=self._kept_bytes(),
            copies=score_copies(self.setting.strategy.compute_dtype),
        )

    def _loss(self, tokens: float) -> float:
        if self.index != self.setting.layout.pipeline - 1:
            return 0.0
        engine = self.setting.engine
        quantised = self.setting.weight_dtype not in WIDE
        loss_ratio = engine.loss_ratio * (engine.quantised_loss_ratio if quantised else 1.0)
        line = self.setting.line(GROUP, "Logits in the loss", key="activations")
        return self.ledger.term(
            loss_bytes,
            replace(line, factor=loss_ratio),
            num_tokens=tokens,
            vocab_size=self.setting.model.output_width,
            tensor_parallel_size=1 if engine.gathered_logits else self.setting.layout.tensor,
            bytes_per_element=self._kept_bytes(),
            fp32_copies=UNFUSED_LOSS_FP32_COPIES if engine.gathered_logits else LOSS_FP32_COPIES,
        )
