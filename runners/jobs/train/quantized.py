"""Quantised training: trainable scales over fixed codes, or quantisation-aware weights.

AlphaTuning keeps each linear layer's weights as integer codes, two per byte at 4 bits, and trains
one scale per group. Quantisation-aware training keeps full-width weights and rounds them for each
product; gradients pass straight through the rounding. Both end in plain weights that are exactly
on the grid. The embedding and the output layer are not quantised.

Source: Kwon et al. 2022 (AlphaTuning), arXiv:2210.03858, section 3; Jacob et al. 2017,
arXiv:1712.05877, section 3; Bengio et al. 2013, arXiv:1308.3432 (straight-through).
"""

# mypy: disable-error-code="no-untyped-call"
# torch leaves its autograd functions untyped.

import torch
from transformers import PreTrainedModel

from runners.adapter_options import QuantizedTraining
from runners.jobs.runtime import BadInputError
from runners.jobs.train.autograd import Context
from runners.jobs.train.integers import made_wide, put

SMALLEST_SCALE = 1e-8
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
        put(model, name, kind(layer, options))


def made_plain(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with plain linear layers that have the effective weights."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, CodedLinear | RoundedLinear):
            plain = torch.nn.Linear(1, 1, bias=layer.bias is not None)
            weight = layer.values().detach()
            plain.out_features, plain.in_features = weight.shape
            plain.weight = torch.nn.Parameter(weight)
            plain.register_parameter("bias", layer.bias)
            put(model, name, plain)
    made_wide(model)
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
        """Return the dequantised weights, [outputs, inputs]."""
        return _times(_unpacked(self.codes, self.bits), self.scale)


class RoundedLinear(torch.nn.Linear):
    """A linear layer that rounds its weights in each product."""

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
        """Return the rounded weights, [outputs, inputs]."""
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
    scale = (grouped.abs().amax(-1) / highest).clamp_min(SMALLEST_SCALE)
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
