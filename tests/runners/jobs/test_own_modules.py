"""A model's own modules: copied by one process at a time, and no other model names code."""

import os
import struct
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from runners.jobs.model_files import CODE_FOLDERS_VARIABLE
from runners.jobs.own_code import separate_modules
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.relayed.backend import model_paths
from runners.jobspec import FolderModel, ServeSpec
from tests.hub.models import write_files

CONFIG = {"config.json": '{"model_type": "coded"}'}
NO_TENSORS = struct.pack("<Q", 2) + b"{}"
NAMED = ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["evil/x--own.T", null]}}')


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(place))
    return place


def test_an_engine_finds_the_modules_copied_and_no_code_of_a_draft(tmp_path, monkeypatch, modules):
    models = tmp_path / "models"
    text = "from .inner import B\nraise SystemExit"  # copied, and not run
    write_files(models / "coded", {**CONFIG, "coded.py": text, "inner.py": "import absent_of"})
    write_files(models / "draft", CONFIG)
    for name in ("coded", "draft"):
        (models / name / "model.safetensors").write_bytes(NO_TENSORS)
    monkeypatch.setenv(CODE_FOLDERS_VARIABLE, str(models / "coded"))
    monkeypatch.setenv("SLIPWAY_MODEL_ROOTS", str(models))
    draft = {"model": {"source": "folder", "path": str(models / "draft")}, "tokens": 2}
    spec = ServeSpec(
        model=FolderModel(path=str(models / "coded")), engine="vllm",
        engine_options={"draft": draft},
    )  # fmt: skip
    job = type("Job", (), {"host_dir": tmp_path})

    model_paths(job, spec)
    [copied] = modules.rglob("coded.py")
    assert (copied.read_text(), [*modules.rglob("inner.py")]) == (
        text,
        [copied.parent / "inner.py"],
    )

    (models / "draft" / NAMED[0]).write_text(NAMED[1])
    with pytest.raises(
        BadInputError, match=r"engine_options.draft: tokenizer_config.json of draft"
    ):
        model_paths(job, spec)
    monkeypatch.setenv(CODE_FOLDERS_VARIABLE, "")  # without the option nothing of it runs
    assert model_paths(job, spec).draft is not None


def test_each_rank_copies_modules_into_a_folder_of_its_own(modules, monkeypatch):
    found = set()
    for rank in (41, 41, 42):
        monkeypatch.setattr(os, "getpid", lambda rank=rank: rank)
        separate_modules()
        own = Path(dynamic_module_utils.HF_MODULES_CACHE)
        assert own.is_dir()
        assert own.is_relative_to(modules)
        found.add(own)
    assert len(found) == 2
