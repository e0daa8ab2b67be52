"""Methods that train a layer to match the float layer: norm tweaking and AutoRound."""

from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import NamedTuple

import torch

from runners.jobs.compress.layer_methods import gptq_of, grid_of
from runners.jobs.compress.quantization import (
    TINY,
    LayerStatistics,
    Linears,
    QuantizationGrid,
    QuantizedMatrix,
)
from runners.jobs.loading import SEQUENCES_AT_ONCE, Extra, Hidden
from runners.jobspec import CompressSpec

Values = Mapping[str, torch.Tensor]
Forward = Callable[[Values, Hidden], Hidden]


class Passage(NamedTuple):
    """Inputs of a layer, its other call arguments, and the float layer's outputs."""

    inputs: Hidden
    extra: Extra
    float_outputs: Hidden

    def batches(self) -> list[tuple[Hidden, Hidden]]:
        """Return (inputs, float outputs) in batches of sequences."""
        parts = (
            torch.split(each, SEQUENCES_AT_ONCE) for each in (self.inputs, self.float_outputs)
        )
        return list(zip(*parts, strict=True))


# Norm tweaking: fit the norms of a quantised layer to the float layer's outputs.
#
# A few passes of Adam over the calibration text match the mean and variance of each output channel
# to those of the float layer on the same inputs. Only norms are trained. Source: Li et al. 2023,
# arXiv:2309.02784, algorithm 1 and equation 3.


def tweak_norms(
    layer: torch.nn.Module,
    quantised: Values,
    passage: Passage,
    *,
    passes: int,
    learning_rate: float,
) -> dict[str, float]:
    """Train the layer's norms, keep the pass of least loss; return the loss before and after.

    ``quantised`` are weights by name in place of the layer's own, which stay as they are. If no
    pass improves the loss, the norms are unchanged.
    """

    def forward(norms: Values, inputs: Hidden) -> Hidden:
        return _forward(layer, {**quantised, **norms}, inputs, passage.extra)

    dtypes = {name: each.dtype for name, each in norm_weights(layer).items()}
    values = {
        name: each.detach().float().clone().requires_grad_()
        for name, each in norm_weights(layer).items()
    }
    optimiser = torch.optim.Adam(values.values(), lr=learning_rate)
    best = _stored(values, dtypes)
    before = least = _loss(forward, best, passage)
    for _ in range(passes):
        for batch in passage.batches():
            _step(forward, values, dtypes, batch, optimiser)
        candidate = _stored(values, dtypes)
        loss = _loss(forward, candidate, passage)
        if loss < least:
            best, least = candidate, loss
    layer.load_state_dict(best, strict=False)
    return {"norm_loss_before": before, "norm_loss": least}


def norm_weights(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the layer's norm parameters by name."""
    return {
        f"{name}.{own}": parameter
        for name, module in layer.named_modules()
        if type(module).__name__.endswith("Norm")
        for own, parameter in module.named_parameters(recurse=False)
    }


def channel_loss(outputs: Hidden, targets: Hidden) -> torch.Tensor:
    """Return the mean absolute difference of the channels' means and variances over all tokens."""
    outputs, targets = (each.float().flatten(0, -2) for each in (outputs, targets))
    means = (outputs.mean(dim=0) - targets.mean(dim=0)).abs()
    variances = (outputs.var(dim=0) - targets.var(dim=0)).abs()
    return (means + variances).mean()


def _step(
    forward: Forward,
    values: Values,
    dtypes: Mapping[str, torch.dtype],
    batch: tuple[Hidden, Hidden],
    optimiser: torch.optim.Optimizer,
) -> None:
    inputs, targets = batch
    with torch.enable_grad():
        cast = {name: each.to(dtypes[name]) for name, each in values.items()}
        loss = channel_loss(forward(cast, inputs), targets)
        gradients = torch.autograd.grad(loss, list(values.values()))
    for value, gradient in zip(values.values(), gradients, strict=True):
        value.grad = gradient
    optimiser.step()


@torch.no_grad()
def _loss(forward: Forward, values: Values, passage: Passage) -> float:
    losses = [
        channel_loss(forward(values, inputs), targets) for inputs, targets in passage.batches()
    ]
    return float(torch.stack(losses).mean())


def _forward(layer: torch.nn.Module, values: Values, inputs: Hidden, extra: Extra) -> Hidden:
    result = torch.func.functional_call(layer, dict(values), (inputs,), dict(extra))
    outputs: Hidden = result[0] if isinstance(result, tuple) else result
    return outputs


def _stored(values: Values, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    return {name: each.detach().to(dtypes[name]).clone() for name, each in values.items()}


# AutoRound: learn where each weight rounds to, and how far each group's scale shrinks.
#
# Every weight has an offset of at most half a code, every group a share of its largest weight.
# Steps along the sign of the gradient reduce the squared error of the layer's outputs; rounding
# passes gradients through unchanged. Here the float layer reads the compressed layers' outputs, as
# the rounded one does. Source: Cheng et al. 2023, arXiv:2309.05516, algorithm 1.


MOST_OFFSET, LEAST_SHARE = 0.5, 0.5
CHECKS = 4  # of the loss over the whole text while tuning


class Rounding(NamedTuple):
    """What is learnt of one matrix: offsets [out, in] and shares of scales [out, groups]."""

    weight: torch.Tensor  # fp32
    grid: QuantizationGrid
    dtype: torch.dtype
    offsets: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, grid: QuantizationGrid) -> "Rounding":
        """Return the rounding of a matrix to its nearest codes."""
        groups = -(-weight.shape[1] // grid.group_size)
        return cls(
            weight.float(),
            grid,
            weight.dtype,
            torch.zeros_like(weight, dtype=torch.float32).requires_grad_(),
            torch.ones(len(weight), groups, device=weight.device).requires_grad_(),
        )

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is trained."""
        return self.offsets, self.shares

    def copy(self) -> "Rounding":
        """Return a copy that later steps do not change."""
        offsets, shares = (each.detach().clone() for each in self.parameters)
        return self._replace(offsets=offsets, shares=shares)

    def scales(self) -> torch.Tensor:
        """Return the scales [out, groups] as they are stored."""
        grid, (rows, columns) = self.grid, self.weight.shape
        padded = torch.nn.functional.pad(self.weight, (0, -columns % grid.group_size))
        largest = padded.view(rows, -1, grid.group_size).abs().amax(dim=2)
        scales = largest * self.shares / ((grid.highest - grid.lowest) / 2)
        return scales.clamp(min=TINY).to(self.dtype)

    def rounded(self) -> torch.Tensor:
        """Return the dequantised matrix in its dtype; gradients pass through the rounding."""
        spread = self._spread(self.scales())
        exact = self.weight / spread.float() + self.offsets
        codes = exact + (exact.round() - exact).detach()
        return codes.clamp(self.grid.lowest, self.grid.highest).to(self.dtype) * spread

    @torch.no_grad()
    def matrix(self) -> QuantizedMatrix:
        """Return the codes and scales."""
        scales = self.scales()
        exact = self.weight / self._spread(scales).float() + self.offsets
        codes = exact.round().clamp(self.grid.lowest, self.grid.highest)
        return QuantizedMatrix(codes.to(torch.int8), scales, self.grid)

    def _spread(self, scales: torch.Tensor) -> torch.Tensor:
        columns = self.weight.shape[1]
        return scales.repeat_interleave(self.grid.group_size, dim=1)[:, :columns]


def tune_rounding(
    layer: torch.nn.Module,
    linears: Mapping[str, torch.nn.Linear],
    passage: Passage,
    spec: CompressSpec,
) -> tuple[dict[str, QuantizedMatrix], dict[str, float]]:
    """Return the codes of a layer's matrices, and the mean squared error before and after.

    The layer is unchanged. Of the roundings at ``CHECKS`` times, the one of least error over the
    whole text is returned: nearest codes if none is better.
    """
    grid = grid_of(spec)
    current = {name: Rounding.of(each.weight.data, grid) for name, each in linears.items()}
    best = {name: each.copy() for name, each in current.items()}
    before = least = _rounding_loss(layer, current, passage)
    steps, every = spec.rounding_steps, max(1, spec.rounding_steps // CHECKS)
    for step, batch in enumerate(islice(cycle(passage.batches()), steps), 1):
        _sign_step(layer, current, (*batch, passage.extra), (1 - (step - 1) / steps) / steps)
        if step % every and step != steps:
            continue
        loss = _rounding_loss(layer, current, passage)
        if loss < least:
            least, best = loss, {name: each.copy() for name, each in current.items()}
    matrices = {name: each.matrix() for name, each in best.items()}
    return matrices, {"rounding_loss_before": before, "rounding_loss": least}


def _sign_step(
    layer: torch.nn.Module,
    current: Mapping[str, Rounding],
    batch: tuple[Hidden, Hidden, Extra],
    learning_rate: float,
) -> None:
    inputs, targets, extra = batch
    trained = [each for one in current.values() for each in one.parameters]
    with torch.enable_grad():
        outputs = _forward(layer, _weights(current), inputs, extra)
        loss = torch.nn.functional.mse_loss(outputs.float(), targets.float())
        gradients = torch.autograd.grad(loss, trained)
    with torch.no_grad():
        for each, gradient in zip(trained, gradients, strict=True):
            each.sub_(learning_rate * gradient.sign())
        for one in current.values():
            one.offsets.clamp_(-MOST_OFFSET, MOST_OFFSET)
            one.shares.clamp_(LEAST_SHARE, 1.0)


@torch.no_grad()
def _rounding_loss(
    layer: torch.nn.Module, current: Mapping[str, Rounding], passage: Passage
) -> float:
    weights = _weights(current)
    squares = [
        (_forward(layer, weights, inputs, passage.extra).float() - targets.float()).square()
        for inputs, targets in passage.batches()
    ]
    return float(torch.cat(squares).mean())


def _weights(current: Mapping[str, Rounding]) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": each.rounded() for name, each in current.items()}


# The methods by name.


Matrices = dict[str, QuantizedMatrix]
Tune = Callable[
    [torch.nn.Module, Linears, LayerStatistics, Passage, CompressSpec],
    tuple[Matrices, dict[str, float]],
]


def _norm_tweaking(
    layer: torch.nn.Module,
    linears: Linears,
    statistics: LayerStatistics,
    passage: Passage,
    spec: CompressSpec,
) -> tuple[Matrices, dict[str, float]]:
    matrices = {
        name: gptq_of(each.weight.data, statistics[name], spec) for name, each in linears.items()
    }
    figures = tweak_norms(
        layer,
        {
            f"{name}.weight": each.weight().to(linears[name].weight.dtype)
            for name, each in matrices.items()
        },
        passage,
        passes=spec.tweak_passes,
        learning_rate=spec.tweak_learning_rate,
    )
    return matrices, figures


def _autoround(
    layer: torch.nn.Module,
    linears: Linears,
    _statistics: LayerStatistics,
    passage: Passage,
    spec: CompressSpec,
) -> tuple[Matrices, dict[str, float]]:
    return tune_rounding(layer, linears, passage, spec)


# A row leaves the linear layers as they are, and returns their codes and figures of the training.
TUNED_METHODS: Mapping[str, Tune] = {
    "norm_tweaking": _norm_tweaking,
    "autoround": _autoround,
}
