"""Kill one part of the product in the middle of a job: the job ends once, and nothing is lost.

Real processes, real SIGKILL. What counts is read from the databases themselves.
"""

import contextlib
import os
import signal
import time

import psutil
import pytest

from tests.faults.conftest import stored
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.xdist_group("faults")]
DOWN_SECONDS = 4.0
END_SECONDS = 180.0


def celery_worker(stack: Stack) -> psutil.Process | None:
    """Return the host's Celery worker, the child of its agent."""
    for child in psutil.Process(stack.processes["host"].pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a child may end between its listing and here
            if "celery" in " ".join(child.cmdline()):
                return child
    return None


def kill_celery_worker(stack: Stack) -> None:
    """Kill the host's Celery worker; its agent starts another."""
    worker = wait_for(lambda: celery_worker(stack), "the host's Celery worker")
    os.kill(worker.pid, signal.SIGKILL)


def kill_and_restart(*names: str):
    """Return a fault that kills parts, leaves them down for a while, and starts them again."""

    def fault(stack: Stack) -> None:
        for name in names:
            stack.kill(name)
        time.sleep(DOWN_SECONDS)
        for name in names:
            stack.restart(name)

    return fault


FAULTS = [
    pytest.param(kill_celery_worker, id="celery-worker"),
    pytest.param(kill_and_restart("web"), id="web"),
    pytest.param(kill_and_restart("redis"), id="redis"),
    pytest.param(kill_and_restart("control"), id="control"),
    pytest.param(kill_and_restart("ticker"), id="ticker"),
    pytest.param(kill_and_restart("host"), id="agent"),
    pytest.param(kill_and_restart("web", "redis", "control", "ticker", "host"), id="everything"),
]


@pytest.fixture(scope="module", params=FAULTS)
def survived(request, faulty_stack):
    """Run one demo job through one fault and return what the databases hold of it."""
    client = faulty_stack.client("alice")
    job_id = client.launch_demo()
    client.wait_for_state(job_id, "running")
    wait_for(lambda: len(stored(faulty_stack, job_id).point_seqs) >= 5, "the first points")
    request.param(faulty_stack)
    client = wait_for(lambda: faulty_stack.client("alice"), "the web process")
    client.wait_for_state(job_id, "succeeded", timeout_s=END_SECONDS)
    return stored(faulty_stack, job_id)


def test_every_numbered_event_is_stored_once(survived):
    seqs = sorted(survived.row_seqs + survived.point_seqs)

    assert seqs == list(range(1, survived.acked_seq + 1))


def test_the_job_was_started_once_and_ended_once(survived):
    assert survived.num_attempts == 1
    assert survived.kinds.count("started") == 1
    assert survived.kinds.count("exited") == 1


def test_the_job_went_straight_through_its_states(survived):
    assert survived.states == ["queued", "preflight", "starting", "running", "succeeded"]
