"""Pipeline parallelism with torch's schedules.

Sources: Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473
(1F1B, interleaved); Qi et al. 2023, arXiv:2401.10241 (zero bubble).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from runners.jobs.runtime import BadInputError
from runners.jobs.train.layout import summed_loss
from runners.jobs.train.layouts.stage import Sequences, Stage
from runners.jobspec.train import WOVEN, LayoutOptions

SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
WORK = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
)


class Pipeline:
    """This rank's stages and the schedule that runs them over a step's micro-batches."""

    def __init__(
        self,
        stages: Sequence[Stage],
        options: LayoutOptions,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._options = options
        self._stages = stages
        self._group_and_device = (group, device)
        self._schedule: Any = None
        self._shape: tuple[int, ...] = ()
        self._scale = 1.0
        self._busy_seconds = 0.0
        self.idle_ratio = 0.0  # of the last step

    def run(self, batches: Sequence[Sequences], scale: float) -> torch.Tensor:
        """Compute the gradients of the losses times ``scale``; return the sum of the losses.

        The sum is that of the last stage, 0 elsewhere. Every rank gets the same micro-batches.

        Raises:
            BadInputError: the schedule does not support this number of micro-batches.
        """
        shape = (len(batches), *batches[0].input_ids.shape)
        if any(each.input_ids.shape != shape[1:] for each in batches):
            msg = "a pipeline takes micro-batches of one shape, and this data's rows differ"
            raise BadInputError(f"{msg}; pack them, or take pipeline_parallel_size 1")
        if shape != self._shape:
            self._schedule, self._shape = self._build_schedule(len(batches)), shape
        self._scale = scale
        joined = Sequences(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
        is_first = hasattr(self._stages[0].model, "embed_tokens")
        losses: list[torch.Tensor] = []
        began, self._busy_seconds = time.monotonic(), 0.0
        self._schedule.step(
            *([joined.input_ids] if is_first else []),
            target=joined.labels,
            losses=losses,
            return_outputs=False,
            **joined.places,
        )
        seconds = max(1e-9, time.monotonic() - began)
        self.idle_ratio = max(0.0, 1.0 - self._busy_seconds / seconds)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._group_and_device[1])
        for each in losses:
            loss_sum += each.detach()
        return loss_sum / scale

    def move_to(self, group: dist.ProcessGroup) -> None:
        """Use another process group of the same ranks from the next step on."""
        self._group_and_device = (group, self._group_and_device[1])
        self._schedule, self._shape = None, ()

    def _build_schedule(self, num_micro_batches: int) -> Any:  # noqa: ANN401 - torch's schedules share no public class
        group, device = self._group_and_device
        own, size = dist.get_rank(group), self._options.pipeline_parallel_size
        stages = [
            PipelineStage(stage, own + at * size, self._options.num_stages, device, group=group)
            for at, stage in enumerate(self._stages)
        ]
        for stage in stages:
            for name in WORK:
                setattr(stage, name, self._timed(getattr(stage, name)))
        name = self._options.pipeline_schedule
        fields = {"n_microbatches": num_micro_batches, "loss_fn": self._loss, "scale_grads": False}
        try:
            if name in WOVEN:
                return SEVERAL[name](stages, **fields)
            return SINGLE[name](stages[0], **fields)
        except ValueError as error:
            msg = f"pipeline_schedule {name} does not take {num_micro_batches} micro-batches"
            raise BadInputError(f"{msg} on {size} ranks: {error}") from error

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_loss(logits, labels) * self._scale

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on as they come
            began = time.monotonic()
            try:
                return work(*args, **kwargs)
            finally:
                self._busy_seconds += time.monotonic() - began

        return timed
