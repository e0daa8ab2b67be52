"""Checkpoints that are written beside the steps: whole, of their own step, not in the way."""

import json
import os
import shutil
import signal
import time

import pytest
import safetensors.torch
import torch

from runners.jobs.events import read_events
from runners.jobs.train.checkpoint import CheckpointWriter, checkpoints, read_latest
from runners.jobs.train.evaluator import FOLDER, BestWeights, EvaluatedStep
from tests.runners.jobs.tiny import tiny_training
from tests.runners.jobs.train.test_checkpoint import (  # noqa: F401 -- some are fixtures
    SLOW_SECONDS,
    folder,
    kept,
    slow_disk,
    staged,
)
from tests.runners.jobs.train.training import HELD_OUT, linear, stop_at, tiny_trainer
from tests.system.jobs.train.forked import EXIT_LOST, forked
from tests.system.jobs.train.slowed import CASES, FROM_THE_START, SLOW_STEPS, STEPS

FULL = r"No space left|File too large|I/O error"
LOSS_TOLERANCE = 5e-6  # nats, as between layouts
EACH = pytest.mark.parametrize("name", CASES)


def test_one_is_written_at_a_time_and_the_newest_are_kept(tmp_path, slow_disk):
    writer = CheckpointWriter(tmp_path, keep=2)
    began = time.monotonic()
    for step in (1, 2, 3):
        writer.begin(staged(step))
        assert len(list(tmp_path.glob(".step-*-building"))) <= 1
    writer.finish()

    assert time.monotonic() - began >= 3 * SLOW_SECONDS
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert writer.num_written == 3
    assert writer.written_seconds >= 3 * SLOW_SECONDS


def test_a_full_disk_is_told_at_the_next_step_and_the_last_whole_one_stays(small_disk):
    writer = CheckpointWriter(small_disk, keep=1)
    writer.begin(staged(3))
    writer.finish()
    writer.begin(staged(4, size=200_000))
    while writer.is_busy:
        time.sleep(0.01)
    with pytest.raises(Exception, match=FULL):
        writer.check()
    assert [each.name for each in small_disk.iterdir()] == ["step-00000003"]

    writer.begin(staged(5))  # there is room again
    writer.finish()
    assert [each.name for each in small_disk.iterdir()] == ["step-00000005"]


def test_a_training_on_a_full_disk_ends_by_it_and_not_at_its_end(make_job, small_disk):
    spec = tiny_training(
        max_steps=2000, checkpoint_every_seconds=1e-6, checkpoint_writing="background"
    )
    trainer = tiny_trainer(make_job(spec))
    trainer.writer.folder = small_disk

    with pytest.raises(Exception, match=FULL):
        trainer.run()

    assert 0 < trainer.state.step < 2000
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(("how", "steps"), [("in_step", 6), ("background", 30)])
def test_steps_wait_for_the_copy_alone(make_job, events_path, slow_disk, how, steps):
    asked = {"max_steps": steps, "keep_best": False, "checkpoint_every_seconds": 1e-6}
    spec = tiny_training(checkpoint_writing=how, **asked)
    trainer = tiny_trainer(make_job(spec))
    trainer.run()
    trainer.job.emitter.close()
    values = [
        each["body"]["values"] for each in read_events(events_path) if each["kind"] == "metric"
    ]
    waits = [
        each["checkpoint_wait_seconds"] for each in values if "checkpoint_wait_seconds" in each
    ]

    beside = how == "background"
    assert len(waits) == trainer.writer.num_written >= (2 if beside else steps)
    assert all((each < SLOW_SECONDS) == beside for each in waits)
    assert any("checkpoint_write_seconds" in each for each in values)
    last = trainer.writer.figures()
    states = sum(each.nbytes for each in trainer.model.parameters()) * 3
    assert last["checkpoint_copy_bytes"] == (pytest.approx(states, rel=0.01) if beside else 0)
    assert ("in the background" in trainer.writer.note()) == beside


def test_a_stop_is_followed_by_a_checkpoint_of_its_own_step(make_job, slow_disk):
    spec = tiny_training(
        max_steps=100, checkpoint_every_seconds=1e-6, checkpoint_writing="background"
    )
    trainer = tiny_trainer(make_job(spec))
    stop_at(trainer, 5)
    assert not trainer.run()

    saved = read_latest(trainer.job.checkpoint_dir)
    assert saved is not None
    assert saved.state.step == 5
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(saved.weights[name], weight)


def test_a_disk_too_full_for_the_best_weights_is_told_and_the_former_stay(small_disk):
    writer, best = CheckpointWriter(small_disk, keep=1), BestWeights(small_disk)
    best.take(linear(1.0), EvaluatedStep(1, 3.0), writer)
    best.take(torch.nn.Linear(400, 300), EvaluatedStep(2, 1.0), writer)

    with pytest.raises(Exception, match=FULL):
        writer.finish()

    assert [each.name for each in (small_disk / FOLDER).iterdir()] == ["step-00000001"]
    assert BestWeights(small_disk).stored_step() == EvaluatedStep(1, 3.0)


def test_a_kill_in_the_middle_of_the_best_weights_leaves_the_former(tmp_path, monkeypatch):
    best, save_file = BestWeights(tmp_path), safetensors.torch.save_file
    best.take(linear(1.0), EvaluatedStep(1, 3.0))

    def tear(tensors, path):
        save_file(tensors, path)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def write(_ranks):
        writer = CheckpointWriter(tmp_path, keep=1)
        best.take(linear(2.0), EvaluatedStep(2, 1.0), writer)
        writer.finish()

    monkeypatch.setattr(safetensors.torch, "save_file", tear)
    assert forked(1, write) == [-signal.SIGKILL]
    monkeypatch.undo()

    assert len(list((tmp_path / FOLDER).glob(".step-*-building"))) == 1
    again, model = BestWeights(tmp_path), linear(9.0)
    again.restore_best(model, EvaluatedStep(3, 5.0))
    assert (again.exported, model.weight.unique().tolist()) == (EvaluatedStep(1, 3.0), [1.0])
    again.take(linear(4.0), EvaluatedStep(4, 0.5))
    assert [each.name for each in (tmp_path / FOLDER).iterdir()] == ["step-00000004"]


def test_a_training_leaves_the_same_best_weights_beside_its_steps(make_job, slow_disk):
    found = []
    for how in ("in_step", "background"):
        trainer = tiny_trainer(make_job(tiny_training(max_steps=24, checkpoint_writing=how)))
        trainer.held_out.ids = HELD_OUT
        assert trainer.run()
        assert not trainer.writer.is_busy
        folders = {each.name for each in (trainer.job.checkpoint_dir / FOLDER).iterdir()}
        trainer.evaluator.finish(trainer.model, trainer.state)
        weights = [each.detach().clone() for each in trainer.model.parameters()]
        found.append((folders, trainer.evaluator.best.exported, weights))
        shutil.rmtree(trainer.job.checkpoint_dir)
    (folders, exported, weights), (folders_beside, exported_beside, weights_beside) = found

    assert folders_beside == folders == {f"step-{exported.step:08d}"}
    assert exported_beside == exported
    assert exported.step < 24
    assert all(map(torch.equal, weights_beside, weights))


def told(folder, name, part, rank=0):
    return json.loads((folder / name / part / f"{rank}.json").read_text())


@pytest.mark.equality
@pytest.mark.slow
@EACH
def test_each_checkpoint_is_that_of_its_step_though_the_steps_went_on(folder, name):
    found, every = kept(folder, name, "beside"), kept(folder, name, "in_step")
    seen = told(folder, name, "beside")

    assert len(every) == STEPS + 1
    assert 3 <= len(found) == seen["num_written"] < len(every)
    assert min(seen["passed"][:2]) >= SLOW_STEPS  # while the files of the first two were written
    for step, at in found.items():
        for file in every[step].glob("*.safetensors"):
            tensors, others = (
                safetensors.torch.load_file(each) for each in (file, at / file.name)
            )
            assert tensors.keys() == others.keys(), (step, file)  # headers have a random order
            for weight, tensor in tensors.items():
                assert torch.equal(others[weight], tensor), (step, file, weight)
    assert seen["losses"] == told(folder, name, "in_step")["losses"]


@pytest.mark.equality
@pytest.mark.slow
@EACH
def test_steps_wait_for_less_than_the_disk_takes_in_every_layout(folder, name):
    seen = told(folder, name, "beside")

    # A copy, and the end of the last one: not the steps that passed while the others were written.
    assert seen["waited_seconds"] < 0.7 * seen["written_seconds"]
    assert seen["copied_bytes"] > 0


@pytest.mark.equality
@pytest.mark.slow
@EACH
def test_a_kill_in_the_middle_of_a_write_leaves_the_last_whole_one(folder, name):
    ends = json.loads((folder / "killed.json").read_text())[name]
    losses = told(folder, name, "in_step")["losses"]
    again = told(folder, name, "resumed")
    at = again["resumed_at_step"]

    assert ends == [-signal.SIGKILL] + [EXIT_LOST] * (len(ends) - 1)
    assert (at == 0) == (name == FROM_THE_START)
    assert at < STEPS
    assert f"step-{at:08d}" in kept(folder, name, "killed")
    assert again["losses"] == pytest.approx(losses[at:], abs=LOSS_TOLERANCE)
