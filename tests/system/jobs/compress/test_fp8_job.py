"""Weights as floats of 8 bits: half the bytes on disk and in memory, products in 16 bit."""

import json

import pytest
import torch

from runners.jobs.compress.job import work
from runners.jobs.loading import load_folder, stored_quantisation
from runners.jobs.runtime import BadInputError
from runners.jobspec import CompressSpec
from tests.runners.jobs.tiny import SHORT


@pytest.fixture(scope="module")
def finished(host, trained_model):
    spec = CompressSpec(model=trained_model, method="fp8", **SHORT)
    return host.run_here("compress-fp8", spec, work)


@pytest.fixture
def folder(finished):
    return finished.folder / "output" / "model"


def test_matrices_take_a_byte_a_weight_and_a_scale_a_row(finished):
    ratio = finished.measured["matrices_bytes"] / finished.measured["original_matrices_bytes"]

    assert 0.5 < ratio < 0.6
    assert 0.95 < finished.measured["perplexity_ratio"] < 1.05


def test_the_folder_says_that_it_holds_8_bit_floats(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]

    assert stored_quantisation(folder) == "fp8"
    assert config["quant_type"]["default"]["_data"]["weight_dtype"]["_data"] == "float8_e4m3fn"


def test_a_reader_holds_them_as_8_bit_floats(folder):
    weight = load_folder(folder, "fp8", torch.device("cpu")).model.layers[0].mlp.up_proj.weight

    assert weight.qdata.dtype == torch.float8_e4m3fn
    assert weight.scale.shape == (128, 1)


def test_it_is_not_taken_for_8_bit_whole_numbers(folder):
    with pytest.raises(BadInputError, match="holds fp8 weights: load it as fp8"):
        load_folder(folder, "int8", torch.device("cpu"))
