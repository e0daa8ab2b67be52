"""Activation recomputation (gradient checkpointing).

Per layer: ``full`` saves only its input, ``selective`` also the outputs of its matrix products, so
that only norms, activation functions and attention scores are recomputed.

Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198, section 5.
"""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from runners.jobs.runtime import BadInputError
from runners.jobspec.training_memory import Recomputation

_ATEN = torch.ops.aten
KEPT_PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 - SDPA on a CPU
        _ATEN._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - SDPA on a GPU
        _ATEN._scaled_dot_product_efficient_attention.default,  # noqa: SLF001 - the same
    }
)


def recompute(model: PreTrainedModel, how: Recomputation) -> None:
    """Enable recomputation in the model's layers.

    Raises:
        BadInputError: the architecture does not support it.
    """
    if how == "none":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:  # transformers before 5.18
            older: Any = model
            older.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    except ValueError as error:
        msg = (
            f"activation_recomputation {how}: {type(model).__name__} has no layers that can be "
            "computed again; choose none, or a smaller micro_batch_size"
        )
        raise BadInputError(msg) from error


def _policy(_context: object, operator: object, *_args: object, **_kwargs: object) -> object:
    """Save what is expensive: one product costs more than everything between two."""
    if operator in KEPT_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
