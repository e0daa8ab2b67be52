"""A training over several nodes of a real Slurm, and a node that is lost under it."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runners.jobs.tiny import tiny_training
from tests.runners.tools import wait_for
from tests.system.scheduled import (
    SECONDS,
    check_that_two_nodes_learn_what_one_process_learns,
    said,
    want_on_nodes,
)
from tests.system.slurm.cluster import CPUS, Cluster

pytestmark = pytest.mark.slow
NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[Cluster]:
    if reason := Cluster.why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slipway-slurm-"))
    folder.chmod(0o755)  # munge's clients are other users
    made = Cluster(folder, NODES)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


def test_two_nodes_of_two_ranks_learn_what_one_process_learns(acceptor, attempt_ids, serve):
    shared = check_that_two_nodes_learn_what_one_process_learns(acceptor, attempt_ids, serve)
    assert re.search(r"Slurm job \d+ runs on n\d, n\d\n", said(shared))


@pytest.mark.faults
def test_a_preempted_training_goes_on_and_who_cancels_it_later_is_told(
    acceptor, attempt_ids, serve, cluster, host_dir
):
    spec = tiny_training(
        max_steps=4000, gradient_accumulation_steps=4, checkpoint_every_seconds=1.0
    )
    stored = want_on_nodes(acceptor, attempt_ids[0], spec)
    checkpoints = host_dir.attempts / attempt_ids[0] / "checkpoint"

    with serve(max_jobs=3):
        wait_for(lambda: any(checkpoints.glob("*/state.json")), SECONDS)
        job, first = re.search(r"Slurm job (\d+) runs on (n\d), n\d\n", said(stored)).groups()
        place = (f"--nodelist={first}", "--partition=urgent", f"--cpus-per-task={CPUS}")
        cluster.run("sbatch", *place, "--output=/dev/null", "--wrap=true")
        wait_for(lambda: f"Slurm requeued job {job}" in said(stored), SECONDS)
        cluster.wait_for(lambda: "PENDING" in cluster.run("squeue", "-h", "-o%T", f"-j{job}"))
        cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")  # else in two minutes
        wait_for(lambda: "resumed from the checkpoint" in said(stored), SECONDS)
        assert not stored.has_exited
        cluster.run("scancel", job)
        wait_for(lambda: stored.has_exited, SECONDS)

    assert f"Slurm job {job}, restart 1, runs on n" in said(stored)
    assert (stored.exit["reason"], stored.kinds().count("started")) == ("killed_externally", 2)
    assert f"Slurm says that job {job} is COMPLETING" in said(stored)  # 22.05 says no more yet
    assert "PREEMPTED" not in " ".join(stored.exit["last_lines"])


@pytest.mark.faults
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_lost_node_requeues_the_job_which_goes_on_from_its_checkpoint(
    acceptor, attempt_ids, serve, cluster, host_dir, place
):
    spec = tiny_training(
        max_steps=400, gradient_accumulation_steps=4, checkpoint_every_seconds=1.0
    )
    stored = want_on_nodes(acceptor, attempt_ids[0], spec)
    checkpoints = host_dir.attempts / attempt_ids[0] / "checkpoint"

    with serve(max_jobs=3):
        wait_for(lambda: any(checkpoints.glob("*/state.json")), SECONDS)
        nodes = re.search(r"runs on (n\d), (n\d)\n", said(stored)).groups()
        lost = nodes[place == "second"]
        cluster.kill_node(lost)
        wait_for(lambda: stored.has_exited, SECONDS)
        cluster.start_node(lost)
        cluster.wait_for(lambda: cluster.num_idle() == len(NODES))

    assert stored.exit["reason"] == "ok", said(stored)
    restarted = re.search(r"restart 1, runs on (n\d), (n\d)\n", said(stored))
    assert set(restarted.groups()) == set(NODES) - {lost}
    assert ("the job is requeued" in said(stored)) == (place == "second")  # else Slurm does it
    (step,) = map(
        int, re.findall(r"\[rank 0\] resumed from the checkpoint at step (\d+)", said(stored))
    )
    assert step >= 1
    assert stored.kinds().count("started") == 2
    assert len(stored.of_kind("result")) == 1
