"""8-bit weights whose inputs are rounded to 8 bits as well, token by token, by torchao."""

import json

import pytest
import torch

from runners.jobs.compress.job import work
from runners.jobs.loading import load_folder, stored_quantisation
from runners.jobspec import CompressSpec
from tests.runners.jobs.tiny import SHORT

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def finished(host, trained_model):
    spec = CompressSpec(model=trained_model, method="int8_dynamic", **SHORT)
    return host.run_here("compress-int8-dynamic", spec, work)


@pytest.fixture
def folder(finished):
    return finished.folder / "output" / "model"


@pytest.mark.proven
def test_matrices_take_half_and_the_text_reads_nearly_as_before(finished):
    ratio = finished.measured["matrices_bytes"] / finished.measured["original_matrices_bytes"]

    assert 0.5 < ratio < 0.6
    assert 0.95 < finished.measured["perplexity_ratio"] < 1.05


def test_a_reader_rounds_each_tokens_inputs_too(folder):
    """Beside an input of 100, a step is 100 / 127: inputs of 0.3 are less than half of it."""
    layer = load_folder(folder, "int8", CPU).model.layers[0].mlp.up_proj
    inputs = torch.full((1, layer.in_features), 0.3, dtype=torch.bfloat16)
    alone = torch.zeros_like(inputs)
    inputs[0, 5] = alone[0, 5] = 100.0

    assert torch.equal(layer(inputs), layer(alone))
    assert layer(alone).abs().max() > 0


def test_the_folder_and_the_card_say_what_is_rounded(finished, folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]

    assert stored_quantisation(folder) == "int8"
    assert config["quant_type"]["default"]["_type"] == "Int8DynamicActivationInt8WeightConfig"
    assert "activations to 8 bits" in finished.bodies("result")[0]["notes"]["method"]
