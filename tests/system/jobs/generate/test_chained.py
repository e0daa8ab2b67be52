"""A chain of stage servers writes what one process writes, whichever of them is lost."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from runners.jobs.generate import chained
from runners.jobs.generate.chained import ServerChain, run_chain
from runners.jobs.generate.static import AnswerLimits, BatchSetup, run_batch
from runners.jobs.loading import load_folder
from runners.jobs.runtime import Job
from runners.jobspec import DataParallel, DemoPrompts
from runners.jobspec.generate import StageChain
from runners.shared.messages import RunRequest
from tests.runners.jobs.generate.test_link import (  # noqa: F401 -- some are fixtures
    CPU,
    chain_spec,
    folder,
    gang_of,
)
from tests.stack import free_port
from tests.system.jobs.generate.reading import outputs

PROMPTS = [[5, 7, 11, 13], [17, 19, 23]]
DEFAULTS = {"prompts": DemoPrompts(count=4, input_tokens=20, shortest=4), "output_tokens": 10}


def test_without_a_server_that_comes_the_job_ends_by_name(
    host, trained_model, make_job, monkeypatch
):
    monkeypatch.setattr(chained, "SERVER", "runners.jobs.no_such_server")
    spec = chain_spec(trained_model, restarts=1)

    with pytest.raises(SystemExit, match="RANK_LOST: no server connected within"):
        run_chain(make_job(spec), spec, spec.split, lambda opened: bool(opened()))


@pytest.mark.slow
@pytest.mark.equality
def test_a_job_whose_stage_is_a_server_writes_the_same_and_says_what_became_of_it(
    generate, trained_model
):
    resident = generate("here")

    run = generate("chained", split=StageChain(stages=1))

    assert outputs(run) == outputs(resident)
    assert run.measured["servers_lost"] == 0
    assert run.measured["hidden_bytes_sent"] > 0
    assert run.measured["parameter_bytes"] < resident.measured["parameter_bytes"]
    assert "a chain of 1 stages" in run.bodies("result")[0]["notes"]["split"]


def job_of(host, name, spec, gang=None) -> Job:
    folder = host.attempt(name, spec)
    request = RunRequest.model_validate_json((folder / "spec.json").read_bytes())
    request = request.model_copy(update={"gang": gang})
    (folder / "spec.json").write_text(request.model_dump_json())
    return Job(folder, host.path, request, None, threading.Event())


def killing(at, kill):
    """AnswerLimits whose question at every token kills somebody at one of them."""
    left = [at]

    def should_stop():
        left[0] -= 1
        if left[0] == 0:
            kill()
        return False

    return AnswerLimits(16, should_stop=should_stop)


@pytest.mark.slow
@pytest.mark.equality
def test_a_server_killed_in_the_middle_is_replaced_and_the_text_is_unbroken(host, trained_model):
    spec = chain_spec(trained_model, restarts=1, patience_seconds=240.0)
    job = job_of(host, "chain-killed", spec)
    resident = load_folder(host.path / "attempts/trained/output/model", "fp32", CPU)
    wanted = run_batch(resident, PROMPTS, AnswerLimits(16)).answers
    chain = ServerChain(job, spec, spec.split)
    limits = killing(6, lambda: os.kill(chain.servers.pids[0], signal.SIGKILL))

    found = run_batch(chain.model, PROMPTS, limits, BatchSetup(chain=chain)).answers
    chain.finish(is_stopped=False)

    assert found == wanted
    measured = chain.result_metrics()
    assert measured["servers_lost"] == 1
    assert measured["replayed_positions"] == len(PROMPTS) * (len(PROMPTS[0]) + 5)


@pytest.mark.slow
@pytest.mark.equality
def test_a_host_killed_in_the_middle_leaves_its_layers_to_the_other(host, trained_model):
    spec = chain_spec(trained_model, restarts=0, patience_seconds=5.0).model_copy(
        update={"parallel": DataParallel(on_lost_rank="shrink")}
    )
    port = free_port()
    lead, member = (gang_of(rank, port=port) for rank in range(2))
    folder = job_of(host, "chain-member", spec, member).attempt_dir
    other = subprocess.Popen(
        [sys.executable, "-m", "runners.jobs.generate", str(folder)], env=host.environment()
    )
    job = job_of(host, "chain-lead", spec, lead)
    resident = load_folder(host.path / "attempts/trained/output/model", "fp32", CPU)
    wanted = run_batch(resident, PROMPTS, AnswerLimits(16)).answers
    try:
        chain = ServerChain(job, spec, spec.split)
        limits = killing(6, lambda: (other.kill(), other.wait()))  # its server dies with it
        found = run_batch(chain.model, PROMPTS, limits, BatchSetup(chain=chain)).answers
        chain.finish(is_stopped=False)
    finally:
        other.kill()
        other.wait()

    assert found == wanted
    assert chain.result_metrics()["servers_lost"] == 1
