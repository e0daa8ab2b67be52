"""A step's loss and gradient norm on their way from the device to the host.

The copy runs beside the device's work: a step that is read after the next one was launched has not
kept the device waiting.
"""

from typing import NamedTuple

import torch


class StepFigures(NamedTuple):
    """The figures of one step, on the host."""

    loss: float  # mean loss per token in nats, of all ranks
    own_loss: float  # of this rank's micro-batches
    grad_norm: float  # before clipping


class Reading:
    """The figures of one step, copied once; ``figures`` waits for the copy alone."""

    def __init__(self, step: int, *figures: torch.Tensor) -> None:
        """Start to copy the figures, in the order of ``StepFigures``."""
        self.step = step
        device = figures[0].device
        stacked = torch.stack([each.detach().to(device, torch.float64) for each in figures])
        self._host = stacked
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._host = torch.empty(stacked.shape, dtype=torch.float64, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def figures(self) -> StepFigures:
        """Return the figures; waits until the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        return StepFigures(*self._host.tolist())
