"""What Slurm's programs print, recorded from 22.05.8, becomes jobs, states and partitions."""

import pytest

from runners.launchers import slurm_commands
from runners.launchers.slurm_commands import (
    Phase,
    SlurmError,
    SlurmJob,
    SlurmUnreachableError,
    read_accounting,
    read_control,
    read_job_id,
    read_partitions,
    read_queue,
)

QUEUE = """\
4|CANCELLED|None|vm|slipway-c
1|COMPLETED|None|vm|slipway-ok
2|FAILED|JobLaunchFailure|vm|slipway-bad
3|RUNNING|None|vm|slipway-long
6|PENDING|(Resources)||slipway-a|b
slurm_load_jobs: something new
"""
CONTROL = (
    "JobId=2 JobName=slipway-bad UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Priority=4294901758 Nice=0 Account=(null) QOS=(null) JobState=FAILED "
    "Reason=JobLaunchFailure Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=0:9 RunTime=00:00:01 TimeLimit=UNLIMITED NodeList=vm BatchHost=vm\n"
)
SINFO = "main|up|infinite|1|2|4000|(null)\ngpu*|down|1:00:00|3|64+|515000+|gpu:a100:8\n"


def test_every_line_of_the_queue_is_a_job_and_no_other_is():
    found = read_queue(QUEUE)

    assert [(job.job_id, job.phase) for job in found] == [
        ("4", Phase.ENDED),
        ("1", Phase.ENDED),
        ("2", Phase.ENDED),
        ("3", Phase.ACTIVE),
        ("6", Phase.WAITING),
    ]


def test_a_waiting_job_says_why_and_a_name_may_hold_the_separator():
    job = read_queue(QUEUE)[-1]

    assert (job.detail, job.nodes, job.name) == ("Resources", "", "slipway-a|b")


@pytest.mark.parametrize("state", ["COMPLETING", "SUSPENDED", "STAGE_OUT", "A_STATE_OF_TOMORROW"])
def test_a_state_that_is_no_end_counts_as_running(state):
    assert SlurmJob("1", state).phase is Phase.ACTIVE


@pytest.mark.parametrize("text", ["17\n", "17;cluster\n", "sbatch: a notice\n17\n"])
def test_the_job_id_is_found_in_what_sbatch_prints(text):
    assert read_job_id(text) == "17"


@pytest.mark.parametrize("text", ["", "Submitted batch job 17"])
def test_a_job_id_that_is_not_there_is_an_error(text):
    with pytest.raises(SlurmError, match="no job id"):
        read_job_id(text)


def test_control_tells_how_a_job_ended():
    assert read_control(CONTROL) == SlurmJob("2", "FAILED", "0:9", "slipway-bad", "vm")


def test_control_that_tells_of_no_job_is_nothing():
    assert read_control("No jobs in the system\n") is None


def test_accounting_tells_the_last_run_without_who_cancelled_it():
    text = "7|PREEMPTED|0:0|n1|slipway-x\n7|CANCELLED by 1000|0:15|n2|slipway-x\n"

    assert read_accounting(text) == SlurmJob("7", "CANCELLED", "0:15", "slipway-x", "n2")


def test_accounting_that_is_empty_is_nothing():
    assert read_accounting("\n") is None


def test_partitions_are_read_with_their_limits_and_devices():
    main, gpu = read_partitions(SINFO)

    assert (main.is_up, main.time_limit, main.gres) == (True, "infinite", "")
    assert (gpu.is_up, gpu.nodes, gpu.cpus_per_node, gpu.gres) == (False, 3, "64", "gpu:a100:8")


# What the programs say when they say no


def program(tmp_path, monkeypatch, said: str, code: int = 1) -> None:
    """Put a program on the path that says what sbatch was recorded to say."""
    path = tmp_path / "sbatch"
    path.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit {code}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"',
        "sbatch: fatal: Could not establish a configuration source",
    ],
)
def test_a_controller_that_is_away_decides_nothing(tmp_path, monkeypatch, said):
    program(tmp_path, monkeypatch, said)

    with pytest.raises(SlurmUnreachableError):
        slurm_commands.run("sbatch")


def test_a_refusal_is_told_in_slurms_words(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "sbatch: error: invalid partition specified: nowhere")

    with pytest.raises(SlurmError, match="invalid partition") as caught:
        slurm_commands.run("sbatch")
    assert not isinstance(caught.value, SlurmUnreachableError)


def test_a_program_that_hangs_is_given_up(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "")
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm_commands, "TIMEOUT_SECONDS", 0.2)

    with pytest.raises(SlurmUnreachableError, match="took over"):
        slurm_commands.run("sbatch")


def test_a_machine_without_slurm_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SlurmUnreachableError, match="sinfo is not installed here"):
        slurm_commands.partitions()
