"""Every method of compression: what it writes, what it takes, what it does not fit."""

import pytest

from planner.catalog.models import get_model
from planner.cost.compression import RECIPES, matrices, written_bytes
from planner.cost.parameters import count_parameters
from planner.errors import NotPossibleError
from tests.planner.asking import LLAMA_8B, MIXTRAL, ask

DENSE = sorted(set(RECIPES) - {"qmoe"})


def compressed(method, model=LLAMA_8B, **workload):
    workload = {"kind": "compress", "method": method, **workload}
    return ask(model=model, workload=workload, device="b300-sxm")


def term(found, key):
    return sum(one.value for one in found.terms if one.key == key)


@pytest.mark.parametrize("method", DENSE)
def test_what_is_written_is_never_more_than_what_was_read(method):
    found = compressed(method)
    source = 2 * count_parameters(get_model(LLAMA_8B)).total

    assert 0 < term(found, "written_bytes") <= source
    assert found.memory.disk_bytes == pytest.approx(source + term(found, "written_bytes"), abs=2)


@pytest.mark.parametrize("method", DENSE)
def test_a_method_with_calibration_text_takes_longer_than_rounding(method):
    rounding = compressed("int8_weight_only").performance.duration_seconds

    found = compressed(method).performance.duration_seconds
    assert found > rounding if RECIPES[method].is_calibrated else found <= 1.01 * rounding


@pytest.mark.parametrize("method", ["gptq", "sparsegpt", "norm_tweaking", "quantease"])
def test_second_order_methods_hold_a_layers_hessians(method):
    """Six matrices read 4,096 columns, one reads 14,336; three more of the widest to solve it."""
    held = compressed(method).memory.breakdown_bytes["buffers"]

    hessians = 6 * 4096**2 + 14336**2 + 3 * 14336**2
    assert held == pytest.approx(4 * (hessians + 4096 * 14336), abs=2)


def test_structural_pruning_leaves_four_fifths_of_the_linear_weights():
    counts = count_parameters(get_model(LLAMA_8B))
    whole, pruned = (
        term(compressed(name), "written_bytes") for name in ("sparsegpt", "llm_pruner")
    )

    assert whole - pruned == pytest.approx(2 * 0.2 * counts.layer_linear)


def test_coordinate_descent_repeats_the_column_updates():
    gptq, quantease = (
        term(compressed(name), "second_order_flops") for name in ("gptq", "quantease")
    )

    assert gptq < quantease < 25 * gptq


@pytest.mark.parametrize("name", [LLAMA_8B, MIXTRAL, "Qwen/Qwen3-30B-A3B", "facebook/opt-13b"])
def test_the_matrices_of_a_model_are_all_its_linear_weights(name):
    model = get_model(name)
    whole = sum(inputs * outputs * count for inputs, outputs, count in matrices(model))

    assert whole == count_parameters(model).layer_linear


def test_qmoe_packs_experts_alone():
    counts = count_parameters(get_model(MIXTRAL))
    found = compressed("qmoe", model=MIXTRAL)

    rest = counts.total - counts.experts
    assert term(found, "written_bytes") == pytest.approx(2 * rest + counts.experts * 0.1)


def test_qmoe_needs_experts():
    with pytest.raises(NotPossibleError, match=r"Llama-3\.1-8B is dense"):
        compressed("qmoe")


@pytest.mark.parametrize("method", ["norm_tweaking", "quantease", "finequant"])
def test_a_method_without_a_table_of_its_own_borrows_no_other_methods(method):
    quality = compressed(method).quality

    assert quality.loss_ratio is None
    assert "no published table" in quality.evidence[0]


def test_pruned_columns_cost_what_llm_pruners_table_says():
    low, middle, high = compressed(
        "llm_pruner", model="huggyllama/llama-7b"
    ).quality.perplexity_ratio

    assert low < middle < high
    assert 1.3 < middle < 2.5


def test_written_bytes_are_plain_ones_and_packed_ones():
    assert float(written_bytes(plain_bytes=10, parameters=100, bytes_per_element=0.5)) == 60.0
