"""Jobs of a cluster's host, from the claim to the end, and a training over its nodes."""

import secrets
import signal

import pytest

from runners.jobspec import DrillSpec
from tests.runners.jobs.tiny import tiny_training
from tests.runners.programs import FOREVER
from tests.runners.tools import wait_for
from tests.system.scheduled import (
    SECONDS,
    check_that_two_nodes_learn_what_one_process_learns,
    want_on_nodes,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def attempt_ids() -> list[str]:
    return [secrets.token_hex(8).upper() for _ in range(4)]


def test_drills_go_through_a_cluster_stop_and_are_lost(acceptor, attempt_ids, serve, cluster):
    drill = acceptor.want(attempt_ids[0], DrillSpec(steps=3, step_seconds=0.1))
    with serve(max_jobs=2):
        wait_for(lambda: drill.has_exited, SECONDS)
    assert drill.exit["reason"] == "ok"
    assert drill.of_kind("result")[0]["measured"] == {"steps": 3.0}

    stopped, lost = acceptor.want(attempt_ids[1]), acceptor.want(attempt_ids[2])
    with serve(FOREVER, max_jobs=2):
        wait_for(lambda: stopped.events and lost.events, SECONDS)
        acceptor.order_stop(attempt_ids[1])
        cluster.pods[f"slipway-{attempt_ids[2].lower()}"][0].signal(signal.SIGKILL)
        wait_for(lambda: stopped.has_exited and lost.has_exited, SECONDS)
    assert (stopped.exit["reason"], stopped.exit["by"]) == ("stopped_by_user", "supervisor")
    assert (lost.exit["reason"], lost.exit["by"]) == ("supervisor_lost", "reaper")
    assert "ended on n1 as Failed" in lost.exit["last_lines"][0]


def test_two_pods_of_two_ranks_learn_what_one_process_learns(
    acceptor, attempt_ids, serve, cluster
):
    check_that_two_nodes_learn_what_one_process_learns(acceptor, attempt_ids, serve)
    name = f"slipway-{attempt_ids[1].lower()}"
    wait_for(lambda: cluster.has_ended(name), SECONDS)  # its other pod, too


def test_a_lost_pod_ends_the_training_for_the_server_to_retry(
    acceptor, attempt_ids, serve, cluster, host_dir
):
    spec = tiny_training(
        max_steps=400, gradient_accumulation_steps=4, checkpoint_every_seconds=1.0
    )
    stored = want_on_nodes(acceptor, attempt_ids[0], spec)
    checkpoints = host_dir.attempts / attempt_ids[0] / "checkpoint"
    with serve(max_jobs=3):
        wait_for(lambda: any(checkpoints.glob("*/state.json")), SECONDS)
        cluster.pods[f"slipway-{attempt_ids[0].lower()}"][1].signal(signal.SIGKILL)
        wait_for(lambda: stored.has_exited, SECONDS)
    assert stored.exit["reason"] in {"killed_externally", "rank_lost"}, stored.exit
    assert list(checkpoints.glob("*/state.json"))
