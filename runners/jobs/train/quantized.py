"""Training in FP8 and INT8, and QLoRA's frozen weights."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from runners.jobs.runtime import BadInputError
from runners.jobspec.base import QuantizedTraining

# ---------------------------------------------------------------------------
# The type of the context that torch passes to an autograd function.
# ---------------------------------------------------------------------------


class Context(Protocol):
    """The context of an autograd function's forward and backward; torch exports no class.

    Tensors go through ``save_for_backward``, so that torch detects in-place changes; everything
    else is set as an attribute of any name.
    """

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Save tensors; the backward pass reads them from ``saved_tensors``."""

    def __setattr__(self, name: str, value: object) -> None: ...

    def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - any attribute


# ---------------------------------------------------------------------------
# Quantised training: trainable scales, integer matrices, or quantisation-aware weights.
# ---------------------------------------------------------------------------


# Models whose matrices are 8-bit integers during training, with one scale per row.
#
# A matrix is dequantised for one product at a time. Its gradient is rounded to 8 bits in the
# backward pass and passed to the optimizer; autograd keeps none. Rounding is stochastic, so that
# updates smaller than the grid's step count on average. Norms and biases, which are vectors, keep
# 32 bits.
#
# Source: Li et al. 2023 (QFT), arXiv:2310.07147, section 3; Gupta et al. 2015, arXiv:1502.02551
# (stochastic rounding).


# mypy: disable-error-code="no-untyped-call"
# torch leaves its autograd functions untyped.


HIGHEST_CODE = 127
SMALLEST_SCALE = 1e-12
ELEMENTS_AT_ONCE = 2**22  # dequantised at a time: 16 MiB of fp32


class IntegerRows(NamedTuple):
    """Rows of 8-bit codes [rows, columns], and the scale of each row [rows, 1]."""

    codes: torch.Tensor
    scale: torch.Tensor

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantised numbers, [rows, columns], as ``dtype``."""
        return self.codes.to(dtype) * self.scale.to(dtype)

    def rows(self, part: slice) -> "IntegerRows":
        """Return a view of some of the rows."""
        return IntegerRows(self.codes[part], self.scale[part])

    def norm(self) -> float:
        """Return the L2 norm of all numbers."""
        parts = (self.rows(part).values().square().sum() for part in row_parts(self.codes))
        return float(sum(parts, torch.zeros((), device=self.codes.device)).sqrt())

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes


def quantize_rows(values: torch.Tensor, generator: torch.Generator | None = None) -> IntegerRows:
    """Return a matrix [rows, columns] as 8-bit codes with one scale per row.

    Values are rounded to the nearest code; with a generator stochastically, which is unbiased.
    """
    wide = values.float()
    scale = wide.abs().amax(-1, keepdim=True).div_(HIGHEST_CODE).clamp_min_(SMALLEST_SCALE)
    steps = wide / scale
    if generator is None:
        steps.round_()
    else:
        noise = torch.rand(steps.shape, generator=generator, device=steps.device)
        steps.add_(noise).floor_()
    return IntegerRows(steps.clamp_(-HIGHEST_CODE, HIGHEST_CODE).to(torch.int8), scale)


def quantize_rows_in_parts(
    values: torch.Tensor, generator: torch.Generator | None = None
) -> IntegerRows:
    """Return the same as ``quantize_rows``, for matrices too large to convert at once."""
    parts = [quantize_rows(values[part], generator) for part in row_parts(values)]
    return IntegerRows(*(torch.cat(each) for each in zip(*parts, strict=True)))


def row_parts(matrix: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows with about ``ELEMENTS_AT_ONCE`` numbers each."""
    each = max(1, ELEMENTS_AT_ONCE // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), each):
        yield slice(start, start + each)


class IntegerMatrix(torch.nn.Module):
    """A matrix as integers, and the callback for its gradient.

    ``num_places``: how many layers use it; a tied matrix's gradient is complete when all have
    given theirs. Integer parameters have no gradient in torch, so they count as frozen.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Round a matrix [rows, columns] to the nearest integers."""
        super().__init__()
        codes, scale = quantize_rows_in_parts(weight.detach())
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        self.num_places = 1
        self.on_gradient: Callable[[torch.Tensor], None] | None = None
        self._num_given = 0

    @property
    def integers(self) -> IntegerRows:
        """Return codes and scales."""
        return IntegerRows(self.codes.data, self.scale.data)

    def take(self, gradient: torch.Tensor) -> None:
        """Pass on the gradient of one layer's backward pass."""
        if self.on_gradient is not None:
            self.on_gradient(gradient)

    def count_gradient(self) -> bool:
        """Count the gradient of one use; return whether all ``num_places`` uses gave theirs."""
        self._num_given = (self._num_given + 1) % self.num_places
        return self._num_given == 0


class IntegerLinear(torch.nn.Module):
    """A linear layer with an integer matrix."""

    bias: torch.nn.Parameter | None

    def __init__(self, layer: torch.nn.Linear, matrix: IntegerMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs."""
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        output: torch.Tensor = _Product.apply(inputs, self.matrix)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class IntegerEmbedding(torch.nn.Module):
    """An embedding with integer rows; only the tokens' rows are dequantised."""

    def __init__(self, matrix: IntegerMatrix) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' vectors, in the autocast dtype."""
        anchor = torch.empty(0, requires_grad=True)  # token ids alone have no backward pass
        output: torch.Tensor = _Lookup.apply(ids, anchor, self.matrix)
        kind = ids.device.type
        dtype = torch.get_autocast_dtype(kind)
        return output.to(dtype) if torch.is_autocast_enabled(kind) else output


def convert_to_integer_layers(model: PreTrainedModel) -> None:
    """Replace the matrices of a model's linear layers and embedding by integers."""
    matrices: dict[int, IntegerMatrix] = {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            matrix = matrices.get(id(layer.weight))
            if matrix is None:
                matrix = matrices[id(layer.weight)] = IntegerMatrix(layer.weight)
            else:
                matrix.num_places += 1
            if isinstance(layer, torch.nn.Linear):
                replace_layer(model, name, IntegerLinear(layer, matrix))
            else:
                replace_layer(model, name, IntegerEmbedding(matrix))
    model.float()


def with_dequantized_layers(model: PreTrainedModel) -> None:
    """Replace integer layers by plain ones with the dequantised weights."""
    wide: dict[int, torch.nn.Parameter] = {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, IntegerLinear | IntegerEmbedding):
            matrix = layer.matrix
            weight = wide.setdefault(
                id(matrix), torch.nn.Parameter(matrix.integers.values(), requires_grad=True)
            )
            replace_layer(model, name, _plain_layer(layer, weight))


def integer_matrices(model: torch.nn.Module) -> dict[str, IntegerMatrix]:
    """Return a model's integer matrices by name, each once."""
    modules = model.named_modules()
    return {name: each for name, each in modules if isinstance(each, IntegerMatrix)}


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trained tensors by name: parameters with a gradient, and codes."""
    codes = {f"{name}.codes": each.codes for name, each in integer_matrices(model).items()}
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return named | codes


def replace_layer(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    """Replace one of a model's layers."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _plain_layer(
    layer: IntegerLinear | IntegerEmbedding, weight: torch.nn.Parameter
) -> torch.nn.Module:
    if isinstance(layer, IntegerEmbedding):
        embedding = torch.nn.Embedding(1, 1)
        embedding.num_embeddings, embedding.embedding_dim = weight.shape
        embedding.weight = weight
        return embedding
    plain = torch.nn.Linear(1, 1, bias=False)
    plain.in_features, plain.out_features = layer.in_features, layer.out_features
    plain.weight = weight
    plain.register_parameter("bias", layer.bias)
    return plain


class _Product(torch.autograd.Function):
    """A product that saves only its input; the backward pass dequantises the matrix again."""

    @staticmethod
    def forward(ctx: Context, inputs: torch.Tensor, matrix: IntegerMatrix) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.matrix = matrix
        return inputs @ matrix.integers.values(inputs.dtype).T

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        matrix: IntegerMatrix = ctx.matrix
        # computed before ``take`` changes the matrix
        input_gradient = gradient @ matrix.integers.values(gradient.dtype)
        matrix.take(gradient.flatten(0, -2).T @ inputs.flatten(0, -2))
        return input_gradient, None


class _Lookup(torch.autograd.Function):
    """A row lookup in an integer matrix."""

    @staticmethod
    def forward(
        ctx: Context,
        ids: torch.Tensor,
        _anchor: torch.Tensor,
        matrix: IntegerMatrix,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.matrix = matrix
        codes, scale = matrix.integers
        return codes[ids].float() * scale[ids]

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        matrix: IntegerMatrix = ctx.matrix
        whole = gradient.new_zeros(matrix.codes.shape)
        matrix.take(whole.index_add_(0, ids.flatten(), gradient.flatten(0, -2)))
        return None, None, None


# mypy: disable-error-code="no-untyped-call"
# torch leaves its autograd functions untyped.


SMALLEST_GROUP_SCALE = 1e-8
NIBBLE_BITS = 4  # two codes per byte


def quantize_for_training(model: PreTrainedModel, options: QuantizedTraining) -> None:
    """Replace the model's linear layers by those of the method.

    Raises:
        BadInputError: a layer's rows are not a multiple of the group size.
    """
    kind = CodedLinear if options.method == "alphatuning" else RoundedLinear
    if options.method == "alphatuning":
        model.requires_grad_(requires_grad=False)
    for name, layer in _linear_layers(model):
        if layer.in_features % options.group_size:
            msg = (
                f"quantized.group_size {options.group_size}: {name} has rows of "
                f"{layer.in_features} weights, which hold no whole number of groups; choose a "
                "divisor, such as 32 or 64"
            )
            raise BadInputError(msg)
        replace_layer(model, name, kind(layer, options))


def with_effective_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with plain linear layers that have the effective weights."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, CodedLinear | RoundedLinear):
            plain = torch.nn.Linear(1, 1, bias=layer.bias is not None)
            weight = layer.values().detach()
            plain.out_features, plain.in_features = weight.shape
            plain.weight = torch.nn.Parameter(weight)
            plain.register_parameter("bias", layer.bias)
            replace_layer(model, name, plain)
    with_dequantized_layers(model)
    return model


class CodedLinear(torch.nn.Module):
    """A linear layer of fixed codes and trained scales [outputs, groups]."""

    codes: torch.Tensor
    bias: torch.nn.Parameter | None

    def __init__(self, layer: torch.nn.Linear, options: QuantizedTraining) -> None:
        """Round the layer's weights to the nearest codes."""
        super().__init__()
        codes, scale = _nearest(layer.weight.detach(), options)
        self.bits = options.bits
        self.register_parameter("bias", layer.bias)
        self.register_buffer("codes", _packed(codes) if self.bits == NIBBLE_BITS else codes)
        self.scale = torch.nn.Parameter(scale)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs; weights are dequantised per product."""
        dtype = torch.get_autocast_dtype(inputs.device.type)
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(dtype)
        output: torch.Tensor = _CodedProduct.apply(inputs, self.scale, self.codes, self.bits)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def values(self) -> torch.Tensor:
        """Return the dequantised weights, [outputs, inputs], in the dtype of the scales."""
        return _times(_unpacked(self.codes, self.bits), self.scale)


class RoundedLinear(torch.nn.Linear):
    """Fake-quantizes its weights in ``forward`` (straight-through estimator)."""

    def __init__(self, layer: torch.nn.Linear, options: QuantizedTraining) -> None:
        """Use the layer's own weights."""
        super().__init__(1, 1, bias=False)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._options = options

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs; gradients pass straight through the rounding."""
        rounded = self.weight + (self.values() - self.weight).detach()
        return torch.nn.functional.linear(inputs, rounded, self.bias)

    def values(self) -> torch.Tensor:
        """Return the weights rounded to the nearest codes and dequantised, [outputs, inputs]."""
        codes, scale = _nearest(self.weight.detach(), self._options)
        return _times(codes, scale)


class _CodedProduct(torch.autograd.Function):
    """A product that saves its input and the codes; weights are dequantised again when needed."""

    @staticmethod
    def forward(
        ctx: Context,
        inputs: torch.Tensor,
        scale: torch.Tensor,
        codes: torch.Tensor,
        bits: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, scale, codes)
        ctx.bits = bits
        return inputs @ _times(_unpacked(codes, bits), scale).to(inputs.dtype).T

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, scale, codes = ctx.saved_tensors
        plain = _unpacked(codes, ctx.bits)
        input_gradient = gradient @ _times(plain, scale).to(gradient.dtype)
        weight_gradient = gradient.flatten(0, -2).T.float() @ inputs.flatten(0, -2).float()
        scale_gradient = (weight_gradient * plain).unflatten(1, (scale.shape[1], -1)).sum(-1)
        return input_gradient, scale_gradient.to(scale.dtype), None, None


def _nearest(
    weight: torch.Tensor, options: QuantizedTraining
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return symmetric codes [outputs, inputs] in int8 and scales [outputs, groups]."""
    highest = 2 ** (options.bits - 1) - 1
    grouped = weight.float().unflatten(1, (-1, options.group_size))
    scale = (grouped.abs().amax(-1) / highest).clamp_min(SMALLEST_GROUP_SCALE)
    codes = torch.round(grouped / scale.unsqueeze(-1)).clamp_(-highest, highest)
    return codes.flatten(1).to(torch.int8), scale


def _times(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    grouped: torch.Tensor = codes.unflatten(1, (scale.shape[1], -1))
    return (grouped * scale.unsqueeze(-1)).flatten(1)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack two 4-bit codes into each byte."""
    shifted = (codes + 8).to(torch.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits != NIBBLE_BITS:  # one code per byte
        return codes
    halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    return halves.to(torch.int8).sub_(8)


def _linear_layers(model: PreTrainedModel) -> list[tuple[str, torch.nn.Linear]]:
    head = model.get_output_embeddings()
    return [
        (name, each)
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear) and each is not head
    ]
