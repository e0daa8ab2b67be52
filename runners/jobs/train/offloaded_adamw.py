"""AdamW with its moments in host memory or in a memory-mapped file.

On a GPU the moments are in host memory, and the update runs on the CPU. On a CPU they are in a
mapped file, and the pages of each tensor are released after its update; their content is in the
file.

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
    """An unnamed mapped file of tensors, each aligned to a page."""

    def __init__(self, folder: Path, counts: Iterable[int]) -> None:
        """Allocate fp32 tensors with these numbers of elements, all 0."""
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
        """Return the tensor with this index."""
        count = shape.numel()
        flat = torch.frombuffer(
            self._map, dtype=torch.float32, count=count, offset=self.offsets[index]
        )
        return flat.view(shape)

    def give_back(self, index: int) -> None:
        """Release a tensor's pages; the file keeps their content."""
        start = self.offsets[index]
        end = self.offsets[index + 1] if index + 1 < len(self.offsets) else self.size
        self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


class OffloadedAdamW(OneByOne):
    """AdamW with both moments off the device; its update equals torch's."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        folder: Path | None,
    ) -> None:
        """Store the moments in a file in ``folder``, or in host memory if it is None."""
        defaults = {"lr": learning_rate, "betas": betas, "weight_decay": 0.0, "eps": 1e-8}
        super().__init__(groups, defaults)
        trained = [each for group in self.param_groups for each in group["params"]]
        counts = [each.numel() for each in trained for _ in MOMENTS]
        self._mapped = MappedStates(folder, counts) if folder is not None else None
        self._indices: dict[torch.Tensor, tuple[int, int]] = {}
        for index, parameter in enumerate(trained):
            self._indices[parameter] = (2 * index, 2 * index + 1)

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of the mapped file; 0 without one."""
        return 0 if self._mapped is None else self._mapped.size

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a weight's moments and step count; create them if missing."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name, place in zip(MOMENTS, self._indices[parameter], strict=True):
                state[name] = (
                    torch.zeros(parameter.shape, dtype=torch.float32)
                    if self._mapped is None
                    else self._mapped.tensor(place, parameter.shape)
                )
        return state

    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a weight and its moments on the CPU."""
        state, (beta1, beta2) = self.state_of(parameter), group["betas"]
        host_weight = parameter.to(HOST)
        adamw(
            [host_weight],
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
        if host_weight is not parameter:
            parameter.copy_(host_weight)
        if self._mapped is not None:
            for place in self._indices[parameter]:
                self._mapped.give_back(place)
