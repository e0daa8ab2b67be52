"""Weights in fewer bits: codes, scales, norms that follow, K-quants, and ternary symbols."""

from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from gguf import GGMLQuantizationType as Type
from gguf import quants
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from runners.jobs.compress.gguf import is_as_written, quantize, type_of
from runners.jobs.compress.job import HOW_LAYERWISE
from runners.jobs.compress.layer_methods import METHODS
from runners.jobs.compress.layer_training import (
    TUNED_METHODS,
    Passage,
    channel_loss,
    norm_weights,
    tune_rounding,
    tweak_norms,
)
from runners.jobs.compress.quantization import (
    IllConditionedError,
    InputStatistics,
    QuantizationGrid,
    best_scales,
    check_shape_known,
    finequant,
    folds_of,
    gptq,
    inverse_factor,
    level_by_logarithm,
    output_error,
    quantease,
    quantease_with_outliers,
    quantise_per_token,
    quantised_inputs,
    round_to_nearest,
    scale_for_rounding,
    smooth,
)
from runners.jobs.runtime import BadInputError
from runners.jobs.weights import CorruptCodeError, decode, encode, entropy_bits
from runners.jobspec import CompressSpec, DemoModel
from runners.jobspec.compress import CompressOptions, JobCompressMethod
from tests.runners.jobs.cases import refused

BITS = (2, 3, 4)
F32 = torch.float32


def error_of(layer, result):
    weight, statistics = layer
    return output_error(weight, result.weight(), statistics.gram)


def nearest_of(layer, bits):
    return round_to_nearest(layer[0], QuantizationGrid(bits, 32), F32)


def test_no_weight_that_fits_is_further_off_than_half_a_step(layer):
    for bits in (2, 3, 4, 8):
        grid = QuantizationGrid(bits, 32)
        codes = round_to_nearest(layer[0], grid, F32)
        steps = codes.scales.repeat_interleave(32, dim=1)
        inside = layer[0] / steps <= grid.highest

        distance = (codes.weight() - layer[0]).abs() / steps

        assert codes.values.min() >= grid.lowest, bits
        assert codes.values.max() <= grid.highest, bits
        assert distance[inside].max() <= 0.5 + 1e-5, bits


def test_rows_are_rounded_to_the_ends_of_their_groups_and_zeros_stay():
    weight = torch.linspace(-1, 1, 70).repeat(2, 1)
    codes = round_to_nearest(weight, QuantizationGrid(8, 64), F32)
    assert codes.scales.shape == (2, 2)
    assert torch.allclose(codes.weight(), weight, atol=0.01)
    codes = round_to_nearest(torch.zeros(2, 32), QuantizationGrid(4, 32), F32)
    assert codes.weight().count_nonzero() == 0


def test_stored_bytes_are_those_of_the_packed_codes_and_the_scales(layer):
    for bits in (2, 3, 4):
        codes = nearest_of(layer, bits)
        packed = pack_to_int32(codes.values, bits)
        assert codes.stored_bytes == packed.numel() * 4 + codes.scales.numel() * 4, bits


def test_gptq_errs_less_than_the_nearest_codes(layer):
    weight, statistics = layer
    for bits in BITS:
        nearest = error_of(layer, nearest_of(layer, bits))
        for is_act_ordered in (False, True):
            found = gptq(
                weight,
                statistics.gram,
                QuantizationGrid(bits, 32),
                F32,
                is_act_ordered=is_act_ordered,
            )
            assert error_of(layer, found) < 0.8 * nearest, (bits, is_act_ordered)


def test_gptq_on_inputs_that_do_not_depend_on_each_other_is_round_to_nearest(layer):
    weight, _statistics = layer
    found = gptq(weight, torch.eye(weight.shape[1]), QuantizationGrid(4, 32), F32)
    assert torch.equal(found.values, nearest_of(layer, 4).values)


def test_gptq_in_blocks_equals_gptq_column_by_column(layer):
    """The paper's algorithm without its lazy blocks, written out."""
    weight, statistics = layer
    grid, rest = QuantizationGrid(4, 192), layer[0].clone()
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


def test_quantease_errs_less_than_the_nearest_codes_and_improves_what_gptq_found(layer):
    weight, statistics = layer
    for bits in BITS:
        grid = QuantizationGrid(bits, 32)
        found = quantease(weight, statistics.gram, grid, F32)
        start = gptq(weight, statistics.gram, grid, F32)
        improved = quantease(weight, statistics.gram, grid, F32, start=start)
        assert error_of(layer, found) < 0.8 * error_of(layer, nearest_of(layer, bits)), bits
        assert error_of(layer, improved) < error_of(layer, start), bits


def test_a_percent_of_outliers_in_16_bit_helps_quantease(layer):
    for bits in (2, 3):
        weight, statistics = layer
        plain = quantease(weight, statistics.gram, QuantizationGrid(bits, 32), F32)
        found = quantease_with_outliers(
            weight, statistics.gram, QuantizationGrid(bits, 32), F32, share=0.01
        )
        assert error_of(layer, found) < 0.8 * error_of(layer, plain), bits
        assert found.outliers.count_nonzero() == round(0.01 * weight.numel()), bits
        assert found.stored_bytes > plain.stored_bytes, bits


def test_an_input_that_never_occurs_breaks_neither_method(layer):
    weight, statistics = layer
    gram = statistics.gram.clone()
    gram[5], gram[:, 5] = 0.0, 0.0
    for found in (
        gptq(weight, gram, QuantizationGrid(4, 32), F32),
        quantease(weight, gram, QuantizationGrid(4, 32), F32),
    ):
        assert found.weight().isfinite().all()


def test_the_factor_gives_the_inverse_of_a_damped_hessian_of_numbers(layer):
    gram = layer[1].gram
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram))
    factor = inverse_factor(gram)
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(len(gram)), atol=1e-3)
    gram = torch.full((4, 4), float("nan"))
    with pytest.raises(IllConditionedError, match="has no inverse"):
        inverse_factor(gram)


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


# Scales that move between a layer's norms and its matrices: outputs stay, rounding loses less.

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=1,
    attn_implementation="eager",
)
WAYS = {
    "awq": partial(scale_for_rounding, grid=QuantizationGrid(4, 32)),
    "smoothquant": partial(smooth, share=0.5),
    "fptq": level_by_logarithm,
}


@pytest.fixture
def block():
    """Return a decoder layer, some channels of whose inputs are large, and what it was shown."""
    torch.manual_seed(5)
    layer = LlamaDecoderLayer(CONFIG, 0).requires_grad_(requires_grad=False)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.data[:3] = 40.0
    inputs = torch.randn(2, 24, 64)
    places = LlamaRotaryEmbedding(CONFIG)(inputs, torch.arange(24)[None])
    linears = {n: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    seen = {name: InputStatistics(each.in_features) for name, each in linears.items()}
    hooks = [
        each.register_forward_pre_hook(lambda _m, given, name=name: seen[name].add(given[0]))
        for name, each in linears.items()
    ]
    run = partial(layer, inputs, position_embeddings=places)
    run()
    for hook in hooks:
        hook.remove()
    return layer, linears, seen, run


@pytest.mark.parametrize("way", list(WAYS))
def test_the_layer_computes_what_it_did_and_its_statistics_are_of_scaled_inputs(way, block):
    layer, linears, seen, run = block
    before, again = run(), InputStatistics(64)
    WAYS[way](layer, linears, seen)
    with linears["mlp.up_proj"].register_forward_pre_hook(lambda _m, given: again.add(given[0])):
        after = run()

    assert not torch.equal(layer.input_layernorm.weight[:3], torch.full((3,), 40.0))
    assert torch.allclose(after, before, atol=1e-4 * before.abs().max().item())
    assert torch.allclose(again.gram, seen["mlp.up_proj"].gram, rtol=1e-3, atol=1e-3)
    assert torch.allclose(again.largest, seen["mlp.up_proj"].largest, rtol=1e-3)


def test_awq_errs_less_than_the_nearest_codes(layer):
    for bits in (3, 4):
        weight, statistics = layer
        grid = QuantizationGrid(bits, 32)
        plain = output_error(
            weight, round_to_nearest(weight, grid, weight.dtype).weight(), statistics.gram
        )

        scales = best_scales([weight], statistics, grid)

        made = round_to_nearest(weight * scales, grid, weight.dtype).weight() / scales
        assert output_error(weight, made, statistics.gram) < 0.9 * plain, bits
        assert (
            scales[statistics.mean_absolute.argmax()] > scales[statistics.mean_absolute.argmin()]
        ), bits


@pytest.mark.parametrize("way", ["smoothquant", "fptq"])
def test_levelled_activations_survive_8_bits_better(way, block):
    layer, linears, seen, run = block
    exact = run()
    with quantised_inputs(linears.values()):
        plain = (run() - exact).square().sum()
    WAYS[way](layer, linears, seen)
    with quantised_inputs(linears.values()):
        levelled = (run() - exact).square().sum()
    assert levelled < 0.8 * plain


def test_smoothing_by_half_makes_inputs_and_weights_equally_large(block):
    layer, linears, seen, _run = block
    smooth(layer, linears, seen, 0.5)
    columns = torch.stack(
        [linears[f"mlp.{name}_proj"].weight.abs().amax(dim=0) for name in ("gate", "up")]
    )
    assert torch.allclose(columns.amax(dim=0), seen["mlp.up_proj"].largest, rtol=1e-3)


def test_a_token_rounds_by_its_own_largest_input():
    inputs = torch.tensor([[[1.0, -0.5, 0.0]], [[200.0, 0.3, 100.0]]])
    rounded = quantise_per_token(inputs)
    assert torch.allclose(rounded[0], inputs[0], atol=1 / 255)
    assert rounded[1, 0, 1] == 0.0
    assert torch.equal(quantise_per_token(torch.zeros(1, 4)), torch.zeros(1, 4))


def test_values_that_several_queries_share_are_left_and_other_layers_are_refused():
    for heads, count in ((4, 4), (2, 3)):
        config = LlamaConfig(**CONFIG.to_dict() | {"num_key_value_heads": heads})
        assert len(folds_of(LlamaDecoderLayer(config, 0), between_linears=True)) == count, heads
    with pytest.raises(BadInputError, match="of type 'gemma2'; choose gptq or quantease"):
        check_shape_known("gemma2", "awq moves scales into the norms of")


# Norms that follow what rounding did to their layer, and groups as coarse as a matrix allows.


class Block(torch.nn.Module):
    """A norm before a linear layer, as a decoder layer has two of."""

    def __init__(self):
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(32)
        self.proj = torch.nn.Linear(32, 32, bias=False)

    def forward(self, hidden):
        return hidden + self.proj(self.input_layernorm(hidden))


@pytest.fixture
def rounded():
    """Return a block at 2 bits and what it made of some text before."""
    torch.manual_seed(3)
    block, inputs = Block(), torch.randn(8, 16, 32)
    with torch.no_grad():
        passage = Passage(inputs, {}, block(inputs))
        weight = block.proj.weight
        weight.copy_(round_to_nearest(weight, QuantizationGrid(2, 32), torch.float32).weight())
    return block, passage


def test_every_method_by_layer_has_a_function_and_words():
    methods = get_args(JobCompressMethod)
    by_layer = {each for each in methods if CompressOptions(method=each).is_layerwise}
    assert by_layer == set(HOW_LAYERWISE) == {*METHODS, *TUNED_METHODS}
    assert not METHODS.keys() & TUNED_METHODS.keys()


def test_autoround_learns_codes_within_one_of_the_weights_with_less_error_than_the_nearest():
    torch.manual_seed(3)
    block, grid = Block(), QuantizationGrid(3, 16)
    inputs = torch.randn(64, 16, 32) @ torch.randn(32, 32)
    spec = CompressSpec(model=DemoModel(), method="autoround", bits=3, group_size=16)
    with torch.no_grad():
        passage = Passage(inputs, {}, block(inputs))
    weight = block.proj.weight.detach().clone()
    codes, losses = tune_rounding(block, {"proj": block.proj}, passage, spec)
    assert torch.equal(block.proj.weight, weight)
    error = {}
    for name, found in (
        ("autoround", codes["proj"]),
        ("nearest", round_to_nearest(weight, grid, F32)),
    ):
        with torch.no_grad():
            block.proj.weight.copy_(found.weight())
            error[name] = torch.nn.functional.mse_loss(block(inputs), passage.float_outputs).item()
    assert error["autoround"] == pytest.approx(losses["rounding_loss"], rel=1e-4)
    assert error["nearest"] == pytest.approx(losses["rounding_loss_before"], rel=1e-4)
    assert error["autoround"] < 0.9 * error["nearest"]
    exact = weight / codes["proj"].scales.repeat_interleave(16, dim=1)
    near = exact.clamp(grid.lowest, grid.highest)
    assert (codes["proj"].values - near).abs().max() <= 1.0


def test_norms_bring_the_outputs_distribution_nearer_to_that_before(rounded):
    block, passage = rounded
    losses = tweak_norms(block, {}, passage, passes=10, learning_rate=5e-3)
    assert losses["norm_loss"] < 0.95 * losses["norm_loss_before"]
    found = torch.stack([channel_loss(block(some), goal) for some, goal in passage.batches()])
    assert found.mean().item() == pytest.approx(losses["norm_loss"], rel=1e-5)


def test_norms_alone_are_changed_and_none_that_no_pass_improves(rounded):
    assert list(norm_weights(rounded[0])) == ["input_layernorm.weight"]

    block, passage = rounded
    losses = tweak_norms(block, {}, passage, passes=1, learning_rate=50.0)
    assert losses["norm_loss"] == losses["norm_loss_before"]
    assert torch.equal(block.input_layernorm.weight, torch.ones(32))

    before = block.proj.weight.clone()
    tweak_norms(block, {"proj.weight": before / 2}, passage, passes=2, learning_rate=5e-3)
    assert torch.equal(block.proj.weight, before)
    assert not torch.equal(block.input_layernorm.weight, torch.ones(32))


def test_outputs_that_are_alike_have_no_loss():
    wanted = torch.randn(2, 8, 4)
    assert channel_loss(wanted, wanted) == 0
    assert channel_loss(wanted + 1, wanted).item() == pytest.approx(1.0, rel=1e-4)


SHUFFLED = torch.randperm(128, generator=torch.Generator().manual_seed(2))


def group_size(weight, least_gain=0.3):
    return finequant(weight, QuantizationGrid(4, 16), torch.float32, least_gain).grid.group_size


def test_groups_are_as_coarse_as_the_parts_of_a_matrix_allow():
    assert group_size(torch.linspace(-1, 1, 128).repeat(4, 1)[:, SHUFFLED]) == 128
    sizes = torch.tensor([1.0, 20.0, 0.1, 5.0]).repeat_interleave(32)
    even = torch.rand(16, 128, generator=torch.Generator().manual_seed(2))
    assert group_size(even.add(0.1) * sizes) == 32
    normal = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    assert group_size(normal, least_gain=0.02) == 16


# K-quants written by our code, read by the gguf package's decoder.

KINDS = ((Type.Q4_K, 4.5, Type.Q4_0), (Type.Q5_K, 5.5, Type.Q5_0), (Type.Q6_K, 6.5625, Type.Q5_0))
MATRIX = np.zeros((4, 512), np.float32)


@pytest.fixture(scope="module")
def rows():
    """Rows of unlike size; one of zeros, one above zero only, one with outliers."""
    generator = np.random.default_rng(17)
    sizes = np.exp(generator.standard_normal((64, 1))) * 0.02
    made = (generator.standard_normal((64, 512)) * sizes).astype(np.float32)
    made[0], made[1] = 0.0, np.abs(made[1])
    made[2, ::64] *= 30
    return made


def error(rows, decoded) -> float:
    return float(np.sqrt(((rows - decoded) ** 2).sum() / (rows**2).sum()))


def test_a_row_has_its_types_bits_and_decodes_nearer_than_from_a_plain_type(rows):
    for kind, bits, plain in KINDS:
        coded = quantize(rows, kind)
        decoded = quants.dequantize(coded, kind)
        again = quants.dequantize(quants.quantize(rows, plain), plain)

        assert coded.shape[1] * 8 / rows.shape[1] == bits, kind
        assert error(rows, decoded) < 0.9 * error(rows, again), kind
        assert is_as_written(rows, decoded, kind), kind
        assert not decoded[0].any(), kind
        assert not is_as_written(rows[::-1], decoded, kind), kind  # of another matrix


def test_values_on_the_grid_come_back_as_they_were():
    codes = np.tile(np.arange(16, dtype=np.float32), (1, 16))
    exact = codes / 1024 * 63  # a scale of 63 codes, with no offset
    decoded = quants.dequantize(quantize(exact, Type.Q4_K), Type.Q4_K)
    assert decoded == pytest.approx(exact, rel=2e-3, abs=1e-6)


def test_the_mixture_is_that_of_llama_cpp():
    for name, array, expected in (
        ("blk.0.attn_v.weight", MATRIX, Type.Q6_K),  # of the first eighth
        ("blk.1.attn_v.weight", MATRIX, Type.Q4_K),
        ("blk.3.ffn_down.weight", MATRIX, Type.Q6_K),  # each third after it
        ("blk.7.ffn_down.weight", MATRIX, Type.Q6_K),
        ("blk.0.attn_q.weight", MATRIX, Type.Q4_K),
        ("output.weight", MATRIX, Type.Q6_K),
        ("token_embd.weight", MATRIX, Type.Q4_K),
        ("blk.0.attn_q.weight", MATRIX[:, :192], Type.Q5_0),
        ("output.weight", MATRIX[:, :192], Type.Q8_0),
        ("blk.0.attn_norm.weight", MATRIX[0], Type.F32),
        ("blk.0.attn_q.weight", MATRIX[:, :40], Type.F16),
    ):
        assert type_of(name, array, "Q4_K_M", 8) == expected, (name, array, expected)
    assert type_of("token_embd.weight", MATRIX, "Q4_K_M", 8, is_tied=True) == Type.Q6_K


# Ternary symbols through the entropy code and back, bit for bit.


def drawn(shares, count=200_000):
    generator = np.random.default_rng(5)
    return generator.choice(3, size=count, p=shares).astype(np.uint8)


def test_what_goes_in_comes_out():
    for count in (1, 4095, 4096, 4097, 50_000):
        for shares in ((0.9, 0.06, 0.04), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5)):
            symbols = drawn(shares, count)
            assert np.array_equal(decode(encode(symbols)), symbols), (shares, count)
    symbols = np.zeros(100_000, np.uint8)
    symbols[77_777] = 2
    assert np.array_equal(decode(encode(symbols)), symbols)


def test_the_code_is_hardly_longer_than_the_entropy_of_the_formula():
    for shares in ((0.9, 0.06, 0.04), (1 / 3, 1 / 3, 1 / 3), (0.6, 0.39, 0.01)):
        symbols = drawn(shares)
        bits = 8 * encode(symbols).stored_bytes / symbols.size
        least = entropy_bits(symbols)
        assert least <= bits < least + 0.02, shares
    assert entropy_bits(np.array([0, 0, 1, 2], np.uint8)) == pytest.approx(1.5)
    assert entropy_bits(np.zeros(9, np.uint8)) == 0.0


def test_damage_is_found():
    coded = encode(drawn((0.8, 0.1, 0.1), 20_000))
    changed = coded.words.copy()
    changed[7] ^= 0x5A5A
    for damage, wrong in {
        "cut": replace(coded, words=coded.words[:-3]),
        "changed": replace(coded, words=changed),
        "longer": replace(coded, words=np.append(coded.words, np.uint16(1))),
        "parts": replace(coded, frequencies=coded.frequencies + np.uint16(1)),
    }.items():
        with refused(CorruptCodeError, None, damage):
            decode(wrong)
