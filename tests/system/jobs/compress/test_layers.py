"""One layer in memory at a time gives what the whole model gives."""

import pytest
import torch

from runners.jobs.compress.layerwise import calibration_samples
from runners.jobs.loading import LayerwiseModel, load_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(trained):
    return trained.folder / "output" / "model"


@pytest.fixture
def ids():
    return torch.randint(0, 512, (5, 24), generator=torch.Generator().manual_seed(3))


def on_meta(layer):
    return {parameter.device.type for parameter in layer.parameters()} == {"meta"}


def test_only_the_layer_whose_turn_it_is_has_weights(folder):
    model = LayerwiseModel(folder, CPU, torch.bfloat16)

    model.load_layer(1)

    assert [on_meta(layer) for layer in model.layers] == [True, False]
    model.drop_layer(1)
    assert all(on_meta(layer) for layer in model.layers)


@torch.inference_mode()
def test_layer_by_layer_the_logits_are_those_of_the_whole_model(folder, ids):
    whole = load_folder(folder, "fp32", CPU)(ids, logits_to_keep=7).logits
    model = LayerwiseModel(folder, CPU, torch.float32)

    hidden, extras = model.embed(ids)
    for index in range(len(model.layers)):
        model.load_layer(index)
        hidden = model.run(index, hidden, extras[index])
        model.drop_layer(index)

    assert torch.allclose(model.logits(hidden, ids, 7), whole, atol=1e-4)


def test_every_stored_tensor_belongs_to_a_layer_or_stands_around_them(folder):
    model = LayerwiseModel(folder, CPU, torch.bfloat16)

    around = model.names_around()

    assert around == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert len(model.reader.names) == len(around) + 2 * 9


def test_calibration_pieces_depend_on_the_seed_alone():
    text = torch.arange(1000).numpy()

    first, again, other = (calibration_samples(text, 50, 500, seed) for seed in (1, 1, 2))

    assert first.shape == (10, 50)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
