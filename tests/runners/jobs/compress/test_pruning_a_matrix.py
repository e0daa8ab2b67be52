"""Fewer weights: SparseGPT against Wanda against magnitude, and Sheared LLaMA."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runners.jobs.compress import compressed_store
from runners.jobs.compress.compressed_store import LayerStore
from runners.jobs.compress.pruning import magnitude, sparsegpt, wanda
from runners.jobs.compress.quantization import output_error
from runners.jobs.compress.shearing import (
    Masks,
    Progress,
    PruningState,
    Recovery,
    apply_masks,
    prune_to_indices,
    recover,
    shape_of,
    train_masks,
)
from runners.jobs.corpus import Document, Domains, domain_of
from runners.jobs.runtime import BadInputError
from runners.jobspec.compress import Shape, Shear
from tests.runners.jobs.cases import refused


def pruned_by(method, layer, pattern, sparsity=0.5):
    weight, statistics = layer
    if method == "magnitude":
        return magnitude(weight, sparsity, pattern)
    if method == "wanda":
        return wanda(weight, statistics.norms, sparsity, pattern)
    return sparsegpt(weight, statistics.gram, sparsity, pattern)


def error_of(layer, pruned):
    return output_error(layer[0], pruned, layer[1].gram)


def test_errors_fall_from_magnitude_over_wanda_to_sparsegpt(layer):
    for pattern in ("unstructured", "2:4"):
        plain, weighed, solved = (
            error_of(layer, pruned_by(method, layer, pattern))
            for method in ("magnitude", "wanda", "sparsegpt")
        )
        assert solved < 0.8 * weighed, pattern
        assert weighed < plain, pattern


def test_two_of_four_and_the_share_that_was_asked_for_are_zero_and_the_rest_stays(layer):
    for method in ("magnitude", "wanda", "sparsegpt"):
        kept = pruned_by(method, layer, "2:4").view(len(layer[0]), -1, 4).count_nonzero(dim=2)
        assert (kept == 2).all(), method

    for method in ("magnitude", "wanda", "sparsegpt"):
        for sparsity in (0.25, 0.5, 0.75):
            pruned = pruned_by(method, layer, "unstructured", sparsity)
            assert float((pruned == 0).double().mean()) == pytest.approx(sparsity, abs=0.005), (
                method,
                sparsity,
            )

    for method in ("magnitude", "wanda"):
        pruned = pruned_by(method, layer, "unstructured")
        assert torch.equal(pruned[pruned != 0], layer[0][pruned != 0]), method


def test_rows_that_do_not_divide_into_fours_are_refused(layer):
    for method in ("magnitude", "wanda", "sparsegpt"):
        cut = (layer[0][:, :190], type(layer[1])(190))
        cut[1].gram = layer[1].gram[:190, :190]
        with refused(ValueError, "rows of 190 weights do not divide into blocks of 4", method):
            pruned_by(method, cut, "2:4")


def test_the_sparse_store_takes_a_bit_a_weight_and_the_values(layer):
    pruned = pruned_by("magnitude", layer, "unstructured").to(torch.bfloat16)
    stored = compressed_store.encode(pruned)
    found = sum(stored[name].numel() * stored[name].element_size() for name in ("mask", "values"))
    assert compressed_store.stored_bytes(pruned) == found
    assert found / (pruned.numel() * 2) == pytest.approx(0.5 + 1 / 16, abs=0.001)

    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 5), (8, 16)):
            weight = torch.randn(shape).to(dtype) * (torch.rand(shape) < 0.4)
            stored = compressed_store.encode(weight)
            assert torch.equal(compressed_store.decode(stored), weight), (dtype, shape)


# Sheared LLaMA on a really trained model: masks, the cut, and text drawn by domain.

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


def test_cutting_what_masks_hide_changes_nothing(ids):
    for is_tied in (False, True):
        torch.manual_seed(3)
        config = LlamaConfig(**{**SMALL.to_dict(), "tie_word_embeddings": is_tied})
        model = LlamaForCausalLM(config).eval()
        kept = Masks(FULL, seed=1).indices_to_keep(PART)
        values = {
            name: torch.zeros_like(each) for name, each in Masks(FULL, seed=1).logits.items()
        }
        for name, places in kept.items():
            values[name].scatter_(-1, places, 1.0)
        with torch.no_grad(), apply_masks(model, values):
            hidden = model(ids).logits

        prune_to_indices(model, kept, PART)

        with torch.no_grad():
            assert torch.allclose(model(ids).logits, hidden, atol=1e-4)
        assert shape_of(model.config) == PART, is_tied


def test_masks_of_ones_change_nothing(model, ids):
    values = {name: torch.ones_like(each) for name, each in Masks(FULL, seed=1).logits.items()}
    with torch.no_grad():
        plain = model(ids).logits
        with apply_masks(model, values):
            assert torch.equal(model(ids).logits, plain)
        assert torch.equal(model(ids).logits, plain)


def test_more_is_drawn_of_the_domain_that_is_behind_and_no_less_of_one_ahead(domains):
    before = dict(domains.weights)
    domains.follow({"code": 1.0, "prose": 2.0}, {"code": 3.0, "prose": 3.0})
    assert domains.weights == pytest.approx(before)
    domains.follow({"code": 3.0, "prose": 4.0}, {"code": 3.0, "prose": 3.0})
    odds = domains.weights["prose"] / domains.weights["code"]
    assert odds == pytest.approx(np.e * before["prose"] / before["code"])
    drawn = (domains.batch(400) >= 64).all(dim=1).double().mean().item()
    assert drawn == pytest.approx(domains.weights["prose"], abs=0.1)


def test_domains_are_code_and_prose_of_enough_text():
    names = ("python/json/__init__.py", "common-licenses/GPL-3", "docs/hosts.md")
    assert [domain_of(Document(name, "")) for name in names] == ["code", "prose", "prose"]
    with pytest.raises(BadInputError, match="the prose text of this host has 30 tokens"):
        Domains({"prose": np.zeros(30, np.int32)}, 24, 5)


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
            masks = train_masks(model, texts, PART, shear, step, progress)
            prune_to_indices(model, masks.indices_to_keep(PART), PART)
            found = progress.document.get("pruned") or pruned
            recover(model, texts, Recovery(masks, REFERENCE, found, progress), shear, step)
        except KilledError:
            continue
        return model, texts.weights


@pytest.mark.faults
def test_a_killed_pruning_makes_the_steps_that_an_unbroken_one_makes(tmp_path):
    whole, weights = sheared(tmp_path / "whole")
    for killed_at in ((3,), (6,), (2, 4, 3)):
        again, resumed_weights = sheared(tmp_path / f"killed {killed_at}", killed_at=killed_at)
        assert resumed_weights == weights, killed_at
        for (name, ours), theirs in zip(again.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs), (killed_at, name)


def test_a_resumed_compression_of_another_model_is_refused_by_name(tmp_path):
    old, new = {"model": "a" * 64}, {"model": "b" * 64}
    refusal = r"model \(sha256 aaaaaaaaaaaa, now bbbbbbbbbbbb\) changed since"
    tensors = {"w": torch.ones(2)}
    LayerStore(tmp_path, "settings", old).write("layer-0", tensors, {"error": 1.0})
    assert LayerStore(tmp_path, "settings", old).read("layer-0")[1] == {"error": 1.0}
    assert LayerStore(tmp_path, "other settings", new).read("layer-0") is None
    with pytest.raises(BadInputError, match=f"{refusal} the finished layer layer-0"):
        LayerStore(tmp_path, "settings", new).read("layer-0")
    LayerStore(tmp_path, "settings").write("layer-1", tensors, {})
    store = LayerStore(tmp_path, "settings", new)
    assert store.read("layer-1") is not None
    assert "could not be checked" in store.remark

    learner = PruningState({}, {}, np.random.default_rng(0))
    folder = tmp_path / "shear"
    assert Progress(folder, inputs=new).check() == ""
    Progress(folder, inputs=old).keep("masks", 3, learner, {}, is_due=True)
    assert Progress(folder, inputs=old).check() == ""
    with pytest.raises(BadInputError, match=f"{refusal} the checkpoint at step 3"):
        Progress(folder, inputs=new).check()
