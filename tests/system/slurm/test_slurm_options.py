"""What a job asks of a real Slurm, what a host reads from it, and how a preempted job is told."""

import pytest

from runners.jobspec import DrillSpec
from runners.launchers import slurm_commands
from runners.shared.observed import ObservedJobReport
from tests.runners.programs import FOREVER
from tests.runners.tools import wait_for
from tests.system.slurm.cluster import CPUS
from tests.system.slurm.test_slurm_host import SECONDS, name

pytestmark = pytest.mark.slow
WHOLE_NODE = {"cpus-per-task": str(CPUS), "partition": "main"}


def test_a_host_reads_limits_and_reservations_and_says_what_slurm_does_not_tell(
    acceptor, serve, cluster
):
    kept = ("reservationname=lab", "starttime=now+1hour", "duration=60", "users=root", "nodes=ALL")
    cluster.run("scontrol", "create", "reservation", *kept)
    try:
        with serve():
            wait_for(lambda: acceptor.beats)
    finally:
        cluster.run("scontrol", "delete", "reservationname=lab")
    said = acceptor.beats[0].facts.scheduler
    main, closed, urgent = said.partitions
    assert (main.is_default, closed.is_default, urgent.is_default) == (True, False, False)
    assert (closed.time_limit, urgent.max_nodes) == ("1:00:00", 1)
    assert [(each.name, each.nodes) for each in said.reservations] == [("lab", cluster.host)]
    assert said.accounts == ()
    assert any("accounting_storage" in each for each in said.unread)


def test_a_job_of_somebody_else_is_read_and_outlives_the_agent(acceptor, serve, cluster):
    sent = ("--parsable", "--mem=100", "--time=30", "--output=/dev/null", "--job-name=theirs")
    number = cluster.run("sbatch", *sent, "--wrap=sleep 600").strip()
    state = ("squeue", "-h", "-o", "%T", f"--jobs={number}")
    cluster.wait_for(lambda: cluster.run(*state) == "RUNNING\n")
    with serve():
        wait_for(lambda: acceptor.beats)
    (theirs,) = acceptor.beats[0].facts.scheduler.other_jobs
    assert (theirs.job_id, theirs.name, theirs.state) == (number, "theirs", "RUNNING")
    assert (theirs.nodes, theirs.num_nodes, theirs.devices) == (cluster.host, 1, 0)
    assert (theirs.time_limit_seconds, theirs.elapsed_seconds < SECONDS) == (1800, True)
    assert cluster.run(*state) == "RUNNING\n"


@pytest.mark.faults
def test_a_job_of_another_partition_preempts_and_the_other_is_told_as_preempted(
    acceptor, attempt_ids, serve, cluster
):
    low = acceptor.want(attempt_ids[0])
    with serve(FOREVER, options=WHOLE_NODE, max_jobs=2):
        wait_for(lambda: low.events, SECONDS)
        assert "squeue" not in slurm_commands._without_json  # this release answers in JSON
        urgent = DrillSpec(steps=3, scheduler_options={"partition": "urgent"})
        high = acceptor.want(attempt_ids[1], urgent)
        wait_for(lambda: low.has_exited and high.events, SECONDS)
        told = cluster.run("squeue", "-h", "-o", "%P|%T", f"--name={name(attempt_ids[1])}")
        assert told.strip() == "urgent|RUNNING"
        acceptor.order_stop(attempt_ids[1])
        wait_for(lambda: high.has_exited, SECONDS)
    assert low.exit["reason"] == "killed_externally"
    assert "PREEMPTED" in " ".join(low.exit["last_lines"]), low.exit


def test_a_job_of_somebody_else_is_observed_by_its_id_to_its_exit_code(
    acceptor, serve, cluster, tmp_path
):
    log, gate = tmp_path / "theirs.out", tmp_path / "gate"
    line = "iteration 5/ 10 | elapsed time per iteration (ms): 250.0 | lm loss: 2.5E+00 |"
    code = f"echo '{line}'; while [ ! -e {gate} ]; do sleep 0.2; done; exit 3"
    sent = ("--parsable", "--mem=100", "--time=30", f"--output={tmp_path}/%x.out")
    number = cluster.run("sbatch", *sent, "--job-name=theirs", f"--wrap={code}").strip()
    acceptor.observe = (number, "999999")

    def reports() -> dict[str, ObservedJobReport]:
        return {each.job_id: each for beat in acceptor.beats for each in beat.observed}

    with serve():
        wait_for(lambda: number in reports() and reports()[number].log, SECONDS)
        running = reports()[number]
        assert (running.facts.state, running.facts.name) == ("RUNNING", "theirs")
        assert (running.log_path, running.log_problem) == (str(log), "")
        assert running.figures == {
            "step": 5.0, "total_steps": 10.0, "step_seconds": 0.25, "loss": 2.5,
        }  # fmt: skip
        assert "no job 999999" in reports()["999999"].problem
        gate.touch()
        wait_for(lambda: reports()[number].has_ended, SECONDS)
    ended = reports()[number]
    assert (ended.facts.state, ended.exit_code, ended.signal) == ("FAILED", 3, None)
    assert 0 < ended.started_at_ms <= ended.ended_at_ms
