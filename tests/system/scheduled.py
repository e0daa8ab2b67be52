"""What the tests of hosts with a scheduler share: an agent that serves, a training over nodes."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runners.host.agent import Agent
from runners.launchers.launch import render_argv
from runners.shared.config import Credential, HostDir
from runners.shared.messages import Gang, RunDevice
from tests.runners.jobs.tiny import tiny_training
from tests.runners.test_agent import BENCH
from tests.runners.tools import wait_for

SECONDS = 400.0  # ranks load their libraries on a busy machine, after a loss twice
TRAINING = tiny_training(max_steps=8, gradient_accumulation_steps=4)


@contextmanager
def serving(host_dir: HostDir, credential: Credential, code: str | None) -> Iterator[Agent]:
    """Run an agent while a block runs, whose jobs are a program or their own; they outlive it."""
    render = (lambda _spec, _folder: [sys.executable, "-c", code]) if code else render_argv
    agent = Agent(host_dir, credential, render=render, bench_command=BENCH)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        yield agent
    finally:
        agent.stop()
        thread.join(30)
    assert not thread.is_alive()


def want_on_nodes(acceptor, attempt_id, spec, slots: int = 2, ranks: int = 2):
    """Let the server give a training some slots of the host, with ranks on each."""
    stored = acceptor.want(attempt_id, spec)
    gang = Gang(
        node_rank=0, num_nodes=1, num_processes=ranks, master_address="127.0.0.1",
        master_port=29400, own_address="127.0.0.1", rendezvous_id=attempt_id,
    )  # fmt: skip
    devices = [RunDevice(kind="slot", index=each, uuid=f"slot-{each}") for each in range(slots)]
    stored.request = stored.request.model_copy(update={"gang": gang, "devices": tuple(devices)})
    return stored


def said(stored) -> str:
    return "".join(body["text"] for body in stored.of_kind("log"))


def losses_of(stored) -> dict[int, float]:
    metrics = stored.of_kind("metric")
    return {each["step"]: each["values"]["loss"] for each in metrics if "loss" in each["values"]}


def check_that_two_nodes_learn_what_one_process_learns(acceptor, attempt_ids, serve):
    """Train on two nodes of two ranks and in one process; return the former."""
    alone = acceptor.want(attempt_ids[0], TRAINING)
    shared = want_on_nodes(acceptor, attempt_ids[1], TRAINING)
    with serve(max_jobs=3):
        wait_for(lambda: alone.has_exited and shared.has_exited, SECONDS)
    assert (alone.exit["reason"], shared.exit["reason"]) == ("ok", "ok"), said(shared)
    found, expected = losses_of(shared), losses_of(alone)
    both = found.keys() & expected.keys()  # a step sooner than a second after another is not told
    assert len(both) >= 2
    assert [found[step] for step in both] == pytest.approx(
        [expected[step] for step in both], rel=1e-4
    )
    final = [each.of_kind("result")[0]["measured"]["final_loss"] for each in (shared, alone)]
    assert final[0] == pytest.approx(final[1], rel=1e-4)
    assert len(shared.of_kind("result")) == len(shared.of_kind("artefact")) == 1
    assert "[rank 3] step 8 " in said(shared)
    return shared
