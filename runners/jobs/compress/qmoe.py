"""QMoE: the experts of a sparse model as ternary weights in an entropy code, all else untouched.

Each row has three values: its least, zero, and its largest. Columns are rounded in turn as GPTQ
does, on the tokens that the router sends to that expert. Experts are rounded layer by layer, each
on text that the rounded layers before have changed; the whole model is in memory.
Source: Frantar and Alistarh 2023, arXiv:2310.16795, sections 3.1 and 4.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from runners.jobs.artefacts import weight_file_bytes
from runners.jobs.compress.engine import Compressed
from runners.jobs.compress.layerwise import check_disk, texts
from runners.jobs.compress.second_order import inverse_factor
from runners.jobs.compress.whole_model import held_out_of, load_whole
from runners.jobs.entropy_code import entropy_bits
from runners.jobs.evaluation import evaluate
from runners.jobs.layers import SEQUENCES_AT_ONCE
from runners.jobs.loading import require_tokenizer, shape_only
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.stages import Stages
from runners.jobs.ternary_files import Ternary, save_ternary, tensors_of
from runners.jobspec import CompressSpec

GATE_UP, DOWN = "gate_up_proj", "down_proj"
DAMPING = 0.1  # of the mean diagonal; an expert sees few tokens


class Routed(NamedTuple):
    """The tokens [count, width] that reached a layer's experts, and to which each one went."""

    hidden: torch.Tensor
    experts: torch.Tensor


def by_ternary(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> Compressed:
    """Round and code every expert, save the folder, and return the perplexity of the outcome."""
    loaded = load_whole(source, "bf16")
    model, tokenizer = loaded.model, require_tokenizer(loaded, "the calibration text")
    ids = held_out_of(job, loaded, source)
    _windows, calibration = texts(job, loaded, spec)
    blocks, stages = expert_blocks(model), stages.via(job.emitter)
    coded: dict[str, torch.Tensor] = {}
    tally = _Tally()
    for at, (name, experts) in enumerate(blocks.items()):
        routed = routed_of(model, experts, calibration.to(loaded.device))
        for word, stack in rounded(experts, routed).items():
            tensors, num_bytes = tensors_of(f"{name}.{word}", stack)
            coded |= tensors
            tally.add(stack, num_bytes)
        stages.advance((at + 1) / (len(blocks) + 1))
    save_ternary(target, model, coded)
    tokenizer.save_pretrained(str(target))
    found = evaluate(model, ids, spec.evaluation_tokens)
    return Compressed(found, {**tally.figures(), "calibration_tokens": float(calibration.numel())})


def check_sparse(source: Path, _spec: CompressSpec, job: Job) -> None:
    """Refuse a model without experts before anything is measured.

    Raises:
        BadInputError: it has none, or the disk is too small.
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
    """Return the modules that hold a layer's experts as two stacks, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if {each for each, _ in module.named_parameters(recurse=False)} == {GATE_UP, DOWN}
    }


@torch.no_grad()
def routed_of(
    model: PreTrainedModel, experts: torch.nn.Module, calibration: torch.Tensor
) -> Routed:
    """Return what the text sends to a layer's experts."""
    seen: list[Routed] = []

    def see(_module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = [*given, *named.values()]
        seen.append(Routed(values[0].detach(), values[1].detach()))

    handle = experts.register_forward_pre_hook(see, with_kwargs=True)
    try:
        for ids in torch.split(calibration, SEQUENCES_AT_ONCE):
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return Routed(*(torch.cat(each) for each in zip(*seen, strict=True)))


@torch.no_grad()
def rounded(experts: torch.nn.Module, routed: Routed) -> dict[str, Ternary]:
    """Make each expert ternary where it stands, and return both stacks of it."""
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
    """Return a matrix [out, in] in three values a row, its error passed on column by column."""
    rest = weight.float().clone()
    levels = torch.stack([rest.amin(dim=1).clamp(max=0), rest.amax(dim=1).clamp(min=0)], dim=1).to(
        weight.dtype
    )
    values = torch.cat([torch.zeros_like(levels[:, :1]), levels], dim=1).float()
    tokens = inputs.float()
    factor = inverse_factor(tokens.T @ tokens, DAMPING)
    symbols = torch.zeros_like(rest, dtype=torch.uint8)
    for column in range(rest.shape[1]):
        nearest = (rest[:, column : column + 1] - values).abs().argmin(dim=1)
        symbols[:, column] = nearest.to(torch.uint8)
        kept = values.gather(1, nearest[:, None])[:, 0]
        error = (rest[:, column] - kept) / factor[column, column]
        rest[:, column:] -= error[:, None] * factor[column, column:][None, :]
    return Ternary(symbols, levels)


class _Tally:
    """What the experts took and take, over all layers."""

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
