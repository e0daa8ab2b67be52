"""Linear layers with stored weights of 16, 8 and 4 bits, as jobs run them.

int8 is torchao's and nf4 is bitsandbytes', as in ``runners.jobs.loading``; int4 is torch's own
tinygemm kernel (``aten::_weight_int4pack_mm``), which needs no further library.
"""

# mypy: disable-error-code="no-untyped-call"
# bitsandbytes has no types.

from typing import Literal

import torch
from torch.nn import functional

WeightKind = Literal["bf16", "int8", "int4", "nf4"]
INT4_GROUP = 128
INT4_LEVELS = 15  # codes 0 to 15
INT4_MIDDLE = 8  # the kernel computes (code - 8) * scale + zero
INNER_K_TILES = 8
NF4_BLOCK = 64


class Int4Linear(torch.nn.Module):
    """A matrix [rows, columns] of 4-bit codes with a bf16 scale and zero point per group.

    Rows must be a multiple of 16 and columns of 128.
    """

    def __init__(self, weight: torch.Tensor, group_size: int = INT4_GROUP) -> None:
        super().__init__()
        self.group_size = group_size
        self.shape = weight.shape
        codes, scales_and_zeros = _codes(weight.float(), group_size)
        self.is_on_cpu = weight.device.type == "cpu"
        if self.is_on_cpu:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, INNER_K_TILES)  # noqa: SLF001 - no public name
        else:
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_K_TILES)  # noqa: SLF001 - no public name
        self.register_buffer("packed", packed)
        self.register_buffer("scales_and_zeros", scales_and_zeros)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product of bf16 inputs [..., columns] with the matrix."""
        aten = torch.ops.aten
        multiply = aten._weight_int4pack_mm_for_cpu if self.is_on_cpu else aten._weight_int4pack_mm  # noqa: SLF001 - no public name
        flat = inputs.reshape(-1, inputs.shape[-1])
        product = multiply(flat, self.packed, self.group_size, self.scales_and_zeros)
        result: torch.Tensor = product.reshape(*inputs.shape[:-1], self.shape[0])
        return result


def dequantised_int4(weight: torch.Tensor, group_size: int = INT4_GROUP) -> torch.Tensor:
    """Return in float64 the matrix that ``Int4Linear`` multiplies with."""
    codes, scales_and_zeros = _codes(weight.float(), group_size)
    scales, zeros = scales_and_zeros.double().permute(1, 0, 2).unbind(-1)  # [rows, groups]
    grouped = (codes.double() - INT4_MIDDLE).reshape(len(codes), -1, group_size)
    return (grouped * scales[..., None] + zeros[..., None]).reshape(codes.shape)


def _codes(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 codes [rows, columns], and bf16 scales and zeros [groups, rows, 2]."""
    grouped = weight.reshape(len(weight), -1, group_size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / INT4_LEVELS).clamp(min=1e-6).to(torch.bfloat16).float()
    zeros = (low + scales * INT4_MIDDLE).to(torch.bfloat16).float()
    codes = ((grouped - zeros[..., None]) / scales[..., None] + INT4_MIDDLE).round()
    codes = codes.clamp(0, INT4_LEVELS).to(torch.int32).reshape(weight.shape)
    pairs = torch.stack([scales, zeros], dim=-1).permute(1, 0, 2).contiguous()
    return codes, pairs.to(torch.bfloat16)


def linear_with(kind: WeightKind, weight: torch.Tensor) -> torch.nn.Module:
    """Return a linear layer with the weight [rows, columns] stored as ``kind``.

    Raises:
        ImportError: the library of ``kind`` is not installed.
    """
    if kind == "int4":
        return Int4Linear(weight)
    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=False, device=weight.device, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(layer, Int8WeightOnlyConfig())
    elif kind == "nf4":
        return nf4_linear(layer)
    return layer


def nf4_linear(layer: torch.nn.Linear) -> torch.nn.Module:
    """Return bitsandbytes' layer with the weights in nf4, packed on their device."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    packed: torch.nn.Module = Linear4bit(
        layer.in_features, layer.out_features, bias=False,
        compute_dtype=torch.bfloat16, quant_type="nf4",
    )  # fmt: skip
    packed.weight = Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
    return packed.to(layer.weight.device)


def stored_bytes(layer: torch.nn.Module) -> int:
    """Return the bytes that one product reads of the layer's weights, scales included."""
    if isinstance(layer, Int4Linear):
        return sum(each.numel() * each.element_size() for each in layer.buffers())
    (weight,) = layer.parameters()
    rows, columns = getattr(layer, "out_features", 0), getattr(layer, "in_features", 0)
    if type(layer).__name__ == "Linear4bit":
        return rows * columns // 2 + rows * columns // NF4_BLOCK * 4
    if weight.dtype == torch.bfloat16 and type(weight.data) is torch.Tensor:
        return rows * columns * 2
    return rows * columns + rows * 2


def product_with(layer: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the layer's output without recording gradients."""
    with torch.inference_mode():
        output: torch.Tensor = layer(inputs)
        return output


def exact_product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return in float64 on the CPU the product that a layer should compute."""
    return functional.linear(inputs.double().cpu(), weight.double().cpu())
