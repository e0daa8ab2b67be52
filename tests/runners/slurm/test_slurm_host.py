"""Jobs through a real Slurm: from the claim to the end, whatever falls silent on the way."""

import os
import signal

import pytest

from runners.attempts import AttemptFolder
from runners.jobspec import DrillSpec
from runners.supervision import record
from tests.runners.programs import FOREVER
from tests.runners.tools import wait_for

pytestmark = pytest.mark.slow
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


def test_a_stop_lets_the_supervisor_end_the_job_inside_its_grace(
    acceptor, attempt_ids, serve, cluster
):
    stored = acceptor.want(attempt_ids[0])

    with serve(FOREVER):
        wait_for(lambda: stored.events, SECONDS)
        acceptor.order_stop(attempt_ids[0])
        wait_for(lambda: stored.has_exited, SECONDS)

    assert (stored.exit["reason"], stored.exit["by"]) == ("stopped_by_user", "supervisor")
    cluster.wait_for(lambda: cluster.states()[name(attempt_ids[0])] in {"COMPLETED", "COMPLETING"})


def test_a_job_that_slurm_has_not_begun_says_why_and_can_be_stopped(
    acceptor, attempt_ids, serve, cluster
):
    first, second = acceptor.want(attempt_ids[0]), acceptor.want(attempt_ids[1])

    with serve(FOREVER, options={"cpus-per-task": "2"}, max_jobs=2):
        wait_for(lambda: "Priority" in waits_for(acceptor, attempt_ids[1]) or "Resources" in waits_for(
            acceptor, attempt_ids[1]), SECONDS)  # fmt: skip
        acceptor.order_stop(attempt_ids[1])
        wait_for(lambda: second.has_exited, SECONDS)
        acceptor.order_stop(attempt_ids[0])
        wait_for(lambda: first.has_exited, SECONDS)

    assert (second.exit["reason"], second.exit["by"]) == ("stopped_by_user", "reaper")
    assert second.kinds() == ["exited"]
    assert "as CANCELLED" in second.exit["last_lines"][0]


def test_a_job_ends_at_its_longest_duration(acceptor, attempt_ids, serve):
    stored = acceptor.want(attempt_ids[0], max_duration_seconds=1.0)

    with serve(FOREVER):
        wait_for(lambda: stored.has_exited, SECONDS)

    assert (stored.exit["reason"], stored.exit["by"]) == ("max_duration", "supervisor")


@pytest.mark.faults
def test_the_next_agent_adopts_a_job_that_runs_and_sends_it_only_once(
    acceptor, attempt_ids, serve, cluster
):
    stored = acceptor.want(attempt_ids[0])
    with serve("import time; print('on', flush=True); time.sleep(6); print('end')"):
        wait_for(lambda: stored.events, SECONDS)

    with serve():
        wait_for(lambda: stored.has_exited, SECONDS)

    assert stored.exit["reason"] == "ok"
    assert stored.kinds().count("started") == 1
    assert list(cluster.states()).count(name(attempt_ids[0])) == 1


@pytest.mark.faults
def test_an_agent_that_died_before_it_noted_the_number_finds_its_job(
    acceptor, attempt_ids, serve, cluster, host_dir
):
    stored = acceptor.want(attempt_ids[0])
    with serve(FOREVER):
        wait_for(lambda: stored.events, SECONDS)
    (host_dir.attempts / attempt_ids[0] / "slurm.json").unlink()

    with serve():
        acceptor.order_stop(attempt_ids[0])
        wait_for(lambda: stored.has_exited, SECONDS)

    assert stored.exit["reason"] == "stopped_by_user"
    assert stored.kinds().count("started") == 1


@pytest.mark.faults
def test_somebody_who_cancels_the_job_is_told_as_such(acceptor, attempt_ids, serve, cluster):
    stored = acceptor.want(attempt_ids[0])

    with serve(FOREVER):
        wait_for(lambda: stored.events, SECONDS)
        cluster.run("scancel", f"--name={name(attempt_ids[0])}")
        wait_for(lambda: stored.has_exited, SECONDS)

    assert stored.exit["reason"] == "killed_externally"


@pytest.mark.faults
def test_a_killed_supervisor_is_told_as_lost_in_slurms_words(
    acceptor, attempt_ids, serve, host_dir
):
    stored = acceptor.want(attempt_ids[0])

    with serve(FOREVER):
        wait_for(lambda: stored.events, SECONDS)
        identity = record.read_json(host_dir.attempts / attempt_ids[0] / record.SUPERVISOR)
        os.kill(identity["pid"], signal.SIGKILL)
        wait_for(lambda: stored.has_exited, SECONDS)

    assert (stored.exit["reason"], stored.exit["by"]) == ("supervisor_lost", "reaper")
    assert "as FAILED" in stored.exit["last_lines"][0]


@pytest.mark.faults
def test_a_silent_controller_ends_nothing(acceptor, attempt_ids, serve, cluster, host_dir):
    stored = acceptor.want(attempt_ids[0])

    with serve("import time; time.sleep(15)"):
        wait_for(lambda: stored.events, SECONDS)
        cluster.wait_for(lambda: cluster.has_saved(host_dir.attempts / attempt_ids[0]))
        cluster.kill_controller()
        folder = AttemptFolder(host_dir.attempts / attempt_ids[0])
        wait_for(folder.exit_record, SECONDS)
        wait_for(lambda: stored.has_exited, SECONDS)
        cluster.start_controller()

    assert (stored.exit["reason"], stored.exit["by"]) == ("ok", "supervisor")


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
    ]
