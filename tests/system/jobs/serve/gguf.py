"""The tiny trained model as a GGUF file, and the environment in which llama.cpp serves it."""

from pathlib import Path

import torch

from runners.jobs.compress.gguf import write_gguf
from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.weights import WeightReader
from tests.system.jobs import environments


def write_model(source: Path, folder: Path) -> None:
    """Write a model folder as our compress job leaves it: one GGUF file and what describes it."""
    model, tokenizer = load_folder(source, "fp32", torch.device("cpu")), load_tokenizer(source)
    folder.mkdir(parents=True)
    write_gguf(folder / "model.gguf", model.config, WeightReader(source, model), tokenizer, "F16")
    model.config.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def build_environment(host: Path) -> None:
    """Build llama.cpp's environment on a host; skip where no package index is reached."""
    environments.build_environment(host, "llamacpp")
