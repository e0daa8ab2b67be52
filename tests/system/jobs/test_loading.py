"""The one door to models: what it lets in, what it refuses, and with which words."""

import json
import shutil

import pytest
import torch

from runners.jobs.loading import (
    fresh_model,
    load_folder,
    load_model,
    parameter_count,
    quantised_matrices,
    ready,
    require_tokenizer,
    stored_quantisation,
)
from runners.jobs.model_folders import MODEL_ROOTS_VARIABLE, model_folder
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import ArtefactModel, BenchmarkSpec, FolderModel, RandomModel
from tests.runners.jobs.tiny import TINY, TINY_CONFIG
from tests.system.jobs.harness import PROJECT

CPU = torch.device("cpu")
CONFIGS = PROJECT / "planner" / "catalog" / "data" / "configs"


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


def test_a_link_out_of_the_roots_is_refused(host, tmp_path):
    link = host.path / "models" / "link"
    link.symlink_to(tmp_path)

    with pytest.raises(MissingModelError, match="outside"):
        model_folder(FolderModel(path="link"), host.path)

    link.unlink()


def test_a_further_root_lets_its_folders_in(host, folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "mine")
    monkeypatch.setenv(MODEL_ROOTS_VARIABLE, str(tmp_path))

    assert model_folder(FolderModel(path=str(tmp_path / "mine")), host.path).name == "mine"


def test_an_artefact_cannot_climb_out_of_the_attempts(host):
    with pytest.raises(MissingModelError, match="outside"):
        model_folder(ArtefactModel(attempt_id="../../../..", name="etc"), host.path)


def test_an_absent_folder_is_named(host):
    with pytest.raises(MissingModelError, match="models/nowhere on this host"):
        model_folder(FolderModel(path="nowhere"), host.path)


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


def test_the_quantised_matrices_are_all_linear_layers_but_the_head():
    names = quantised_matrices(fresh_model(TINY_CONFIG, torch.float32))

    assert len(names) == 2 * 7
    assert "lm_head" not in names


def test_parameters_are_counted_without_the_packing(int4):
    model = load_folder(int4.folder / "output" / "model", "int4", CPU)
    plain = fresh_model(TINY_CONFIG, torch.float32)

    assert parameter_count(model.config) == sum(each.numel() for each in plain.parameters())


def test_casting_weights_leaves_the_rotary_frequencies_alone():
    model = ready(fresh_model(TINY_CONFIG, torch.float32), dtype=torch.bfloat16)

    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in model.buffers()} == {torch.float32}


def test_random_weights_repeat_with_their_seed(make_job):
    job = make_job(BenchmarkSpec(model=RandomModel(config=TINY_CONFIG), seed=5))

    first, second = (load_model(job, job.spec.model, "fp32", CPU).model for _ in range(2))

    assert torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_random_weights_have_no_tokenizer(make_job):
    job = make_job(BenchmarkSpec(model=RandomModel(config=TINY_CONFIG)))
    loaded = load_model(job, job.spec.model, "fp32", CPU)

    with pytest.raises(MissingModelError, match=r"tokenizer\.json, which perplexity needs"):
        require_tokenizer(loaded, "perplexity")


def test_random_weights_of_the_demo_shape_have_its_parameters(make_job):
    job = make_job(BenchmarkSpec(model=TINY))

    loaded = load_model(job, job.spec.model, "fp32", CPU)

    assert loaded.num_parameters == sum(each.numel() for each in loaded.model.parameters())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_random_weights_leave_no_folder_behind(make_job, dtype):
    job = make_job(BenchmarkSpec(model=RandomModel(config=TINY_CONFIG)))

    load_model(job, job.spec.model, dtype, CPU)

    assert list(job.scratch_dir().iterdir()) == []


@pytest.mark.parametrize(
    ("name", "published"),
    [
        pytest.param("facebook--opt-13b", 12_853_473_280, id="OPT 13B: ffn_dim"),
        pytest.param("tiiuae--falcon-7b", 6_921_720_704, id="Falcon 7B: derived head_dim"),
        pytest.param("meta-llama--Meta-Llama-3.1-8B", 8_030_261_248, id="Llama 3.1 8B"),
        pytest.param("EleutherAI--gpt-neox-20b", 20_554_567_680, id="GPT-NeoX 20B"),
    ],
)
def test_catalog_configs_build_models_of_their_published_size(name, published):
    config = json.loads((CONFIGS / f"{name}.json").read_text())

    with torch.device("meta"):
        model = fresh_model(config, torch.bfloat16)

    assert sum(each.numel() for each in model.parameters()) == published


def test_rows_that_do_not_fill_nf4_blocks_are_refused(make_job):
    config = {**TINY_CONFIG, "intermediate_size": 96}
    job = make_job(BenchmarkSpec(model=RandomModel(config=config)))

    with pytest.raises(BadInputError, match=r"down_proj has rows of 96.*multiples of 64"):
        load_model(job, job.spec.model, "int4", CPU)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"model_type": "no-such-thing"}, id="unknown architecture"),
        pytest.param({}, id="no architecture"),
        pytest.param({**TINY_CONFIG, "num_attention_heads": "many"}, id="a word for a number"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(config):
    with pytest.raises(BadInputError, match=r"config\.json describes no model"):
        fresh_model(config, torch.float32)
