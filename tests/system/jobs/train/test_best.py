"""A training leaves the weights whose held-out loss was the lowest, restarts included."""

import pytest
import torch

from runners.jobs.events import read_events
from runners.jobs.train import job as train
from runners.jobs.train.checkpoint import checkpoints, read_latest
from runners.jobs.train.evaluator import FOLDER, BestWeights, EvaluatedStep
from tests.runners.jobs.tiny import tiny_training
from tests.runners.jobs.train.test_checkpoint import (  # noqa: F401 -- some are fixtures
    overfitting,
)
from tests.runners.jobs.train.training import linear, stop_at


def judged_of(trainer, events_path):
    trainer.job.emitter.close()
    bodies = [each["body"] for each in read_events(events_path) if each["kind"] == "metric"]
    key = "validation_loss"
    return {each["step"]: each["values"][key] for each in bodies if key in each["values"]}


def test_a_full_disk_keeps_the_best_that_was_whole(small_disk):
    best = BestWeights(small_disk)
    best.take(linear(1.0), EvaluatedStep(1, 3.0))

    with pytest.raises(Exception, match=r"No space left|File too large|I/O error"):
        best.take(torch.nn.Linear(400, 300), EvaluatedStep(2, 1.0))

    assert best.stored_step() == EvaluatedStep(1, 3.0)
    found = linear(0.0)
    best.restore_best(found, EvaluatedStep(3, 5.0))
    assert found.weight.unique().tolist() == [1.0]


def test_it_leaves_the_weights_of_the_step_that_did_best(overfitting, events_path):
    trainer = overfitting()
    assert trainer.run()
    last = trainer.model.lm_head.weight.clone()
    trainer.evaluator.finish(trainer.model, trainer.state)
    judged = judged_of(trainer, events_path)

    step = min(judged, key=judged.get)
    assert (len(judged), max(judged)) == (8, 40)  # seven on the way, and the last
    assert 0 < step < 40
    assert trainer.evaluator.best.exported == EvaluatedStep(step, judged[step])
    assert not torch.equal(trainer.model.lm_head.weight, last)
    every = {each.name: each for each in checkpoints(trainer.job.checkpoint_dir)}
    then = overfitting()
    for name in every.keys() - {f"step-{step:08d}"}:
        every[name].rename(trainer.job.attempt_dir / name)
    saved = read_latest(then.job.checkpoint_dir)
    assert saved is not None
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, saved.weights[name])
    found = trainer.held_out.validation(trainer.model)["validation_loss"]
    assert found == pytest.approx(judged[step], abs=1e-6)


def test_a_restart_still_knows_the_best(overfitting):
    first = overfitting()
    stop_at(first, 22)
    assert not first.run()
    before = first.evaluator.best.stored_step()
    second = overfitting()
    second.resume()
    assert second.run()
    second.evaluator.finish(second.model, second.state)

    assert before is not None
    assert second.resumed_at_step == 22
    assert second.evaluator.best.exported == before
    assert before.step < 22


def test_without_the_option_it_leaves_the_last(overfitting):
    trainer = overfitting(keep_best=False)
    assert trainer.run()
    last = trainer.model.lm_head.weight.clone()

    trainer.evaluator.finish(trainer.model, trainer.state)

    assert torch.equal(trainer.model.lm_head.weight, last)
    assert trainer.evaluator.best.exported is None
    assert not (trainer.job.checkpoint_dir / FOLDER).exists()


def test_the_result_says_of_which_step_the_published_weights_are(host):
    ran = host.run_here("best", tiny_training(max_steps=24), train.work)
    notes = ran.bodies("result")[0]["notes"]
    losses = ran.metric("validation_loss")

    assert 0 < ran.measured["exported_step"] <= 24
    assert f"{min(losses):.4f} nats" in notes["exported_step"]
    assert len(losses) == 8
    assert not (ran.folder / "checkpoint").exists()
