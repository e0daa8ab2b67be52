"""Several ranks as one training: who leads, who computes what, and what a lost one looks like."""

import os
import subprocess
import sys

import pytest

from tests.runners.jobs.tiny import tiny_training
from tests.stack import ROOT, free_port
from tests.system.jobs.gang import run_on_ranks, start
from tests.system.jobs.harness import Finished, Host

BY_ITSELF = "tests.system.jobs.rank_by_itself"


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
