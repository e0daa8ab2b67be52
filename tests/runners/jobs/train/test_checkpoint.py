"""Checkpoints stand whole or not at all, beside the steps too, and the best weights are kept."""

import math
import re
import shutil
import time

import pytest
import safetensors.torch
import torch

from planner.api import estimate
from planner.specs.estimate import EstimateRequest
from runners.jobs.inputs import model_digest
from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobs.train import checkpoint, checkpoint_files
from runners.jobs.train.checkpoint import (
    CheckpointWriter,
    Keepers,
    StagedCheckpoint,
    TrainState,
    checkpoint_parts,
    checkpoints,
    load_latest,
    newest_checkpoint,
    read_latest,
    remove_older_checkpoints,
    tensor_tables,
)
from runners.jobs.train.evaluator import FOLDER, BestWeights, EvaluatedStep, HeldOutData
from runners.jobs.train.rows import TextBatches
from runners.jobs.train.trainer import Trainer
from tests.planner.asking import CPU
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import HELD_OUT, IDS, linear, tiny_trainer
from tests.system.jobs.train.forked import run_script


@pytest.fixture
def pair():
    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    return make


def save_checkpoint(folder, model, optimizer, state):
    parts = checkpoint_parts(*tensor_tables(model, optimizer))
    Keepers().write(folder, StagedCheckpoint(parts, state), state)
    return newest_checkpoint(folder)


def _step(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_resume_on_other_data_or_another_base_is_refused_by_name(make_job, capsys):
    read = {"training data": "a" * 64, "model": "b" * 64}
    for before, now, words in (
        (read, read, ""),
        (read, read | {"training data": "c" * 64}, (
            "training data (sha256 aaaaaaaaaaaa, now cccccccccccc) changed since the checkpoint "
            "at step 2; put it back as it was and resume again, or run the job again from the "
            "start"
        )),
        (read, read | {"model": "c" * 64}, "model (sha256 bbbbbbbbbbbb, now cccccccccccc) changed"),
        (read, {"model": "c" * 64}, "and training data (sha256 aaaaaaaaaaaa, now none) changed"),
        ({}, read, ""),
    ):  # fmt: skip
        job = make_job(tiny_training(max_steps=4))
        shutil.rmtree(job.checkpoint_dir)
        first, resumed = (tiny_trainer(job) for _ in range(2))
        first.inputs, resumed.inputs = before, now
        first.resume()
        first.state.step = 2
        first.checkpoint()
        if words:
            with pytest.raises(BadInputError, match=re.escape(words)):
                resumed.resume()
            assert resumed.resumed_at_step is None
            continue
        resumed.resume()
        assert resumed.resumed_at_step == 2
        assert resumed.state.inputs == tuple(now.items())
        assert bool(resumed.resumed_remark) == (not before)
    assert "resumed from the checkpoint at step 2; whether data and weights are the same" in (
        capsys.readouterr().out
    )


def test_a_model_has_another_digest_once_its_weights_config_or_tokenizer_changed(tmp_path):
    safetensors.torch.save_file({"w": torch.zeros(8)}, tmp_path / "model.safetensors")
    digests = [model_digest(tmp_path)]
    for name, content in (("config.json", b"{}"), ("tokenizer.json", b"{}")):
        (tmp_path / name).write_bytes(content)
        digests.append(model_digest(tmp_path))
    safetensors.torch.save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    digests.append(model_digest(tmp_path))
    assert len(set(digests)) == len(digests)


def test_a_half_written_one_is_not_seen_and_the_same_step_can_be_saved_twice(tmp_path, pair):
    assert load_latest(tmp_path, *pair(1)) is None

    save_checkpoint(tmp_path, *pair(1), TrainState(step=3))
    half = tmp_path / ".step-00000009-building"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"torn")
    assert load_latest(tmp_path, *pair(2)) == TrainState(step=3)

    save_checkpoint(tmp_path, *pair(1), TrainState(step=3))
    save_checkpoint(tmp_path, *pair(1), TrainState(step=3, tokens=7))
    assert load_latest(tmp_path, *pair(2)) == TrainState(step=3, tokens=7)


def test_weights_optimizer_and_progress_come_back(tmp_path, pair):
    saved = pair(1)
    _step(*saved)
    save_checkpoint(tmp_path, *saved, TrainState(step=1, tokens=9, elapsed_seconds=0.5))
    loaded = pair(2)

    state = load_latest(tmp_path, *loaded)
    _step(*saved)
    _step(*loaded)

    assert state == TrainState(step=1, tokens=9, elapsed_seconds=0.5)
    assert torch.equal(saved[0].weight, loaded[0].weight)


def test_a_checkpoint_of_an_earlier_release_is_read(tmp_path, pair):
    saved = pair(1)
    _step(*saved)
    weights, states = tensor_tables(*saved)
    (old := tmp_path / "step-00000001").mkdir()
    safetensors.torch.save_file(weights, old / "model.safetensors")
    safetensors.torch.save_file(states, old / "optimizer.safetensors")
    (old / "state.json").write_text('{"step": 1}')
    loaded = pair(2)

    assert load_latest(tmp_path, *loaded) == TrainState(step=1)
    _step(*saved)
    _step(*loaded)
    assert torch.equal(saved[0].weight, loaded[0].weight)


def test_a_checkpoint_that_lost_or_damaged_files_is_refused_by_name(tmp_path, monkeypatch, pair):
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 64)
    saved = pair(1)
    _step(*saved)
    for name, harm, words in (
        ("cut off", lambda file: file.write_bytes(file.read_bytes()[:-4]), "step-00000001 is dam"),
        ("lost", lambda file: file.unlink(), "it has no tensor "),
    ):
        at = save_checkpoint(tmp_path / name, *saved, TrainState(step=1))
        files = sorted(at.glob("*.safetensors"))
        assert len(files) > 1
        harm(files[0])
        with pytest.raises(BadInputError, match=words):
            load_latest(tmp_path / name, *pair(2))
    wider = torch.nn.Linear(5, 3)
    save_checkpoint(
        tmp_path / "other", wider, torch.optim.AdamW(wider.parameters()), TrainState(step=1)
    )
    with pytest.raises(BadInputError, match=r"its tensor weight is \[3, 5\], and \[3, 4\] is"):
        load_latest(tmp_path / "other", *pair(2))


def test_the_newest_are_kept(tmp_path, pair):
    for keep, left in ((1, [10]), (2, [2, 10]), (9, [1, 2, 10])):
        (folder := tmp_path / str(keep)).mkdir()
        for step in (1, 2, 10):
            save_checkpoint(folder, *pair(1), TrainState(step=step))
            remove_older_checkpoints(folder, keep)

        assert [each.name for each in checkpoints(folder)] == [f"step-{step:08d}" for step in left]
        state = load_latest(folder, *pair(2))
        assert state is not None, keep
        assert state.step == 10, keep


def test_saving_after_a_torn_attempt_starts_clean(tmp_path, pair):
    half = tmp_path / ".step-00000003-building"
    half.mkdir()
    (half / "stray").write_bytes(b"torn")

    final = save_checkpoint(tmp_path, *pair(1), TrainState(step=3))

    assert {each.name for each in final.iterdir()} == {
        "shard-00001-model-00001-of-00001.safetensors",
        "state.json",
    }


def test_a_full_disk_leaves_the_last_whole_checkpoint_until_there_is_room_again(small_disk, pair):
    large = torch.nn.Linear(400, 300)
    optimizer = torch.optim.AdamW(large.parameters(), lr=0.1)
    saved = pair(1)
    save_checkpoint(small_disk, *saved, TrainState(step=3))
    with pytest.raises(Exception, match=r"No space left|File too large|I/O error"):
        save_checkpoint(small_disk, large, optimizer, TrainState(step=4))
    loaded = pair(2)
    assert load_latest(small_disk, *loaded) == TrainState(step=3)
    assert torch.equal(saved[0].weight, loaded[0].weight)
    assert [each.name for each in small_disk.iterdir()] == ["step-00000003"]

    with pytest.raises(Exception, match=r"No space left|File too large|I/O error"):
        save_checkpoint(small_disk, large, optimizer, TrainState(step=4))
    save_checkpoint(small_disk, *pair(1), TrainState(step=5))
    assert load_latest(small_disk, *pair(2)) == TrainState(step=5)


# Checkpoints that are written beside the steps: whole, of their own step, not in the way.

SLOW_SECONDS = 0.15


def staged(step: int, size: int = 4) -> StagedCheckpoint:
    parts = checkpoint_parts({"w": torch.full((size,), float(step))}, {})
    return StagedCheckpoint(parts, TrainState(step=step))


@pytest.fixture
def slow_disk(monkeypatch):
    def slowed(save):
        def saved(*args, **options):
            time.sleep(SLOW_SECONDS)
            return save(*args, **options)

        return saved

    for name in ("save", "save_file"):  # of checkpoints, and of the best weights
        monkeypatch.setattr(safetensors.torch, name, slowed(getattr(safetensors.torch, name)))


def test_what_is_written_is_the_copy_and_not_what_the_steps_made_of_it(tmp_path, slow_disk):
    writer, asked = CheckpointWriter(tmp_path, keep=1), staged(3)
    writer.begin(asked)
    assert writer.is_busy
    asked.parts["w"].tensor.fill_(99.0)
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
def test_the_copy_takes_what_is_planned(make_job, monkeypatch, optimizer, method, near):
    """The plan has the term on a processor where the copy lies beside the states."""
    # The first copy is of no states yet: a slow disk leaves out none of the later ones.
    monkeypatch.setattr(CheckpointWriter, "is_busy", False)
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


def test_unless_it_is_chosen_only_states_on_a_gpu_are_copied():
    for writing, device, is_beside in (
        ("auto", "cuda", True),
        ("auto", "cpu", False),
        ("background", "cpu", True),
        ("in_step", "cuda", False),
    ):
        spec = tiny_training(checkpoint_writing=writing)
        assert spec.writes_checkpoints_in_background(device) == is_beside, writing


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
    began = time.monotonic()
    writer, best, model = CheckpointWriter(tmp_path, keep=1), BestWeights(tmp_path), linear(1.0)
    best.take(model, EvaluatedStep(1, 3.0), writer)
    assert writer.is_busy
    torch.nn.init.constant_(model.weight, 9.0)
    best.take(model, EvaluatedStep(2, 3.5), writer)
    assert best.stored_step() is None
    writer.begin(staged(5))
    assert best.stored_step() == EvaluatedStep(1, 3.0)
    writer.finish()
    passed = time.monotonic() - began

    best.restore_best(model, EvaluatedStep(6, 3.25))
    assert model.weight.unique().tolist() == [1.0]
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000005"]
    assert writer.num_written == 1
    assert writer.written_seconds >= SLOW_SECONDS  # of the checkpoint alone
    assert passed >= 2 * SLOW_SECONDS  # of both, one after the other


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("slowed")
    run_script("slowed", found, seconds=420)
    return found


def kept(folder, name, part):
    return {each.name: each for each in checkpoints(folder / name / f"{part}-work" / "checkpoint")}


# A training leaves the weights whose held-out loss was the lowest, restarts included.


@pytest.fixture
def overfitting(make_job):
    def make(**changes):
        asked = {"max_steps": 40, "keep_checkpoints": 100, "checkpoint_every_seconds": 1e-6}
        spec = tiny_training(**{**asked, "checkpoint_writing": "in_step", **changes})
        torch.manual_seed(spec.seed)
        model = fresh_model(TINY_CONFIG, torch.float32)
        batches = TextBatches(IDS, spec)
        return Trainer(
            make_job(spec), spec, model, batches, HeldOutData(HELD_OUT), torch.device("cpu")
        )

    return make


def test_only_a_lower_loss_takes_the_place(tmp_path):
    best, model = BestWeights(tmp_path), linear(9.0)
    assert best.stored_step() is None
    for step, loss in [(1, 3.0), (2, 2.0), (3, 2.0), (4, math.nan), (5, 2.5)]:
        best.take(linear(float(step)), EvaluatedStep(step, loss))

    assert best.stored_step() == EvaluatedStep(2, 2.0)
    assert [each.name for each in checkpoints(tmp_path / FOLDER)] == ["step-00000002"]
    best.restore_best(model, EvaluatedStep(6, 2.25))
    assert model.weight.unique().tolist() == [2.0]
    assert best.note().startswith("those of step 2: held-out loss 2.0000 nats")
    assert best.note().endswith("the last step's was 2.2500")


def test_the_last_weights_stay_where_they_are_the_best(tmp_path):
    best, model = BestWeights(tmp_path), linear(9.0)
    best.take(linear(1.0), EvaluatedStep(1, 3.0))
    best.restore_best(model, EvaluatedStep(7, 3.0))
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
    assert again.stored_step() == EvaluatedStep(2, 2.0)
    again.restore_best(model, EvaluatedStep(3, 5.0))
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
