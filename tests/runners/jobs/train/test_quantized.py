"""Training through integers: scales alone, or weights that are rounded; plain weights are left."""

import pytest
import torch
from pydantic import ValidationError

from runners.jobs.loading import fresh_model
from runners.jobs.memory import gradient_bytes, model_bytes
from runners.jobs.runtime import BadInputError
from runners.jobs.train.quantized import CodedLinear, made_plain, quantize_for_training
from runners.jobspec import ArtefactModel
from runners.jobspec.base import LoraOptions, QuantizedTraining
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import tiny_trainer

IDS = torch.arange(2 * 32).reshape(2, 32)
WAYS = [
    QuantizedTraining(method=method, bits=bits)
    for method in ("alphatuning", "qat")
    for bits in (4, 8)
]


def model_of(options, config=TINY_CONFIG):
    torch.manual_seed(0)
    model = fresh_model(config, torch.float32)
    quantize_for_training(model, options)
    return model


def step(model):
    """Make a step's gradients and return its loss."""
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    torch.autograd.backward(loss)
    return float(loss.detach())


@pytest.fixture(params=WAYS, ids=lambda each: f"{each.method} {each.bits}")
def options(request):
    return request.param


@torch.no_grad()
def test_the_plain_model_computes_what_was_trained(options):
    model = model_of(options)
    before = model(IDS).logits

    assert torch.allclose(made_plain(model)(IDS).logits, before, atol=1e-5)


def test_the_plain_weights_lie_on_the_grid(options):
    model = made_plain(model_of(options))

    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    levels = [len(row.unique()) for row in weight.unflatten(1, (-1, options.group_size))[0]]
    assert max(levels) <= 2**options.bits - 1


def test_it_learns(make_job, options):
    trainer = tiny_trainer(make_job(tiny_training(max_steps=15, learning_rate=2e-2)))
    quantize_for_training(trainer.model, options)
    trainer.__post_init__()
    before = float(trainer.layout.gradients([trainer.batches.micro_batch(0, 0)]).loss)

    trainer.run()

    assert trainer.last_loss < before


def test_alphatuning_trains_a_scale_for_each_group_alone():
    model = model_of(WAYS[0])
    plain = fresh_model(TINY_CONFIG, torch.float32)
    inside = sum(each.numel() for each in plain.model.layers.parameters() if each.ndim == 2)

    step(model)

    assert gradient_bytes(model) == 4 * inside / 32
    assert model_bytes(plain) - model_bytes(model) == inside * (4 - 0.5 - 4 / 32)


def test_the_gradient_of_a_scale_is_that_of_plain_autograd():
    model = model_of(WAYS[0])
    step(model)
    layer = next(each for each in model.modules() if isinstance(each, CodedLinear))
    inputs = torch.randn(3, 64)
    expected = layer.scale.detach().clone().requires_grad_()
    codes = (layer.values() / layer.scale.repeat_interleave(32, 1)).detach()
    torch.autograd.backward(
        (inputs @ (codes * expected.repeat_interleave(32, 1)).T).square().sum()
    )
    layer.scale.grad = None

    torch.autograd.backward(layer(inputs).square().sum())

    assert torch.allclose(layer.scale.grad, expected.grad, rtol=1e-4)


def test_groups_that_rows_do_not_hold_are_refused_by_name():
    with pytest.raises(BadInputError, match=r"group_size 48: .* has rows of 64 weights"):
        model_of(QuantizedTraining(method="qat", group_size=48))


def test_integers_and_an_adapter_do_not_go_together():
    fields = {"model": ArtefactModel(attempt_id="a"), "lora": LoraOptions(), "quantized": WAYS[0]}

    with pytest.raises(ValidationError, match="alphatuning changes the layers that lora"):
        tiny_training(**fields)


def test_scales_of_weights_that_learnt_nothing_are_not_trained():
    with pytest.raises(ValidationError, match="scales of trained weights, and a 'demo' model"):
        tiny_training(quantized=WAYS[0])
