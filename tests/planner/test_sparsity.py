"""Zeros among the weights: what they save, and where they save nothing."""

import pytest

from planner.catalog.devices import get_device
from planner.cost.weights import GEMM_SPEEDUP, has_sparse_cores, stored_bits
from tests.planner.asking import ask, held


def pruned(sparsity=0.5, **fields):
    return ask(strategy={"sparsity": sparsity}, **{"engine": "vllm", **fields})


def of_linear(found, group="prefill"):
    return next(t.value for t in found.terms if t.key == "linear" and t.group == group)


@pytest.mark.parametrize(("bits", "stored"), [(16, 9), (8, 5), (4, 3)])
def test_two_of_four_weights_and_their_indices_are_stored(bits, stored):
    assert stored_bits(bits) == stored


def test_half_of_the_weights_in_fours_saves_memory_and_reads():
    dense, half = ask(engine="vllm"), pruned()

    assert 0.56 < held(half, "weights") / held(dense, "weights") < 0.65
    assert of_linear(half, "decode") < 0.6 * of_linear(dense, "decode")


def test_products_gain_what_was_measured_and_not_the_twofold_peak():
    ratio = of_linear(ask(engine="vllm")) / of_linear(pruned())

    assert ratio == pytest.approx(GEMM_SPEEDUP)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sparsity": 0.6}, "two zeros in every four"),
        ({"engine": "llama_cpp"}, "has no 2:4 kernels"),
        ({"device": "v100"}, "no sparse tensor cores"),
        ({"device": "mi300x"}, "no sparse tensor cores"),
    ],
)
def test_zeros_that_nothing_skips_save_nothing_and_the_answer_says_why(fields, reason):
    found = pruned(**fields)
    dense = ask(**{"engine": "vllm", **{k: v for k, v in fields.items() if k != "sparsity"}})

    assert any("saves neither" in w and reason in w for w in found.warnings)
    assert found.memory == dense.memory
    assert found.performance == dense.performance


@pytest.mark.parametrize(("device", "has"), [("a100", True), ("l4", True), ("t4", False)])
def test_sparse_cores_came_with_ampere(device, has):
    assert has_sparse_cores(get_device(device)) is has
