"""Second-order methods against round-to-nearest on the same matrix and the same text."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from runners.jobs.compress.quantization import (
    Grid,
    IllConditionedError,
    InputStatistics,
    gptq,
    inverse_factor,
    output_error,
    quantease,
    quantease_with_outliers,
    round_to_nearest,
)

BITS = pytest.mark.parametrize("bits", [2, 3, 4])
F32 = torch.float32


def error_of(layer, result):
    weight, statistics = layer
    return output_error(weight, result.weight(), statistics.gram)


def nearest_of(layer, bits):
    return round_to_nearest(layer[0], Grid(bits, 32), F32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_weight_that_fits_is_further_off_than_half_a_step(bits, layer):
    grid = Grid(bits, 32)
    codes = round_to_nearest(layer[0], grid, F32)
    steps = codes.scales.repeat_interleave(32, dim=1)
    inside = layer[0] / steps <= grid.highest

    distance = (codes.weight() - layer[0]).abs() / steps

    assert codes.values.min() >= grid.lowest
    assert codes.values.max() <= grid.highest
    assert distance[inside].max() <= 0.5 + 1e-5


def test_a_row_that_ends_within_a_group_is_rounded_to_its_end():
    weight = torch.linspace(-1, 1, 70).repeat(2, 1)

    codes = round_to_nearest(weight, Grid(8, 64), F32)

    assert codes.scales.shape == (2, 2)
    assert torch.allclose(codes.weight(), weight, atol=0.01)


def test_a_group_of_zeros_stays_zero():
    codes = round_to_nearest(torch.zeros(2, 32), Grid(4, 32), F32)

    assert codes.weight().count_nonzero() == 0


@BITS
def test_stored_bytes_are_those_of_the_packed_codes_and_the_scales(bits, layer):
    codes = nearest_of(layer, bits)

    packed = pack_to_int32(codes.values, bits)

    assert codes.stored_bytes == packed.numel() * 4 + codes.scales.numel() * 4


@BITS
@pytest.mark.parametrize("is_act_ordered", [False, True])
def test_gptq_errs_less_than_the_nearest_codes(bits, is_act_ordered, layer):
    weight, statistics = layer

    found = gptq(weight, statistics.gram, Grid(bits, 32), F32, is_act_ordered=is_act_ordered)

    assert error_of(layer, found) < 0.8 * error_of(layer, nearest_of(layer, bits))


def test_gptq_on_inputs_that_do_not_depend_on_each_other_is_round_to_nearest(layer):
    weight, _statistics = layer

    found = gptq(weight, torch.eye(weight.shape[1]), Grid(4, 32), F32)

    assert torch.equal(found.values, nearest_of(layer, 4).values)


def test_gptq_in_blocks_equals_gptq_column_by_column(layer):
    """The paper's algorithm without its lazy blocks, written out."""
    weight, statistics = layer
    grid, rest = Grid(4, 192), layer[0].clone()
    factor = inverse_factor(statistics.gram)
    scales = round_to_nearest(weight, grid, F32).scales
    plain = torch.zeros_like(weight)
    for column in range(weight.shape[1]):
        code = (rest[:, column] / scales[:, 0]).round().clamp(grid.lowest, grid.highest)
        plain[:, column] = code
        error = (rest[:, column] - code * scales[:, 0]) / factor[column, column]
        rest[:, column:] -= error[:, None] * factor[column, column:][None]

    found = gptq(weight, statistics.gram, grid, F32)

    assert (found.values != plain).float().mean() < 0.002


@BITS
def test_quantease_errs_less_than_the_nearest_codes(bits, layer):
    weight, statistics = layer

    found = quantease(weight, statistics.gram, Grid(bits, 32), F32)

    assert error_of(layer, found) < 0.8 * error_of(layer, nearest_of(layer, bits))


@BITS
def test_quantease_improves_what_gptq_found(bits, layer):
    weight, statistics = layer
    start = gptq(weight, statistics.gram, Grid(bits, 32), F32)

    found = quantease(weight, statistics.gram, Grid(bits, 32), F32, start=start)

    assert error_of(layer, found) < error_of(layer, start)


@pytest.mark.parametrize("bits", [2, 3])
def test_a_percent_of_outliers_in_16_bit_helps_quantease(bits, layer):
    weight, statistics = layer
    plain = quantease(weight, statistics.gram, Grid(bits, 32), F32)

    found = quantease_with_outliers(weight, statistics.gram, Grid(bits, 32), F32, share=0.01)

    assert error_of(layer, found) < 0.8 * error_of(layer, plain)
    assert found.outliers.count_nonzero() == round(0.01 * weight.numel())
    assert found.stored_bytes > plain.stored_bytes


def test_an_input_that_never_occurs_breaks_neither_method(layer):
    weight, statistics = layer
    gram = statistics.gram.clone()
    gram[5], gram[:, 5] = 0.0, 0.0

    for found in (gptq(weight, gram, Grid(4, 32), F32), quantease(weight, gram, Grid(4, 32), F32)):
        assert found.weight().isfinite().all()


def test_inputs_that_are_not_numbers_are_an_error_by_name():
    gram = torch.full((4, 4), float("nan"))

    with pytest.raises(IllConditionedError, match="has no inverse"):
        inverse_factor(gram)


def test_the_factor_gives_the_inverse_of_the_damped_hessian(layer):
    gram = layer[1].gram
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram))

    factor = inverse_factor(gram)

    assert torch.allclose(factor.T @ factor @ damped, torch.eye(len(gram)), atol=1e-3)


def test_statistics_of_parts_are_those_of_the_whole():
    inputs = torch.randn(6, 10, 8)
    whole, parts = InputStatistics(8), InputStatistics(8)
    whole.add(inputs)
    for part in inputs:
        parts.add(part)

    assert torch.allclose(whole.gram, parts.gram, atol=1e-4)
    assert torch.allclose(whole.norms, inputs.flatten(0, 1).norm(dim=0))
    assert torch.allclose(parts.mean_absolute, inputs.abs().mean(dim=(0, 1)))
    assert parts.num_tokens == 60
