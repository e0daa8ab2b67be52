"""Adapters that answer otherwise than their base, made on the spot and saved as peft has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from runners.jobs.adapters import Lora, weights_digest
from runners.jobs.loading import load_folder
from runners.jobspec import FolderModel
from runners.jobspec.base import LoraOptions

CPU = torch.device("cpu")
Made = Mapping[str, Mapping[str, Any]]  # name -> options of its LoRA


def make_all(base: Path, root: Path, made: Made) -> dict[str, PreTrainedModel]:
    """Save named adapters below ``root``; return each merged model, and the base as "model"."""
    models = {
        name: make_adapter(base, root / name, seed, **options)
        for seed, (name, options) in enumerate(made.items())
    }
    return {**models, "model": load_folder(base, "fp32", CPU)}


def make_adapter(base: Path, folder: Path, seed: int, **options) -> PreTrainedModel:
    """Save an adapter of ``seed``'s matrices into ``folder``; return the base with it merged."""
    model = load_folder(base, "fp32", CPU)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lora = Lora(model, LoraOptions(**{"rank": 4, "alpha": 8, **options}))
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.data = torch.randn(each.shape)
    folder.mkdir(parents=True)
    lora.save(folder, FolderModel(path=str(base)), weights_digest(base))
    return lora.merge()
