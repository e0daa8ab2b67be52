"""Jobs of a real Ray cluster: placed, stopped, cancelled, lost; a training over its nodes."""

import re
import subprocess
import sys

import pytest

from runners.jobspec import DrillSpec
from runners.launchers.node_command import main as run_on_node
from runners.supervision import child
from tests.runners.jobs.tiny import tiny_training
from tests.runners.programs import FOREVER
from tests.runners.tools import wait_for
from tests.system.ray.cluster import ACCELERATOR, GPUS
from tests.system.scheduled import (
    SECONDS,
    check_that_two_nodes_learn_what_one_process_learns,
    said,
    want_on_nodes,
)

pytestmark = pytest.mark.slow
SHOW_PLACE = """
import os
print("devices", os.environ["CUDA_VISIBLE_DEVICES"], "threads", os.environ["OMP_NUM_THREADS"],
      os.environ["SLIPWAY_RAY_WORDS"], flush=True)
"""
PLACED = re.compile(r"Ray job slipway-\w+(, restart (\d+),)? runs on (n\d), (n\d)")


def waits_for(acceptor, attempt_id: str) -> str:
    told = acceptor.beats[-1].attempts if acceptor.beats else ()
    return next((each.waits_for for each in told if each.attempt_id == attempt_id), "")


def test_a_job_gets_its_bundle_of_one_node_and_is_told_to_its_end(
    acceptor, attempt_ids, serve, cluster
):
    placed, drill = (
        acceptor.want(attempt_ids[0]),
        acceptor.want(attempt_ids[1], DrillSpec(steps=3)),
    )
    with serve(SHOW_PLACE, max_jobs=2):
        wait_for(lambda: placed.has_exited, SECONDS)
    assert re.search(
        rf"devices 0,1 threads 2 Ray job slipway-{attempt_ids[0]} runs on n\d\n", said(placed)
    )
    facts = acceptor.beats[0].facts.scheduler
    assert (facts.kind, facts.problem, facts.max_jobs) == ("ray", "", 2)
    assert [(one.name, one.is_up, one.nodes, one.gpus_per_node) for one in facts.partitions] == [
        ("", False, 1, 0), (ACCELERATOR, True, 3, GPUS),
    ]  # fmt: skip
    with serve(max_jobs=2):
        wait_for(lambda: drill.has_exited, SECONDS)
    assert cluster.states()[f"slipway-{attempt_ids[0]}"] == "SUCCEEDED"
    assert placed.exit["reason"] == "ok"


def test_stops_cancellations_and_what_waits_are_told_as_such(
    acceptor, attempt_ids, serve, cluster, host_dir
):
    stopped, cancelled, lost, waiting = (acceptor.want(each) for each in attempt_ids)
    with serve(FOREVER, max_jobs=4):
        wait_for(
            lambda: sum(bool(each.events) for each in (stopped, cancelled, lost, waiting)) == 3,
            SECONDS,
        )
        (late,) = [each for each in (stopped, cancelled, lost, waiting) if not each.events]
        ids = dict(zip(map(id, (stopped, cancelled, lost, waiting)), attempt_ids, strict=True))
        first, second, third = [
            each for each in (stopped, cancelled, lost, waiting) if each.events
        ]
        wait_for(lambda: "they are in use" in waits_for(acceptor, ids[id(late)]), SECONDS)
        acceptor.order_stop(ids[id(late)])
        wait_for(lambda: late.has_exited, SECONDS)
        acceptor.order_stop(ids[id(first)])
        command = ["job", "stop", "--no-wait", f"--address={cluster.address}",
                   f"slipway-{ids[id(second)]}"]  # fmt: skip
        subprocess.run([cluster.program(), *command], check=True, capture_output=True)
        wait_for(lambda: first.has_exited and second.has_exited, SECONDS)
        identity = child.read_json(host_dir.attempts / ids[id(third)] / child.SUPERVISOR)
        subprocess.run(["kill", "-9", str(identity["pid"])], check=True)
        wait_for(lambda: third.has_exited, SECONDS)
    assert (late.exit["reason"], late.kinds()) == ("stopped_by_user", ["exited"])
    assert (first.exit["reason"], first.exit["by"]) == ("stopped_by_user", "supervisor")
    assert (second.exit["reason"], second.exit["by"]) == ("killed_externally", "supervisor")
    assert (third.exit["reason"], third.exit["by"]) == ("supervisor_lost", "reaper")
    assert re.search(r"ended on n\d as FAILED", third.exit["last_lines"][0])
    wait_for(lambda: "RUNNING" not in cluster.states().values(), SECONDS)


def test_a_short_command_runs_in_a_bundle(serve, host_dir, capfd):
    with serve():
        pass
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert run_on_node([str(host_dir.path), sys.executable, "-c", code]) == 0
    assert capfd.readouterr().out == "0,1\n"
    assert not list(host_dir.path.glob(".slipway-run*"))


def test_two_nodes_of_two_ranks_learn_what_one_process_learns(acceptor, attempt_ids, serve):
    shared = check_that_two_nodes_learn_what_one_process_learns(acceptor, attempt_ids, serve)
    _, _, first, second = PLACED.search(said(shared)).groups()
    assert first != second


@pytest.mark.faults
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_killed_raylet_of_two_nodes_is_named_and_the_training_goes_on(
    acceptor, attempt_ids, serve, cluster, host_dir, place
):
    spec = tiny_training(
        max_steps=400, gradient_accumulation_steps=4, checkpoint_every_seconds=1.0
    )
    stored = want_on_nodes(acceptor, attempt_ids[0], spec)
    checkpoints = host_dir.attempts / attempt_ids[0] / "checkpoint"
    with serve(max_jobs=3):
        wait_for(lambda: any(checkpoints.glob("*/state.json")), SECONDS)
        *_, first, second = PLACED.search(said(stored)).groups()
        lost = second if place == "second" else first
        cluster.kill_node(lost)
        try:
            wait_for(lambda: stored.has_exited, SECONDS)
        finally:
            cluster.start_node(lost)
    assert stored.exit["reason"] == "ok", said(stored)
    again = next(each for each in PLACED.finditer(said(stored)) if each[1])
    assert (again[2], {again[3], again[4]}) == ("1", set(cluster.nodes) - {lost})
    assert f"after node {lost} was lost" in said(stored)
    assert ("the attempt is placed again" in said(stored)) == (place == "second")
    steps = re.findall(r"\[rank \d\] resumed from the checkpoint at step (\d+)", said(stored))
    assert steps
    assert min(map(int, steps)) >= 1
    assert stored.kinds().count("started") == 2
    assert len(stored.of_kind("result")) == 1


@pytest.mark.faults
def test_a_bundle_of_one_node_ends_with_it_for_the_server_to_retry(
    acceptor, attempt_ids, serve, cluster
):
    stored = acceptor.want(attempt_ids[0])
    with serve(
        "import time; print(__import__('os').environ['SLIPWAY_RAY_WORDS'], flush=True); time.sleep(600)"
    ):
        wait_for(lambda: "runs on" in said(stored), SECONDS)
        (lost,) = re.findall(r"runs on (n\d)", said(stored))
        cluster.kill_node(lost)
        try:
            wait_for(lambda: stored.has_exited, SECONDS)
        finally:
            cluster.start_node(lost)
    assert (stored.exit["reason"], stored.exit["by"]) == ("host_rebooted", "reaper")
    assert f"as NODE_LOST: node {lost} was lost" in stored.exit["last_lines"][0]
