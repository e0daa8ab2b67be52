"""Replicas with reduced communication: gradient compression, or local SGD."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from runners.jobs.ranks import Ranks, naming_rank_failures
from runners.jobs.train.layout import Replicas, StepLoss
from runners.jobs.train.rows import Batch
from runners.jobspec import ComputeDtype
from runners.jobspec.train import LayoutOptions

if TYPE_CHECKING:
    GradBucket = Any  # torch's stubs leave it out, but DDP reads it from a hook's signature
else:
    from torch.distributed import GradBucket

NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}
INT8_LEVELS = 127
POWERSGD_START = 3  # uncompressed steps first: torch requires at least 2
Reduced = torch.futures.Future[torch.Tensor]


class CompressedReplicas(Replicas):
    """Replicas with gradients compressed to fewer bits, or to low rank by PowerSGD.

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
        """Wrap the model in DDP with a compression hook.

        Raises:
            RankFailedError: not every rank connected in time.
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
        """Compute the step's gradients from this rank's micro-batches.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        self._sent_bytes = 0
        return super().gradients(batches)

    def figures(self) -> dict[str, float]:
        """Return the gradient bytes that this rank sent in the last step."""
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
        """Return the mean of the ranks' int8 gradients, each in units of 1/127 of its maximum."""
        gradient: torch.Tensor = bucket.buffer()
        scale = gradient.abs().amax().clamp_min(torch.finfo(gradient.dtype).tiny) / INT8_LEVELS
        codes = (gradient / scale).round().to(torch.int8)
        self._sent_bytes += codes.nbytes + scale.nbytes
        scales = [torch.empty_like(scale) for _ in range(self._ranks.size)]
        dist.all_gather(scales, scale)
        all_codes = [torch.empty_like(codes) for _ in range(self._ranks.size)]
        gathering = dist.all_gather(all_codes, codes, async_op=True)

        def mean(_done: object) -> torch.Tensor:
            gradient.zero_()
            for each, its_scale in zip(all_codes, scales, strict=True):
                gradient.add_(each * its_scale)
            return gradient.div_(self._ranks.size)

        return _then(gathering, mean)

    def _counted(self, hook: Callable[..., Reduced]) -> Callable[..., Reduced]:
        def counted(state: Any, bucket: GradBucket) -> Reduced:  # noqa: ANN401 - PowerSGD's own
            _ratio, _before, sent = state.compression_stats()
            if state.iter < state.start_powerSGD_iter:
                self._sent_bytes += bucket.buffer().nbytes
            reduced = hook(state, bucket)
            added = state.compression_stats()[2] - sent
            self._sent_bytes += added * bucket.buffer().element_size()
            return reduced

        return counted


class LocalReplicas(Replicas):
    """Local SGD: replicas train independently and average their weights periodically.

    Evaluations and checkpoints average the weights first, in addition.
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
        self._steps_since_average = 0
        self._sent_bytes = 0

    def begin(self) -> None:
        """Do nothing: each replica trains by itself."""

    def gradients(self, batches: Sequence[Batch]) -> StepLoss:
        """Compute the gradients of this rank's own micro-batches.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        own_labels = sum(batch.num_labels for batch in batches)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            loss_sum += self._backward(batch, own_labels * self._ranks.size)
        (labels,) = self._ranks.total([float(own_labels)])
        total = self._ranks.total_on_device(loss_sum)
        self._sent_bytes = 0
        return StepLoss(total / labels, loss_sum / max(1, own_labels))

    def updated(self) -> None:
        """Average the replicas' weights if the interval is over."""
        self._steps_since_average += 1
        if self._steps_since_average >= self._interval:
            self.synchronise()

    def synchronise(self) -> None:
        """Average the weights of all replicas.

        Raises:
            RankFailedError: another rank did not respond in time.
        """
        if not self._steps_since_average or self._ranks.is_alone:
            return
        self._steps_since_average = 0
        with naming_rank_failures(self._ranks), torch.no_grad():
            for each in self.trained.parameters():
                if each.requires_grad:
                    dist.all_reduce(each)
                    each.div_(self._ranks.size)
                    self._sent_bytes += each.nbytes

    def figures(self) -> dict[str, float]:
        """Return the weight bytes that this rank sent after the last step."""
        return {"weight_bytes_sent": float(self._sent_bytes)}


def _then(work: Any, continuation: Callable[[object], torch.Tensor]) -> Reduced:  # noqa: ANN401 - torch types no Work's future
    reduced: Reduced = work.get_future().then(continuation)
    return reduced
