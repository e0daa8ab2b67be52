"""The attention kernel of a training: fused, separate products, or block-sparse.

FlexAttention computes only the blocks of 128 queries and 128 keys with visible pairs and skips the
others: in rows of several documents, most of them. Only GPUs train with it, because torch has no
CPU backward pass for it. Validation uses SDPA, as after loading: other shapes would be compiled
again.

Source: Dong et al. 2024 (FlexAttention), arXiv:2412.05496.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import flex_attention_mask

from runners.jobs.runtime import BadInputError
from runners.jobspec.train import TrainAttention

NAME = "slipway_flex_attention"
JUDGED = "sdpa"
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


def attend(
    model: PreTrainedModel, asked: TrainAttention, device: torch.device
) -> BlockAttention | None:
    """Set the model's attention; return the block counter if it is block-sparse.

    Raises:
        BadInputError: flex was requested on a CPU, or for layers that do not support it.
    """
    if asked == "flex":
        if device.type != "cuda":
            raise BadInputError(
                f"attention is flex, and torch {torch.__version__} has no backward pass of "
                f"FlexAttention on a {device.type} device; choose flash (SDPA), or a host with a "
                "GPU"
            )
        return BlockAttention(model)
    if asked != "auto":
        model.set_attn_implementation("sdpa" if asked == "flash" else "eager")
    elif device.type == "cpu":
        # For short sequences the plain product was 20-45 % faster per step than torch's flash
        # kernel for CPUs (192 wide, 4 layers, bf16, AVX-512).
        model.set_attn_implementation("eager")
    return None


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
        reason = f"{name} has no layers for it"
    elif getattr(config, "attention_dropout", 0.0):
        reason = f"{name} drops out {config.attention_dropout:g} of its scores, which it cannot"
    elif head < LEAST_HEAD:
        reason = f"{name} has heads of {head} elements, and it takes {LEAST_HEAD} or more"
    if reason:
        raise BadInputError(f"attention is flex, and {reason}; choose flash (SDPA)")
