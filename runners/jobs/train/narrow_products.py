"""Training whose layers multiply in 8-bit floats, by torchao: forward e4m3, gradients e5m2.

Each operand of a product is rounded as the product begins, with one scale for the whole tensor
that follows its largest value. The weights that learn stay fp32, what is kept for the backward
pass 16 bits; the output layer, and layers whose sides are no multiple of 16, multiply in bf16.
Where the device has no such units, products of the rounded operands run in fp32 instead.

Source: Micikevicius et al. 2022, arXiv:2209.05433; Peng et al. 2023 (FP8-LM), arXiv:2310.18313.
"""

# mypy: disable-error-code="no-untyped-call"
# torchao leaves its modules without types.

import importlib.metadata

import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from transformers import PreTrainedModel

from runners.cuda import FP8_CAPABILITY
from runners.jobs.runtime import BadInputError
from runners.jobs.train.integers import put

SIDE_MULTIPLE = 16  # what the units of GPUs take in at once, in elements


class NarrowLinear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """A linear layer that multiplies in 8-bit floats while it learns, and as plain ones judged."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out_features], in bf16 while it learns."""
        if not self.training:
            return torch.nn.functional.linear(inputs, self.weight, self.bias)
        with torch.autocast(inputs.device.type, enabled=False):
            found: torch.Tensor = super().forward(inputs.to(torch.bfloat16))
        return found


def narrow_products(model: PreTrainedModel, device: torch.device) -> None:
    """Have the model's layers multiply in 8-bit floats while they learn.

    Raises:
        BadInputError: the device is a GPU without units for them, or no layer can.
    """
    _check_device(device)
    config = Float8LinearConfig(emulate=device.type != "cuda", pad_inner_dim=True)
    head, num_changed = model.get_output_embeddings(), 0
    for name, layer in list(model.named_modules()):
        is_plain = type(layer) is torch.nn.Linear and layer is not head
        if is_plain and not (layer.in_features | layer.out_features) % SIDE_MULTIPLE:
            put(model, name, NarrowLinear.from_float(layer, config).train(layer.training))
            num_changed += 1
    if not num_changed:
        msg = (
            f"compute_dtype fp8: {type(model).__name__} has no linear layer whose sides are "
            f"multiples of {SIDE_MULTIPLE}; choose bf16"
        )
        raise BadInputError(msg)


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model with plain linear layers, of the weights that were learnt."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, NarrowLinear):
            plain = torch.nn.Linear(1, 1, bias=False, device="meta")
            plain.in_features, plain.out_features = layer.in_features, layer.out_features
            plain.weight, plain.bias = layer.weight, layer.bias
            put(model, name, plain.train(layer.training))
    return model


def products_note(device: torch.device) -> str:
    """Return in words how the products ran."""
    library = f"torchao {importlib.metadata.version('torchao')}"
    said = f"the layers' products in 8-bit floats ({library}), one scale a tensor"
    if device.type == "cuda":
        return f"{said}; the output layer's in bf16"
    return (
        f"{said}, emulated: this device has no units for them, so that operands are rounded and "
        "multiplied in fp32, which takes longer than bf16; the output layer's in bf16"
    )


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        msg = (
            f"compute_dtype fp8 needs a GPU of compute capability "
            f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer, and {name} has "
            f"{found[0]}.{found[1]}; choose bf16, or another GPU"
        )
        raise BadInputError(msg)
