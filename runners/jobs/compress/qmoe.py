"""QMoE: ternary, entropy-coded experts of a mixture-of-experts model; all else is unchanged.

Each row has three values: its minimum, zero and its maximum. Columns are quantised in turn as in
GPTQ, on the tokens that the router sends to the expert. Layers are quantised in order, on the
activations of the already quantised layers before them; the whole model is in memory.
Source: Frantar and Alistarh 2023, arXiv:2310.16795, sections 3.1 and 4.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from runners.jobs.artefacts import weight_file_bytes
from runners.jobs.compress.engine import Compressed, check_disk, texts
from runners.jobs.compress.quantization import inverse_factor
from runners.jobs.compress.whole_model import held_out_of, load_whole
from runners.jobs.evaluation import evaluate
from runners.jobs.events import Stages
from runners.jobs.loading import require_tokenizer, shape_only
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.skeleton import SEQUENCES_AT_ONCE
from runners.jobs.ternary_files import Ternary, entropy_bits, save_ternary, tensors_of
from runners.jobspec import CompressSpec

GATE_UP, DOWN = "gate_up_proj", "down_proj"
DAMPING = 0.1  # of the mean diagonal; few tokens reach an expert


class Routed(NamedTuple):
    """Input tokens [count, width] of a layer's experts, and the experts chosen for each token."""

    hidden: torch.Tensor
    experts: torch.Tensor


def by_ternary(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> Compressed:
    """Quantise and code every expert, save the folder, and return the resulting perplexity."""
    loaded = load_whole(source, "bf16")
    model, tokenizer = loaded.model, require_tokenizer(loaded, "the calibration text")
    ids = held_out_of(job, loaded, source)
    _windows, calibration = texts(job, loaded, spec)
    blocks, stages = expert_blocks(model), stages.via(job.emitter)
    coded: dict[str, torch.Tensor] = {}
    totals = _SizeTotals()
    for at, (name, experts) in enumerate(blocks.items()):
        routed = routed_of(model, experts, calibration.to(loaded.device))
        for matrix_name, stack in rounded(experts, routed).items():
            tensors, num_bytes = tensors_of(f"{name}.{matrix_name}", stack)
            coded |= tensors
            totals.add(stack, num_bytes)
        stages.advance((at + 1) / (len(blocks) + 1))
    save_ternary(target, model, coded)
    tokenizer.save_pretrained(str(target))
    perplexity = evaluate(model, ids, spec.evaluation_tokens)
    return Compressed(
        perplexity, {**totals.figures(), "calibration_tokens": float(calibration.numel())}
    )


def check_sparse(source: Path, _spec: CompressSpec, job: Job) -> None:
    """Check that the model has experts to compress.

    Raises:
        BadInputError: the model has no experts, or the disk is too small.
    """
    check_disk(job.attempt_dir, weight_file_bytes(source))
    config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    if not expert_blocks(shape_only(config)):
        msg = (
            f"qmoe codes the experts of a sparse mixture-of-experts model, and this "
            f"'{config.model_type}' has none; choose gptq for a dense model"
        )
        raise BadInputError(msg)


def expert_blocks(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return, by name, the modules that hold a layer's experts as two stacked matrices."""
    return {
        name: module
        for name, module in model.named_modules()
        if {each for each, _ in module.named_parameters(recurse=False)} == {GATE_UP, DOWN}
    }


@torch.no_grad()
def routed_of(
    model: PreTrainedModel, experts: torch.nn.Module, calibration: torch.Tensor
) -> Routed:
    """Return the tokens of the text that are routed to a layer's experts."""
    batches: list[Routed] = []

    def record(_module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = [*given, *named.values()]
        batches.append(Routed(values[0].detach(), values[1].detach()))

    handle = experts.register_forward_pre_hook(record, with_kwargs=True)
    try:
        for ids in torch.split(calibration, SEQUENCES_AT_ONCE):
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return Routed(*(torch.cat(each) for each in zip(*batches, strict=True)))


@torch.no_grad()
def rounded(experts: torch.nn.Module, routed: Routed) -> dict[str, Ternary]:
    """Quantise each expert to ternary in place; return both stacked matrices."""
    up, down = experts.get_parameter(GATE_UP), experts.get_parameter(DOWN)
    act = experts.get_submodule("act_fn")
    parts: dict[str, list[Ternary]] = {GATE_UP: [], DOWN: []}
    for index in range(len(up)):
        inputs = routed.hidden[(routed.experts == index).any(dim=-1)]
        first = ternary(up[index], inputs)
        up[index] = first.weight()
        gate, value = torch.nn.functional.linear(inputs, up[index]).chunk(2, dim=-1)
        second = ternary(down[index], act(gate) * value)
        down[index] = second.weight()
        parts[GATE_UP].append(first)
        parts[DOWN].append(second)
    return {
        word: Ternary(
            torch.stack([each.symbols for each in own]), torch.stack([each.levels for each in own])
        )
        for word, own in parts.items()
    }


def ternary(weight: torch.Tensor, inputs: torch.Tensor) -> Ternary:
    """Quantise a matrix [out, in] to three values per row with GPTQ's error compensation."""
    remaining = weight.float().clone()
    levels = torch.stack(
        [remaining.amin(dim=1).clamp(max=0), remaining.amax(dim=1).clamp(min=0)], dim=1
    ).to(weight.dtype)
    values = torch.cat([torch.zeros_like(levels[:, :1]), levels], dim=1).float()
    tokens = inputs.float()
    factor = inverse_factor(tokens.T @ tokens, DAMPING)
    symbols = torch.zeros_like(remaining, dtype=torch.uint8)
    for column in range(remaining.shape[1]):
        nearest = (remaining[:, column : column + 1] - values).abs().argmin(dim=1)
        symbols[:, column] = nearest.to(torch.uint8)
        dequantised = values.gather(1, nearest[:, None])[:, 0]
        error = (remaining[:, column] - dequantised) / factor[column, column]
        remaining[:, column:] -= error[:, None] * factor[column, column:][None, :]
    return Ternary(symbols, levels)


class _SizeTotals:
    """Sizes of the experts before and after compression, summed over all layers."""

    def __init__(self) -> None:
        self.weights = self.bytes = self.zeros = 0
        self.entropy_bits = 0.0

    def add(self, stack: Ternary, num_bytes: int) -> None:
        count = stack.symbols.numel()
        self.weights += count
        self.bytes += num_bytes
        self.zeros += int((stack.symbols == 0).sum())
        self.entropy_bits += entropy_bits(stack.symbols.cpu().numpy()) * count

    def figures(self) -> dict[str, float]:
        return {
            "expert_bits_per_weight": 8 * self.bytes / self.weights,
            "expert_entropy_bits_per_weight": self.entropy_bits / self.weights,
            "expert_zeros_share": self.zeros / self.weights,
            "compressed_bytes": float(self.bytes),
            "original_matrix_bytes": 2.0 * self.weights,
        }
