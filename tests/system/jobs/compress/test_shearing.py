"""Sheared LLaMA on a really trained model: masks, the cut, and text drawn by domain."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from runners.jobs import corpus
from runners.jobs.compress.job import work
from runners.jobs.compress.masks import Masks, masked
from runners.jobs.compress.shear_progress import Progress
from runners.jobs.compress.shearing import Recovery, cut, learn, recover, shape_of
from runners.jobs.corpus import Document
from runners.jobs.domains import Domains, domain_of
from runners.jobs.runtime import BadInputError
from runners.jobspec import CompressSpec
from runners.shear_options import Shape, Shear
from tests.runners.jobs.tiny import SHORT

TARGET = Shape(layers=1, hidden_size=48, key_value_heads=1, intermediate_size=64)
SMALL = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    rms_norm_eps=1e-12,  # else a mean over fewer units differs by it
    tie_word_embeddings=False,
)
FULL, PART = Shape(2, 32, 2, 64), Shape(1, 16, 1, 32)
REFERENCE = {"code": 3.0, "prose": 2.5}


@pytest.fixture(scope="module")
def finished(host, trained_model):
    shear = Shear(**TARGET._asdict(), mask_steps=10, recovery_steps=24)
    spec = CompressSpec(model=trained_model, method="sheared_llama", shear=shear, **SHORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "MAX_FILE_BYTES", 20_000)  # a quarter of the text to tokenise
        return host.run_here("compress-sheared", spec, work)


@pytest.fixture
def model():
    torch.manual_seed(3)
    return LlamaForCausalLM(SMALL).eval()


@pytest.fixture
def ids():
    return torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))


def random_domains() -> Domains:
    generator = np.random.default_rng(7)
    texts = {"code": generator.integers(0, 64, 4000), "prose": generator.integers(64, 128, 2000)}
    return Domains({name: each.astype(np.int32) for name, each in texts.items()}, 24, 5)


@pytest.fixture
def domains():
    return random_domains()


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


@pytest.mark.parametrize("is_tied", [False, True])
def test_cutting_what_masks_hide_changes_nothing(ids, is_tied):
    torch.manual_seed(3)
    config = LlamaConfig(**{**SMALL.to_dict(), "tie_word_embeddings": is_tied})
    model = LlamaForCausalLM(config).eval()
    kept = Masks(FULL, seed=1).kept(PART)
    values = {name: torch.zeros_like(each) for name, each in Masks(FULL, seed=1).logits.items()}
    for name, places in kept.items():
        values[name].scatter_(-1, places, 1.0)
    with torch.no_grad(), masked(model, values):
        hidden = model(ids).logits

    cut(model, kept, PART)

    with torch.no_grad():
        assert torch.allclose(model(ids).logits, hidden, atol=1e-4)
    assert shape_of(model.config) == PART


def test_masks_of_ones_change_nothing(model, ids):
    values = {name: torch.ones_like(each) for name, each in Masks(FULL, seed=1).logits.items()}

    with torch.no_grad():
        plain = model(ids).logits
        with masked(model, values):
            assert torch.equal(model(ids).logits, plain)
        assert torch.equal(model(ids).logits, plain)


def test_learning_brings_the_expected_shape_to_the_target(model, domains):
    masks = learn(model, domains, PART, Shear(mask_steps=120), lambda _step: None)

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

    masks = learn(model, domains, PART, Shear(mask_steps=60), lambda _step: None)

    logits = masks.logits["hidden"].detach()
    assert logits[:8].mean() > logits[8:].mean()


def test_more_is_drawn_of_the_domain_that_is_further_behind(domains):
    before = dict(domains.weights)

    domains.follow({"code": 3.0, "prose": 4.0}, {"code": 3.0, "prose": 3.0})

    odds = domains.weights["prose"] / domains.weights["code"]
    assert odds == pytest.approx(np.e * before["prose"] / before["code"])
    drawn = (domains.batch(400) >= 64).all(dim=1).double().mean().item()
    assert drawn == pytest.approx(domains.weights["prose"], abs=0.1)


def test_a_domain_that_is_ahead_is_drawn_no_less_for_it(domains):
    before = dict(domains.weights)

    domains.follow({"code": 1.0, "prose": 2.0}, {"code": 3.0, "prose": 3.0})

    assert domains.weights == pytest.approx(before)


def test_a_domain_with_too_little_text_is_refused():
    with pytest.raises(BadInputError, match="the prose text of this host has 30 tokens"):
        Domains({"prose": np.zeros(30, np.int32)}, 24, 5)


def test_python_is_code_and_manuals_are_prose():
    names = ("python/json/__init__.py", "common-licenses/GPL-3", "docs/hosts.md")

    assert [domain_of(Document(name, "")) for name in names] == ["code", "prose", "prose"]


def test_a_share_is_taken_evenly_from_every_dimension():
    assert Shape(32, 4096, 8, 14336).without(0.5) == Shape(25, 3248, 6, 11392)
    assert Shear(layers=20).target(Shape(32, 4096, 8, 14336), 0.5).layers == 20


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


class KilledError(Exception):
    """Stands for a kill between two steps."""


def sheared(tmp_path, *, killed_at: tuple[int, ...] = ()):
    """Prune and recover a fresh model, killed after some steps, and return its weights."""
    shear, pruned = Shear(mask_steps=4, recovery_steps=4), {"code": 5.0, "prose": 5.0}
    kills = list(killed_at)
    while True:
        made = []

        def step(at, kills=kills, made=made):
            made.append(at)
            if kills and len(made) == kills[0]:
                kills.pop(0)
                raise KilledError

        torch.manual_seed(3)
        own = LlamaConfig(**SMALL.to_dict())  # it is cut with the model
        model, texts = LlamaForCausalLM(own).eval(), random_domains()
        progress = Progress(tmp_path, every_seconds=0.0)
        try:
            masks = learn(model, texts, PART, shear, step, progress)
            cut(model, masks.kept(PART), PART)
            found = progress.document.get("pruned") or pruned
            recover(model, texts, Recovery(masks, REFERENCE, found, progress), shear, step)
        except KilledError:
            continue
        return model, texts.weights


@pytest.mark.faults
@pytest.mark.parametrize("killed_at", [(3,), (6,), (2, 4, 3)])
def test_a_killed_pruning_makes_the_steps_that_an_unbroken_one_makes(tmp_path, killed_at):
    whole, weights = sheared(tmp_path / "whole")

    again, resumed_weights = sheared(tmp_path / "killed", killed_at=killed_at)

    assert resumed_weights == weights
    for (name, ours), theirs in zip(again.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_finished_pruning_leaves_no_checkpoint(finished):
    assert not list((finished.folder / "checkpoint").glob("*"))
