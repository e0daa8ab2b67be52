"""How a step is spread over the ranks: who computes what, and how their gradients meet."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from runners.jobs.memory import gradient_bytes, model_bytes
from runners.jobs.ranks import Ranks, lost_rank_named
from runners.jobs.train.batches import IGNORED, Batch
from runners.jobs.train.checkpoint import (
    Saved,
    TrainState,
    load_latest,
    share_progress,
    tables_of,
)
from runners.jobs.train.checkpoint_writing import Staged
from runners.jobspec import ComputeDtype

# Beside products in 8-bit floats, all else runs as with bf16.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
STEPS_TO_ORDER_BUCKETS = 2  # DDP makes new ones as its second step begins


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the labels' losses in nats; the classes are the logits' last axis."""
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class StepLoss(NamedTuple):
    """The mean loss a token, in nats: of the whole step, and of what this rank computed."""

    loss: float
    own_loss: float


class Layout(Protocol):
    """What a trainer asks of the way in which its ranks share the work."""

    trained: torch.nn.Module
    loss_scale: float  # what gradients are multiplied with until the trainer divides them

    @property
    def keeps_gradients(self) -> bool:
        """Tell whether gradients are in buffers that stay: then they are zeroed, not let go."""

    def begin(self) -> None:
        """Meet the other ranks."""

    def settled(self, patience_seconds: float) -> None:
        """Take a rank that is silent for longer as lost: the first step is made."""

    def share(self, count: int) -> range:
        """Return which of a step's ``count`` micro-batches this rank computes."""

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Leave the step's gradients in ``trained``."""

    def clip(self, max_norm: float) -> float:
        """Scale the gradients to at most this norm, and return the norm that they had."""

    def updated(self) -> None:
        """Bring the updated weights to the ranks that use them."""

    def synchronise(self) -> None:
        """Make ranks that parted the same again."""

    def figures(self) -> dict[str, float]:
        """Return what shares of the last step went to what, where that is known."""

    def axes_of_groups(self) -> dict[str, str]:
        """Return along which axis the messages of each group go, by the group's name."""

    def whole(self) -> PreTrainedModel | None:
        """Return the whole model on the lead; every rank calls it."""

    def weight_bytes(self) -> int:
        """Return the bytes of the weights on this rank, between steps."""

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that are held now."""

    def staged(self, optimizer: torch.optim.Optimizer, state: TrainState) -> Staged:
        """Return this rank's part of a checkpoint as it is now; every rank calls it."""

    def resume(self, folder: Path, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Go on from the lead's newest checkpoint; None where it has none."""


class Replicas:
    """Every rank holds the whole model and computes some of a step's micro-batches.

    The loss is a mean over the step's labels, wherever they stand: a micro-batch with few of
    them counts for few, and a step is the same on any number of ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: ComputeDtype,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        """Hold the model; nothing is exchanged before ``begin``."""
        self.model = model
        self.trained: torch.nn.Module = model
        self._dtype = AUTOCAST.get(compute_dtype)
        self._device = device
        self._ranks = ranks
        self.loss_scale = 1.0
        self._replica: PreTrainedModel | DistributedDataParallel = model
        self._num_steps = 0

    @property
    def keeps_gradients(self) -> bool:
        """Tell whether gradients are in the buckets of an exchange, whose order is settled."""
        is_joined = isinstance(self._replica, DistributedDataParallel)
        return is_joined and self._num_steps >= STEPS_TO_ORDER_BUCKETS

    def begin(self) -> None:
        """Meet the other ranks, whose gradients are averaged from now on.

        Raises:
            RankLostError: not every rank came in time.
        """
        self._replica = self._ranks.join(self.model)

    def settled(self, patience_seconds: float) -> None:
        """Do nothing: copies meet in exchanges among all of them."""

    def share(self, count: int) -> range:
        """Return which of a step's ``count`` micro-batches this rank computes."""
        return self._ranks.share(count)

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Leave the step's gradients in the model, given this rank's micro-batches.

        Raises:
            RankLostError: another rank was silent for too long.
        """
        self._num_steps += 1
        own_labels = sum(batch.num_labels for batch in batches)
        (labels,) = self._ranks.total([float(own_labels)])
        *others, last = batches
        with self._unsynced():
            found = sum(self._backward(batch, labels) for batch in others)
        with lost_rank_named(self._ranks):
            found += self._backward(last, labels)
        (total,) = self._ranks.total([found])
        return StepLoss(total / labels, found / max(1, own_labels))

    def clip(self, max_norm: float) -> float:
        """Scale the gradients to at most this norm, and return the norm that they had."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def updated(self) -> None:
        """Do nothing: every rank has made the same update."""

    def synchronise(self) -> None:
        """Do nothing: the ranks never part."""

    def figures(self) -> dict[str, float]:
        """Return nothing: the exchange runs beside the backward pass."""
        return {}

    def axes_of_groups(self) -> dict[str, str]:
        """Return that all messages are those of copies."""
        return {str(dist.group.WORLD.group_name): "data"} if dist.group.WORLD else {}

    def whole(self) -> PreTrainedModel | None:
        """Return the model on the lead."""
        return self.model if self._ranks.is_lead else None

    def weight_bytes(self) -> int:
        """Return the bytes of the weights."""
        return model_bytes(self.model)

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that are held now."""
        return gradient_bytes(self.model)

    def staged(self, optimizer: torch.optim.Optimizer, state: TrainState) -> Staged:
        """Return the checkpoint as it is now, which is the lead's."""
        if not self._ranks.is_lead:
            return Staged({}, lambda _parts: None)
        weights, states = tables_of(self.model, optimizer)
        then = replace(state)  # the trainer's own goes on
        parts = {"weights": weights, "optimizer": states}
        return Staged(parts, lambda kept: Saved(kept["weights"], kept["optimizer"], then))

    def resume(self, folder: Path, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Take the lead's weights, and where it has a checkpoint its states and progress.

        Raises:
            RankLostError: a rank did not answer in time.
        """
        state = None
        if self._ranks.is_lead:
            state = load_latest(folder, self.model, optimizer)
        if not self._ranks.is_alone:
            state = share_progress(self._ranks, self.model, optimizer, state)
        return state

    def _unsynced(self) -> AbstractContextManager[None]:
        if isinstance(self._replica, DistributedDataParallel):
            return self._replica.no_sync()
        return contextlib.nullcontext()

    def _backward(self, batch: Batch, labels: float) -> float:
        """Add a micro-batch's gradients, and return the sum of its labels' losses."""
        batch = batch.to(self._device)
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None):
            logits = self._replica(**batch.inputs).logits
        loss = summed_loss(logits, batch.labels)
        # The ranks' gradients are averaged, so each counts for as many as there are.
        torch.autograd.backward(loss * (self.loss_scale * self._ranks.size / labels))
        return float(loss.detach())
