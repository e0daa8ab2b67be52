"""A training over several nodes of a real Slurm, and a node that is lost under it."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.shared.messages import Gang, RunDevice
from tests.runners.jobs.tiny import tiny_training
from tests.runners.tools import wait_for
from tests.system.slurm.cluster import Cluster

pytestmark = pytest.mark.slow
SECONDS = 400.0  # four ranks load their libraries on a busy machine, after a loss twice
NODES = ("n1", "n2", "n3")
TRAINING = tiny_training(max_steps=8, gradient_accumulation_steps=4)


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


def want_on_nodes(acceptor, attempt_id, spec, slots: int = 2, ranks: int = 2):
    """Let the server give a training some slots of the Slurm host, with ranks on each."""
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


def test_two_nodes_of_two_ranks_learn_what_one_process_learns(acceptor, attempt_ids, serve):
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
    assert re.search(r"Slurm job \d+ runs on n\d, n\d\n", said(shared))


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
