"""The tiny trained model as a GGUF file, and the environment in which llama.cpp serves it."""

from pathlib import Path

import pytest
import torch

from runners.config import HostDir
from runners.environments.builder import BuildError, ensure
from runners.environments.store import Store
from runners.jobs.compress.gguf_file import write_gguf
from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.weights import WeightReader


def write_model(source: Path, folder: Path) -> None:
    """Write a model folder as our compress job leaves it: one GGUF file and what describes it."""
    model, tokenizer = load_folder(source, "fp32", torch.device("cpu")), load_tokenizer(source)
    folder.mkdir(parents=True)
    write_gguf(folder / "model.gguf", model.config, WeightReader(source, model), tokenizer, "F16")
    model.config.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def build_environment(host: Path) -> None:
    """Build llama.cpp's environment on a host; skip where no package index is reached."""
    store = Store(HostDir(host))
    try:
        ensure(store, store.pins("llamacpp"), print)
    except BuildError as error:
        if "cannot be reached" not in str(error):
            raise
        pytest.skip(f"the environment llamacpp needs a package index: {error}")
