"""The interface of parallel layouts, and plain data parallelism."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from runners.jobs.memory import gradient_bytes, model_bytes
from runners.jobs.ranks import Ranks, naming_rank_failures
from runners.jobs.train.checkpoint import (
    StagedCheckpoint,
    TrainState,
    checkpoint_parts,
    load_latest,
    tensor_tables,
)
from runners.jobs.train.rows import IGNORED, Batch, one_text_per_row
from runners.jobspec import ComputeDtype

# With 8-bit float products, everything else runs in bf16.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
STEPS_TO_ORDER_BUCKETS = 2  # DDP rebuilds its buckets as the second step begins


LOSS_CHUNK_LOGITS = 2**27  # computed in fp32 at once: 0.5 GB


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of the labels in nats; classes are the last axis.

    Many logits are taken in chunks of rows, which are computed again for their gradients: whole,
    the fp32 copy, the log-probabilities and two gradients take 16 bytes per logit beside the
    logits, 16.8 GB for 8,192 tokens and a vocabulary of 128,256.
    """
    rows, targets = logits.flatten(0, -2), labels.flatten()
    count = max(1, LOSS_CHUNK_LOGITS // rows.shape[-1])
    if len(rows) <= count:
        return _chunk_loss(rows, targets)
    losses = [
        checkpoint(_chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(torch.split(rows, count), torch.split(targets, count), strict=True)
    ]
    return torch.stack(losses).sum()


def _chunk_loss(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        rows.float(), targets, ignore_index=IGNORED, reduction="sum"
    )


class StepLoss(NamedTuple):
    """The mean loss per token in nats: of the whole step, and of this rank's part.

    Both are fp64 scalars on the device: reading one waits for the device.
    """

    loss: torch.Tensor
    own_loss: torch.Tensor


class Layout(Protocol):
    """How a trainer's ranks share the work of a step."""

    trained: torch.nn.Module
    loss_scale: float  # factor of the gradients until the trainer divides by it

    @property
    def keeps_gradients(self) -> bool:
        """Return whether gradients live in persistent buffers, to be zeroed instead of freed."""

    def begin(self) -> None:
        """Connect to the other ranks."""

    def set_timeout(self, timeout_seconds: float) -> None:
        """Set the timeout for unresponsive ranks, after the first step."""

    def share(self, count: int) -> range:
        """Return which of a step's ``count`` micro-batches this rank computes."""

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Compute the step's gradients into ``trained``."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients to this norm, and return the norm before clipping, unread."""

    def after_update(self) -> None:
        """Send the updated weights to the ranks that use them."""

    def synchronise(self) -> None:
        """Make diverged replicas equal again."""

    def figures(self) -> dict[str, float]:
        """Return time shares of the last step, where known."""

    def axes_of_groups(self) -> dict[str, str]:
        """Return the mesh axis of each process group, by the group's name."""

    def gathered_model(self) -> PreTrainedModel | None:
        """Return the whole model on the lead; every rank calls it."""

    def weight_bytes(self) -> int:
        """Return the bytes of this rank's weights between steps."""

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients in memory."""

    def checkpoint_part(
        self, optimizer: torch.optim.Optimizer, state: TrainState
    ) -> StagedCheckpoint:
        """Return this rank's part of a checkpoint of the current state; every rank calls it."""

    def resume(self, folder: Path, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Resume from the newest checkpoint in the folder; return None if it has none."""


class Replicas:
    """Data parallelism: every rank has the whole model and some of a step's micro-batches.

    The loss is a mean over all labels of the step: each micro-batch is weighted by its labels, so
    a step is the same on any number of ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: ComputeDtype,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        """Store the model; ranks communicate only after ``begin``."""
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
        """Return whether gradients are in DDP's buckets, once their order is final."""
        is_joined = isinstance(self._replica, DistributedDataParallel)
        return is_joined and self._num_steps >= STEPS_TO_ORDER_BUCKETS

    def begin(self) -> None:
        """Wrap the model in DDP, which averages the gradients.

        Raises:
            RankFailedError: not every rank connected in time.
        """
        self._replica = self._ranks.join(self.model)

    def set_timeout(self, timeout_seconds: float) -> None:
        """Do nothing: all replicas take part in every collective."""

    def share(self, count: int) -> range:
        """Return which of a step's ``count`` micro-batches this rank computes."""
        return self._ranks.share(count)

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Compute the step's gradients from this rank's micro-batches.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        self._num_steps += 1
        own_labels = sum(batch.num_labels for batch in batches)
        (labels,) = self._ranks.total([float(own_labels)])
        *others, last = batches
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        replica = self._replica
        with (
            replica.no_sync()
            if isinstance(replica, DistributedDataParallel)
            else contextlib.nullcontext()
        ):
            for batch in others:
                loss_sum += self._backward(batch, labels)
        with naming_rank_failures(self._ranks):
            loss_sum += self._backward(last, labels)
        total = self._ranks.total_on_device(loss_sum)
        return StepLoss(total / labels, loss_sum / max(1, own_labels))

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients to this norm, and return the norm before clipping, unread."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def after_update(self) -> None:
        """Do nothing: every rank has made the same update."""

    def synchronise(self) -> None:
        """Do nothing: the replicas never diverge."""

    def figures(self) -> dict[str, float]:
        """Return nothing: the all-reduce overlaps with the backward pass."""
        return {}

    def axes_of_groups(self) -> dict[str, str]:
        """Return the data axis for the world group."""
        return {str(dist.group.WORLD.group_name): "data"} if dist.group.WORLD else {}

    def gathered_model(self) -> PreTrainedModel | None:
        """Return the model on the lead."""
        return self.model if self._ranks.is_lead else None

    def weight_bytes(self) -> int:
        """Return the bytes of the weights."""
        return model_bytes(self.model)

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients in memory."""
        return gradient_bytes(self.model)

    def checkpoint_part(
        self, optimizer: torch.optim.Optimizer, state: TrainState
    ) -> StagedCheckpoint:
        """Return the checkpoint of the current state, whole on every rank."""
        parts = checkpoint_parts(*tensor_tables(self.model, optimizer))
        return StagedCheckpoint(parts, replace(state))  # the trainer's own goes on changing

    def resume(self, folder: Path, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Load the newest checkpoint, or else the lead's weights.

        Raises:
            RankFailedError: a rank did not respond in time.
            BadInputError: the checkpoint is damaged, or of another model.
        """
        self._ranks.copy_from_lead(list(self.model.parameters()))
        return load_latest(folder, self.model, optimizer)

    def _backward(self, batch: Batch, labels: float) -> torch.Tensor:
        """Add a micro-batch's gradients, and return the summed loss of its labels."""
        batch = batch.to(self._device)
        is_packed = batch.position_ids is not None
        masks = contextlib.nullcontext() if is_packed else one_text_per_row()
        enabled = self._dtype is not None
        with masks, torch.autocast(self._device.type, dtype=self._dtype, enabled=enabled):
            logits = self._replica(**batch.inputs).logits
        loss = summed_loss(logits, batch.labels)
        # DDP averages over ranks, so multiply by their number.
        torch.autograd.backward(loss * (self.loss_scale * self._ranks.size / labels))
        return loss.detach()
