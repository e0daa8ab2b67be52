"""Scales that move between a layer's norms and its matrices: outputs stay, rounding loses less."""

from functools import partial

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from runners.jobs.compress.quantization import (
    Grid,
    InputStatistics,
    best_scales,
    check_shape_known,
    folds_of,
    level_by_logarithm,
    output_error,
    round_to_nearest,
    rounded_by_token,
    rounded_inputs,
    scale_for_rounding,
    smooth,
)
from runners.jobs.runtime import BadInputError

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=1,
    attn_implementation="eager",
)
WAYS = {
    "awq": partial(scale_for_rounding, grid=Grid(4, 32)),
    "smoothquant": partial(smooth, share=0.5),
    "fptq": level_by_logarithm,
}
EACH = pytest.mark.parametrize("way", list(WAYS))


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


@EACH
def test_the_layer_computes_what_it_did_before(way, block):
    layer, linears, seen, run = block
    before = run()

    WAYS[way](layer, linears, seen)

    assert not torch.equal(layer.input_layernorm.weight[:3], torch.full((3,), 40.0))
    assert torch.allclose(run(), before, atol=1e-4 * before.abs().max().item())


@EACH
def test_the_statistics_become_those_of_the_scaled_inputs(way, block):
    layer, linears, seen, run = block
    WAYS[way](layer, linears, seen)
    again = InputStatistics(64)

    with linears["mlp.up_proj"].register_forward_pre_hook(lambda _m, given: again.add(given[0])):
        run()

    assert torch.allclose(again.gram, seen["mlp.up_proj"].gram, rtol=1e-3, atol=1e-3)
    assert torch.allclose(again.largest, seen["mlp.up_proj"].largest, rtol=1e-3)


@pytest.mark.parametrize("bits", [3, 4])
def test_awq_errs_less_than_the_nearest_codes(bits, layer):
    weight, statistics = layer
    grid = Grid(bits, 32)
    plain = output_error(
        weight, round_to_nearest(weight, grid, weight.dtype).weight(), statistics.gram
    )

    scales = best_scales([weight], statistics, grid)

    made = round_to_nearest(weight * scales, grid, weight.dtype).weight() / scales
    assert output_error(weight, made, statistics.gram) < 0.9 * plain
    assert scales[statistics.mean_absolute.argmax()] > scales[statistics.mean_absolute.argmin()]


@pytest.mark.parametrize("way", ["smoothquant", "fptq"])
def test_levelled_activations_survive_8_bits_better(way, block):
    layer, linears, seen, run = block
    exact = run()
    with rounded_inputs(linears.values()):
        plain = (run() - exact).square().sum()
    WAYS[way](layer, linears, seen)

    with rounded_inputs(linears.values()):
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

    rounded = rounded_by_token(inputs)

    assert torch.allclose(rounded[0], inputs[0], atol=1 / 255)
    assert rounded[1, 0, 1] == 0.0
    assert torch.equal(rounded_by_token(torch.zeros(1, 4)), torch.zeros(1, 4))


@pytest.mark.parametrize(("heads", "count"), [(4, 4), (2, 3)])
def test_values_that_several_queries_share_are_left_as_they_are(heads, count):
    config = LlamaConfig(**CONFIG.to_dict() | {"num_key_value_heads": heads})

    assert len(folds_of(LlamaDecoderLayer(config, 0), between_linears=True)) == count


def test_a_layer_that_is_built_otherwise_is_refused_with_the_way_out():
    with pytest.raises(BadInputError, match="of type 'gemma2'; choose gptq or quantease"):
        check_shape_known("gemma2", "awq moves scales into the norms of")
