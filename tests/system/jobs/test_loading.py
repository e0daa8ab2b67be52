"""The one door to models: what it lets in, what it refuses, and with which words."""

import json
import shutil

import pytest
import torch

from runners.jobs.loading import fresh_model, load_folder, parameter_count, stored_quantisation
from runners.jobs.model_files import MODEL_ROOTS_VARIABLE, model_folder
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import FolderModel
from tests.runners.jobs.test_model_files import CPU
from tests.runners.jobs.tiny import TINY_CONFIG


@pytest.fixture
def folder(host, trained):
    path = host.path / "models" / "tiny"
    shutil.copytree(trained.folder / "output" / "model", path)
    yield path
    shutil.rmtree(path)


def test_a_folder_below_the_models_root_is_found(host, folder):
    assert model_folder(FolderModel(path="tiny"), host.path) == folder.resolve()


def test_an_absolute_path_below_a_root_is_found(host, folder):
    assert model_folder(FolderModel(path=str(folder)), host.path) == folder.resolve()


@pytest.mark.parametrize("path", ["/etc", "../../..", "tiny/../../attempts", "."])
def test_a_path_outside_the_roots_is_refused(host, folder, path):
    with pytest.raises(MissingModelError, match=f"outside .*{MODEL_ROOTS_VARIABLE}"):
        model_folder(FolderModel(path=path), host.path)


def test_a_further_root_lets_its_folders_in(host, folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "mine")
    monkeypatch.setenv(MODEL_ROOTS_VARIABLE, str(tmp_path))

    assert model_folder(FolderModel(path=str(tmp_path / "mine")), host.path).name == "mine"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_says_what_it_lacks(host, folder, name):
    (folder / name).unlink()

    with pytest.raises(MissingModelError, match=r"lacks .*(config.json|safetensors)"):
        model_folder(FolderModel(path="tiny"), host.path)


def test_pickled_weights_are_not_read(host, folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")

    with pytest.raises(MissingModelError, match="safetensors"):
        model_folder(FolderModel(path="tiny"), host.path)


def test_code_in_a_model_folder_does_not_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    with pytest.raises(BadInputError, match="cannot load"):
        load_folder(folder, "fp32", CPU)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_plain_weights_are_held_in_the_asked_dtype(folder, dtype, expected):
    model = load_folder(folder, dtype, CPU)

    assert {each.dtype for each in model.parameters()} == {expected}


def test_a_quantised_folder_knows_its_dtype(int8, int4):
    folders = [each.folder / "output" / "model" for each in (int8, int4)]

    assert [stored_quantisation(each) for each in folders] == ["int8", "int4"]


def test_a_quantised_folder_loads_in_no_other_dtype(int8):
    with pytest.raises(BadInputError, match="holds int8 weights: load it as int8"):
        load_folder(int8.folder / "output" / "model", "bf16", CPU)


def test_a_quantisation_that_is_not_ours_is_named(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(BadInputError, match="'gptq'"):
        stored_quantisation(folder)


def test_parameters_are_counted_without_the_packing(int4):
    model = load_folder(int4.folder / "output" / "model", "int4", CPU)
    plain = fresh_model(TINY_CONFIG, torch.float32)

    assert parameter_count(model.config) == sum(each.numel() for each in plain.parameters())
