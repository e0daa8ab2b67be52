"""Optimisers: what each holds, that it learns, and that it goes on to the bit."""

from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.memory import LiveBytes, gradient_bytes, optimizer_bytes, resident_bytes
from runners.jobs.runtime import BadInputError
from runners.jobs.train.activations import recompute
from runners.jobs.train.evaluator import HeldOut
from runners.jobs.train.optimizers import build_optimizer
from runners.jobs.train.rows import TextBatches
from runners.jobs.train.trainer import Trainer
from runners.jobspec.train import USUAL_LEARNING_RATES, Optimizer
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.test_against_the_plan import SHAPE, planned
from tests.runners.jobs.train.training import stop_at, tiny_trainer

ALL = get_args(Optimizer)
WAYS = [*((name, "none") for name in ALL), ("adamw", "disk")]
IDS = torch.arange(4 * 64).reshape(4, 64) % 512
TIED = TINY_CONFIG | {"tie_word_embeddings": True}


def spec_of(name, where="none", **changes):
    fields = {"optimizer": name, "optimizer_offload": where, "max_steps": 4}
    return tiny_training(**{**fields, "learning_rate": USUAL_LEARNING_RATES[name], **changes})


@pytest.fixture(params=WAYS, ids=" ".join)
def way(request):
    return request.param


def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(make_job, way):
    unbroken = tiny_trainer(make_job(spec_of(*way)))
    unbroken.run()
    stopped = tiny_trainer(make_job(spec_of(*way)))
    stop_at(stopped, 2)
    stopped.run()
    resumed = tiny_trainer(make_job(spec_of(*way)))

    resumed.resume()
    resumed.run()

    assert resumed.resumed_at_step == 2
    pairs = zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("name", ALL)
def test_the_loss_falls_at_the_usual_rate(make_job, name):
    trainer = tiny_trainer(make_job(spec_of(name, max_steps=15)))
    before = float(trainer.layout.gradients([trainer.batches.micro_batch(0, 0)]).loss)

    trainer.run()

    assert trainer.last_loss < 0.9 * before


def one_step(name, config=TINY_CONFIG, how="none"):
    """Return a model after one step at a rate of a tenth, and its optimiser."""
    torch.manual_seed(0)
    model = fresh_model(config, torch.float32).train()
    recompute(model, how)
    optimizer = build_optimizer(model, 0.1, name)
    torch.autograd.backward(model(input_ids=IDS, labels=IDS, use_cache=False).loss)
    held = gradient_bytes(model)
    if name == "sgd":
        for parameter in model.parameters():
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    optimizer.step()
    return model, optimizer, held


def same(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(*pair, atol=1e-6) for pair in pairs)


@pytest.mark.parametrize("config", [TINY_CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("how", ["none", "full"])
def test_lomo_takes_the_step_of_gradient_descent(config, how):
    fused, plain = one_step("lomo", config, how)[0], one_step("sgd", config)[0]

    assert same(fused, plain)


@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_fused_updates_hold_one_operators_gradients(name):
    _, optimizer, left = one_step(name)
    _, _, whole = one_step("adamw")
    embedding = 4 * 512 * 64

    assert left == 0
    assert optimizer.peak_gradient_bytes == embedding < whole / 3


def test_lomo_has_no_state_and_adalomo_a_row_and_a_column():
    assert optimizer_bytes(one_step("lomo")[1]) == 0
    model, optimizer, _ = one_step("adalomo")
    shapes = [each.shape for each in model.parameters()]

    assert optimizer_bytes(optimizer) == 4 * sum(sum(shape) for shape in shapes)


def test_states_are_as_small_as_the_literature_has_them():
    config = TINY_CONFIG | {"intermediate_size": 4096}  # small tensors keep 32 bits
    numbers = sum(each.numel() for each in fresh_model(config, torch.float32).parameters())
    bytes_each = {
        name: optimizer_bytes(one_step(name, config)[1]) / numbers
        for name in ("adamw", "lion", "adamw_8bit", "lion_8bit")
    }

    expected = {"adamw": 8.0, "lion": 4.0, "adamw_8bit": 2.0, "lion_8bit": 1.0}
    assert bytes_each == pytest.approx(expected, rel=0.12)


def test_moments_on_disk_make_the_update_of_adamw(make_job, tmp_path):
    plain = tiny_trainer(make_job(spec_of("adamw")))
    away = tiny_trainer(make_job(spec_of("adamw", "disk")))

    plain.run()
    away.run()

    assert same(plain.model, away.model)
    assert optimizer_bytes(away.optimizer) == optimizer_bytes(plain.optimizer)


def test_moments_on_disk_take_the_planned_bytes_and_no_memory(tmp_path):
    model = fresh_model(demo_config(SHAPE), torch.float32)
    optimizer = build_optimizer(model, 1e-3, "adamw", ("disk", tmp_path))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    expected = planned()["optimizer_states"]

    with LiveBytes(model.parameters()) as live:
        before = resident_bytes()
        optimizer.step()
    held = resident_bytes() - before

    assert optimizer.mapped_bytes == pytest.approx(expected, rel=0.02)
    assert max(live.peak, held) < expected / 4
    assert float(optimizer.state_of(next(model.parameters()))["step"]) == 2.0


def test_moments_on_a_cpu_cannot_wait_in_its_own_memory():
    model = fresh_model(TINY_CONFIG, torch.float32)

    with pytest.raises(BadInputError, match=r"optimizer_offload cpu: this host .* choose disk"):
        build_optimizer(model, 1e-3, "adamw", ("cpu", None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "lomo", "gradient_accumulation_steps": 2}, "lomo updates .* is 2; make it"),
        ({"optimizer": "adalomo", "gradient_accumulation_steps": 4}, "choose adafactor"),
        (
            {"optimizer": "lion", "optimizer_offload": "disk"},
            "the optimizer is lion; choose adamw",
        ),
        (
            {"optimizer": "lomo", "compute_dtype": "fp16"},
            "scaled and checked together; choose bf16",
        ),
        ({"optimizer": "adam"}, "optimizer"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(changes, words):
    with pytest.raises(ValidationError, match=words):
        tiny_training(**changes)


def test_a_trainer_without_a_state_tells_how_much_it_holds(make_job):
    ids = np.arange(400, dtype=np.int32) % 64
    spec = spec_of("lomo", max_steps=1)
    model = fresh_model(TINY_CONFIG, torch.float32)
    job = make_job(spec)
    told = []
    trainer = Trainer(job, spec, model, TextBatches(ids, spec), HeldOut(ids), torch.device("cpu"))
    trainer.report_held = lambda **held: told.append(held)

    trainer.run()

    assert told[0]["gradients"] == 4 * 512 * 64
    assert told[1] == {"optimizer_states": 0}
