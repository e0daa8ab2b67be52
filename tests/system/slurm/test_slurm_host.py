"""Jobs through a real Slurm: from the claim to the end, whatever falls silent on the way."""

import os
import secrets
import signal

import pytest

from runners.jobspec import DrillSpec
from runners.launchers.attempts import AttemptFolder
from runners.supervision import child
from tests.runners.programs import FOREVER
from tests.runners.tools import wait_for
from tests.system.slurm.cluster import CPUS, Cluster

pytestmark = pytest.mark.slow
UNTIL_TOLD = """
import os, time
while not os.path.exists(os.path.join({folder!r}, os.environ["SLIPWAY_ATTEMPT"])):
    time.sleep(0.1)
"""
SECONDS = 180.0  # Slurm's own rounds take seconds each, on a busy machine many


def name(attempt_id: str) -> str:
    return f"slipway-{attempt_id}"


def waits_for(acceptor, attempt_id: str) -> str:
    told = acceptor.beats[-1].attempts if acceptor.beats else ()
    return next((each.waits_for for each in told if each.attempt_id == attempt_id), "")


def test_a_drill_goes_through_slurm_and_is_told_to_its_end(acceptor, attempt_ids, serve, cluster):
    stored = acceptor.want(attempt_ids[0], DrillSpec(steps=3, step_seconds=0.1))

    with serve():
        wait_for(lambda: stored.has_exited, SECONDS)

    assert stored.exit["reason"] == "ok"
    assert stored.of_kind("result")[0]["measured"] == {"steps": 3.0}
    cluster.wait_for(lambda: cluster.states()[name(attempt_ids[0])] == "COMPLETED")


def has_exited(*stored) -> bool:
    return all(each.has_exited for each in stored)


@pytest.mark.faults
def test_stops_cancellations_kills_and_the_longest_duration_are_told_as_such(
    acceptor, attempt_ids, serve, cluster, host_dir
):
    stopped, cancelled, lost = (acceptor.want(each) for each in attempt_ids[:3])
    long = acceptor.want(attempt_ids[3], max_duration_seconds=1.0)

    with serve(FOREVER, max_jobs=4):
        wait_for(lambda: all(each.events for each in (stopped, cancelled, lost)), SECONDS)
        acceptor.order_stop(attempt_ids[0])
        cluster.run("scancel", f"--name={name(attempt_ids[1])}")
        identity = child.read_json(host_dir.attempts / attempt_ids[2] / child.SUPERVISOR)
        os.kill(identity["pid"], signal.SIGKILL)
        wait_for(lambda: has_exited(stopped, cancelled, lost, long), SECONDS)

    assert (stopped.exit["reason"], stopped.exit["by"]) == ("stopped_by_user", "supervisor")
    cluster.wait_for(lambda: cluster.states()[name(attempt_ids[0])] in {"COMPLETED", "COMPLETING"})
    assert cancelled.exit["reason"] == "killed_externally"
    assert (lost.exit["reason"], lost.exit["by"]) == ("supervisor_lost", "reaper")
    assert "as FAILED" in lost.exit["last_lines"][0]
    assert (long.exit["reason"], long.exit["by"]) == ("max_duration", "supervisor")


def test_a_job_that_slurm_has_not_begun_says_why_and_can_be_stopped(
    acceptor, attempt_ids, serve, cluster
):
    first, second = acceptor.want(attempt_ids[0]), acceptor.want(attempt_ids[1])

    with serve(FOREVER, options={"cpus-per-task": str(CPUS)}, max_jobs=2):
        wait_for(lambda: "Priority" in waits_for(acceptor, attempt_ids[1]) or "Resources" in waits_for(
            acceptor, attempt_ids[1]), SECONDS)  # fmt: skip
        acceptor.order_stop(attempt_ids[1])
        wait_for(lambda: second.has_exited, SECONDS)
        acceptor.order_stop(attempt_ids[0])
        wait_for(lambda: first.has_exited, SECONDS)

    assert (second.exit["reason"], second.exit["by"]) == ("stopped_by_user", "reaper")
    assert second.kinds() == ["exited"]
    assert "as CANCELLED" in second.exit["last_lines"][0]


@pytest.mark.faults
def test_the_next_agent_adopts_jobs_whether_or_not_their_numbers_were_noted(
    acceptor, attempt_ids, serve, cluster, host_dir, tmp_path
):
    first, second = (acceptor.want(each) for each in attempt_ids[:2])
    with serve(UNTIL_TOLD.format(folder=str(tmp_path)), max_jobs=2):
        wait_for(lambda: first.events and second.events, SECONDS)
    (host_dir.attempts / attempt_ids[1] / "slurm.json").unlink()

    with serve(max_jobs=2):
        (tmp_path / attempt_ids[0]).touch()
        acceptor.order_stop(attempt_ids[1])
        wait_for(lambda: has_exited(first, second), SECONDS)

    assert (first.exit["reason"], second.exit["reason"]) == ("ok", "stopped_by_user")
    for stored, attempt_id in zip((first, second), attempt_ids, strict=False):
        assert stored.kinds().count("started") == 1
        assert list(cluster.states()).count(name(attempt_id)) == 1


@pytest.mark.faults
def test_a_silent_controller_ends_nothing(
    acceptor, attempt_ids, serve, cluster, host_dir, tmp_path
):
    stored = acceptor.want(attempt_ids[0])

    with serve(UNTIL_TOLD.format(folder=str(tmp_path))):
        wait_for(lambda: stored.events, SECONDS)
        cluster.wait_for(lambda: cluster.has_saved(host_dir.attempts / attempt_ids[0]))
        cluster.kill_controller()
        (tmp_path / attempt_ids[0]).touch()
        folder = AttemptFolder(host_dir.attempts / attempt_ids[0])
        wait_for(folder.exit_record, SECONDS)
        wait_for(lambda: stored.has_exited, SECONDS)
        cluster.start_controller()

    assert (stored.exit["reason"], stored.exit["by"]) == ("ok", "supervisor")


def num_submitted(cluster: Cluster) -> int:
    """Return how often the controller was asked to queue a script."""
    return (cluster.folder / "slurmctld.log").read_text().count("_slurm_rpc_submit_batch_job:")


def test_a_sweep_of_eight_is_one_array_of_which_one_is_stopped_and_one_cancelled(
    acceptor, serve, cluster, tmp_path
):
    ids = sorted(secrets.token_hex(8) for _ in range(8))  # as ULIDs are by their time
    jobs = [acceptor.want(each) for each in ids]
    submitted = num_submitted(cluster)

    with serve(UNTIL_TOLD.format(folder=str(tmp_path)), max_jobs=8, array_limit=2):
        wait_for(lambda: sum(bool(each.events) for each in jobs) == 2, SECONDS)
        (array,) = {each for each in cluster.states() if each.startswith("slipway-array-")}
        listed = ("squeue", "-h", "--array", f"--name={array}", "-o")
        tasks = dict(line.split() for line in cluster.run(*listed, "%K %T").splitlines())
        assert sorted(tasks, key=int) == list("01234567")
        assert [tasks[each] for each in "01234567"] == ["RUNNING"] * 2 + ["PENDING"] * 6
        wait_for(lambda: "JobArrayTaskLimit" in waits_for(acceptor, ids[2]), SECONDS)
        acceptor.order_stop(ids[0])
        acceptor.order_stop(ids[7])
        wait_for(lambda: has_exited(jobs[0], jobs[7]), SECONDS)
        wait_for(lambda: jobs[2].events, SECONDS)
        cluster.run("scancel", cluster.run(*listed, "%i %T").split("_")[0] + "_1")
        wait_for(lambda: jobs[1].has_exited, SECONDS)
        for each in ids[2:7]:
            (tmp_path / each).touch()
        wait_for(lambda: has_exited(*jobs), SECONDS)

    assert [each.exit["reason"] for each in jobs] == [
        "stopped_by_user", "killed_externally", *["ok"] * 5, "stopped_by_user",
    ]  # fmt: skip
    assert num_submitted(cluster) - submitted == 1
    cluster.wait_for(lambda: not cluster.run("squeue", "-h"))  # nothing is left


def test_what_slurm_refuses_is_told_with_its_words(acceptor, attempt_ids, serve):
    stored = acceptor.want(attempt_ids[0])

    with serve(FOREVER, options={"partition": "nowhere"}):
        wait_for(lambda: stored.has_exited, SECONDS)

    assert stored.exit["reason"] == "preflight_failed"
    assert "invalid partition" in stored.exit["last_lines"][0].lower()


def test_the_facts_name_the_scheduler_and_its_partitions(acceptor, serve):
    with serve(max_jobs=3):
        wait_for(lambda: acceptor.beats)

    said = acceptor.beats[0].facts.scheduler
    assert (said.kind, said.max_jobs, said.problem) == ("slurm", 3, "")
    assert [(one.name, one.is_up, one.nodes) for one in said.partitions] == [
        ("main", True, 1),
        ("closed", False, 1),
        ("urgent", True, 1),
    ]
