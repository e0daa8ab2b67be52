"""How a training attends: fused, in separate products, or by the blocks that its rows need.

FlexAttention computes the blocks of 128 queries and 128 keys in which a query sees a key, and
passes over the others: in rows of several documents most of them. A GPU alone trains with it, as
torch has no backward pass of it on processors. What is judged in between attends by SDPA, as it
will be loaded: other shapes would be compiled anew.

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
LEAST_HEAD = 16  # elements of a head that its kernels take in at once


class BlockAttention:
    """FlexAttention in a model's layers, and how many blocks of its rows were computed."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Have the model attend by blocks from now on, on whichever device it is called.

        Raises:
            BadInputError: the model's layers cannot, with the way out.
        """
        _check_model(model)
        self._model = model
        self._computed: torch.Tensor | int = 0  # on the device: no step waits for it
        self._causal = 0
        AttentionInterface.register(NAME, _attended)
        AttentionMaskInterface.register(NAME, self._mask)
        model.set_attn_implementation(NAME)

    def _mask(self, **asked: Any) -> BlockMask:
        """Return the mask of a batch, its blocks counted."""
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
        """Return the share that was computed of the blocks that rows of one document have."""
        return int(self._computed) / self._causal if self._causal else None

    def note(self) -> str:
        """Return in words how it attended, with what its masks left out."""
        said = f"FlexAttention of torch {torch.__version__}, compiled"
        ratio = self.computed_ratio
        if ratio is None:
            return said
        return (
            f"{said}; {ratio:.0%} of the blocks were computed that rows of one document have, as "
            "the masks counted them"
        )


def attend(
    model: PreTrainedModel, asked: TrainAttention, device: torch.device
) -> BlockAttention | None:
    """Have the model attend as asked, or as suits the device; return what counts its blocks.

    Raises:
        BadInputError: flex was asked of a processor, or of layers that cannot.
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


def _attended(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return what queries [rows, heads, length, width] see, as [rows, length, heads, width].

    Rotated queries and keys are as wide as the weights, values as autocast has the products: the
    kernel, which autocast does not know, wants all of them alike.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    found, _ = flex_attention_forward(module, query, key, value, attention_mask, **others)
    return found, None


def _check_model(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    why = ""
    if not model._supports_flex_attn:  # noqa: SLF001 - there is no other reader
        why = f"{name} has no layers for it"
    elif getattr(config, "attention_dropout", 0.0):
        why = f"{name} drops out {config.attention_dropout:g} of its scores, which it cannot"
    elif head < LEAST_HEAD:
        why = f"{name} has heads of {head} elements, and it takes {LEAST_HEAD} or more"
    if why:
        raise BadInputError(f"attention is flex, and {why}; choose flash (SDPA)")
