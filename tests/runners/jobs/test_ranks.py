"""Several ranks as one training: who leads, who computes what, and what a lost one looks like."""

import os

import pytest
import torch

from runners.jobs.events import Emitter, read_events
from runners.jobs.loading import fresh_model
from runners.jobs.ranks import ALONE, RankFailedError, Ranks, joined_ranks, naming_rank_failures
from runners.jobs.runtime import BadInputError
from runners.jobs.train.checkpoint import share_progress
from runners.jobs.train.job import _check_same_text, _check_share
from runners.jobs.train.optimizers import build_optimizer
from runners.jobspec import DataParallel
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training

GLOO = "[/src/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:65: Connection reset by peer."


def test_alone_a_process_leads_and_exchanges_nothing():
    assert ALONE.is_lead
    assert ALONE.is_alone
    assert ALONE.total([1.0, 2.5]) == [1.0, 2.5]
    assert ALONE.name == ""


def test_what_torchrun_did_not_start_is_alone(make_job):
    with joined_ranks(make_job(tiny_training()), DataParallel()) as ranks:
        assert ranks is ALONE


@pytest.mark.parametrize(("size", "count"), [(1, 3), (2, 4), (2, 5), (3, 3), (3, 8)])
def test_every_micro_batch_of_a_step_is_computed_once(size, count):
    shares = [list(Ranks(rank, size).share(count)) for rank in range(size)]

    assert sorted(index for share in shares for index in share) == list(range(count))


@pytest.mark.parametrize("words", [GLOO, "Timed out waiting 5000ms for recv operation"])
def test_what_the_network_library_says_of_a_lost_rank_is_one_error(words):
    with (
        pytest.raises(RankFailedError, match=r"^rank 1 of 2: "),
        naming_rank_failures(Ranks(1, 2)),
    ):
        raise RuntimeError(words)


def test_the_error_of_a_lost_rank_names_no_source_file_of_the_library():
    with pytest.raises(RankFailedError) as lost, naming_rank_failures(Ranks(0, 2)):
        raise RuntimeError(f"{GLOO} This is typically caused by a hanging worker.")

    assert str(lost.value).endswith("Read error [10.0.0.1]:65: Connection reset by peer")


def test_an_error_of_the_computation_stays_what_it_is():
    with pytest.raises(RuntimeError, match="shape"), naming_rank_failures(Ranks(0, 2)):
        raise RuntimeError("shape mismatch")


def test_alone_no_error_is_blamed_on_another_rank():
    with pytest.raises(RuntimeError, match="Connection reset"), naming_rank_failures(ALONE):
        raise RuntimeError(GLOO)


def test_more_ranks_than_micro_batches_are_refused_with_the_way_out():
    with pytest.raises(BadInputError, match="3 ranks share 2 micro-batches"):
        _check_share(Ranks(0, 3), tiny_training(gradient_accumulation_steps=2))


def test_ranks_with_different_text_do_not_train_together(monkeypatch):
    monkeypatch.setattr(Ranks, "total", lambda _self, _values: [1.0])

    with pytest.raises(BadInputError, match="same Python version"):
        _check_same_text(Ranks(1, 2), "f" * 64)


def test_nothing_to_resume_stays_nothing():
    model = fresh_model(TINY_CONFIG, torch.float32)

    assert share_progress(ALONE, model, build_optimizer(model, 1e-3), None) is None


@pytest.mark.parametrize(("local_rank", "is_heard"), [("0", True), ("1", False)])
def test_the_first_rank_of_a_host_speaks_through_the_pipe_that_its_parent_holds(
    tmp_path, monkeypatch, local_rank, is_heard
):
    path = tmp_path / "events.jsonl"
    with path.open("ab") as held:
        monkeypatch.setattr(os, "getppid", os.getpid)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a1")
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monkeypatch.setenv("SLIPWAY_EVENT_FD", str(held.fileno()))

        emitter = Emitter.from_environment()
        emitter.phase("Training")
        emitter.close()

    assert bool(read_events(path)) is is_heard
