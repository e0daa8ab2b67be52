"""A compiled decode step over a cache of fixed room writes what plain greedy decoding writes."""

import shutil

import pytest
import torch
import torch._inductor.config

from runners.jobs.loading import fresh_model, load_tokenizer
from runners.jobspec import DemoPrompts, FolderModel
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.generate.reading import outputs

DEFAULTS = {"prompts": DemoPrompts(count=3, input_tokens=20, shortest=4), "output_tokens": 8}


@pytest.mark.slow
@pytest.mark.equality
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_a_compiled_step_writes_the_same(host, trained, generate):
    folder = host.path / "models" / "one-layer"  # g++ takes 9 s of a core for each of its layers
    torch.manual_seed(3)
    fresh_model({**TINY_CONFIG, "num_hidden_layers": 1}, torch.float32).save_pretrained(folder)
    load_tokenizer(trained.folder / "output" / "model").save_pretrained(folder)
    asked = {"model": FolderModel(path=folder.name), "batch_size": 2}
    plain = outputs(generate("plain", **asked))

    with torch._inductor.config.patch(compile_threads=1):  # no pool of processes
        run = generate("compiled", **asked, compiled_step=True)

    assert outputs(run) == plain
    assert "compiled for 2 prompts of" in run.bodies("result")[0]["notes"]["compiled_step"]
