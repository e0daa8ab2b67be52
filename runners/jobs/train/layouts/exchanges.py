"""Whole copies that exchange less: compressed gradients, or weights now and then (local SGD)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from runners.jobs.ranks import Ranks, lost_rank_named
from runners.jobs.train.batches import Batch
from runners.jobs.train.layout import Replicas, StepLoss
from runners.jobspec import ComputeDtype
from runners.layout_options import LayoutOptions

if TYPE_CHECKING:
    GradBucket = Any  # torch's stubs leave it out, and DDP reads it from a hook's signature
else:
    from torch.distributed import GradBucket

NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}
INT8_LEVELS = 127
POWERSGD_START = 3  # steps that are exchanged whole: torch asks for at least 2
Reduced = torch.futures.Future[torch.Tensor]


class CompressedReplicas(Replicas):
    """Copies whose gradients are exchanged in fewer bits, or as the product of two thin matrices.

    Source: Vogels et al. 2019 (PowerSGD), arXiv:1905.13727; Dettmers 2015, arXiv:1511.04561.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: ComputeDtype,
        device: torch.device,
        ranks: Ranks,
        options: LayoutOptions,
    ) -> None:
        super().__init__(model, compute_dtype, device, ranks)
        self._method, self._rank = options.gradient_compression, options.powersgd_rank
        self._sent_bytes = 0

    def begin(self) -> None:
        """Meet the other ranks, whose gradients come compressed from now on.

        Raises:
            RankLostError: not every rank came in time.
        """
        super().begin()
        if not isinstance(self._replica, DistributedDataParallel):
            return
        if self._method == "powersgd":
            state = PowerSGDState(
                None,
                matrix_approximation_rank=self._rank,
                start_powerSGD_iter=POWERSGD_START,
                min_compression_rate=1,
            )
            self._replica.register_comm_hook(state, self._counted(powerSGD_hook))
        elif self._method == "int8":
            self._replica.register_comm_hook(None, self._in_int8)
        else:
            self._replica.register_comm_hook(NARROW[self._method or "bf16"], self._narrowed)

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Leave the step's gradients in the model, given this rank's micro-batches.

        Raises:
            RankLostError: another rank was silent for too long.
        """
        self._sent_bytes = 0
        return super().gradients(batches)

    def figures(self) -> dict[str, float]:
        """Return the bytes of the gradients that this rank put in for the last step."""
        return {"gradient_bytes_sent": float(self._sent_bytes)}

    def _narrowed(self, state: torch.dtype, bucket: GradBucket) -> Reduced:
        gradient: torch.Tensor = bucket.buffer()
        narrow = gradient.div(self._ranks.size).to(state)
        self._sent_bytes += narrow.nbytes
        summing = dist.all_reduce(narrow, async_op=True)

        def widened(_done: object) -> torch.Tensor:
            return gradient.copy_(narrow)

        return _then(summing, widened)

    def _in_int8(self, state: None, bucket: GradBucket) -> Reduced:  # noqa: ARG002 - torch passes it by name
        """Return the mean of what the ranks' gradients are in steps of a 127th of the largest."""
        gradient: torch.Tensor = bucket.buffer()
        scale = gradient.abs().amax().clamp_min(torch.finfo(gradient.dtype).tiny) / INT8_LEVELS
        codes = (gradient / scale).round().to(torch.int8)
        self._sent_bytes += codes.nbytes + scale.nbytes
        scales = [torch.empty_like(scale) for _ in range(self._ranks.size)]
        dist.all_gather(scales, scale)
        theirs = [torch.empty_like(codes) for _ in range(self._ranks.size)]
        gathering = dist.all_gather(theirs, codes, async_op=True)

        def mean(_done: object) -> torch.Tensor:
            gradient.zero_()
            for each, its_scale in zip(theirs, scales, strict=True):
                gradient.add_(each * its_scale)
            return gradient.div_(self._ranks.size)

        return _then(gathering, mean)

    def _counted(self, hook: Callable[..., Reduced]) -> Callable[..., Reduced]:
        def counted(state: Any, bucket: GradBucket) -> Reduced:  # noqa: ANN401 - PowerSGD's own
            _ratio, _before, sent = state.compression_stats()
            if state.iter < state.start_powerSGD_iter:
                self._sent_bytes += bucket.buffer().nbytes
            found = hook(state, bucket)
            added = state.compression_stats()[2] - sent
            self._sent_bytes += added * bucket.buffer().element_size()
            return found

        return counted


class LocalReplicas(Replicas):
    """Copies that each learn from their own data, and take the mean of their weights now and then.

    What is judged or saved is such a mean: an evaluation or a checkpoint is one meeting more.
    Source: Stich 2018, arXiv:1805.09767.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: ComputeDtype,
        device: torch.device,
        ranks: Ranks,
        options: LayoutOptions,
    ) -> None:
        super().__init__(model, compute_dtype, device, ranks)
        self._interval = options.synchronization_interval_steps
        self._since = 0
        self._sent_bytes = 0

    def begin(self) -> None:
        """Do nothing: each copy learns by itself."""

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Leave the gradients of this rank's own micro-batches in the model.

        Raises:
            RankLostError: another rank was silent for too long.
        """
        own_labels = sum(batch.num_labels for batch in batches)
        found = sum(self._backward(batch, own_labels * self._ranks.size) for batch in batches)
        total, labels = self._ranks.total([found, float(own_labels)])
        self._sent_bytes = 0
        return StepLoss(total / labels, found / max(1, own_labels))

    def updated(self) -> None:
        """Take the mean of the copies where it is time."""
        self._since += 1
        if self._since >= self._interval:
            self.synchronise()

    def synchronise(self) -> None:
        """Take the mean of all copies' weights.

        Raises:
            RankLostError: another rank was silent for too long.
        """
        if not self._since or self._ranks.is_alone:
            return
        self._since = 0
        with lost_rank_named(self._ranks), torch.no_grad():
            for each in self.trained.parameters():
                if each.requires_grad:
                    dist.all_reduce(each)
                    each.div_(self._ranks.size)
                    self._sent_bytes += each.nbytes

    def figures(self) -> dict[str, float]:
        """Return the bytes of the weights that this rank put in after the last step."""
        return {"weight_bytes_sent": float(self._sent_bytes)}


def _then(work: Any, made: Callable[[object], torch.Tensor]) -> Reduced:  # noqa: ANN401 - torch types no Work's future
    found: Reduced = work.get_future().then(made)
    return found
