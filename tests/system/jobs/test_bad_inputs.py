"""Every kind of job on every kind of bad input: an error by name, and nothing half made stays.

In process: what a job's own process does between its start and its exit code.
"""

import errno
import itertools
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from runners.jobs import corpus, evaluate
from runners.jobs.compress.job import work as compress
from runners.jobs.generate.job import work as generate
from runners.jobs.load import benchmark
from runners.jobs.runtime import EXIT_BAD_INPUT, BadInputError, carry_out
from runners.jobs.serve.own_backend import work as serve
from runners.jobs.train.job import work as train
from runners.jobspec import (
    BenchmarkSpec,
    CompressSpec,
    DemoPrompts,
    EvaluateSpec,
    FolderModel,
    GenerateSpec,
    InlinePrompts,
    NamedAdapter,
    ServeSpec,
    TrainSpec,
)
from runners.shared.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.plugins.extent import first
from tests.runners.jobs.test_model_layouts import marked, shard

pytestmark = pytest.mark.slow
DOWN = "model.layers.1.mlp.down_proj.weight"
SHORT = {"prompt_tokens": 8, "output_tokens": 2, "evaluation_tokens": 64}
KINDS = {
    "train": (train, lambda m: TrainSpec(model=m, max_steps=1, time_budget_seconds=None)),
    "compress by a library": (compress, lambda m: CompressSpec(model=m, method="int8", **SHORT)),
    "compress by layers": (compress, lambda m: CompressSpec(model=m, method="rtn", **SHORT)),
    "evaluate": (evaluate.work, lambda m: EvaluateSpec(model=m, evaluation_tokens=64)),
    "benchmark": (benchmark.work, lambda m: BenchmarkSpec(model=m, repetitions=1, **SHORT)),
    "generate": (
        generate,
        lambda m: GenerateSpec(model=m, prompts=InlinePrompts(texts=("def",)), output_tokens=2),
    ),
    "serve": (serve, lambda m: ServeSpec(model=m, served_name="m")),
}


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def configured(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def no_number(folder):
    weights = load_file(folder / "model.safetensors")
    weights[DOWN][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def adapter_only(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def missing_shard(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


BAD = {
    "a missing shard": (
        missing_shard,
        r"lacks model-00002-of-00002\.safetensors, which.*download",
    ),
    "a mark": (marked("config.json"), r"config\.json begins with a byte order mark.*save it as"),
    "cut off": (cut_off, r"model\.safetensors is not a complete safetensors file.*copy it again"),
    "pickle": (pickled, r"pytorch_model\.bin is pickle, which is never read.*give a complete"),
    "wider by config": (configured(intermediate_size=160), r"64, 128\].*64, 160\].*of one model"),
    "deeper by config": (configured(num_hidden_layers=3), r"lack model\.layers\.2.*of one model"),
    "shallower by config": (
        configured(num_hidden_layers=1),
        r"also hold model\.layers\.1.*of one model",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json.*add"),
    "NaN": (no_number, rf"{DOWN} holds NaN or infinity; train or download"),
    "an adapter": (adapter_only, r"lacks config\.json.*give a complete Hugging Face folder"),
}


@pytest.fixture(scope="module")
def bad(host, trained):
    """Make each bad folder once."""
    made = {}

    def make(name: str) -> FolderModel:
        if name not in made:
            folder = host.path / "models" / f"bad-{len(made)}"
            shutil.copytree(trained.folder / "output" / "model", folder)
            BAD[name][0](folder)
            made[name] = FolderModel(path=folder.name)
        return made[name]

    return make


def files_of(job) -> list[str]:
    return [str(path) for path in job.attempt_dir.rglob("*") if path.is_file()]


def ended(error: BadInputError) -> Reason:
    """Return the reason that the supervisor gives to the job's end."""
    return classify(Ending(EXIT_BAD_INPUT, None, f"{error.prefix}: {error}\n"))


def cases() -> list[tuple[str, str]]:
    """Return what is bad and who reads it: those first that read a folder's files themselves."""
    readers, likely = ("compress by layers", "evaluate"), ("cut off", "NaN")
    every = list(itertools.product(BAD, KINDS))
    chosen = [case for case in every if case[0] in likely or case[1] in readers]
    return first([*chosen, *(case for case in every if case not in chosen)], len(chosen))


@pytest.mark.parametrize(("name", "kind"), cases())
def test_a_bad_model_is_named_with_the_way_out_and_leaves_nothing(bad, make_job, name, kind):
    work, spec = KINDS[kind]
    job = make_job(spec(bad(name)))

    with pytest.raises(BadInputError, match=rf"(?s){BAD[name][1]}") as refused:
        carry_out(job, work)

    assert ended(refused.value) in {Reason.BAD_INPUT, Reason.MODEL_OR_DATA_MISSING}
    assert files_of(job) == []


@pytest.mark.parametrize("kind", ["serve", "generate"])
def test_a_wrong_adapter_is_named(bad, host, trained_model, make_job, kind):
    work, spec = KINDS[kind]
    adapter = NamedAdapter(name="a", adapter=bad("NaN"))
    job = make_job(spec(trained_model).model_copy(update={"adapters": (adapter,)}))

    with pytest.raises(BadInputError, match=r"lacks adapter_config\.json") as refused:
        carry_out(job, work)

    assert ended(refused.value) is Reason.MODEL_OR_DATA_MISSING
    assert files_of(job) == []


# An endpoint writes nothing but its events, which are the agent's affair.
WRITING = [kind for kind in KINDS if kind != "serve"]


@pytest.fixture
def full(monkeypatch):
    """A host whose disk is full as soon as the tokens of a short text are written."""
    monkeypatch.setattr(corpus, "MAX_FILE_BYTES", 4000)

    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", refuse)


@pytest.mark.parametrize("kind", WRITING)
def test_a_full_disk_ends_a_job_by_name_and_frees_what_was_half_written(
    host, trained_model, make_job, full, tmp_path, kind
):
    work, spec = KINDS[kind]
    asked = spec(trained_model)
    if kind == "generate":
        asked = asked.model_copy(update={"prompts": DemoPrompts(count=1, input_tokens=4)})
    fresh = tmp_path / "host"  # nothing is in its cache
    shutil.copytree(host.path / "attempts" / "trained", fresh / "attempts" / "trained")
    job = replace(make_job(asked), host_dir=fresh)

    with pytest.raises(BadInputError, match=r"No space left .*free some space") as refused:
        carry_out(job, work)

    assert ended(refused.value) is Reason.DISK_FULL
    assert files_of(job) == []
    assert [path for path in (fresh / "cache").rglob("*") if path.is_file()] == []


def test_the_host_works_on_after_bad_jobs(bad, trained_model, make_job):
    work, spec = KINDS["evaluate"]
    with pytest.raises(BadInputError):
        carry_out(make_job(spec(bad("cut off"))), work)

    carry_out(make_job(spec(trained_model)), work)
