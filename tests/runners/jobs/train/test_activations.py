"""What a step keeps for its backward pass: less of it changes no gradient."""

import pytest
import torch
from transformers import PreTrainedModel

from runners.jobs.events import read_events
from runners.jobs.loading import fresh_model
from runners.jobs.memory import activations_counted
from runners.jobs.runtime import BadInputError
from runners.jobs.train.activations import offloaded_activations, recompute
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import tiny_trainer

CPU = torch.device("cpu")
IDS = torch.arange(4 * 64).reshape(4, 64) % 512
WAYS = {
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
    return {name: step(*way, folder) for name, way in WAYS.items()}


@pytest.mark.parametrize("name", [each for each in WAYS if each != "none"])
def test_whatever_is_kept_the_gradients_are_the_same_to_the_bit(steps, name):
    assert torch.equal(steps[name][0], steps["none"][0])


def test_the_more_is_computed_again_the_less_is_held(steps):
    held = {name: peak for name, (_, peak) in steps.items()}

    assert held["none"] > 1.5 * held["selective"] > 1.5 * held["full"]


def test_on_disk_activations_take_little_memory(steps):
    assert steps["disk"][1] < 0.5 * steps["none"][1]


def test_a_tensor_that_many_operators_keep_is_written_once(tmp_path):
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


def test_the_file_of_activations_has_no_name(tmp_path):
    offloaded_activations("disk", torch.nn.Linear(4, 4), CPU, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_cpus_activations_cannot_wait_in_its_own_memory(tmp_path):
    with pytest.raises(BadInputError, match=r"activation_offload cpu: this host .* choose disk"):
        offloaded_activations("cpu", torch.nn.Linear(4, 4), CPU, tmp_path)


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
