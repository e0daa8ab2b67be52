"""What an adapter spares against training every weight: ``python -m runners.jobs.tuning_bench``.

Prints ratios as JSON lines, for `manage.py bench tune`. Each model makes a step, so that gradients
and states are really there; they are counted, nothing is timed.
"""

import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from runners.adapter_options import LoraOptions
from runners.jobs.adapters import Lora
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.memory import gradient_bytes, optimizer_bytes
from runners.jobs.runtime import prepare_process
from runners.jobs.trainer import build_optimizer
from runners.jobspec import DemoModel
from runners.ratios import Ratio

RANK = 8
TOKENS = 32


class Held(NamedTuple):
    """What one step of training held beside weights and activations."""

    trained_parameters: float
    gradients: float
    optimizer_states: float


def ratios(shape: DemoModel | None = None, rank: int = RANK) -> Iterator[Ratio]:
    """Yield each ratio of training every weight to training an adapter."""
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


def held(shape: DemoModel, options: LoraOptions | None) -> Held:
    """Return what is held after one step, with an adapter or without."""
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
    for each in ratios():
        sys.stdout.write(json.dumps(each) + "\n")
