"""What optimisers and activations hold, as planned, and that gradients stay the same."""

from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from planner.api import estimate
from planner.specs.estimate import EstimateRequest
from runners.jobs.bench.tuning_bench import step_of
from runners.jobs.events import read_events
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.memory import (
    LiveBytes,
    activations_counted,
    gradient_bytes,
    optimizer_bytes,
    resident_bytes,
)
from runners.jobs.runtime import BadInputError
from runners.jobs.train.evaluator import HeldOutData
from runners.jobs.train.optimizers import build_optimizer
from runners.jobs.train.rows import TextBatches
from runners.jobs.train.trainer import Trainer, offloaded_activations, recompute
from runners.jobspec import DemoModel
from runners.jobspec.train import USUAL_LEARNING_RATES, Optimizer
from tests.plugins.extent import sample
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import stop_at, tiny_trainer

ROWS = 2
SHAPE = DemoModel(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=3,
    vocab_size=1024,
    max_position_embeddings=128,
)


def planned(how="none", **workload):
    """Return the planner's bytes by tensor class."""
    request = {
        "model": demo_config(SHAPE),
        "cluster": {"device": "rtx-4090", "devices_per_node": 1, "nodes": 1},
        "workload": {
            "kind": "train",
            "sequence_length": SHAPE.max_position_embeddings,
            "global_batch_size": ROWS,
            **workload,
        },
        "engine": "torch",
        "strategy": {
            "activation_recomputation": how,
            "micro_batch_size": ROWS,
            "weight_dtype": "int8" if workload.get("method") == "qft" else "fp32",
            "compute_dtype": "bf16",
            "attention": "eager",
        },
    }
    return estimate(EstimateRequest.model_validate(request)).memory.breakdown_bytes


@pytest.fixture(scope="module")
def held():
    return {how: step_of(SHAPE, ROWS, "adamw", how) for how in ("none", "selective", "full")}


def test_activations_and_states_are_those_planned(held):
    for how, step in held.items():
        expected = planned(how)
        kept = expected["activations"] + expected["buffers"]
        assert step.activations == pytest.approx(kept, rel=0.1), how
    assert held["full"].activations < held["selective"].activations < held["none"].activations

    for name in ("adamw", "adamw_8bit"):
        states = held["none"] if name == "adamw" else step_of(SHAPE, 1, name)
        expected = planned(optimizer=name)["optimizer_states"]
        assert states.optimizer_states == pytest.approx(expected, rel=0.05), name

    lomo = step_of(SHAPE, ROWS, "lomo", "full")
    assert "optimizer_states" not in planned("full", method="lomo")
    assert lomo.optimizer_states == 0
    assert lomo.peak < held["full"].peak < held["selective"].peak < held["none"].peak


# Optimisers: what each holds, that it learns, and that it goes on to the bit.

ALL = get_args(Optimizer)
WAYS = [*((name, "none") for name in ALL), ("adamw", "disk")]
IDS = torch.arange(4 * 64).reshape(4, 64) % 512
TIED = TINY_CONFIG | {"tie_word_embeddings": True}


def spec_of(name, where="none", **changes):
    fields = {"optimizer": name, "optimizer_offload": where, "max_steps": 4}
    return tiny_training(**{**fields, "learning_rate": USUAL_LEARNING_RATES[name], **changes})


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
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


def test_the_loss_falls_at_the_usual_rate(make_job):
    for name in sample(ALL, share=0.4):
        trainer = tiny_trainer(make_job(spec_of(name, max_steps=15)))
        before = float(trainer.layout.gradients([trainer.batches.micro_batch(0, 0)]).loss)
        trainer.run()
        assert trainer.last_loss < 0.9 * before, name


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


def test_lomo_takes_the_step_of_gradient_descent():
    for config in (TINY_CONFIG, TIED):
        for how in ("none", "full"):
            fused, plain = one_step("lomo", config, how)[0], one_step("sgd", config)[0]
            assert same(fused, plain), (config, how)


def test_fused_updates_hold_one_operators_gradients():
    for name in ("lomo", "adalomo"):
        _, optimizer, left = one_step(name)
        _, _, whole = one_step("adamw")
        embedding = 4 * 512 * 64
        assert left == 0, name
        assert optimizer.peak_gradient_bytes == embedding < whole / 3, name


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

    assert optimizer._mapped.size == pytest.approx(expected, rel=0.02)
    assert max(live.peak, held) < expected / 4
    assert float(optimizer.state_of(next(model.parameters()))["step"]) == 2.0


def test_what_does_not_go_together_is_refused_by_name():
    for changes, words in (
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
    ):
        with refused(ValidationError, words, (changes, words)):
            tiny_training(**changes)


def test_a_trainer_without_a_state_tells_how_much_it_holds(make_job):
    ids = np.arange(400, dtype=np.int32) % 64
    spec = spec_of("lomo", max_steps=1)
    model = fresh_model(TINY_CONFIG, torch.float32)
    job = make_job(spec)
    told = []
    trainer = Trainer(
        job, spec, model, TextBatches(ids, spec), HeldOutData(ids), torch.device("cpu")
    )
    trainer.report_held_bytes = lambda **held: told.append(held)

    trainer.run()

    assert told[0]["gradients"] == 4 * 512 * 64
    assert told[1] == {"optimizer_states": 0}


# What a step keeps for its backward pass: less of it changes no gradient.

CPU = torch.device("cpu")
KEPT = {
    "none": ("none", "none"),
    "selective": ("selective", "none"),
    "full": ("full", "none"),
    "disk": ("none", "disk"),
    "full, disk": ("full", "disk"),
}


def step(how, where, folder):
    """Return the gradients of one step and the most that its activations held."""
    torch.manual_seed(0)
    model = fresh_model(TINY_CONFIG, torch.float32).train()
    model.set_attn_implementation("eager")
    recompute(model, how)
    swap = offloaded_activations(where, model, CPU, folder)
    with activations_counted(model) as live, swap.step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=IDS, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), IDS.flatten())
        del logits
        torch.autograd.backward(loss)
    return torch.cat([each.grad.flatten() for each in model.parameters()]), live.peak


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swap")
    return {name: step(*way, folder) for name, way in KEPT.items()}


def test_whatever_is_kept_the_gradients_are_the_same_to_the_bit(steps):
    for name in [each for each in KEPT if each != "none"]:
        assert torch.equal(steps[name][0], steps["none"][0]), name


def test_the_more_is_computed_again_or_lies_on_disk_the_less_is_held(steps):
    held = {name: peak for name, (_, peak) in steps.items()}
    assert held["none"] > 1.5 * held["selective"] > 1.5 * held["full"]
    assert steps["disk"][1] < 0.5 * steps["none"][1]


def test_a_tensor_that_many_operators_keep_is_written_once_to_a_file_without_a_name(tmp_path):
    offloaded_activations("disk", torch.nn.Linear(4, 4), CPU, tmp_path)
    assert list(tmp_path.iterdir()) == []

    layer = torch.nn.Linear(64, 64)
    swap = offloaded_activations("disk", layer, CPU, tmp_path)
    inputs = torch.randn(64, 64, requires_grad=True) * 2
    twice = inputs.detach().requires_grad_()
    with swap.step():
        loss = sum((layer(twice) * twice.sum()).sum() for _ in range(3))
        torch.autograd.backward(loss)
    plain = inputs.detach().requires_grad_()
    torch.autograd.backward(sum((layer(plain) * plain.sum()).sum() for _ in range(3)))
    assert torch.equal(twice.grad, plain.grad)
    assert swap.disk.written_bytes == 4 * 64 * 64 * (1 + 3)  # the input, and three products


def test_a_cpus_activations_and_moments_cannot_wait_in_its_own_memory(tmp_path):
    with pytest.raises(BadInputError, match=r"activation_offload cpu: this host .* choose disk"):
        offloaded_activations("cpu", torch.nn.Linear(4, 4), CPU, tmp_path)
    model = fresh_model(TINY_CONFIG, torch.float32)
    with pytest.raises(BadInputError, match=r"optimizer_offload cpu: this host .* choose disk"):
        build_optimizer(model, 1e-3, "adamw", ("cpu", None))


def test_an_architecture_without_layers_to_compute_again_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "supports_gradient_checkpointing", False)
    model = fresh_model(TINY_CONFIG, torch.float32)
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(BadInputError, match="activation_recomputation full: LlamaForCausalLM"):
        recompute(model, "full")


def test_a_training_tells_what_its_activations_held(make_job, events_path):
    trainers = []
    for how in ("none", "full"):
        trainer = tiny_trainer(make_job(tiny_training(max_steps=1, activation_recomputation=how)))
        trainer.run()
        trainers.append(trainer)
    trainers[0].job.emitter.close()

    told = [each["body"].get("values", {}) for each in read_events(events_path)]
    name = "held_activations_bytes"
    none, full = (each[name] for each in told if name in each)
    assert none > 1.5 * full
    assert trainers[0].last_loss == trainers[1].last_loss
