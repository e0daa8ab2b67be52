"""Tensor and sequence parallelism with torch's DTensor.

Source: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053; Korthikanti et al. 2022,
arXiv:2205.05198, for sequence parallelism of norms and residuals.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runners.jobs.train.layouts.stage import Stage
from runners.jobs.train.layouts.tensor_slices import TensorSlice, whole_slice

SEQUENCE = 1  # dimension of the length in [rows, length, width]


def divide_matrices(stage: Stage, mesh: DeviceMesh, *, is_sequence_divided: bool) -> None:
    """Shard every matrix of a stage; norms stay whole."""
    between: Placement = Shard(SEQUENCE) if is_sequence_divided else Replicate()
    ends: dict[str, ParallelStyle] = {}
    if hasattr(stage.model, "embed_tokens"):
        ends["model.embed_tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    if stage.is_last:
        ends["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        if is_sequence_divided:
            ends["model.norm"] = SequenceParallel()
    is_tied = stage.is_last and bool(stage.config.tie_word_embeddings)
    parallelize_module(stage, mesh, ends)
    if is_tied:
        stage.lm_head.weight = stage.model.embed_tokens.weight  # type: ignore[union-attr]  # torch types a submodule as a tensor too
    for block in stage.blocks.values():
        parallelize_module(block, mesh, _block_plan(between))


def _block_plan(between: Placement) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if isinstance(between, Replicate):
        return plan
    return plan | {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
    }


def own_slice(name: str, weight: torch.Tensor) -> TensorSlice:
    """Return the slice of a weight that this rank has on the tensor axis."""
    box = whole_slice(name, weight.shape)
    if not isinstance(weight, DTensor):
        return box
    index, count = weight.device_mesh.get_local_rank(), weight.device_mesh.size()
    for placement in weight.placements:
        if isinstance(placement, Shard):
            at = placement.dim
            size = weight.shape[at] // count
            start = (*box.start[:at], index * size, *box.start[at + 1 :])
            box = TensorSlice(name, start, (*box.size[:at], size, *box.size[at + 1 :]))
    return box


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a weight's gradient with the weight's placements, as a local tensor."""
    gradient = weight.grad
    if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
        gradient = gradient.redistribute(placements=weight.placements)
    return None if gradient is None else plain(gradient)
