"""The one door to models: what it lets in, what it refuses, and with which words."""

import json

import pytest
import torch

from runners.jobs.loading import (
    fresh_model,
    load_model,
    quantised_matrices,
    ready,
    require_tokenizer,
)
from runners.jobs.model_files import model_folder
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import ArtefactModel, BenchmarkSpec, FolderModel, RandomModel
from tests.runners.jobs.tiny import TINY, TINY_CONFIG
from tests.system.jobs.harness import PROJECT

CPU = torch.device("cpu")
CONFIGS = PROJECT / "planner" / "catalog" / "data" / "configs"


def test_a_link_out_of_the_roots_is_refused(host, tmp_path):
    link = host.path / "models" / "link"
    link.symlink_to(tmp_path)

    with pytest.raises(MissingModelError, match="outside"):
        model_folder(FolderModel(path="link"), host.path)

    link.unlink()


def test_an_artefact_cannot_climb_out_of_the_attempts(host):
    with pytest.raises(MissingModelError, match="outside"):
        model_folder(ArtefactModel(attempt_id="../../../..", name="etc"), host.path)


def test_an_absent_folder_is_named(host):
    with pytest.raises(MissingModelError, match="models/nowhere on this host"):
        model_folder(FolderModel(path="nowhere"), host.path)


def test_the_quantised_matrices_are_all_linear_layers_but_the_head():
    names = quantised_matrices(fresh_model(TINY_CONFIG, torch.float32))

    assert len(names) == 2 * 7
    assert "lm_head" not in names


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
