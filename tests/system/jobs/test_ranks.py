"""Several ranks as one training: who leads, who computes what, and what a lost one looks like."""

import os
import subprocess
import sys

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
from tests.stack import ROOT, free_port
from tests.system.jobs.gang import run_on_ranks, start
from tests.system.jobs.harness import Finished, Host

BY_ITSELF = "tests.system.jobs.rank_by_itself"
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


def started_rank(part, rank, size, port):
    command = [sys.executable, "-m", BY_ITSELF, part, str(rank)]
    torchruns = {
        "TORCHELASTIC_RUN_ID": "a1", "WORLD_SIZE": str(size), "RANK": str(rank),
        "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return start(command, env, torchruns, cwd=ROOT, **pipes)


@pytest.mark.slow
def test_a_rank_may_start_late_but_not_fall_silent_once_it_trains():
    port = free_port()
    first, late = (started_rank("late", rank, 2, port) for rank in range(2))
    try:
        said, why = first.communicate(timeout=600)
    finally:
        for each in (first, late):
            each.kill()
        heard = late.communicate()

    assert said == "started [2.0]\n", (why, heard)
    assert "RankFailedError: rank 0 of 2: Timed out waiting 2000ms" in why


def test_no_rank_waits_for_a_groups_thread_when_it_frees_its_model():
    """That thread may wait for the lock under which it is waited for: what stays, cannot hang."""
    rank = started_rank("parted", 0, 1, free_port())
    said, why = rank.communicate(timeout=600)

    assert rank.returncode == 0, why
    assert "pt_gloo_runloop" in said


def run_on_two_ranks(host: Host, name: str, steps: int) -> Finished:
    done = run_on_ranks(host, name, tiny_training(max_steps=steps, gradient_accumulation_steps=2))
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def shared(host: Host) -> Finished:
    return run_on_two_ranks(host, "shared", 12)


@pytest.mark.slow
def test_ranks_that_are_looked_at_leave_the_log_to_the_job(shared):
    """Beyond the fifth step a profiler has begun and ended, and the library has lines for both."""
    assert "communication_ratio" in shared.measured
    assert [line for line in shared.stderr.splitlines() if "profiler" in line.lower()] == []
    assert shared.stderr == ""


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_from_the_same_steps(host, shared):
    alone = host.run("alone", tiny_training(max_steps=12, gradient_accumulation_steps=2))

    assert shared.measured["tokens"] == alone.measured["tokens"]
    assert shared.measured["final_loss"] == pytest.approx(alone.measured["final_loss"], rel=1e-4)
    assert shared.measured["perplexity"] == pytest.approx(alone.measured["perplexity"], rel=1e-3)


@pytest.mark.slow
def test_one_result_and_one_model_come_of_two_ranks(shared):
    assert len(shared.bodies("result")) == len(shared.bodies("artefact")) == 1
    assert "2, each with its share" in shared.bodies("result")[0]["notes"]["ranks"]


@pytest.mark.slow
def test_every_rank_says_its_steps_under_its_own_name(shared):
    text = (shared.folder / "stdout.txt").read_text()

    assert "[rank 0] step 12  loss" in text
    assert "[rank 1] step 12  loss" in text
