"""LLM-Pruner on a really trained model: what is left is a smaller model that any loader reads."""

import argparse
import inspect
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from runners.jobs.compress.job import work
from runners.jobs.compress.pruning import PrunedSizes, prune, pruned_sizes, taylor_scores
from runners.jobs.compress.whole_model import recover
from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError
from runners.jobspec import CompressSpec, RandomModel
from tests.runners.jobs.tiny import SHORT, TINY_CONFIG

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def finished(host, trained_model):
    fields = {"calibration_tokens": 2048, **SHORT}
    spec = CompressSpec(model=trained_model, method="llm_pruner", sparsity=0.5, **fields)
    return host.run_here("compress-llm-pruner", spec, work)


@pytest.fixture
def model(trained):
    return load_folder(trained.folder / "output" / "model", "fp32", CPU)


@pytest.fixture
def ids():
    return torch.randint(0, 512, (6, 32), generator=torch.Generator().manual_seed(1))


def test_the_folder_is_a_smaller_model_of_one_shape(finished):
    folder = finished.folder / "output" / "model"
    config = json.loads((folder / "config.json").read_text())

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    shape = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[name] for name in shape] == [64, 2, 1, 16]
    assert model.model.layers[1].mlp.down_proj.weight.shape == (64, 64)
    assert "quantization_config" not in config


def test_half_of_the_layers_parameters_are_gone_from_disk(finished):
    measured = finished.measured

    assert measured["compressed_bytes"] == pytest.approx(0.5 * measured["original_matrix_bytes"])
    assert measured["removed_parameters_share"] > 0.25
    assert measured["disk_bytes"] < 0.75 * measured["original_disk_bytes"]
    assert 0.9 < measured["perplexity_ratio"] < 2.0


def test_recovery_brings_the_text_nearer_again_and_leaves_no_adapter(model, ids):
    ids = ids.repeat(4, 1)
    prune(model, taylor_scores(model, ids, 4), pruned_sizes(model.config, 0.5))
    names = set(model.state_dict())

    before = float(model(ids, labels=ids).loss)
    model = recover(model, ids, 20, 4)

    assert float(model(ids, labels=ids).loss) < before
    assert set(model.state_dict()) == names


def test_a_job_that_recovers_says_its_perplexity_before_and_after(host, trained_model):
    fields = {"calibration_tokens": 2048, **SHORT}
    spec = CompressSpec(
        model=trained_model, method="llm_pruner", sparsity=0.5, recovery_steps=40, **fields
    )

    measured = host.run_here("compress-recovered", spec, work).measured

    assert measured["unrecovered_perplexity"] != measured["perplexity"]
    assert measured["perplexity"] < 1.1 * measured["unrecovered_perplexity"]


def test_the_card_says_what_was_removed(finished):
    card = (finished.folder / "output" / "model" / "README.md").read_text()

    assert "| sparsity | 0.5 |" in card
    assert "LLM-Pruner" in card


def test_what_weighs_least_goes_and_the_rest_keeps_its_values(model, ids):
    before = model.model.layers[0].mlp.gate_proj.weight.clone()
    scores = {name: torch.ones_like(p) for name, p in model.named_parameters() if "_proj" in name}
    for name in ("gate", "up"):
        scores[f"model.layers.0.mlp.{name}_proj.weight"][:96] = 0.0
    scores["model.layers.0.mlp.down_proj.weight"][:, :96] = 0.0

    prune(model, scores, PrunedSizes(channels=32, key_value_heads=1))

    assert torch.equal(model.model.layers[0].mlp.gate_proj.weight, before[96:])
    assert model(ids).logits.isfinite().all()


@torch.no_grad()
def loss_without_half(model, ids, scores):
    prune(model, scores, PrunedSizes(channels=64, key_value_heads=2))
    return model(ids, labels=ids).loss.item()


def test_gradients_choose_better_than_their_opposite(trained):
    folder, losses = trained.folder / "output" / "model", []
    text = load_tokenizer(folder)(inspect.getsource(argparse))["input_ids"]
    ids = torch.tensor(text[:2048]).view(32, 64)  # of what it was trained on: noise says nothing
    for sign in (1, -1):
        model = load_folder(folder, "fp32", CPU)
        scores = taylor_scores(model, ids, 2)
        losses.append(loss_without_half(model, ids, {n: sign * s for n, s in scores.items()}))

    assert losses[0] < losses[1]


def test_pruning_nothing_of_a_model_leaves_what_it_computes(model, ids):
    with torch.no_grad():
        before = model(ids).logits
    scores = taylor_scores(model, ids, 2)

    prune(model, scores, PrunedSizes(channels=128, key_value_heads=2))

    assert torch.allclose(model(ids).logits, before)


def test_a_share_that_removes_nothing_is_refused_with_the_way_out():
    config = LlamaConfig(intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)

    with pytest.raises(BadInputError, match=r"sparsity 0\.05 removes nothing .* larger share"):
        pruned_sizes(config, 0.05)


def test_random_weights_are_not_cut(make_job):
    job = make_job(CompressSpec(model=RandomModel(config=TINY_CONFIG), method="llm_pruner"))

    with pytest.raises(Exception, match="has no trained weights"):
        work(job)
