"""Benchmarks memory-saving training techniques: ``python -m runners.jobs.tuning_bench``.

Prints ratios as JSON lines, for `manage.py bench tune`. Each model runs real steps, so that
activations, gradients and states are allocated and counted; times come from alternating rounds.
"""

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from runners.adapter_options import LoraOptions
from runners.jobs.adapters import Lora
from runners.jobs.live_bytes import LiveBytes, activations_counted
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.memory import gradient_bytes, model_bytes, optimizer_bytes
from runners.jobs.runtime import prepare_process
from runners.jobs.train.optimizers import build_optimizer
from runners.jobs.train.recomputation import recompute
from runners.jobs.train.swap import Swap, offloaded_activations
from runners.jobs.training_pace_bench import growing_ratios, recomputation_ratios
from runners.jobspec import DemoModel
from runners.jobspec.training_memory import Away, Optimizer, Recomputation
from runners.ratios import Ratio

RANK = 8
TOKENS = 32
ROWS = 8  # of text per step with counted activations


class Held(NamedTuple):
    """The memory of one training step besides weights and activations."""

    trained_parameters: float
    gradients: float
    optimizer_states: float


def ratios(shape: DemoModel | None = None, rank: int = RANK) -> Iterator[Ratio]:
    """Yield the ratios of full fine-tuning to adapter training."""
    shape = shape or DemoModel()
    full, adapter = held(shape, None), held(shape, LoraOptions(rank=rank, alpha=2 * rank))
    yield Ratio.exact(
        "full / LoRA trained parameters",
        full.trained_parameters,
        adapter.trained_parameters,
        "parameters",
    )
    yield Ratio.exact("full / LoRA gradients", full.gradients, adapter.gradients, "bytes")
    yield Ratio.exact(
        "full / LoRA optimiser states", full.optimizer_states, adapter.optimizer_states, "bytes"
    )


class Step(NamedTuple):
    """Peak tensor bytes of two steps: in total, and of activations."""

    peak: float
    activations: float
    optimizer_states: float


def fitting_ratios(shape: DemoModel | None = None, rows: int = ROWS) -> Iterator[Ratio]:
    """Yield the ratios of plain to memory-saving training with equal gradients."""
    shape = shape or DemoModel()
    plain = step_of(shape, rows)
    adamw, lomo = step_of(shape, 1, "adamw", "full"), step_of(shape, 1, "lomo", "full")
    yield Ratio.exact("AdamW / LOMO peak of a step", adamw.peak, lomo.peak, "bytes")
    eight_bit: tuple[tuple[Optimizer, str], ...] = (
        ("adamw_8bit", "AdamW 8-bit"),
        ("lion_8bit", "Lion 8-bit"),
    )
    for name, title in eight_bit:
        small = step_of(shape, 1, name).optimizer_states
        yield Ratio.exact(f"AdamW / {title} states", plain.optimizer_states, small, "bytes")
    ways: tuple[Recomputation, ...] = ("selective", "full")
    for how in ways:
        again = step_of(shape, rows, how=how)
        yield Ratio.exact(
            f"kept / {how} recomputation's activations",
            plain.activations,
            again.activations,
            "bytes",
        )
    swapped = step_of(shape, rows, where="disk")
    yield Ratio.exact(
        "kept / swapped activations", plain.activations, swapped.activations, "bytes"
    )


def step_of(
    shape: DemoModel,
    rows: int,
    name: Optimizer = "adamw",
    how: Recomputation = "none",
    where: Away = "none",
) -> Step:
    """Return the memory of two steps over ``rows`` rows of text."""
    torch.manual_seed(0)
    model = fresh_model(demo_config(shape), torch.float32).train()
    model.set_attn_implementation("eager")
    recompute(model, how)
    optimizer = build_optimizer(model, 1e-3, name)
    length = shape.max_position_embeddings
    ids = torch.arange(rows * length).reshape(rows, length) % shape.vocab_size
    with TemporaryDirectory() as folder, LiveBytes(model.parameters()) as live:
        swap = offloaded_activations(where, model, torch.device("cpu"), Path(folder))
        activations = [_step(model, optimizer, ids, swap) for _ in range(2)][-1]
    states = optimizer_bytes(optimizer)
    return Step(float(live.peak + model_bytes(model)), float(activations), float(states))


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, ids: torch.Tensor, swap: Swap
) -> int:
    """Run one step on the text and return its peak activation bytes."""
    with activations_counted(model) as counted, swap.step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        wide = logits.float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(wide, ids.flatten())
        del logits, wide
        torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return counted.peak


def held(shape: DemoModel, options: LoraOptions | None) -> Held:
    """Return the memory after one step, with or without an adapter."""
    model = fresh_model(demo_config(shape), torch.float32)
    if options is not None:
        Lora(model, options)
    optimizer = build_optimizer(model, 1e-3)
    ids = torch.arange(TOKENS)[None]
    torch.autograd.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
    gradients = gradient_bytes(model)
    optimizer.step()
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return Held(float(trained), float(gradients), float(optimizer_bytes(optimizer)))


if __name__ == "__main__":
    prepare_process()
    torch.set_num_threads(1)
    for each in chain(ratios(), fitting_ratios(), recomputation_ratios(), growing_ratios()):
        sys.stdout.write(json.dumps(each) + "\n")
