"""Jobs on folders with other files beside the model: what is published is made of the model."""

import shutil

import pytest

from runners.jobs.compress.job import work as compress
from runners.jobs.generate.job import work as generate
from runners.jobs.train.job import work as train
from runners.jobspec import (
    CompressSpec,
    EvaluateSpec,
    FolderModel,
    GenerateSpec,
    InlinePrompts,
    TrainSpec,
)
from runners.jobspec.generate import LayerStreaming, MappedWeights
from runners.supervision.classification import Ending, classify
from tests.runners.jobs.test_model_layouts import beside, marked, shard, without
from tests.runners.jobs.tiny import SHORT
from tests.system.jobs.generate.reading import outputs

pytestmark = pytest.mark.slow
MADE = {
    "plain": (),
    "mistral": (shard, beside("consolidated.safetensors", ("model.layers", "layers"))),
    "leftover": (shard, beside("pytorch_model.safetensors")),
    "two-models": (shard, beside("model.safetensors")),
}
PROMPTS = InlinePrompts(texts=("def main", "import os"))


@pytest.fixture(scope="module")
def laid_out(host, trained):
    for name, changes in MADE.items():
        folder = host.path / "models" / f"laid-{name}"
        shutil.copytree(trained.folder / "output" / "model", folder)
        for change in changes:
            change(folder)
    return {name: FolderModel(path=f"laid-{name}") for name in MADE}


@pytest.mark.parametrize("method", ["rtn", "gguf", "int8"])
def test_a_compression_publishes_the_model_itself(host, laid_out, method):
    found = {}
    for name, model in laid_out.items():
        done = host.run_here(
            f"laid-{method}-{name}", CompressSpec(model=model, method=method, **SHORT), compress
        )
        figures = ("perplexity", "original_perplexity", "disk_bytes", "original_disk_bytes")
        found[name] = {each: done.measured[each] for each in figures}
        found[name]["original_disk_bytes"] //= 100_000  # two files have two headers
    assert all(each == found["plain"] for each in found.values()), found


def test_streamed_and_mapped_generation_write_what_the_model_writes(host, laid_out):
    written = {}
    for name, model in laid_out.items():
        for title, offload in (
            ("whole", None), ("stream", LayerStreaming()), ("map", MappedWeights(memory_bytes=300_000)),
        ):  # fmt: skip
            spec = GenerateSpec(model=model, prompts=PROMPTS, output_tokens=6, offload=offload)
            written[name, title] = outputs(host.run_here(f"laid-{name}-{title}", spec, generate))
    assert all(each == written["plain", "whole"] for each in written.values()), written


def test_training_starts_from_the_model_itself(host, laid_out):
    losses = {}
    for name, model in laid_out.items():
        spec = TrainSpec(model=model, max_steps=2, time_budget_seconds=None, compute_dtype="fp32")
        losses[name] = host.run_here(f"laid-train-{name}", spec, train).metric("loss")
    assert all(each == losses["plain"] for each in losses.values()), losses


@pytest.mark.parametrize(
    ("name", "changes", "reason", "words"),
    [
        ("missing", (shard, without("model-00002-of-00002.safetensors")),
         "model_or_data_missing", "lacks model-00002-of-00002.safetensors, which"),
        ("marked-config", (marked("config.json"),),
         "bad_input", "config.json begins with a byte order mark"),
        ("marked-tokenizer", (marked("tokenizer.json"),),
         "bad_input", "tokenizer.json begins with a byte order mark"),
    ],
)  # fmt: skip
def test_a_process_ends_with_the_reason_and_the_file(host, trained, name, changes, reason, words):
    folder = host.path / "models" / name
    shutil.copytree(trained.folder / "output" / "model", folder)
    for change in changes:
        change(folder)
    spec = EvaluateSpec(model=FolderModel(path=name), evaluation_tokens=64)
    done = host.run(f"ends-{name}", spec)
    assert classify(Ending(done.returncode, None, done.stderr)).value == reason, done.stderr
    assert words in done.stderr.strip().splitlines()[-1]
