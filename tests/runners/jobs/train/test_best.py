"""A training leaves the weights whose held-out loss was the lowest, restarts included."""

import math

import pytest
import torch

from runners.jobs.loading import fresh_model
from runners.jobs.train.checkpoint import checkpoints
from runners.jobs.train.evaluator import FOLDER, BestWeights, EvaluatedStep, HeldOut
from runners.jobs.train.rows import TextBatches
from runners.jobs.train.trainer import Trainer
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import HELD_OUT, IDS, linear


@pytest.fixture
def overfitting(make_job):
    def make(**changes):
        asked = {"max_steps": 40, "keep_checkpoints": 100, "checkpoint_every_seconds": 1e-6}
        spec = tiny_training(**{**asked, "checkpoint_writing": "in_step", **changes})
        torch.manual_seed(spec.seed)
        model = fresh_model(TINY_CONFIG, torch.float32)
        batches = TextBatches(IDS, spec)
        return Trainer(
            make_job(spec), spec, model, batches, HeldOut(HELD_OUT), torch.device("cpu")
        )

    return make


def test_only_a_lower_loss_takes_the_place(tmp_path):
    best, model = BestWeights(tmp_path), linear(9.0)
    assert best.kept() is None
    for step, loss in [(1, 3.0), (2, 2.0), (3, 2.0), (4, math.nan), (5, 2.5)]:
        best.take(linear(float(step)), EvaluatedStep(step, loss))

    assert best.kept() == EvaluatedStep(2, 2.0)
    assert [each.name for each in checkpoints(tmp_path / FOLDER)] == ["step-00000002"]
    best.put_back(model, EvaluatedStep(6, 2.25))
    assert model.weight.unique().tolist() == [2.0]
    assert best.note().startswith("those of step 2: held-out loss 2.0000 nats")
    assert best.note().endswith("the last step's was 2.2500")


def test_the_last_weights_stay_where_they_are_the_best(tmp_path):
    best, model = BestWeights(tmp_path), linear(9.0)
    best.take(linear(1.0), EvaluatedStep(1, 3.0))

    best.put_back(model, EvaluatedStep(7, 3.0))

    assert model.bias.tolist() == [9.0, 9.0]
    assert best.exported == EvaluatedStep(7, 3.0)
    assert best.note().startswith("the last step's: held-out loss 3.0000 nats")


@pytest.mark.parametrize("left", [{"loss.json"}, {"model.safetensors"}, set()], ids=str)
def test_a_kill_while_the_former_ones_go_loses_nothing(tmp_path, monkeypatch, left):
    best = BestWeights(tmp_path)
    best.take(linear(1.0), EvaluatedStep(1, 3.0))

    def cut_short(folder, **_):
        for each in folder.glob("*"):
            if each.name not in left:
                each.unlink()

    monkeypatch.setattr("runners.jobs.train.evaluator.shutil.rmtree", cut_short)
    best.take(linear(2.0), EvaluatedStep(2, 2.0))
    monkeypatch.undo()
    again, model = BestWeights(tmp_path), linear(9.0)

    assert len(checkpoints(tmp_path / FOLDER)) == 2
    assert again.kept() == EvaluatedStep(2, 2.0)
    again.put_back(model, EvaluatedStep(3, 5.0))
    assert model.weight.unique().tolist() == [2.0]
    again.take(linear(4.0), EvaluatedStep(4, 1.0))
    assert [each.name for each in checkpoints(tmp_path / FOLDER)] == ["step-00000004"]


def test_an_early_stop_leaves_the_best_weights(overfitting):
    trainer = overfitting(early_stop_validations=2)

    assert trainer.run()
    trainer.evaluator.finish(trainer.model, trainer.state)

    assert trainer.evaluator.is_over
    assert trainer.evaluator.best.exported is not None
    assert trainer.evaluator.best.exported.step < trainer.state.step < 40
    assert "the weights" not in trainer.evaluator.patience.note(trainer.state)
