"""SparseGPT against Wanda against magnitude, exact patterns, and what the zeros save."""

import pytest
import torch

from runners.jobs.compress import store
from runners.jobs.compress.pruning import magnitude, sparsegpt, wanda, zero_share
from runners.jobs.compress.quantization import output_error

PATTERNS = pytest.mark.parametrize("pattern", ["unstructured", "2:4"])


def pruned_by(method, layer, pattern, sparsity=0.5):
    weight, statistics = layer
    if method == "magnitude":
        return magnitude(weight, sparsity, pattern)
    if method == "wanda":
        return wanda(weight, statistics.norms, sparsity, pattern)
    return sparsegpt(weight, statistics.gram, sparsity, pattern)


def error_of(layer, pruned):
    return output_error(layer[0], pruned, layer[1].gram)


@PATTERNS
def test_errors_fall_from_magnitude_over_wanda_to_sparsegpt(pattern, layer):
    plain, weighed, solved = (
        error_of(layer, pruned_by(method, layer, pattern))
        for method in ("magnitude", "wanda", "sparsegpt")
    )

    assert solved < 0.8 * weighed
    assert weighed < plain


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_two_of_four_holds_exactly_two_of_each_four(method, layer):
    kept = pruned_by(method, layer, "2:4").view(len(layer[0]), -1, 4).count_nonzero(dim=2)

    assert (kept == 2).all()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.75])
def test_the_share_that_was_asked_for_is_zero(method, sparsity, layer):
    pruned = pruned_by(method, layer, "unstructured", sparsity)

    assert zero_share(pruned) == pytest.approx(sparsity, abs=0.005)


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_without_second_order_the_weights_that_stay_keep_their_values(method, layer):
    pruned = pruned_by(method, layer, "unstructured")

    assert torch.equal(pruned[pruned != 0], layer[0][pruned != 0])


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_rows_that_do_not_divide_into_fours_are_refused(method, layer):
    cut = (layer[0][:, :190], type(layer[1])(190))
    cut[1].gram = layer[1].gram[:190, :190]

    with pytest.raises(ValueError, match="rows of 190 weights do not divide into blocks of 4"):
        pruned_by(method, cut, "2:4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (8, 16)])
def test_the_sparse_store_gives_the_matrix_back_bit_for_bit(dtype, shape):
    weight = torch.randn(shape).to(dtype) * (torch.rand(shape) < 0.4)

    stored = store.encode(weight)

    assert torch.equal(store.decode(stored), weight)


def test_the_sparse_store_takes_a_bit_a_weight_and_the_values(layer):
    pruned = pruned_by("magnitude", layer, "unstructured").to(torch.bfloat16)
    stored = store.encode(pruned)

    found = sum(stored[name].numel() * stored[name].element_size() for name in ("mask", "values"))

    assert store.stored_bytes(pruned) == found
    assert found / (pruned.numel() * 2) == pytest.approx(0.5 + 1 / 16, abs=0.001)
