"""Adapters that answer otherwise than their base, made on the spot and saved as peft has them."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from runners.adapter_options import LoraOptions
from runners.jobs.adapters import Lora, weights_digest
from runners.jobs.loading import load_folder
from runners.jobspec import FolderModel

CPU = torch.device("cpu")


def make_adapter(base: Path, folder: Path, seed: int, **options) -> PreTrainedModel:
    """Save an adapter of random matrices into ``folder``; return the base with it merged."""
    model = load_folder(base, "fp32", CPU)
    lora = Lora(model, LoraOptions(**{"rank": 4, "alpha": 8, **options}))
    generator = torch.Generator().manual_seed(seed)
    for name, each in model.named_parameters():
        if "lora_B" in name:
            each.data = torch.randn(each.shape, generator=generator)
    folder.mkdir(parents=True)
    lora.save(folder, FolderModel(path=str(base)), weights_digest(base))
    return lora.merge()
