"""Sheared LLaMA on a really trained model: masks, the cut, and text drawn by domain."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runners.jobs.compress.shearing import (
    Masks,
    Progress,
    Recovery,
    cut,
    learn,
    masked,
    recover,
    shape_of,
)
from runners.jobs.corpus import Document
from runners.jobs.domains import Domains, domain_of
from runners.jobs.runtime import BadInputError
from runners.jobspec.compress import Shape, Shear

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
