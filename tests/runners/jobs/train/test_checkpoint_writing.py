"""Checkpoints that are written beside the steps: whole, of their own step, not in the way."""

import time

import pytest
import safetensors.torch
import torch

from planner.api import estimate
from planner.specs.estimate import EstimateRequest
from runners.jobs.train import checkpoint
from runners.jobs.train.checkpoint import (
    CheckpointWriter,
    Saved,
    Staged,
    TrainState,
    checkpoints,
    read_latest,
)
from runners.jobs.train.evaluator import BestWeights, EvaluatedStep
from tests.planner.asking import CPU
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import linear, tiny_trainer
from tests.system.jobs.train.forked import run_script

SLOW_SECONDS = 0.15


def staged(step: int, size: int = 4) -> Staged:
    state, weights = TrainState(step=step), {"w": torch.full((size,), float(step))}
    return Staged({"weights": weights}, lambda kept: Saved(kept["weights"], {}, state))


@pytest.fixture
def slow_disk(monkeypatch):
    save_file = safetensors.torch.save_file

    def save(*args):
        time.sleep(SLOW_SECONDS)
        save_file(*args)

    monkeypatch.setattr(safetensors.torch, "save_file", save)


def test_what_is_written_is_the_copy_and_not_what_the_steps_made_of_it(tmp_path, slow_disk):
    writer, asked = CheckpointWriter(tmp_path, keep=1), staged(3)
    writer.begin(asked)
    assert writer.is_busy
    asked.parts["weights"]["w"].fill_(99.0)
    assert checkpoints(tmp_path) == []
    writer.finish()

    found = read_latest(tmp_path)
    assert found is not None
    assert found.state.step == 3
    assert found.weights["w"].tolist() == [3.0] * 4
    assert writer.figures()["checkpoint_copy_bytes"] == 16


def test_without_room_for_a_copy_it_is_written_in_its_step_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "free_host_bytes", lambda: 19)  # of 16, and a quarter
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.begin(staged(1))
    assert not writer.is_busy
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000001"]
    assert "host memory had no room for a copy" in writer.note()
    monkeypatch.setattr(checkpoint, "free_host_bytes", lambda: 20)
    assert staged(1).has_room()


@pytest.mark.parametrize(
    ("optimizer", "method", "near"),
    [("adamw", "full", 0.01), ("lion", "full", 0.01), ("qft", "qft", 0.1)],  # scales of rows of 64
)
def test_the_copy_takes_what_is_planned(make_job, optimizer, method, near):
    """The plan has the term on a processor where the copy lies beside the states."""
    beside = {"checkpoint_every_seconds": 1e-6, "checkpoint_writing": "background"}
    beside |= {"keep_best": False}  # its copies would keep these from being made
    trainer = tiny_trainer(make_job(tiny_training(max_steps=4, optimizer=optimizer, **beside)))
    trainer.run()
    request = {
        "model": TINY_CONFIG,
        "cluster": {"device": CPU},
        "workload": {
            "kind": "train", "sequence_length": 64, "global_batch_size": 4, "method": method,
            "optimizer": None if method == "qft" else optimizer,
        },
        "strategy": {"compute_dtype": "fp32", "checkpoint_writing": "background"},
    }  # fmt: skip
    planned = estimate(EstimateRequest.model_validate(request))
    (term,) = (each for each in planned.terms if each.name.startswith("Checkpoint copy"))

    assert trainer.writer.copied_bytes == pytest.approx(term.value, rel=near)


@pytest.mark.parametrize(
    ("writing", "device", "is_beside"),
    [
        ("auto", "cuda", True),
        ("auto", "cpu", False),
        ("background", "cpu", True),
        ("in_step", "cuda", False),
    ],
)
def test_unless_it_is_chosen_only_states_on_a_gpu_are_copied(writing, device, is_beside):
    spec = tiny_training(checkpoint_writing=writing)

    assert spec.writes_checkpoints_in_background(device) == is_beside


def test_a_processors_training_takes_no_memory_for_a_copy(make_job):
    trainer = tiny_trainer(make_job(tiny_training(max_steps=5, checkpoint_every_seconds=1e-6)))
    trainer.run()

    assert trainer.writer.num_written >= 5
    assert trainer.writer.figures()["checkpoint_copy_bytes"] == 0
    assert "in the step" in trainer.writer.note()


def test_moments_on_disk_are_not_copied_into_memory(make_job):
    away = tiny_training(
        optimizer_offload="disk", checkpoint_every_seconds=1e-6, max_steps=3,
        checkpoint_writing="background",
    )  # fmt: skip
    trainer = tiny_trainer(make_job(away))

    trainer.run()

    assert trainer.writer.num_written == 4
    assert trainer.writer.copied_bytes == 0


def test_the_best_weights_are_those_of_their_step_and_a_checkpoint_waits(tmp_path, slow_disk):
    writer, best, model = CheckpointWriter(tmp_path, keep=1), BestWeights(tmp_path), linear(1.0)
    best.take(model, EvaluatedStep(1, 3.0), writer)
    assert writer.is_busy
    torch.nn.init.constant_(model.weight, 9.0)
    best.take(model, EvaluatedStep(2, 3.5), writer)
    assert best.kept() is None
    writer.begin(staged(5))
    assert best.kept() == EvaluatedStep(1, 3.0)
    writer.finish()

    best.put_back(model, EvaluatedStep(6, 3.25))
    assert model.weight.unique().tolist() == [1.0]
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000005"]
    assert writer.num_written == 1
    assert 2 * SLOW_SECONDS <= writer.written_seconds < 3 * SLOW_SECONDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("slowed")
    run_script("slowed", found, seconds=420)
    return found


def kept(folder, name, part):
    return {each.name: each for each in checkpoints(folder / name / f"{part}-work" / "checkpoint")}
