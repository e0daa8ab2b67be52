"""Checkpoints stand whole or not at all, and bring everything back."""

import pytest
import torch

from runners.jobs.train.checkpoint import (
    TrainState,
    checkpoints,
    forget_older,
    load_latest,
    save_checkpoint,
)


@pytest.fixture
def pair():
    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    return make


def _step(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_nothing_is_found_in_an_empty_folder(tmp_path, pair):
    assert load_latest(tmp_path, *pair(1)) is None


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


@pytest.mark.parametrize(("keep", "left"), [(1, [10]), (2, [2, 10]), (9, [1, 2, 10])])
def test_the_newest_are_kept(tmp_path, pair, keep, left):
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, *pair(1), TrainState(step=step))
        forget_older(tmp_path, keep)

    assert [each.name for each in checkpoints(tmp_path)] == [f"step-{step:08d}" for step in left]
    state = load_latest(tmp_path, *pair(2))
    assert state is not None
    assert state.step == 10


def test_a_half_written_one_is_not_seen(tmp_path, pair):
    save_checkpoint(tmp_path, *pair(1), TrainState(step=3))
    half = tmp_path / ".step-00000009-building"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"torn")

    assert load_latest(tmp_path, *pair(2)) == TrainState(step=3)


def test_saving_after_a_torn_attempt_starts_clean(tmp_path, pair):
    half = tmp_path / ".step-00000003-building"
    half.mkdir()
    (half / "stray").write_bytes(b"torn")

    final = save_checkpoint(tmp_path, *pair(1), TrainState(step=3))

    assert {each.name for each in final.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


def test_the_same_step_can_be_saved_twice(tmp_path, pair):
    save_checkpoint(tmp_path, *pair(1), TrainState(step=3))
    save_checkpoint(tmp_path, *pair(1), TrainState(step=3, tokens=7))

    assert load_latest(tmp_path, *pair(2)) == TrainState(step=3, tokens=7)


def test_a_full_disk_leaves_the_last_whole_checkpoint_and_nothing_half_written(small_disk, pair):
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


def test_once_there_is_room_again_the_next_checkpoint_takes_its_place(small_disk, pair):
    large = torch.nn.Linear(400, 300)
    optimizer = torch.optim.AdamW(large.parameters(), lr=0.1)
    with pytest.raises(Exception, match=r"No space left|File too large|I/O error"):
        save_checkpoint(small_disk, large, optimizer, TrainState(step=4))

    save_checkpoint(small_disk, *pair(1), TrainState(step=5))

    assert load_latest(small_disk, *pair(2)) == TrainState(step=5)
