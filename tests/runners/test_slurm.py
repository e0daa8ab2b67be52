"""What Slurm's programs print, recorded from 22.05.8, and what the launcher concludes from it."""

import json
import subprocess

import pytest

from runners.jobspec import DemoModel, GenerateSpec, TrainSpec
from runners.jobspec.generate import TensorSplit
from runners.launchers import other_jobs, slurm_commands, slurm_end, slurm_facts, slurm_nodes
from runners.launchers.attempts import LOST_REASONS, AttemptFolder, Verdict
from runners.launchers.launch import LaunchRefusedError
from runners.launchers.scheduler import Phase
from runners.launchers.slurm import GATHER_SECONDS, SlurmLauncher, render_script
from runners.launchers.slurm_commands import (
    SlurmError,
    SlurmJob,
    SlurmUnreachableError,
    read_accounting,
    read_control,
    read_job_id,
    read_json_accounting,
    read_json_queue,
    read_partitions,
    read_queue,
)
from runners.shared.facts import MOST_OTHER_JOBS, OtherJobFacts
from runners.shared.messages import Gang, RunDevice, RunRequest
from runners.shared.reasons import Reason
from runners.shared.slurm import SlurmConfig
from runners.shared.timing import SCHEDULER_END_MARGIN_SECONDS, SCHEDULER_SETTLE_SECONDS
from runners.supervision import child
from tests.runners.tools import Attempts

# What Slurm's programs print, recorded from 22.05.8, becomes jobs, states and partitions.

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


def test_every_line_of_the_queue_is_a_job_and_a_waiting_one_says_why():
    found = read_queue(QUEUE)
    assert [(job.job_id, job.phase) for job in found] == [
        ("4", Phase.ENDED),
        ("1", Phase.ENDED),
        ("2", Phase.ENDED),
        ("3", Phase.ACTIVE),
        ("6", Phase.WAITING),
    ]
    job = read_queue(QUEUE)[-1]
    assert (job.detail, job.nodes, job.name) == ("Resources", "", "slipway-a|b")
    for state in ["COMPLETING", "SUSPENDED", "STAGE_OUT", "A_STATE_OF_TOMORROW"]:
        assert SlurmJob("1", state).phase is Phase.ACTIVE, state


def test_the_job_id_is_found_in_what_sbatch_prints_or_an_error():
    for text in ["17\n", "17;cluster\n", "sbatch: a notice\n17\n"]:
        assert read_job_id(text) == "17", text
    for text in ["", "Submitted batch job 17"]:
        with pytest.raises(SlurmError, match="no job id"):
            read_job_id(text)


def test_partitions_control_and_accounting_are_read_or_nothing():
    assert read_control(CONTROL) == SlurmJob("2", "FAILED", "0:9", "slipway-bad", "vm")
    assert read_control("No jobs in the system\n") is None
    text = "7|PREEMPTED|0:0|n1|slipway-x\n7|CANCELLED by 1000|0:15|n2|slipway-x\n"
    assert read_accounting(text) == SlurmJob("7", "CANCELLED", "0:15", "slipway-x", "n2")
    assert read_accounting("\n") is None
    main, gpu = read_partitions(SINFO)
    assert (main.is_up, main.time_limit, main.gres) == (True, "infinite", "")
    assert (gpu.is_up, gpu.nodes, gpu.cpus_per_node, gpu.gres) == (False, 3, "64", "gpu:a100:8")


# As ``squeue --json`` of 22.05.8, which lists everybody's jobs; the last job as later releases.
JSON_QUEUE = {
    "jobs": [
        {
            "job_id": 1, "job_state": "PENDING", "state_reason": "ReqNodeNotAvail",
            "name": "slipway-a", "nodes": "", "user_name": "root",
        },
        {"job_id": 2, "job_state": "RUNNING", "name": "other", "user_name": "alice"},
        {
            "job_id": {"set": True, "infinite": False, "number": 3},
            "job_state": ["CANCELLED", "COMPLETING"], "state_reason": "None",
            "name": "slipway-c", "nodes": "n1", "user_name": "root",
        },
    ]
}  # fmt: skip
JSON_ACCOUNTING = {
    "jobs": [
        {"job_id": 7, "state": {"current": "PREEMPTED"}, "nodes": "n1", "name": "slipway-x"},
        {
            "job_id": 7, "state": {"current": ["FAILED"]}, "nodes": "n2", "name": "slipway-x",
            "exit_code": {"return_code": {"number": 3}, "signal": {"signal_id": {"number": 9}}},
        },
    ]
}  # fmt: skip


def test_jobs_are_read_from_json_of_old_and_new_releases():
    assert read_json_queue(JSON_QUEUE, "root") == [
        SlurmJob("1", "PENDING", "ReqNodeNotAvail", "slipway-a"),
        SlurmJob("3", "CANCELLED", "", "slipway-c", "n1"),
    ]
    assert read_json_accounting(JSON_ACCOUNTING) == SlurmJob(
        "7", "FAILED", "3:9", "slipway-x", "n2"
    )
    assert read_json_accounting({"jobs": []}) is None


def test_a_list_of_tasks_that_slurm_cut_and_arrays_of_others_hide_no_job_of_ours():
    array = {"job_id": 5, "array_job_id": 5, "job_state": "PENDING", "user_name": "root"}
    cut = array | {"name": "slipway-array-b", "array_task_string": "1,3,..."}
    foreign = array | {"name": "sweep", "array_task_string": "0-199999"}
    found = read_json_queue({"jobs": [cut, foreign, *JSON_QUEUE["jobs"]]}, "root")
    assert [job.job_id for job in found] == ["5_1", "5_3", "1", "3"]


def test_slurm_is_told_to_cut_no_list(tmp_path, monkeypatch):
    path = tmp_path / "squeue"
    path.write_text('#!/bin/sh\necho "$SLURM_BITSTR_LEN"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_commands.run("squeue") == "0\n"


def test_a_release_without_json_or_with_everybodys_jobs_is_asked_for_lines(monkeypatch):
    for said, own in (
        (SlurmError("squeue: unrecognized option '--json'"), "lines"),
        ("not JSON", "lines"),
        (json.dumps(JSON_QUEUE), "json"),
    ):
        asked: list[tuple[str, ...]] = []

        def run(program, *arguments, said=said, asked=asked):
            asked.append(arguments)
            if "--json" not in arguments:
                return QUEUE
            if isinstance(said, SlurmError):
                raise said
            return said

        monkeypatch.setattr(slurm_commands, "run", run)
        monkeypatch.setattr(slurm_commands, "_without_json", set())
        monkeypatch.setattr(slurm_commands.getpass, "getuser", lambda: "root")
        names = [job.name for job in slurm_commands.queue()]
        assert ("slipway-long" in names) == (own == "lines"), said
        slurm_commands.queue()  # a site whose filters do not hold for JSON is then asked for lines
        assert "--json" not in asked[-1], said


# Recorded from 22.05.8; the account's line is of a site with slurmdbd.
PARTITION_LINES = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TRES=cpu=4,mem=4000M,node=1,billing=4\n"
    "PartitionName=gpu AllowAccounts=lab,dl AllowQos=high Default=NO MaxNodes=2 State=DOWN\n"
)
RESERVATION = (
    "ReservationName=lab StartTime=2026-12-01T00:44:20 EndTime=2026-12-01T01:44:20 "
    "Duration=01:00:00 Nodes=vm NodeCnt=1 PartitionName=(null) Flags=MAINT,SPEC_NODES\n"
)


def test_limits_reservations_and_accounts_become_facts_and_what_is_not_told_says_so(monkeypatch):
    told = {
        ("sinfo", "--noheader"): SINFO.replace("*", ""),
        ("sinfo", "--version"): "slurm-wlm 22.05.8",
        ("scontrol", "show", "partition"): PARTITION_LINES,
        ("scontrol", "show", "reservation"): RESERVATION,
        ("sacctmgr", "--noheader"): "lab||normal,high\ndl|gpu|\n",
        ("squeue", "--json"): json.dumps(OTHERS),
    }

    def run(*words):
        found = next(text for start, text in told.items() if words[: len(start)] == start)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(slurm_commands, "run", run)
    monkeypatch.setattr(slurm_facts, "run", run)
    facts = slurm_facts.scheduler_facts(SlurmConfig())
    main, gpu = facts.partitions
    assert (main.is_default, main.max_nodes, main.accounts, main.qos) == (True, None, (), ())
    assert (gpu.max_nodes, gpu.accounts, gpu.qos) == (2, ("lab", "dl"), ("high",))
    assert gpu.gpus_per_node == 8
    assert [(each.name, each.nodes, each.partition) for each in facts.reservations] == [
        ("lab", "vm", "")
    ]
    assert [(each.name, each.partition, each.qos) for each in facts.accounts] == [
        ("lab", "", ("normal", "high")),
        ("dl", "gpu", ()),
    ]
    assert (facts.version, facts.unread) == ("22.05.8", ())
    assert [each.job_id for each in facts.other_jobs] == ["7", "8_[0-1]"]
    assert facts.num_other_jobs == 3
    several = RESERVATION.replace("Nodes=vm", "Nodes=n[1-2],m3")
    assert slurm_facts.read_reservations(several)[0].nodes == "n[1-2],m3"

    told["squeue", "--json"] = SlurmError("squeue: unrecognized option '--json'")
    told["sacctmgr", "--noheader"] = SlurmError("Only 'accounting_storage/slurmdbd' is supported.")
    told["scontrol", "show", "reservation"] = "No reservations in the system\n"
    facts = slurm_facts.scheduler_facts(SlurmConfig())
    assert (facts.accounts, facts.reservations, facts.problem) == ((), (), "")
    assert facts.unread == (
        "accounts: Only 'accounting_storage/slurmdbd' is supported.",
        "jobs of others: squeue: unrecognized option '--json'",
    )
    assert (facts.other_jobs, facts.num_other_jobs) == ((), 0)


# As 22.05 and, in its second and last job, later releases write them.
OTHERS = {
    "jobs": [
        {
            "job_id": 7, "name": "pretrain", "user_name": "alice", "partition": "gpu",
            "job_state": "RUNNING", "nodes": "n[1-2]", "node_count": 2, "start_time": 1000,
            "time_limit": 90, "tres_alloc_str": "cpu=64,node=2,gres/gpu=16,gres/gpu:h100=16",
        },
        {
            "job_id": {"set": True, "number": 8}, "array_job_id": {"set": True, "number": 8},
            "array_task_string": "0-1", "name": "sweep", "user_name": "bob", "nodes": "",
            "job_state": ["PENDING"], "state_reason": "Resources", "start_time": 9000,
            "time_limit": {"set": False, "infinite": True, "number": 0},
            "tres_req_str": "cpu=1,node=1", "node_count": {"set": True, "number": 1},
        },
        {"job_id": 9, "name": "slipway-a1", "user_name": "us", "job_state": "RUNNING"},
        {"job_id": 10, "name": "ended", "user_name": "bob", "job_state": ["CANCELLED"]},
    ]
}  # fmt: skip


def test_jobs_of_others_are_read_with_devices_elapsed_time_and_limit_and_ours_left_out():
    running, waiting = other_jobs.slurm_jobs(OTHERS, 1600.5)["other_jobs"]
    assert running == OtherJobFacts(
        job_id="7", name="pretrain", user="alice", state="RUNNING", place="gpu", nodes="n[1-2]",
        num_nodes=2, devices=16, elapsed_seconds=600, time_limit_seconds=5400,
    )  # fmt: skip
    assert (waiting.job_id, waiting.detail, waiting.devices) == ("8_[0-1]", "Resources", 0)
    assert (waiting.elapsed_seconds, waiting.time_limit_seconds) == (None, None)
    array = {"job_id": 5, "array_job_id": 5, "job_state": "PENDING", "name": "sweep"}
    sparse = ",".join(map(str, range(1, 199, 2)))
    tasks = ["0-999999999", "0-9:3%2", sparse]  # counted, and none of them made an object
    arrays = [array | {"array_task_string": each} for each in tasks]
    task = array | {"array_task_id": 4, "job_state": "RUNNING"}
    told = other_jobs.slurm_jobs({"jobs": [*arrays, task]}, 1600.5)
    assert told["num_other_jobs"] == 10**9 + 4 + 99 + 1
    assert [each.job_id for each in told["other_jobs"]] == [
        "5_4", "5_[0-999999999]", "5_[0-9:3%2]", f"5_[{sparse[:40]}...]",
    ]  # fmt: skip
    many = [{"job_id": each, "job_state": "PENDING"} for each in range(200)]
    told = other_jobs.slurm_jobs({"jobs": [*many, OTHERS["jobs"][0]]}, 1600.5)
    assert (len(told["other_jobs"]), told["num_other_jobs"]) == (MOST_OTHER_JOBS, 201)
    assert told["other_jobs"][0] == running


# What the programs say when they say no


def program(tmp_path, monkeypatch, said: str, code: int = 1) -> None:
    """Put a program on the path that says what sbatch was recorded to say."""
    path = tmp_path / "sbatch"
    path.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit {code}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_a_controller_that_is_away_decides_nothing(tmp_path, monkeypatch):
    for said in [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"',
        "sbatch: fatal: Could not establish a configuration source",
    ]:
        program(tmp_path, monkeypatch, said)
        with pytest.raises(SlurmUnreachableError):
            slurm_commands.run("sbatch")


def test_a_refusal_is_told_in_slurms_words_and_its_absence_says_so(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "sbatch: error: invalid partition specified: nowhere")
    with pytest.raises(SlurmError, match="invalid partition") as caught:
        slurm_commands.run("sbatch")
    assert not isinstance(caught.value, SlurmUnreachableError)
    program(tmp_path, monkeypatch, "")
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm_commands, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(SlurmUnreachableError, match="took over"):
        slurm_commands.run("sbatch")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnreachableError, match="sinfo is not installed here"):
        slurm_commands.partitions()


PREEMPTED = "PreemptTime=2026-12-01T03:25:31"


def test_a_node_without_this_package_says_as_what_slurm_ends_its_job_or_why_it_does_not_know(
    launcher, tmp_path
):
    argv = launcher.adapt({})["explain_kill"]
    scontrol = tmp_path / "scontrol"
    for script, printed, warned in [
        (
            f"echo JobId=$3 JobState=COMPLETING {PREEMPTED}",
            "Slurm ended job 7 as PREEMPTED",
            "",
        ),
        (
            f"echo JobId=$3 JobState=CANCELLED {PREEMPTED} StartTime=2026-12-01T03:27:33",
            "Slurm ended job 7 as CANCELLED",
            "",
        ),
        ("echo JobId=$3 JobState=CANCELLED", "Slurm ended job 7 as CANCELLED", ""),
        (
            "echo JobId=$3 JobState=RUNNING PreemptTime=None",
            "",
            "Slurm says that job 7 is RUNNING",
        ),
        (
            "echo JobId=$3 JobState=COMPLETING Restarts=1",  # as Slurm 22.05 says it
            "Slurm requeued job 7, which goes on when Slurm starts it again",
            "",
        ),
        ("echo slurm_load_jobs error: no >&2; exit 1", "", "slurm_load_jobs error: no"),
        (None, "", "[Errno 2] No such file or directory: 'scontrol'"),
    ]:
        scontrol.unlink(missing_ok=True)
        if script:
            scontrol.write_text(f"#!/bin/sh\n{script}\n")
            scontrol.chmod(0o755)
        env = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7"}
        done = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, check=False)
        found = (done.stdout.strip(), done.stderr.strip(), done.returncode)
        status = slurm_end.RUNS_AGAIN if "Restarts" in (script or "") else int(not printed)
        assert found == (printed, warned, status), script


# What the launcher concludes from files and from Slurm's words, one case each.

JOB = "17"


class Told:
    """What Slurm says: its queue, and how a job ended that left it; None is silence."""

    def __init__(self) -> None:
        self.queue: list[SlurmJob] | None = []
        self.ended: SlurmJob | None = None
        self.seconds = 0.0

    def list(self) -> list[SlurmJob]:
        if self.queue is None:
            raise SlurmUnreachableError(
                "slurm_load_jobs error: Unable to contact slurm controller"
            )
        return self.queue


@pytest.fixture
def told(monkeypatch) -> Told:
    made = Told()
    monkeypatch.setattr(slurm_commands, "queue", made.list)
    monkeypatch.setattr(slurm_commands, "ended_job", lambda _job_id: made.ended)
    return made


@pytest.fixture
def launcher(told) -> SlurmLauncher:
    return SlurmLauncher(SlurmConfig(time_limit_minutes=60), clock=lambda: told.seconds)


@pytest.fixture
def folder(attempts: Attempts) -> AttemptFolder:
    """An attempt that was sent as job 17."""
    made = attempts.make()
    child.write_json(
        made.path / SlurmLauncher.TICKET, {"job_id": JOB, "name": SlurmLauncher.job_name(made)}
    )
    return made


def job(folder: AttemptFolder, state: str, detail: str = "") -> SlurmJob:
    return SlurmJob(JOB, state, detail, SlurmLauncher.job_name(folder), "n1")


def look(launcher: SlurmLauncher, folder: AttemptFolder, told: Told, seconds: float = 0.0) -> None:
    told.seconds += seconds
    launcher.refresh([folder])


def lose(launcher: SlurmLauncher, folder: AttemptFolder, told: Told) -> Verdict:
    """Let Slurm tell of the job's end, and wait for as long as a shared folder may take."""
    look(launcher, folder, told)
    look(launcher, folder, told, SCHEDULER_SETTLE_SECONDS + 1)
    return launcher.verdict_of(folder)


def test_a_pending_job_waits_and_says_why_and_runs_before_its_supervisor_says_so(
    launcher, folder, told
):
    told.queue = [job(folder, "PENDING", "Resources")]
    look(launcher, folder, told)
    assert launcher.verdict_of(folder) is Verdict.WAITING
    assert launcher.waits_for(folder) == "Slurm (job 17): Resources"
    told.queue = [job(folder, "RUNNING")]
    look(launcher, folder, told, SCHEDULER_SETTLE_SECONDS + 1)
    assert launcher.verdict_of(folder) is Verdict.RUNNING


def test_silence_of_slurm_ends_nothing_however_long_it_lasts(launcher, folder, told):
    told.queue = None
    for _ in range(5):
        look(launcher, folder, told, 3600)
    assert launcher.verdict_of(folder) is Verdict.WAITING
    assert launcher.waits_for(folder) == "Slurm does not answer its host"


def test_the_login_nodes_reboot_means_nothing(launcher, folder, told, attempts):
    attempts.reboot(folder)
    told.queue = [job(folder, "RUNNING")]
    look(launcher, folder, told)
    assert launcher.verdict_of(folder) is Verdict.RUNNING


def test_an_end_without_a_record_is_believed_once_the_folder_had_time(launcher, folder, told):
    told.queue = [job(folder, "FAILED")]
    look(launcher, folder, told)
    before = launcher.verdict_of(folder)
    assert before is Verdict.WAITING
    assert lose(launcher, folder, told) is Verdict.NEVER_STARTED


def test_how_slurm_ended_a_job_becomes_a_reason(folder, told):
    for state, reason in [
        ("NODE_FAIL", Reason.HOST_REBOOTED),
        ("TIMEOUT", Reason.MAX_DURATION),
        ("OUT_OF_MEMORY", Reason.OOM_HOST),
        ("CANCELLED", Reason.KILLED_EXTERNALLY),
        ("PREEMPTED", Reason.KILLED_EXTERNALLY),
        ("FAILED", Reason.NEVER_STARTED),
    ]:
        launcher = SlurmLauncher(SlurmConfig(time_limit_minutes=60), clock=lambda: told.seconds)
        told.ended = job(folder, state)
        verdict = lose(launcher, folder, told)
        lost = launcher.unrecorded_end(folder, verdict)
        assert lost == (reason, f"Slurm job 17 ended on n1 as {state}")


def test_a_job_that_we_cancelled_has_the_reason_of_the_order(launcher, folder, told):
    child.write_json(folder.path / child.STOP, {"reason": "stopped_by_user"})
    told.ended = job(folder, "CANCELLED")
    lost = launcher.unrecorded_end(folder, lose(launcher, folder, told))
    assert lost.reason is Reason.STOPPED_BY_USER


def test_memory_that_ran_out_while_it_was_stopped_stays_the_reason(launcher, folder, told):
    child.write_json(folder.path / child.STOP, {"reason": "stopped_by_user"})
    told.ended = job(folder, "OUT_OF_MEMORY")
    assert launcher.unrecorded_end(folder, lose(launcher, folder, told)).reason is Reason.OOM_HOST


def test_a_job_that_slurm_has_forgotten_says_so(launcher, folder, told):
    lost = launcher.unrecorded_end(folder, lose(launcher, folder, told))
    assert lost == (Reason.NEVER_STARTED, "Slurm has no record of job 17")


def test_a_job_with_a_verdict_that_is_no_loss_is_not_lost(launcher, folder):
    found = [launcher.unrecorded_end(folder, each) for each in Verdict if each not in LOST_REASONS]
    assert set(found) == {None}


def test_the_supervisor_ends_a_job_before_slurm_would(launcher):
    document = launcher.adapt({"max_duration_seconds": None})
    assert document["max_duration_seconds"] == 60 * 60 - SCHEDULER_END_MARGIN_SECONDS
    assert "CUDA_VISIBLE_DEVICES" in document["inherit"]
    assert "SLURM_NNODES" not in document["inherit"]
    document = launcher.adapt({"max_duration_seconds": 90.0})
    assert document["max_duration_seconds"] == 90.0


# A training over several nodes: how many, what runs on them, and what is refused.


def shared(folder: AttemptFolder, slots: int, **changes: int) -> RunRequest:
    """Return the attempt's request as a training with ranks on some of the host's slots."""
    gang = Gang(
        node_rank=0, master_address="127.0.0.1", master_port=29400, own_address="127.0.0.1",
        rendezvous_id="r", **{"num_nodes": 1, "num_processes": 2, **changes},
    )  # fmt: skip
    devices = [RunDevice(kind="slot", index=each, uuid=f"slot-{each}") for each in range(slots)]
    told = {"gang": gang, "devices": tuple(devices), "spec": TrainSpec()}
    return folder.request().model_copy(update=told)


COMMAND = ["python", "-m", "runners.jobs.train", "/attempt"]


def test_a_training_takes_a_node_for_each_slot_and_a_rank_for_each_gpu(folder, told, monkeypatch):
    sent: list[list[str]] = []
    monkeypatch.setattr(slurm_commands, "submit", lambda options, _script: sent.append(options))
    for gres, ranks in [("", "2"), ("gpu", "1"), ("gpu:h100:4", "4"), ("tmpdisk:9,gpu:8", "8")]:
        config = SlurmConfig(options={"gres": gres} if gres else {})
        launcher = SlurmLauncher(config, clock=lambda: told.seconds)
        request = shared(folder, slots=3)
        argv, _env = launcher.command(request, request.spec, COMMAND, folder.path)
        assert argv[:5] == ["python", "-m", slurm_nodes.__name__, str(folder.path), ranks], gres
        assert argv[5:] == COMMAND[1:]
        assert "SLURM_NNODES" in launcher.adapt({"argv": argv})["inherit"]
    for request, size in [
        (shared(folder, slots=3), ["--requeue", "--nodes=3"]),
        (shared(folder, slots=1), ["--no-requeue", "--nodes=1"]),
        (shared(folder, slots=3).model_copy(update={"gang": None}), ["--no-requeue", "--nodes=1"]),
    ]:
        child.write_json(folder.spec, request.model_dump(mode="json"))
        (folder.path / SlurmLauncher.TICKET).unlink(missing_ok=True)
        launcher.launch(folder)
        told.seconds += GATHER_SECONDS
        launcher.refresh([folder])
        assert [each for each in sent[-1] if "requeue" in each or "--nodes" in each] == size


def test_what_a_job_asks_of_slurm_comes_before_the_hosts_own_options(folder, told, monkeypatch):
    sent: list[list[str]] = []
    monkeypatch.setattr(slurm_commands, "submit", lambda options, _script: sent.append(options))
    config = SlurmConfig(options={"partition": "main", "mem": "100"})
    request = shared(folder, slots=1)
    asked = {"partition": "gpu", "reservation": "lab"}
    spec = request.spec.model_copy(update={"scheduler_options": asked})
    request = request.model_copy(update={"spec": spec})
    child.write_json(folder.spec, request.model_dump(mode="json"))
    (folder.path / SlurmLauncher.TICKET).unlink()
    SlurmLauncher(config, clock=lambda: told.seconds).refresh([folder])
    assert sent[0][:3] == ["--mem=100", "--partition=gpu", "--reservation=lab"]


def test_attempts_that_ask_for_the_same_are_one_array_and_a_lost_ticket_sends_nothing_twice(
    told, monkeypatch, attempts
):
    sent: list[list[str]] = []

    def submit(options, script):
        sent.append(options)
        shown.append(script.read_text())
        if "--mem=7" in options:
            raise SlurmError("mem: too little")
        return "40"

    shown: list[str] = []
    monkeypatch.setattr(slurm_commands, "submit", submit)
    config = SlurmConfig(max_jobs=8, array_limit=2)
    launcher = SlurmLauncher(config, clock=lambda: told.seconds)
    alike = [attempts.make(f"{attempts.first_id}-{number}") for number in range(3)]
    other = attempts.make(f"{attempts.first_id}-other")
    document = child.read_json(other.path / child.LAUNCH)
    child.write_json(other.path / child.LAUNCH, document | {"max_duration_seconds": 60.0})
    for number, folder in enumerate((*alike, other), 1):  # as their checks end
        launcher.launch(folder)
        told.seconds += GATHER_SECONDS / 2
        launcher.refresh([*alike, other][:number])
    assert not sent
    told.seconds += GATHER_SECONDS / 2
    launcher.refresh([*alike, other])
    name = f"slipway-array-{alike[0].attempt_id}"
    assert [each for each in sent[0] if "array" in each] == [f"--job-name={name}", "--array=0-2%2"]
    assert [f"{number}) folder={folder.path} ;;" in shown[0] for number, folder in enumerate(alike)
            ] == [True] * 3  # fmt: skip
    assert f"--job-name=slipway-{other.attempt_id}" in sent[1]
    tickets = [child.read_json(each.path / SlurmLauncher.TICKET)["job_id"] for each in alike]
    assert (tickets, len(sent)) == (["40_0", "40_1", "40_2"], 2)

    # As 22.05 lists an array: its waiting tasks in one record, a cancelled one not at all.
    common = {"array_job_id": 40, "name": name, "user_name": "root"}
    told.queue = read_json_queue({"jobs": [
        common | {"job_id": 41, "job_state": "RUNNING", "array_task_id": 0, "nodes": "n1"},
        common | {"job_id": 40, "job_state": "PENDING", "state_reason": "JobArrayTaskLimit",
                  "array_task_id": None, "array_task_string": "1-2%2"},
    ]}, "root")  # fmt: skip
    (alike[1].path / SlurmLauncher.TICKET).unlink()  # the agent died before it wrote this one
    again = SlurmLauncher(config, clock=lambda: told.seconds)
    again.refresh(alike)
    again.refresh(alike)
    assert child.read_json(alike[1].path / SlurmLauncher.TICKET)["job_id"] == "40_1"
    assert len(sent) == 2
    assert again.verdict_of(alike[0]) is Verdict.RUNNING
    assert again.waits_for(alike[1]) == "Slurm (job 40_1): JobArrayTaskLimit"

    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(slurm_commands, "run", lambda *words: asked.append(words))
    for job_id in ("40_1", "17"):
        launcher.cancel_waiting(job_id)
    assert asked == [("scancel", "40_1"), ("scancel", "--state=PENDING", "17")]

    apart: list[list[str]] = []

    def takes_no_array(options, _script):
        if any(each.startswith("--array") for each in options):
            raise SlurmError("Invalid job array specification")
        apart.append(options)
        return str(50 + len(apart))

    monkeypatch.setattr(slurm_commands, "submit", takes_no_array)
    single = [attempts.make(f"{attempts.first_id}-s{number}") for number in range(2)]
    SlurmLauncher(config).refresh(single)
    tickets = [child.read_json(each.path / SlurmLauncher.TICKET)["job_id"] for each in single]
    assert tickets == ["51", "52"]
    names = [f"--job-name=slipway-{each.attempt_id}" for each in single]
    assert [name in options for name, options in zip(names, apart, strict=True)] == [True] * 2

    monkeypatch.setattr(slurm_commands, "submit", submit)
    refused = [attempts.make(f"{attempts.first_id}-r{number}") for number in range(2)]
    SlurmLauncher(config.model_copy(update={"options": {"mem": "7"}})).refresh(refused)
    for folder in refused:
        assert folder.exit_record().reason is Reason.PREFLIGHT_FAILED
        assert "mem: too little" in folder.exit_record().last_lines[0]


def test_several_hosts_and_other_kinds_of_ranks_are_refused(launcher, folder):
    generation = GenerateSpec(model=DemoModel(), split=TensorSplit())
    hosts, generating = shared(folder, 1, num_nodes=2), shared(folder, slots=2)
    for request, spec in [(hosts, hosts.spec), (generating, generation)]:
        with pytest.raises(LaunchRefusedError, match="takes a training over several nodes alone"):
            launcher.command(request, spec, COMMAND, folder.path)
    alone = folder.request()
    assert launcher.command(alone, alone.spec, COMMAND, folder.path) == (COMMAND, {})


def test_the_script_holds_no_word_of_the_job(folder):
    lines = render_script(folder).splitlines()
    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith(f"{folder.path} --stay")
    assert "demo" not in "".join(lines)
