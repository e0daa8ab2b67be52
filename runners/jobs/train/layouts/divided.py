"""A training whose model, sequences or states are divided over the ranks, one way or several."""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from runners.jobs.ranks import Ranks, lost_rank_named
from runners.jobs.runtime import BadInputError
from runners.jobs.skeleton import fill, skeleton
from runners.jobs.train.batches import Batch
from runners.jobs.train.checkpoint import Saved, TrainState, read_latest
from runners.jobs.train.checkpoint_writing import Staged, Tensors
from runners.jobs.train.layout import AUTOCAST, StepLoss, summed_loss
from runners.jobs.train.layouts.axes import Axes
from runners.jobs.train.layouts.boxes import Box, Registry, Trained
from runners.jobs.train.layouts.context import pieces_of, route_attention, share_sequences
from runners.jobs.train.layouts.encoder_stage import (
    EncoderStage,
    Marked,
    is_encoder,
    marked,
)
from runners.jobs.train.layouts.experts import divide_experts, expert_boxes
from runners.jobs.train.layouts.pipeline import Pipeline
from runners.jobs.train.layouts.stage import (
    Sequences,
    Stage,
    check_model,
    sequences,
    stage_layers,
)
from runners.jobs.train.layouts.states import (
    Copies,
    ShardedGradients,
    ShardedWeights,
    States,
    Weight,
)
from runners.jobs.train.layouts.tensor import divide_matrices, own_box
from runners.jobspec import ComputeDtype
from runners.layout_options import SHARDED_GRADIENTS, SHARDED_WEIGHTS, LayoutOptions

WEIGHTS = "weights"  # the table of a checkpoint that is of no optimiser


class Divided:
    """One rank's part: its stages' weights, its share of the states, its piece of the data."""

    keeps_gradients = False  # let go as soon as the update is made

    def __init__(
        self,
        model: PreTrainedModel,
        options: LayoutOptions,
        compute_dtype: ComputeDtype,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        """Divide the model, which is empty afterwards but for what this rank has.

        Raises:
            BadInputError: the layout is not for as many ranks, or does not divide this model.
        """
        check_model(model, options)
        _check_same_weights(model, ranks)
        self._options, self._device, self._ranks = options, device, ranks
        self._dtype = AUTOCAST.get(compute_dtype)
        self._axes = Axes(options, ranks, device.type)
        self._aside = dist.new_group(backend="gloo")  # of checkpoints, beside the steps
        self._config = copy.deepcopy(model.config)
        self._generation = getattr(model, "generation_config", None)
        self.stages = self._own_stages(model)
        if (group := self._axes.context) is not None:
            share_sequences(model, options.context_method, group)
        boxes = self._divide()
        self._states = self._made_states(boxes)
        self._registry = Registry(ranks, self._states.held)
        self.trained: nn.Module = Trained(self._states.held)
        self._pipeline = self._made_pipeline()
        self.loss_scale = 1.0
        self._step_began = 0.0
        self._is_exchange_seen = (
            options.zero_stage < SHARDED_WEIGHTS and self._axes.copies is not None
        )

    def begin(self) -> None:
        """Have the stages train: the ranks have met when the model was divided."""
        for stage in self.stages:
            stage.train()

    def settled(self, patience_seconds: float) -> None:
        """Await messages between stages, and of a sequence's pieces, no longer than this.

        Raises:
            RankLostError: another rank was silent for too long.
        """
        if dist.get_backend() != "gloo":  # NCCL awaits them as long as other exchanges
            return
        with lost_rank_named(self._ranks):
            if self._pipeline and (stages := self._axes.anew("pipeline", patience_seconds)):
                self._pipeline.move_to(stages)
            if self._axes.context and (pieces := self._axes.anew("context", patience_seconds)):
                route_attention(self._options.context_method, pieces)

    def share(self, count: int) -> range:
        """Return which of a step's ``count`` micro-batches this rank computes.

        Raises:
            BadInputError: the copies cannot have equally many.
        """
        copies = self._options.data_parallel_size
        if count % copies:
            msg = f"gradient_accumulation_steps is {count}, which data_parallel_size {copies} does"
            raise BadInputError(f"{msg} not divide; take a multiple of {copies}")
        return range(self._axes.here.data, count, copies)

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Leave the step's gradients in what is trained, given this rank's micro-batches.

        Raises:
            RankLostError: another rank was silent for too long.
        """
        self._step_began = time.monotonic()
        self._states.exchange_seconds = 0.0
        own_labels = sum(batch.num_labels for batch in batches)
        repeated = self._ranks.size // self._options.data_parallel_size
        (labels,) = self._ranks.total([own_labels / repeated])
        scale = self.loss_scale * self._states.loss_scale / labels
        placed = [self._placed(batch.to(self._device)) for batch in batches]
        with lost_rank_named(self._ranks):
            found = self._computed(placed, scale)
            self._states.collect()
        tensor = self._options.tensor_parallel_size
        (total,) = self._ranks.total([found / tensor])
        return StepLoss(total / labels, found / max(1, own_labels))

    def clip(self, max_norm: float) -> float:
        """Scale the gradients to at most this norm, and return the norm of the whole gradient."""
        held = self._states.held
        norm = self._registry.norm({each.box: each.tensor.grad for each in held})
        ratio = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        for each in held:
            if each.tensor.grad is not None:
                each.tensor.grad.mul_(ratio)
        return norm

    def updated(self) -> None:
        """Bring the updated weights to the ranks that use them; gradients are let go."""
        with lost_rank_named(self._ranks):
            self._states.spread()

    def figures(self) -> dict[str, float]:
        """Return what shares of the last step went to what, where that is known.

        ``exchange_ratio``: gradients and weights on their way between copies, and waiting for
        theirs. ``pipeline_idle_ratio``: no stage of this rank was at work while the micro-batches
        passed, be it for want of one (the bubble) or while one was on its way.
        """
        found = {}
        if self._is_exchange_seen:
            seconds = max(1e-9, time.monotonic() - self._step_began)
            found["exchange_ratio"] = min(1.0, self._states.exchange_seconds / seconds)
        if self._pipeline is not None:
            found["pipeline_idle_ratio"] = self._pipeline.idle_ratio
        return found

    def axes_of_groups(self) -> dict[str, str]:
        """Return along which axis the messages of each group go, by the group's name."""
        return self._axes.named

    def weight_bytes(self) -> int:
        """Return the bytes of the weights on this rank, between steps."""
        return self._states.weight_bytes()

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that are held now, with what they keep alive."""
        gradients = (each.tensor.grad for each in self._states.held)
        storages = {
            each.untyped_storage().data_ptr(): each for each in gradients if each is not None
        }
        return sum(each.untyped_storage().nbytes() for each in storages.values())

    def whole(self) -> PreTrainedModel | None:
        """Return the whole model on the lead, gathered from all ranks; None on the others.

        Raises:
            RankLostError: a rank did not send its part in time.
        """
        tensors = self._registry.gather(self._weights())
        if not self._ranks.is_lead:
            return None
        config = copy.deepcopy(self._config)
        found = skeleton(config, torch.float32, None)
        fill(found, list(tensors), tensors.pop, self._device)
        if self._generation is not None:
            found.generation_config = self._generation
        return found

    def staged(self, optimizer: torch.optim.Optimizer, state: TrainState) -> Staged:
        """Return what this rank gives of a checkpoint: its parts of the weights and moments."""
        given, held = self._registry.given, self._states.held
        parts: dict[str, Tensors] = {WEIGHTS: given(self._weights())}
        for key in _moment_names(optimizer):
            parts[key] = given({each.box: optimizer.state[each.tensor][key] for each in held})
        steps = [float(each["step"]) for each in optimizer.state.values() if "step" in each]
        then = replace(state)  # the trainer's own goes on
        return Staged(parts, lambda kept: self._collected(kept, then, steps))

    def _collected(
        self, parts: Mapping[str, Tensors], state: TrainState, steps: Sequence[float]
    ) -> Saved | None:
        """Return the whole checkpoint on the lead, from the parts of all ranks.

        Raises:
            RankLostError: a rank did not send its part in time.
        """
        whole = {key: self._registry.gather(table, self._aside) for key, table in parts.items()}
        if not self._ranks.is_lead:
            return None
        weights = whole.pop(WEIGHTS)
        moments = {
            f"{name}.{key}": tensor
            for key, table in whole.items()
            for name, tensor in table.items()
        }
        moments |= {f"{name}.step": torch.tensor(steps[0]) for name in weights if steps}
        return Saved(weights, moments, state)

    def resume(self, folder: Path, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Take this rank's part of the lead's newest checkpoint; None where it has none.

        Raises:
            RankLostError: the lead did not send it in time.
        """
        saved = read_latest(folder) if self._ranks.is_lead else None
        told: list[tuple[TrainState, list[str], float] | None] = [saved and _told(saved)]
        with lost_rank_named(self._ranks):
            dist.broadcast_object_list(told, src=self._ranks.lead)
        if told[0] is None:
            return None
        state, moments, step = told[0]
        self._registry.scatter(saved.weights if saved else {}, self._weights())
        self._states.spread()
        whole = saved.optimizer if saved else {}
        for each in self._states.held if moments else ():  # none before the first step
            optimizer.state[each.tensor]["step"] = torch.tensor(step)
        for name in moments:
            parts = {each.box: torch.zeros_like(each.tensor.data) for each in self._states.held}
            ending = f".{name}"
            named = {key.removesuffix(ending): whole[key] for key in whole if key.endswith(ending)}
            self._registry.scatter(named, parts)
            for each in self._states.held:
                optimizer.state[each.tensor][name] = parts[each.box]
        return state

    def synchronise(self) -> None:
        """Do nothing: the ranks never part."""

    def _own_stages(self, model: PreTrainedModel) -> list[Stage | EncoderStage]:
        if is_encoder(model.config):
            return [EncoderStage(model)]
        layers = stage_layers(self._options, model.config.num_hidden_layers)
        own = range(self._axes.here.pipeline, len(layers), self._options.pipeline_parallel_size)
        stages: list[Stage | EncoderStage] = [Stage(model, layers[at]) for at in own]
        model.model.layers = nn.ModuleList()  # what is another rank's is let go
        model.model.embed_tokens = model.model.norm = model.lm_head = None
        return stages

    def _divide(self) -> list[Box]:
        """Divide the stages' matrices and experts; return the boxes of what is left here."""
        found: list[Box] = []
        mesh, options = self._axes.mesh["tensor"], self._options
        for stage in self.stages:
            boxes: dict[str, Box] = {}
            if isinstance(stage, EncoderStage):
                found += [own_box(name, weight) for name, weight in stage.named_parameters()]
                continue
            if options.tensor_parallel_size > 1:
                divide_matrices(stage, mesh, is_sequence_divided=options.sequence_parallel)
            if options.expert_parallel_size > 1 and self._axes.experts is not None:
                divide_experts(stage, self._axes.experts)
                boxes = expert_boxes(stage, self._config.num_local_experts)
            named = stage.named_parameters()
            found += [boxes.get(name) or own_box(name, weight) for name, weight in named]
        return found

    def _made_states(self, boxes: Sequence[Box]) -> States:
        stage = self._options.zero_stage
        if stage == SHARDED_WEIGHTS:
            return ShardedWeights(self.stages, boxes, self._axes)
        named = {name: each for one in self.stages for name, each in one.named_parameters()}
        weights = [Weight(named[box.name], box, self._group_of(box)) for box in boxes]
        if stage == SHARDED_GRADIENTS:
            return ShardedGradients(weights, self._axes)
        return Copies(weights, self._axes, is_sharded=stage == 1)

    def _group_of(self, box: Box) -> dist.ProcessGroup | None:
        is_divided = self._options.expert_parallel_size > 1 and ".experts." in box.name
        return self._axes.expert_copies if is_divided else self._axes.copies

    def _made_pipeline(self) -> Pipeline | None:
        if self._options.num_stages == 1:
            return None
        group = self._axes.along("pipeline")
        stages = [each for each in self.stages if isinstance(each, Stage)]
        return Pipeline(stages, self._options, group, self._device)

    def _placed(self, batch: Batch) -> Sequences | Marked:
        if is_encoder(self._config):
            return marked(batch)
        length, options = batch.input_ids.shape[1], self._options
        tensor = options.tensor_parallel_size
        if options.sequence_parallel and length % tensor:
            msg = (
                f"sequence_length is {length}, which tensor_parallel_size {tensor} does not divide"
            )
            raise BadInputError(f"{msg}; take a multiple, or leave sequence_parallel out")
        if options.context_parallel_size == 1:
            return sequences(batch)
        pieces = pieces_of(length, options.context_parallel_size)
        return sequences(batch, pieces, self._axes.here.context)

    def _computed(self, batches: Sequence[Sequences | Marked], scale: float) -> float:
        """Add the micro-batches' gradients, and return the sum of their labels' losses."""
        found = 0.0
        # A cast that autocast remembers outlives the gathered weight that it was made of.
        with torch.autocast(
            self._device.type,
            dtype=self._dtype,
            enabled=self._dtype is not None,
            cache_enabled=self._options.zero_stage < SHARDED_WEIGHTS,
        ):
            if self._pipeline is not None:
                pieces = [each for each in batches if isinstance(each, Sequences)]
                return self._pipeline.run(pieces, scale)
            for batch in batches:
                logits = self.stages[0](batch.input_ids, **batch.places)
                loss = summed_loss(logits, batch.labels)
                torch.autograd.backward(loss * scale)
                found += float(loss.detach())
        return found

    def _weights(self) -> dict[Box, torch.Tensor]:
        return {each.box: each.tensor.data for each in self._states.held}


def _moment_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return which states have a value for each element of a weight, as Adam's moments."""
    return sorted(
        {
            name
            for parameter, states in optimizer.state.items()
            for name, value in states.items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim
        }
    )


def _told(saved: Saved) -> tuple[TrainState, list[str], float]:
    """Return what every rank must know of a checkpoint: progress, names of moments, updates."""
    moments = {key.rpartition(".")[2] for key in saved.optimizer} - {"step"}
    updates = [float(each) for key, each in saved.optimizer.items() if key.endswith(".step")]
    return saved.state, sorted(moments), max(updates, default=0.0)


def _check_same_weights(model: PreTrainedModel, ranks: Ranks) -> None:
    """Refuse weights that differ from rank to rank: the parts would be of several models.

    Raises:
        BadInputError: the lead's model is another one.
    """
    own = math.fsum(float(each.detach().double().sum()) for each in model.parameters())
    (lead,) = ranks.total([own if ranks.is_lead else 0.0])
    if own != lead:
        msg = "this rank's weights are not the first one's; copy one model folder to every host"
        raise BadInputError(msg)
