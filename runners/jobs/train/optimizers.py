"""The optimizers: AdamW and Lion, offloaded, fused into the backward pass, on integers."""

import math
import mmap
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.adamw import adamw

from runners.jobs.memory import tensor_bytes
from runners.jobs.runtime import BadInputError
from runners.jobs.train.quantized import (
    IntegerMatrix,
    IntegerRows,
    integer_matrices,
    quantize_rows,
    quantize_rows_in_parts,
    row_parts,
    trained_tensors,
)
from runners.jobspec.train import Away, Optimizer, TrainSpec

# Base class of optimizers that update one weight after the other.


class PerWeightOptimizer(torch.optim.Optimizer):
    """Updates every weight that has a gradient, one at a time."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's own has overloads
        """Update all weights, and return the closure's result."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_weight(parameter, parameter.grad, group)
        return loss

    def update_weight(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Update a weight with its gradient and its group's settings."""
        raise NotImplementedError


# Lion: sign updates whose only state is one momentum.
#
# Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.


class Lion(PerWeightOptimizer):
    """Every weight moves by the learning rate, in the sign of the interpolated momentum."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], learning_rate: float, betas: tuple[float, float]
    ) -> None:
        """Create the groups; momenta are created in the first step."""
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "weight_decay": 0.0})

    def update_weight(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Update a weight by the sign of the interpolated momentum."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        direction = momentum.lerp(gradient, 1.0 - beta1).sign_()
        parameter.add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1.0 - beta2)


# AdamW with its moments in host memory or in a memory-mapped file.
#
# On a GPU the moments are in host memory, and the update runs on the CPU. On a CPU they are in a
# mapped file, and the pages of each tensor are released after its update; their content is in the
# file.
#
# Source: Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021
# (ZeRO-Infinity), arXiv:2104.07857, section 5.


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


class OffloadedAdamW(PerWeightOptimizer):
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

    def update_weight(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
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


# Optimizers that update a weight as soon as its gradient is computed, and free the gradient.
#
# Only the gradients of one operator are in memory at a time. What needs all gradients at once is
# not possible: norms are clipped per tensor, and a step has one micro-batch. A tied weight's
# gradient is complete before it is used: autograd sums the gradients of its uses.
#
# Source: Lv et al. 2023 (LOMO), arXiv:2306.09782; Lv et al. 2023 (AdaLomo), arXiv:2310.10195,
# algorithm 1.


# mypy: disable-error-code="no-untyped-call"
# torch leaves its hooks untyped.


MAX_TENSOR_NORM = 1.0
SECOND_MOMENT_DECAY = 0.99  # AdaLomo's beta
SMALLEST = 1e-12
SMALLEST_SCALE = 1e-3  # of a weight's root mean square, so that zero weights can move


class FusedUpdate(torch.optim.Optimizer):
    """An optimizer that runs in hooks of the backward pass; ``step`` does nothing.

    The groups' learning rate is read when a gradient arrives: set it before the backward pass.
    ``peak_gradient_bytes`` is the peak of the gradients in memory since it was last set to 0.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
        """Register a hook on every weight."""
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0})
        self.peak_gradient_bytes = 0
        self._squares: torch.Tensor | float = 0.0
        self._trained = [each for group in self.param_groups for each in group["params"]]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._hook(parameter, group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Do nothing: the backward pass has updated every weight."""
        return closure() if closure is not None else None

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradients since the last call, unread."""
        squares, self._squares = self._squares, 0.0
        return torch.as_tensor(squares, dtype=torch.float64).sqrt()

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Update a weight with its gradient."""
        raise NotImplementedError

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Clip a gradient, apply weight decay and update the weight."""
        norm = gradient.norm().double()  # not read: every weight would wait for the device
        self._squares = norm.square() + self._squares
        gradient.mul_((MAX_TENSOR_NORM / (norm + SMALLEST)).clamp(max=1.0))
        # A gradient without a norm moves nothing; the loss is not finite either, and the run ends.
        gradient.masked_fill_(~norm.isfinite(), 0.0)
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        self.update(parameter, gradient, group["lr"])

    def _hook(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        def arrived(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            self._note_held(0)
            with torch.no_grad():
                self.take(parameter, gradient, group)
            parameter.grad = None

        hooked: Any = parameter  # the hook's method is untyped
        hooked.register_post_accumulate_grad_hook(arrived)

    def _note_held(self, extra_bytes: int) -> None:
        """Update the gradient peak; ``extra_bytes`` come on top of ``.grad``."""
        gradient_bytes = sum(
            tensor_bytes(each.grad) for each in self._trained if each.grad is not None
        )
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, gradient_bytes + extra_bytes)


class Lomo(FusedUpdate):
    """SGD with a fused update; it has no state."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Take a gradient step."""
        parameter.add_(gradient, alpha=-rate)


class AdaLomo(FusedUpdate):
    """A fused optimizer with factored second moments: one row and one column per matrix.

    The update's root mean square is clipped to 1 and scaled by that of the weight.
    """

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Take a gradient step with an adaptive rate per weight."""
        state, square = self.state[parameter], gradient.square()
        step = state["step"] = state.get("step", 0) + 1
        decay = SECOND_MOMENT_DECAY if step > 1 else 0.0
        if gradient.ndim > 1:
            flat = square.flatten(1)
            row = _averaged(state, "row", flat.mean(1), decay)
            column = _averaged(state, "column", flat.mean(0), decay)
            second = torch.outer(row, column).div_(row.mean().clamp_min(SMALLEST))
            second = second.view_as(gradient)
        else:
            second = _averaged(state, "square", square, decay).clone()
        change = gradient * second.clamp_min_(SMALLEST).rsqrt_()
        change.div_(_root_mean_square(change).clamp_min(1.0))
        scale = _root_mean_square(parameter).clamp_min(SMALLEST_SCALE)
        parameter.sub_(change.mul_(scale * rate))


def _averaged(state: dict[str, Any], name: str, value: torch.Tensor, decay: float) -> torch.Tensor:
    """Update and return a running mean in fp32."""
    mean: torch.Tensor = state.setdefault(name, torch.zeros_like(value, dtype=torch.float32))
    return mean.mul_(decay).add_(value, alpha=1.0 - decay)


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()


# QFT: Lion with 8-bit integer weights, gradients and momentum, updated in the backward pass.
#
# Source: Li et al. 2023 (QFT), arXiv:2310.07147, section 3; Chen et al. 2023 (Lion),
# arXiv:2302.06675, algorithm 2; Lv et al. 2023 (LOMO), arXiv:2306.09782 (the fused update).


STEPS_APART = 2**32  # between the seeds of two weights
NUM_USES = 3  # random seeds per step and weight
OF_AN_UPDATE, OF_A_GRADIENT, OF_A_SUM = range(NUM_USES)


class Qft(FusedUpdate):
    """Sign updates at the learning rate, with an integer momentum.

    Stochastic rounding is seeded by weight and step, so a resumed run is identical.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        matrices: Iterable[IntegerMatrix],
    ) -> None:
        """Register on the matrices' gradients; their codes are in the groups."""
        self._matrices: Mapping[torch.Tensor, IntegerMatrix] = {
            each.codes: each for each in matrices
        }
        self._betas = betas
        self._waiting: dict[torch.Tensor, IntegerRows] = {}
        super().__init__(groups, learning_rate)
        self._places = {each: index for index, each in enumerate(self._trained)}

    def _hook(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        matrix = self._matrices.get(parameter)
        if matrix is None:
            super()._hook(parameter, group)
            return
        matrix.on_gradient = lambda gradient: self._arrived(matrix, gradient, group)

    def _arrived(
        self, matrix: IntegerMatrix, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Store a layer's gradient as integers; update when all uses of the matrix have one."""
        codes = matrix.codes
        with torch.no_grad():
            partial = self._waiting.pop(codes, None)
            integers = self._integers(codes, gradient, OF_A_GRADIENT)
            del gradient
            if partial is not None:
                summed = partial.values().add_(integers.values())
                integers = self._integers(codes, summed, OF_A_SUM)
            waiting_bytes = sum(each.nbytes for each in self._waiting.values())
            self._note_held(integers.nbytes + waiting_bytes)
            if matrix.count_gradient():
                self._update(codes, integers, group)
            else:
                self._waiting[codes] = integers

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a vector with the gradient that autograd computed."""
        self._update(parameter, self._integers(parameter, gradient, OF_A_GRADIENT), group)

    def _update(
        self, parameter: torch.Tensor, gradients: IntegerRows, group: dict[str, Any]
    ) -> None:
        norm = gradients.norm()
        self._squares += norm * norm
        if not math.isfinite(norm):
            return
        state, (rows, columns) = self.state[parameter], gradients.codes.shape
        step = state["step"] = state.get("step", 0) + 1
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(gradients.codes)
            state["exp_avg_scale"] = torch.zeros_like(gradients.scale)
        momentum = IntegerRows(state["exp_avg"], state["exp_avg_scale"])
        chance = self._generator(parameter, step, OF_AN_UPDATE)
        matrix = self._matrices.get(parameter)
        decay, (towards, remembered) = 1.0 - group["lr"] * group["weight_decay"], self._betas
        for part in row_parts(gradients.codes):
            gradient, old_momentum = gradients.rows(part).values(), momentum.rows(part)
            momentum_values = old_momentum.values()
            change = momentum_values.lerp(gradient, 1.0 - towards).sign_().mul_(-group["lr"])
            if matrix is None:
                block = parameter.view(rows, columns)[part]
                block.mul_(decay).add_(change)
            else:
                stored = matrix.integers.rows(part)
                _write(stored, quantize_rows(stored.values().mul_(decay).add_(change), chance))
            _write(
                old_momentum,
                quantize_rows(momentum_values.lerp_(gradient, 1.0 - remembered), chance),
            )

    def _integers(self, parameter: torch.Tensor, values: torch.Tensor, use: int) -> IntegerRows:
        step = self.state[parameter].get("step", 0) if parameter in self.state else 0
        matrix = values if values.ndim > 1 else values.unsqueeze(0)
        return quantize_rows_in_parts(matrix.flatten(1), self._generator(parameter, step, use))

    def _generator(self, parameter: torch.Tensor, step: int, use: int) -> torch.Generator:
        """Return the random generator of one rounding of one weight in one step."""
        seed = (self._places[parameter] * STEPS_APART + step) * NUM_USES + use
        return torch.Generator(parameter.device).manual_seed(seed)


def _write(stored: IntegerRows, new: IntegerRows) -> None:
    stored.codes.copy_(new.codes)
    stored.scale.copy_(new.scale)


BETAS = (0.9, 0.95)
LION_BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
Groups = list[dict[str, Any]]


def build_optimizer(
    model: torch.nn.Module,
    learning_rate: float,
    name: Optimizer = "adamw",
    states: tuple[Away, Path | None] = ("none", None),
) -> torch.optim.Optimizer:
    """Return an optimizer with weight decay for matrices only; frozen weights are left out.

    ``states`` are the location of its moments, and the folder of their file.

    Raises:
        BadInputError: the host's device or libraries do not support it.
    """
    trained = list(trained_tensors(model).values())
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    where, folder = states
    if where != "none":
        _check_offload(where, trained)
        return OffloadedAdamW(groups, learning_rate, BETAS, folder if where == "disk" else None)
    nonempty = [each for each in groups if each["params"]]
    if name == "qft":
        return Qft(nonempty, learning_rate, LION_BETAS, integer_matrices(model).values())
    return BUILDERS[name](nonempty, learning_rate)


def optimizer_of(spec: TrainSpec, model: torch.nn.Module, folder: Path) -> torch.optim.Optimizer:
    """Return the optimizer that a training states; moments on the disk lie in ``folder``.

    Raises:
        BadInputError: the host's device or libraries do not support it.
    """
    states = (spec.optimizer_offload, folder)
    return build_optimizer(model, spec.learning_rate, spec.optimizer, states)


def _check_offload(where: Away, trained: list[torch.nn.Parameter]) -> None:
    if where == "cpu" and all(each.device.type == "cpu" for each in trained):
        msg = (
            "optimizer_offload cpu: this host computes on its CPU, so the optimiser's states are "
            "in its memory already; choose disk, or an optimizer with smaller states"
        )
        raise BadInputError(msg)


def _eight_bit(name: str, **options: Any) -> Callable[[Groups, float], torch.optim.Optimizer]:
    """Return a builder of a bitsandbytes optimizer; it keeps small tensors in 32 bits.

    Source: Dettmers et al. 2021, arXiv:2110.02861.
    """

    def build(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
        try:
            from bitsandbytes import optim
        except ImportError as error:
            msg = "8-bit states need bitsandbytes on this host: pip install 'slipway[gpu]'"
            raise BadInputError(msg) from error
        optimizer: torch.optim.Optimizer = getattr(optim, name)(
            groups, lr=learning_rate, **options
        )
        return optimizer

    return build


def _adamw(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


def _adafactor(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=learning_rate)


def _sgd(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=learning_rate)


def _lion(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    return Lion(groups, learning_rate, LION_BETAS)


BUILDERS: dict[Optimizer, Callable[[Groups, float], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _eight_bit("AdamW8bit", betas=BETAS),
    "adafactor": _adafactor,
    "lion": _lion,
    "lion_8bit": _eight_bit("Lion8bit", betas=LION_BETAS),
    "sgd": _sgd,
    "lomo": Lomo,
    "adalomo": AdaLomo,
}
