"""AdamW whose moments wait in the host's memory, or in a file, and come one piece at a time.

A GPU's moments go to the host's memory and the update is computed there; a CPU's go to a file
that is mapped, and each tensor's pages are given back as soon as it is updated: they are in the
file by then.

Source: Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021
(ZeRO-Infinity), arXiv:2104.07857, section 5.
"""

import mmap
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.adamw import adamw

from runners.jobs.train.one_by_one import OneByOne

FP32_BYTES = 4
MOMENTS = ("exp_avg", "exp_avg_sq")
HOST = torch.device("cpu")


class MappedStates:
    """A file without a name that holds tensors; each begins on a page of its own."""

    def __init__(self, folder: Path, counts: Iterable[int]) -> None:
        """Make room for fp32 tensors of so many numbers, all 0."""
        self.offsets: list[int] = []
        size = 0
        for count in counts:
            self.offsets.append(size)
            size += -(-count * FP32_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self.size = size
        self._at = 0

    def tensor(self, index: int, shape: torch.Size) -> torch.Tensor:
        """Return the tensor at a place."""
        count = shape.numel()
        flat = torch.frombuffer(
            self._map, dtype=torch.float32, count=count, offset=self.offsets[index]
        )
        return flat.view(shape)

    def give_back(self, index: int) -> None:
        """Let a tensor's pages go: the file has what was written to them."""
        start = self.offsets[index]
        end = self.offsets[index + 1] if index + 1 < len(self.offsets) else self.size
        self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


class AwayAdamW(OneByOne):
    """AdamW with its two moments off the device; the same update as torch's own."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        folder: Path | None,
    ) -> None:
        """Keep the moments in a file below ``folder``, or in the host's memory without one."""
        defaults = {"lr": learning_rate, "betas": betas, "weight_decay": 0.0, "eps": 1e-8}
        super().__init__(groups, defaults)
        trained = [each for group in self.param_groups for each in group["params"]]
        counts = [each.numel() for each in trained for _ in MOMENTS]
        self._mapped = MappedStates(folder, counts) if folder is not None else None
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        for index, parameter in enumerate(trained):
            self._places[parameter] = (2 * index, 2 * index + 1)

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of the file that the moments are in; 0 where there is none."""
        return 0 if self._mapped is None else self._mapped.size

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a weight's moments and count of steps, made where they are not there yet."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name, place in zip(MOMENTS, self._places[parameter], strict=True):
                state[name] = (
                    torch.zeros(parameter.shape, dtype=torch.float32)
                    if self._mapped is None
                    else self._mapped.tensor(place, parameter.shape)
                )
        return state

    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a weight and its moments where these are."""
        state, (beta1, beta2) = self.state_of(parameter), group["betas"]
        here = parameter.to(HOST)
        adamw(
            [here],
            [gradient.to(HOST)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if here is not parameter:
            parameter.copy_(here)
        if self._mapped is not None:
            for place in self._places[parameter]:
                self._mapped.give_back(place)
