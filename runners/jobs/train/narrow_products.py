"""FP8 training with torchao: e4m3 in the forward pass, e5m2 gradients.

Each operand of a product is quantised with one dynamic scale per tensor, given by its largest
value. The master weights stay fp32, saved activations 16 bits; the output layer, and layers whose
sizes are no multiple of 16, multiply in bf16. Devices without FP8 units multiply the quantised
operands in fp32.

Source: Micikevicius et al. 2022, arXiv:2209.05433; Peng et al. 2023 (FP8-LM), arXiv:2310.18313.
"""

# mypy: disable-error-code="no-untyped-call"
# torchao leaves its modules untyped.

import importlib.metadata

import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from transformers import PreTrainedModel

from runners.cuda import FP8_CAPABILITY
from runners.jobs.runtime import BadInputError
from runners.jobs.train.integers import put

SIDE_MULTIPLE = 16  # the GPU units work on multiples of this, in elements


class NarrowLinear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """A linear layer that multiplies in FP8 while training, and plainly in evaluation mode."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out_features], in bf16 while training."""
        if not self.training:
            return torch.nn.functional.linear(inputs, self.weight, self.bias)
        with torch.autocast(inputs.device.type, enabled=False):
            output: torch.Tensor = super().forward(inputs.to(torch.bfloat16))
        return output


def narrow_products(model: PreTrainedModel, device: torch.device) -> None:
    """Replace the model's linear layers by FP8 ones.

    Raises:
        BadInputError: the GPU has no FP8 units, or no layer qualifies.
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
    """Return the model with plain linear layers that have the trained weights."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, NarrowLinear):
            plain = torch.nn.Linear(1, 1, bias=False, device="meta")
            plain.in_features, plain.out_features = layer.in_features, layer.out_features
            plain.weight, plain.bias = layer.weight, layer.bias
            put(model, name, plain.train(layer.training))
    return model


def products_note(device: torch.device) -> str:
    """Return a note on how the products were computed."""
    library = f"torchao {importlib.metadata.version('torchao')}"
    text = f"the layers' products in 8-bit floats ({library}), one scale a tensor"
    if device.type == "cuda":
        return f"{text}; the output layer's in bf16"
    return (
        f"{text}, emulated: this device has no units for them, so that operands are rounded and "
        "multiplied in fp32, which takes longer than bf16; the output layer's in bf16"
    )


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        msg = (
            f"compute_dtype fp8 needs a GPU of compute capability "
            f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer, and {name} has "
            f"{capability[0]}.{capability[1]}; choose bf16, or another GPU"
        )
        raise BadInputError(msg)
