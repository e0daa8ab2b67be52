"""Sheared LLaMA on a really trained model: masks, the cut, and text drawn by domain."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from runners.jobs import corpus
from runners.jobs.compress.job import work
from runners.jobs.compress.shearing import train_masks
from runners.jobs.runtime import BadInputError
from runners.jobspec import CompressSpec
from runners.jobspec.compress import Shape, Shear
from tests.runners.jobs.compress.test_pruning_a_matrix import (  # noqa: F401 -- some are fixtures
    FULL,
    PART,
    domains,
    ids,
    model,
)
from tests.runners.jobs.tiny import SHORT

TARGET = Shape(layers=1, hidden_size=48, key_value_heads=1, intermediate_size=64)


@pytest.fixture(scope="module")
def finished(host, trained_model):
    shear = Shear(**TARGET._asdict(), mask_steps=10, recovery_steps=24)
    spec = CompressSpec(model=trained_model, method="sheared_llama", shear=shear, **SHORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "MAX_FILE_BYTES", 20_000)  # a quarter of the text to tokenise
        return host.run_here("compress-sheared", spec, work)


def test_the_folder_is_a_model_of_the_target_shape(finished):
    folder = finished.folder / "output" / "model"
    config = json.loads((folder / "config.json").read_text())

    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    names = ("num_hidden_layers", "hidden_size", "num_key_value_heads", "intermediate_size")
    assert tuple(config[name] for name in names) == TARGET
    assert found.model.layers[0].self_attn.q_proj.weight.shape == (32, 48)


def test_each_domains_loss_is_reported_before_pruned_and_after(finished):
    measured = finished.measured

    for name in ("code", "prose"):
        assert measured[f"{name}_loss"] < measured[f"pruned_{name}_loss"]
        assert measured[f"original_{name}_loss"] > 0
    assert measured["code_weight"] + measured["prose_weight"] == pytest.approx(1.0)
    assert measured["removed_parameters_share"] > 0.3


def test_the_card_names_the_steps(finished):
    card = (finished.folder / "output" / "model" / "README.md").read_text()

    assert "Sheared LLaMA (own code)" in card
    assert "| recovery_steps | 24 |" in card


def test_learning_brings_the_expected_shape_to_the_target(model, domains):
    masks = train_masks(model, domains, PART, Shear(mask_steps=120), lambda _step: None)

    for name, share in masks.shares().items():
        wanted = PART.size(name) / FULL.size(name)
        assert share.mean().item() == pytest.approx(wanted, abs=0.15), name


def test_units_that_the_text_needs_stay_before_others(model, domains):
    """Only hidden units 0 to 7 carry what was learnt: the others are empty at both ends."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        ids = domains.batch(8)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 8:] = 0.0
            model.lm_head.weight[:, 8:] = 0.0

    masks = train_masks(model, domains, PART, Shear(mask_steps=60), lambda _step: None)

    logits = masks.logits["hidden"].detach()
    assert logits[:8].mean() > logits[8:].mean()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shear": Shear(layers=3)}, r"shear\.layers is 3 and the model has 2"),
        ({"sparsity": 0.001}, "removes nothing"),
    ],
)
def test_a_target_that_is_no_pruning_is_refused(make_job, trained_model, fields, words):
    with pytest.raises(BadInputError, match=words):
        work(make_job(CompressSpec(model=trained_model, method="sheared_llama", **fields)))


def test_a_finished_pruning_leaves_no_checkpoint(finished):
    assert not list((finished.folder / "checkpoint").glob("*"))
