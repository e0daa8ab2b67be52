"""Recovery after pruning: train a LoRA on the calibration text and merge it.

Source: Ma et al. 2023 (LLM-Pruner), arXiv:2305.11627, section 3.3.
"""

import torch
from transformers import PreTrainedModel

from runners.adapter_options import LoraOptions
from runners.jobs.adapters import Lora
from runners.jobs.train.optimizers import build_optimizer
from runners.jobs.train.schedule import learning_rate_ratio
from runners.jobs.train.trainer import MAX_GRAD_NORM

OPTIONS = LoraOptions(rank=8, alpha=16)
LEARNING_RATE = 1e-3


def recover(
    model: PreTrainedModel, calibration: torch.Tensor, steps: int, at_once: int
) -> PreTrainedModel:
    """Train a LoRA for ``steps`` batches of text [samples, length]; return the merged model."""
    lora = Lora(model, OPTIONS)
    optimizer = build_optimizer(model, LEARNING_RATE)
    batches = torch.split(calibration, at_once)
    with torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * learning_rate_ratio(step / steps)
            ids = batches[step % len(batches)]
            model(ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return lora.merge()
