"""Training through integers or small adapters: what it holds, how it rounds, what it leaves."""

import copy

import pytest
import torch
from pydantic import ValidationError

from runners.jobs.adapters import Lora, weights_digest
from runners.jobs.bench.tuning_bench import step_of
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.memory import gradient_bytes, model_bytes, optimizer_bytes
from runners.jobs.runtime import BadInputError
from runners.jobs.train import quantized
from runners.jobs.train.checkpoint import checkpoints
from runners.jobs.train.checkpoint_files import stored_tensors
from runners.jobs.train.optimizers import LION_BETAS, Qft, build_optimizer
from runners.jobs.train.quantized import (
    CodedLinear,
    convert_to_integer_layers,
    integer_matrices,
    quantize_for_training,
    quantize_rows,
    quantize_rows_in_parts,
    trained_tensors,
    with_dequantized_layers,
    with_effective_weights,
)
from runners.jobspec import ArtefactModel, FolderModel
from runners.jobspec.base import LoraOptions, QuantizedTraining
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY, TINY_CONFIG, tiny_training
from tests.runners.jobs.train.test_optimizers import ROWS, SHAPE, planned
from tests.runners.jobs.train.training import tiny_trainer

IDS = torch.arange(4 * 64).reshape(4, 64) % 512
TIED = TINY_CONFIG | {"tie_word_embeddings": True}


def model_of(config=TINY_CONFIG):
    torch.manual_seed(0)
    return fresh_model(config, torch.float32).train()


def backward(model):
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    torch.autograd.backward(loss)
    return float(loss.detach())


def gradients_taken(model):
    """Return what a backward pass gives each matrix of integers, summed over its places."""
    found = {}
    for name, matrix in integer_matrices(model).items():
        matrix.on_gradient = lambda given, name=name: found.update(
            {name: found.get(name, 0.0) + given}
        )
    backward(model)
    return found


def test_a_code_is_within_half_a_step_in_parts_too_and_chance_is_right_on_the_average(monkeypatch):
    values = torch.randn(3, 50)
    nearest, chance = quantize_rows(values), torch.Generator().manual_seed(1)
    mean = torch.stack([quantize_rows(values, chance).values() for _ in range(600)]).mean(0)
    step = nearest.scale
    assert ((nearest.values() - values).abs() <= 0.5001 * step).all()
    assert ((mean - values).abs() < 0.12 * step).all()
    assert nearest.codes.dtype == torch.int8

    values = torch.randn(7, 10)
    whole = quantize_rows(values)
    monkeypatch.setattr(quantized, "ELEMENTS_AT_ONCE", 25)
    parts = quantize_rows_in_parts(values)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scale, whole.scale)
    assert parts.norm() == pytest.approx(float(whole.values().norm()))


def test_integers_compute_and_give_gradients_as_the_plain_layers_of_their_values():
    for config in (TINY_CONFIG, TIED):
        held = model_of(config)
        convert_to_integer_layers(held)
        plain = copy.deepcopy(held)
        with_dequantized_layers(plain)

        taken = gradients_taken(copy.deepcopy(held))

        assert backward(held) == pytest.approx(backward(plain), abs=1e-5), config
        for name, gradient in taken.items():
            weight = plain.get_parameter(name.replace(".matrix", ".weight"))
            assert torch.allclose(gradient, weight.grad, atol=1e-6)


def test_the_first_step_goes_against_the_gradient_by_the_rate():
    model = model_of()
    convert_to_integer_layers(model)
    before = {name: each.integers.values() for name, each in integer_matrices(model).items()}
    taken = gradients_taken(copy.deepcopy(model))
    build_optimizer(model, 0.01, "qft")

    backward(model)

    for name in ("lm_head.matrix", "model.layers.0.mlp.down_proj.matrix"):
        large = taken[name].abs() > 1e-3
        moved = integer_matrices(model)[name].integers.values() - before[name]
        down = -(moved * taken[name].sign())[large]
        assert float(down.mean()) == pytest.approx(0.01, rel=0.05)


def test_a_tied_matrix_learns_once_a_step_from_both_its_layers():
    model = model_of(TIED)
    convert_to_integer_layers(model)
    optimizer = build_optimizer(model, 1e-3, "qft")
    for _ in range(3):
        backward(model)
    steps = {optimizer.state[each]["step"] for each in trained_tensors(model).values()}
    assert steps == {3}
    assert max(each.num_places for each in integer_matrices(model).values()) == 2


def test_no_state_and_no_matrix_is_wider_than_eight_bits():
    model = model_of()
    convert_to_integer_layers(model)
    optimizer = build_optimizer(model, 1e-3, "qft")
    backward(model)
    tensors = [each["exp_avg"] for each in optimizer.state.values()]
    assert {each.dtype for each in tensors} == {torch.int8}
    assert {each.dtype for each in trained_tensors(model).values() if each.ndim > 1} == {
        torch.int8
    }
    assert optimizer.peak_gradient_bytes == 512 * (64 + 4)  # the largest matrix and its scales


def test_every_training_state_is_as_planned():
    model, expected = fresh_model(demo_config(SHAPE), torch.float32), planned(method="qft")
    convert_to_integer_layers(model)
    held, adamw = step_of(SHAPE, ROWS, "qft"), step_of(SHAPE, ROWS, "adamw")

    assert model_bytes(model) == pytest.approx(expected["weights"], rel=0.05)
    assert held.optimizer_states == pytest.approx(expected["optimizer_states"], rel=0.05)
    assert (
        max(each.codes.nbytes for each in integer_matrices(model).values()) < expected["gradients"]
    )
    assert held.optimizer_states < adamw.optimizer_states / 7.5
    assert held.peak < adamw.peak
    plain = planned()
    states = ("weights", "gradients", "optimizer_states")
    assert sum(expected[each] for each in states) < 0.21 * sum(plain[each] for each in states)


def test_a_trainer_of_integers_holds_and_saves_quarters_of_the_weights(make_job):
    told = {}
    trainer = tiny_trainer(make_job(tiny_training(optimizer="qft", max_steps=2)))
    trainer.report_held_bytes = lambda **held: told.update(held)
    plain = model_bytes(fresh_model(TINY_CONFIG, torch.float32))

    trainer.run()
    trainer.checkpoint()

    assert told["gradients"] == 512 * (64 + 4)  # one matrix's
    assert trainer.layout.weight_bytes() < 0.3 * plain
    assert told["optimizer_states"] == optimizer_bytes(trainer.optimizer) < 0.3 * plain
    (folder,) = checkpoints(trainer.job.checkpoint_dir)
    stored = stored_tensors(folder).weights.values()
    assert sum(each.size.numel() * each.properties.dtype.itemsize for each in stored) < 0.3 * plain
    assert sum(file.stat().st_size for file in folder.iterdir()) < 0.65 * plain  # and states


def test_a_gradient_that_is_no_number_leaves_the_weights_alone():
    weight = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [weight], "weight_decay": 0.0}]
    optimizer = Qft(groups, 0.1, LION_BETAS, [])
    torch.autograd.backward((weight * torch.tensor([1.0, float("nan"), 1.0])).sum())
    assert torch.equal(weight.detach(), torch.ones(3))
    assert optimizer.norm() != optimizer.norm()


def test_what_does_not_go_with_integers_is_refused_by_name():
    for changes, words in (
        (
            {"quantized": {"method": "qat"}},
            "optimizer qft .* quantized replaces the linear layers",
        ),
        ({"gradient_accumulation_steps": 2}, "qft updates each weight as its gradient comes"),
        ({"compute_dtype": "fp16"}, "qft uses each gradient as it comes"),
        ({"layout": {"tensor_parallel_size": 2}}, "optimizer qft requires plain data parallelism"),
    ):
        with refused(ValidationError, words, (changes, words)):
            tiny_training(optimizer="qft", **changes)


# Training through integers: scales alone, or weights that are rounded; plain weights are left.

SHORT_IDS = torch.arange(2 * 32).reshape(2, 32)
WAYS = [
    QuantizedTraining(method=method, bits=bits)
    for method in ("alphatuning", "qat")
    for bits in (4, 8)
]


def quantized_model(options, config=TINY_CONFIG):
    torch.manual_seed(0)
    model = fresh_model(config, torch.float32)
    quantize_for_training(model, options)
    return model


def step(model):
    """Make a step's gradients and return its loss."""
    loss = model(input_ids=SHORT_IDS, labels=SHORT_IDS, use_cache=False).loss
    torch.autograd.backward(loss)
    return float(loss.detach())


@torch.no_grad()
def test_the_plain_model_computes_what_was_trained():
    for options in WAYS:
        model = quantized_model(options)
        before = model(SHORT_IDS).logits
        assert torch.allclose(
            with_effective_weights(model)(SHORT_IDS).logits, before, atol=1e-5
        ), options


def test_the_plain_weights_lie_on_the_grid():
    for options in WAYS:
        model = with_effective_weights(quantized_model(options))
        weight = model.model.layers[0].mlp.up_proj.weight.detach()
        levels = [len(row.unique()) for row in weight.unflatten(1, (-1, options.group_size))[0]]
        assert max(levels) <= 2**options.bits - 1, options


def test_it_learns(make_job):
    for options in WAYS:
        trainer = tiny_trainer(make_job(tiny_training(max_steps=15, learning_rate=2e-2)))
        quantize_for_training(trainer.model, options)
        trainer.__post_init__()
        before = float(trainer.layout.gradients([trainer.batches.micro_batch(0, 0)]).loss)
        trainer.run()
        assert trainer.last_loss < before, options


def test_alphatuning_trains_a_scale_for_each_group_alone():
    model = quantized_model(WAYS[0])
    plain = fresh_model(TINY_CONFIG, torch.float32)
    inside = sum(each.numel() for each in plain.model.layers.parameters() if each.ndim == 2)
    step(model)
    assert gradient_bytes(model) == 4 * inside / 32
    assert model_bytes(plain) - model_bytes(model) == inside * (4 - 0.5 - 4 / 32)


def test_the_gradient_of_a_scale_is_that_of_plain_autograd():
    model = quantized_model(WAYS[0])
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


def test_integers_need_whole_groups_trained_weights_and_no_adapter():
    with pytest.raises(BadInputError, match=r"group_size 48: .* has rows of 64 weights"):
        quantized_model(QuantizedTraining(method="qat", group_size=48))
    fields = {"model": ArtefactModel(attempt_id="a"), "lora": LoraOptions(), "quantized": WAYS[0]}
    with pytest.raises(ValidationError, match="alphatuning changes the layers that lora"):
        tiny_training(**fields)
    with pytest.raises(ValidationError, match="scales of trained weights, and a 'demo' model"):
        tiny_training(quantized=WAYS[0])


# A LoRA fine-tune as a real job: small states, peft opens the outcome, a kill costs little.

LORA = LoraOptions(rank=4, alpha=8)
TOKENS = torch.arange(40)[None]


def tuning(model, **changes):
    """Return a short LoRA fine-tune of a model."""
    fields = {"model": model, "lora": LORA, "learning_rate": 1e-2, "max_steps": 40}
    return tiny_training(**{**fields, **changes})


@torch.inference_mode()
def logits(model):
    return model(input_ids=TOKENS).logits


def test_a_fresh_adapter_changes_nothing_and_needs_layers_of_the_paper(monkeypatch):
    model = fresh_model(TINY_CONFIG, torch.float32).eval()
    before = logits(model)
    Lora(model, LORA)
    assert torch.equal(logits(model), before)
    model = fresh_model(TINY_CONFIG, torch.float32)
    monkeypatch.setattr(type(model.config), "model_type", "unheard-of")
    with pytest.raises(BadInputError, match=r"lora\.targets query_value names no layers of Llama"):
        Lora(model, LoraOptions(targets="query_value"))


def test_trained_weights_alone_take_an_adapter():
    for model in (FolderModel(path="m"), ArtefactModel(attempt_id="a")):
        assert tuning(model).lora == LORA, model
    with pytest.raises(ValidationError, match="lora adapts trained weights, and a 'demo' model"):
        tuning(TINY)


def test_weights_of_another_training_have_another_digest(tmp_path):
    for name, fill in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(fill * 100_000)
    digests = [weights_digest(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[2] != digests[1]
