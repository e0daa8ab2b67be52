"""Sharded layouts: tensor, pipeline, context, expert and ZeRO parallelism, alone or combined."""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from runners.jobs.loading import fill, skeleton
from runners.jobs.ranks import Ranks, naming_rank_failures
from runners.jobs.runtime import BadInputError
from runners.jobs.train.checkpoint import (
    StagedCheckpoint,
    TrainState,
    newest_checkpoint,
    state_of,
)
from runners.jobs.train.checkpoint_files import OPTIMIZER, Part, load_parts, stored_tensors, whole
from runners.jobs.train.layout import AUTOCAST, StepLoss, summed_loss
from runners.jobs.train.layout_pipeline import (
    EncoderStage,
    LabelledBatch,
    Pipeline,
    SequenceBatch,
    Stage,
    check_model,
    is_encoder,
    labelled_batch,
    sequences,
    stage_layers,
)
from runners.jobs.train.layout_states import (
    Axes,
    Copies,
    ShardedGradients,
    ShardedWeights,
    States,
    Weight,
    rank_tokens,
    register_context_parallel_attention,
    use_context_parallel_attention,
)
from runners.jobs.train.layout_tensor import (
    SliceRegistry,
    TensorSlice,
    TrainedParameters,
    expert_slices,
    own_slice,
    shard_experts,
    shard_matrices,
)
from runners.jobs.train.rows import Batch
from runners.jobspec import ComputeDtype
from runners.jobspec.train import SHARDED_GRADIENTS, SHARDED_WEIGHTS, LayoutOptions


class ShardedLayout:
    """One rank's part: the weights of its stages, its shard of the states, its data."""

    keeps_gradients = False  # freed after each update

    def __init__(
        self,
        model: PreTrainedModel,
        options: LayoutOptions,
        compute_dtype: ComputeDtype,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        """Divide the model; afterwards it is empty except for this rank's part.

        Raises:
            BadInputError: the layout has a different number of ranks, or cannot divide this model.
        """
        check_model(model, options)
        _check_same_weights(model, ranks)
        self._options, self._device, self._ranks = options, device, ranks
        self._dtype = AUTOCAST.get(compute_dtype)
        self._axes = Axes(options, ranks, device.type)
        self._config = copy.deepcopy(model.config)
        self._generation = getattr(model, "generation_config", None)
        self.stages = self._own_stages(model)
        if (group := self._axes.context) is not None:
            use_context_parallel_attention(model, options.context_method, group)
        boxes = self._divide()
        self._states = self._build_states(boxes)
        self._registry = SliceRegistry(ranks, self._states.held)
        self._shapes = self._registry.shapes  # of the whole weights, by name
        self.trained: nn.Module = TrainedParameters(self._states.held)
        self._pipeline = self._build_pipeline()
        self.loss_scale = 1.0
        self._step_began = 0.0
        self._is_exchange_seen = (
            options.zero_stage < SHARDED_WEIGHTS and self._axes.copies is not None
        )

    def begin(self) -> None:
        """Switch the stages to training mode; the groups exist since the model was divided."""
        for stage in self.stages:
            stage.train()

    def set_timeout(self, timeout_seconds: float) -> None:
        """Set the timeout of messages between pipeline stages and between context pieces.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        if dist.get_backend() != "gloo":  # NCCL has one timeout for all messages
            return
        with naming_rank_failures(self._ranks):
            if self._pipeline and (stages := self._axes.new_group("pipeline", timeout_seconds)):
                self._pipeline.move_to(stages)
            if self._axes.context and (
                context_group := self._axes.new_group("context", timeout_seconds)
            ):
                register_context_parallel_attention(self._options.context_method, context_group)

    def share(self, count: int) -> range:
        """Return which of a step's ``count`` micro-batches this rank computes.

        Raises:
            BadInputError: the replicas would have unequal numbers.
        """
        copies = self._options.data_parallel_size
        if count % copies:
            msg = f"gradient_accumulation_steps is {count}; data_parallel_size is {copies}"
            raise BadInputError(f"{msg}; choose a multiple of {copies}")
        return range(self._axes.here.data, count, copies)

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Compute the step's gradients from this rank's micro-batches.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        self._step_began = time.monotonic()
        self._states.exchange_seconds = 0.0
        own_labels = sum(batch.num_labels for batch in batches)
        ranks_per_replica = self._ranks.size // self._options.data_parallel_size
        (labels,) = self._ranks.total([own_labels / ranks_per_replica])
        scale = self.loss_scale * self._states.loss_scale / labels
        placed = [self._local_batch(batch.to(self._device)) for batch in batches]
        with naming_rank_failures(self._ranks):
            loss_sum = self._compute(placed, scale)
            self._states.collect()
        tensor = self._options.tensor_parallel_size
        total = self._ranks.total_on_device(loss_sum / tensor)
        return StepLoss(total / labels, loss_sum / max(1, own_labels))

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients to this norm, and return the norm of the whole gradient, unread."""
        held_slices = self._states.held
        norm = self._registry.norm({each.box: each.tensor.grad for each in held_slices})
        # As in torch.nn.utils.clip_grad_norm_.
        ratio = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for each in held_slices:
            if each.tensor.grad is not None:
                each.tensor.grad.mul_(ratio.to(each.tensor.grad.device, non_blocking=True))
        return norm

    def after_update(self) -> None:
        """Send the updated weights to the ranks that use them, and free the gradients."""
        with naming_rank_failures(self._ranks):
            self._states.after_update()

    def figures(self) -> dict[str, float]:
        """Return time shares of the last step, where known.

        ``exchange_ratio``: gradients and weights in transfer between replicas, and waiting for it.
        ``pipeline_idle_ratio``: no stage of this rank computed while the micro-batches passed,
        because of the bubble or a transfer.
        """
        ratios = {}
        if self._is_exchange_seen:
            seconds = max(1e-9, time.monotonic() - self._step_began)
            ratios["exchange_ratio"] = min(1.0, self._states.exchange_seconds / seconds)
        if self._pipeline is not None:
            ratios["pipeline_idle_ratio"] = self._pipeline.idle_ratio
        return ratios

    def axes_of_groups(self) -> dict[str, str]:
        """Return the mesh axis of each process group, by the group's name."""
        return self._axes.named

    def weight_bytes(self) -> int:
        """Return the bytes of this rank's weights between steps."""
        return self._states.weight_bytes()

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients in memory, including storage they keep alive."""
        gradients = (each.tensor.grad for each in self._states.held)
        storages = {
            each.untyped_storage().data_ptr(): each for each in gradients if each is not None
        }
        return sum(each.untyped_storage().nbytes() for each in storages.values())

    def gathered_model(self) -> PreTrainedModel | None:
        """Return the whole model on the lead, gathered from all ranks; None on the others.

        Raises:
            RankFailedError: a rank did not send its part in time.
        """
        tensors = self._registry.gather(self._weights())
        if not self._ranks.is_lead:
            return None
        config = copy.deepcopy(self._config)
        model = skeleton(config, torch.float32, None)
        fill(model, list(tensors), tensors.pop, self._device)
        if self._generation is not None:
            model.generation_config = self._generation
        return model

    def checkpoint_part(
        self, optimizer: torch.optim.Optimizer, state: TrainState
    ) -> StagedCheckpoint:
        """Return this rank's part of a checkpoint: its slices of the weights and moments."""
        parts: dict[str, Part] = {}
        names = [*_moment_names(optimizer), "step"]
        tensors = {each.box: each.tensor for each in self._states.held}
        for box in self._registry.parts_to_send(tensors):
            states = optimizer.state.get(tensors[box], {})
            parts[box.name] = self._part(box, tensors[box].data)
            for name in names:
                if name in states:
                    key, value = f"{OPTIMIZER}{box.name}.{name}", states[name]
                    is_step = name == "step"
                    parts[key] = whole(value) if is_step else self._part(box, value)
        state_copy = replace(state)  # the trainer's own state goes on changing
        return StagedCheckpoint(parts, state_copy, is_divided=True)

    def resume(self, folder: Path, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Load this rank's slices of the newest checkpoint; return None if there is none.

        Raises:
            BadInputError: the checkpoint is damaged, or of another model.
        """
        newest = newest_checkpoint(folder)
        if newest is None:
            return None
        stored, held = stored_tensors(newest), self._states.held
        parts = {each.box.name: self._part(each.box, each.tensor.data) for each in held}
        for name in stored.optimizer:
            weight, _, key = name.rpartition(".")
            for own in (own for own in held if own.box.name == weight):
                value = torch.zeros(()) if key == "step" else torch.zeros_like(own.tensor.data)
                optimizer.state[own.tensor][key] = value
                part = whole(value) if key == "step" else self._part(own.box, value)
                parts[f"{stored.prefix}{name}"] = part
        load_parts(newest, parts)
        self._states.after_update()
        return state_of(newest)

    def _part(self, box: TensorSlice, tensor: torch.Tensor) -> Part:
        return Part(tensor, box.start, self._shapes[box.name])

    def synchronise(self) -> None:
        """Do nothing: the ranks never diverge."""

    def _own_stages(self, model: PreTrainedModel) -> list[Stage | EncoderStage]:
        if is_encoder(model.config):
            return [EncoderStage(model)]
        layers = stage_layers(self._options, model.config.num_hidden_layers)
        stage_numbers = range(
            self._axes.here.pipeline, len(layers), self._options.pipeline_parallel_size
        )
        stages: list[Stage | EncoderStage] = [Stage(model, layers[at]) for at in stage_numbers]
        model.model.layers = nn.ModuleList()  # frees the other ranks' layers
        model.model.embed_tokens = model.model.norm = model.lm_head = None
        return stages

    def _divide(self) -> list[TensorSlice]:
        """Divide the stages' matrices and experts; return the slices that stay here."""
        slices: list[TensorSlice] = []
        mesh, options = self._axes.mesh["tensor"], self._options
        for stage in self.stages:
            boxes: dict[str, TensorSlice] = {}
            if isinstance(stage, EncoderStage):
                slices += [own_slice(name, weight) for name, weight in stage.named_parameters()]
                continue
            if options.tensor_parallel_size > 1:
                shard_matrices(stage, mesh, is_sequence_divided=options.sequence_parallel)
            if options.expert_parallel_size > 1 and self._axes.experts is not None:
                shard_experts(stage, self._axes.experts)
                boxes = expert_slices(stage, self._config.num_local_experts)
            named = stage.named_parameters()
            slices += [boxes.get(name) or own_slice(name, weight) for name, weight in named]
        return slices

    def _build_states(self, boxes: Sequence[TensorSlice]) -> States:
        stage = self._options.zero_stage
        if stage == SHARDED_WEIGHTS:
            return ShardedWeights(self.stages, boxes, self._axes)
        named = {
            name: each
            for stage_module in self.stages
            for name, each in stage_module.named_parameters()
        }
        weights = [Weight(named[box.name], box, self._group_of(box)) for box in boxes]
        if stage == SHARDED_GRADIENTS:
            return ShardedGradients(weights, self._axes)
        return Copies(weights, self._axes, is_sharded=stage == 1)

    def _group_of(self, box: TensorSlice) -> dist.ProcessGroup | None:
        is_divided = self._options.expert_parallel_size > 1 and ".experts." in box.name
        return self._axes.expert_copies if is_divided else self._axes.copies

    def _build_pipeline(self) -> Pipeline | None:
        if self._options.num_stages == 1:
            return None
        group = self._axes.along("pipeline")
        stages = [each for each in self.stages if isinstance(each, Stage)]
        return Pipeline(stages, self._options, group, self._device)

    def _local_batch(self, batch: Batch) -> SequenceBatch | LabelledBatch:
        if is_encoder(self._config):
            return labelled_batch(batch)
        length, options = batch.input_ids.shape[1], self._options
        tensor = options.tensor_parallel_size
        if options.sequence_parallel and length % tensor:
            msg = (
                f"sequence_length is {length}, which tensor_parallel_size {tensor} does not divide"
            )
            raise BadInputError(
                f"{msg}; choose a multiple of {tensor}, or leave sequence_parallel out"
            )
        if options.context_parallel_size == 1:
            return sequences(batch)
        pieces = rank_tokens(length, options.context_parallel_size)
        return sequences(batch, pieces, self._axes.here.context)

    def _compute(
        self, batches: Sequence[SequenceBatch | LabelledBatch], scale: float
    ) -> torch.Tensor:
        """Compute the micro-batches' gradients, and return their summed loss."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        # Autocast's cached cast would outlive the gathered weight it was made from.
        with torch.autocast(
            self._device.type,
            dtype=self._dtype,
            enabled=self._dtype is not None,
            cache_enabled=self._options.zero_stage < SHARDED_WEIGHTS,
        ):
            if self._pipeline is not None:
                pieces = [each for each in batches if isinstance(each, SequenceBatch)]
                return self._pipeline.run(pieces, scale)
            for batch in batches:
                logits = self.stages[0](batch.input_ids, **batch.places)
                loss = summed_loss(logits, batch.labels)
                torch.autograd.backward(loss * scale)
                loss_sum += loss.detach()
        return loss_sum

    def _weights(self) -> dict[TensorSlice, torch.Tensor]:
        return {each.box: each.tensor.data for each in self._states.held}


def _moment_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of element-wise states, such as Adam's moments."""
    return sorted(
        {
            name
            for parameter, states in optimizer.state.items()
            for name, value in states.items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim
        }
    )


def _check_same_weights(model: PreTrainedModel, ranks: Ranks) -> None:
    """Check that all ranks have the same weights.

    Raises:
        BadInputError: the lead's weights differ.
    """
    own_sum = math.fsum(float(each.detach().double().sum()) for each in model.parameters())
    (lead_sum,) = ranks.total([own_sum if ranks.is_lead else 0.0])
    if own_sum != lead_sum:
        msg = "this rank's weights are not the first one's; copy one model folder to every host"
        raise BadInputError(msg)
