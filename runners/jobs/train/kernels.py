"""Kernels of a training: attention, compiled layers and FP8 products."""

import contextlib
import importlib.metadata
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import flex_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from runners.devices.topology import FP8_CAPABILITY
from runners.jobs.runtime import BadInputError, check_compiler
from runners.jobs.train.quantized import replace_layer
from runners.jobspec.train import TrainAttention

# The attention kernel of a training: fused, separate products, or block-sparse.
#
# FlexAttention computes only the blocks of 128 queries and 128 keys with visible pairs and skips
# the others: in rows of several documents, most of them. Only GPUs train with it, because torch
# has no CPU backward pass for it. Validation uses SDPA, as after loading: other shapes would be
# compiled again.
#
# Source: Dong et al. 2024 (FlexAttention), arXiv:2412.05496.


NAME = "slipway_flex_attention"
EVALUATION_ATTENTION = "sdpa"
LEAST_HEAD = 16  # smallest head dimension of its kernels


class BlockAttention:
    """FlexAttention in a model's layers, with a count of the computed blocks."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Switch the model to FlexAttention.

        Raises:
            BadInputError: the model's layers do not support it; the message names an alternative.
        """
        _check_model(model)
        self._model = model
        self._computed: torch.Tensor | int = 0  # on the device, so no step synchronises on it
        self._causal = 0
        AttentionInterface.register(NAME, _flex_attention)
        AttentionMaskInterface.register(NAME, self._mask)
        model.set_attn_implementation(NAME)

    def _mask(self, **asked: Any) -> BlockMask:
        """Return the block mask of a batch, and count its blocks."""
        mask: BlockMask = flex_attention_mask(**asked)
        full = mask.full_kv_num_blocks
        self._computed = self._computed + mask.kv_num_blocks.sum()
        if full is not None:
            self._computed = self._computed + full.sum()
        rows, heads, length = mask.kv_num_blocks.shape
        self._causal += rows * heads * length * (length + 1) // 2
        return mask

    @property
    def computed_ratio(self) -> float | None:
        """Return the computed blocks as a share of those that single-document rows would have."""
        return int(self._computed) / self._causal if self._causal else None

    def note(self) -> str:
        """Return a note on the attention kernel and the skipped blocks."""
        name = f"FlexAttention of torch {torch.__version__}, compiled"
        ratio = self.computed_ratio
        if ratio is None:
            return name
        return (
            f"{name}; {ratio:.0%} of the blocks were computed that rows of one document have, as "
            "the masks counted them"
        )


def set_attention(
    model: PreTrainedModel, implementation: TrainAttention, device: torch.device
) -> BlockAttention | None:
    """Set the model's attention; return the block counter if it is block-sparse.

    Raises:
        BadInputError: flex was requested on a CPU, or for layers that do not support it.
    """
    if implementation == "flex":
        if device.type != "cuda":
            raise BadInputError(
                f"attention is flex, and torch {torch.__version__} has no backward pass of "
                f"FlexAttention on a {device.type} device; choose flash (SDPA), or a host with a "
                "GPU"
            )
        return BlockAttention(model)
    if implementation == "flash" and not has_sdpa(model):
        raise BadInputError(
            f"attention is flash (SDPA), and transformers has none for {type(model).__name__}; "
            "choose eager"
        )
    if implementation != "auto":
        model.set_attn_implementation("sdpa" if implementation == "flash" else "eager")
    elif device.type == "cpu":
        # For short sequences the plain product was 20-45 % faster per step than torch's flash
        # kernel for CPUs (192 wide, 4 layers, bf16, AVX-512).
        model.set_attn_implementation("eager")
    return None


def has_sdpa(model: PreTrainedModel) -> bool:
    """Return whether transformers computes a model's attention by torch's fused kernels."""
    return bool(model._supports_sdpa)  # noqa: SLF001 - it has no public name


def evaluation_attention(model: PreTrainedModel) -> str:
    """Return the attention with which a model is evaluated, and will be loaded."""
    return EVALUATION_ATTENTION if has_sdpa(model) else "eager"


def _flex_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output of [rows, heads, length, width] as [rows, length, heads, width].

    Rotated queries and keys have the weights' dtype, values the autocast dtype; the kernel ignores
    autocast and needs one dtype.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    output, _ = flex_attention_forward(module, query, key, value, attention_mask, **others)
    return output, None


def _check_model(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    reason = ""
    if not model._supports_flex_attn:  # noqa: SLF001 - there is no other reader
        reason = f"{name} does not support FlexAttention in transformers"
    elif getattr(config, "attention_dropout", 0.0):
        reason = f"{name} has attention_dropout {config.attention_dropout:g}, which must be 0"
    elif head < LEAST_HEAD:
        reason = f"{name} has a head_dim of {head}, which must be at least {LEAST_HEAD}"
    if reason:
        raise BadInputError(f"attention is flex, and {reason}; choose flash (SDPA)")


# A model's layers compiled with torch.compile, so that pointwise operations are fused.
#
# All layers are alike, so one compilation serves them all. The first steps run uncompiled as the
# baseline of the speedup. Validation runs uncompiled too: its shapes would be compiled again.
#
# Source: Wang et al. 2021 (LightSeq2), arXiv:2110.05722; Ansel et al. 2024 (PyTorch 2), ASPLOS.


# mypy: disable-error-code="no-untyped-call"
# torch leaves its modules' ``compile`` untyped.


PLAIN_STEPS = 4  # the first two allocate, the last two are the baseline
SETTLED = 2  # steps until the step time is steady, compiled or not


class CompiledLayers:
    """The layers of one training's model; compiled from ``PLAIN_STEPS`` on."""

    def __init__(self, model: PreTrainedModel, scratch: Path) -> None:
        """Find the layers.

        Raises:
            BadInputError: the host has no compiler, or the model no known layers.
        """
        check_compiler(scratch, "compiled")
        layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
        self._layers: Sequence[Any] = layers  # torch types what is compiled as a tensor too
        if not layers:
            msg = (
                f"compiled is true, and {type(model).__name__} has no layers to compile; leave "
                "compiled out"
            )
            raise BadInputError(msg)

    def begin(self) -> None:
        """Compile the layers at their next call."""
        for each in self._layers:
            each.compile(dynamic=False)

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run the layers uncompiled within the block."""
        compiled = [each._compiled_call_impl for each in self._layers]  # noqa: SLF001 - no public API
        self.end()
        yield
        for each, call in zip(self._layers, compiled, strict=True):
            each._compiled_call_impl = call  # noqa: SLF001 - as above

    def end(self) -> None:
        """Run the layers uncompiled from now on."""
        for each in self._layers:
            each._compiled_call_impl = None  # noqa: SLF001 - as above

    def note(self, step_seconds: Sequence[float]) -> str:
        """Return a note on the compile time and the speedup."""
        plain, after = step_seconds[SETTLED:PLAIN_STEPS], step_seconds[PLAIN_STEPS + SETTLED :]
        text = f"{len(self._layers)} layers by torch.compile from step {PLAIN_STEPS + 1} on"
        if not plain or not after:
            return f"{text}; too few steps to say what it brought"
        before, now = statistics.median(plain), statistics.median(after)
        return (
            f"{text}, which took {step_seconds[PLAIN_STEPS]:.1f} s: a step of {before:.3f} s as "
            f"it was takes {now:.3f} s, {before / now:.2f} times as fast"
        )


# FP8 training with torchao: e4m3 in the forward pass, e5m2 gradients.
#
# Each operand of a product is quantised with one dynamic scale per tensor, given by its largest
# value. The master weights stay fp32, saved activations 16 bits; the output layer, and layers
# whose sizes are no multiple of 16, multiply in bf16. Devices without FP8 units multiply the
# quantised operands in fp32.
#
# Source: Micikevicius et al. 2022, arXiv:2209.05433; Peng et al. 2023 (FP8-LM), arXiv:2310.18313.


# mypy: disable-error-code="no-untyped-call"
# torchao leaves its modules untyped.


SIDE_MULTIPLE = 16  # the GPU units work on multiples of this, in elements


class Fp8Linear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """A linear layer that multiplies in FP8 while training, and plainly in evaluation mode."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out_features], in bf16 while training."""
        if not self.training:
            return torch.nn.functional.linear(inputs, self.weight, self.bias)
        with torch.autocast(inputs.device.type, enabled=False):
            output: torch.Tensor = super().forward(inputs.to(torch.bfloat16))
        return output


def use_fp8_linear_layers(model: PreTrainedModel, device: torch.device) -> None:
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
            replace_layer(model, name, Fp8Linear.from_float(layer, config).train(layer.training))
            num_changed += 1
    if not num_changed:
        msg = (
            f"compute_dtype fp8: {type(model).__name__} has no linear layer whose sides are "
            f"multiples of {SIDE_MULTIPLE}; choose bf16"
        )
        raise BadInputError(msg)


def with_plain_linear_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with plain linear layers that have the trained weights."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Fp8Linear):
            plain = torch.nn.Linear(1, 1, bias=False, device="meta")
            plain.in_features, plain.out_features = layer.in_features, layer.out_features
            plain.weight, plain.bias = layer.weight, layer.bias
            replace_layer(model, name, plain.train(layer.training))
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
