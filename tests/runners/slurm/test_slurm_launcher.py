"""What the launcher concludes from files and from Slurm's words, one case each."""

import pytest

from runners.attempts import LOST, AttemptFolder, Verdict
from runners.launch import LaunchRefusedError
from runners.launchers import slurm, slurm_commands
from runners.launchers.slurm import SlurmLauncher, render_script
from runners.launchers.slurm_commands import SlurmJob, SlurmUnreachableError
from runners.messages import Gang, RunRequest
from runners.reasons import Reason
from runners.slurm_options import SlurmConfig
from runners.supervision import record
from tests.runners.tools import Attempts

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
    monkeypatch.setattr(slurm_commands, "ended", lambda _job_id: made.ended)
    return made


@pytest.fixture
def launcher(told) -> SlurmLauncher:
    return SlurmLauncher(SlurmConfig(time_limit_minutes=60), clock=lambda: told.seconds)


@pytest.fixture
def folder(attempts: Attempts) -> AttemptFolder:
    """An attempt that was sent as job 17."""
    made = attempts.make()
    record.write_json(made.path / slurm.TICKET, {"job_id": JOB, "name": slurm.job_name(made)})
    return made


def job(folder: AttemptFolder, state: str, detail: str = "") -> SlurmJob:
    return SlurmJob(JOB, state, detail, slurm.job_name(folder), "n1")


def look(launcher: SlurmLauncher, folder: AttemptFolder, told: Told, seconds: float = 0.0) -> None:
    told.seconds += seconds
    launcher.refresh([folder])


def lose(launcher: SlurmLauncher, folder: AttemptFolder, told: Told) -> Verdict:
    """Let Slurm tell of the job's end, and wait for as long as a shared folder may take."""
    look(launcher, folder, told)
    look(launcher, folder, told, slurm.SETTLE_SECONDS + 1)
    return launcher.verdict_of(folder)


def test_a_pending_job_waits_and_says_why(launcher, folder, told):
    told.queue = [job(folder, "PENDING", "Resources")]

    look(launcher, folder, told)

    assert launcher.verdict_of(folder) is Verdict.WAITING
    assert launcher.waits_for(folder) == "Slurm (job 17): Resources"


def test_a_job_that_slurm_runs_is_running_before_its_supervisor_says_so(launcher, folder, told):
    told.queue = [job(folder, "RUNNING")]

    look(launcher, folder, told)

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


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("NODE_FAIL", Reason.HOST_REBOOTED),
        ("TIMEOUT", Reason.MAX_DURATION),
        ("OUT_OF_MEMORY", Reason.OOM_HOST),
        ("CANCELLED", Reason.KILLED_EXTERNALLY),
        ("PREEMPTED", Reason.KILLED_EXTERNALLY),
        ("FAILED", Reason.NEVER_STARTED),
    ],
)
def test_how_slurm_ended_a_job_becomes_a_reason(launcher, folder, told, state, reason):
    told.ended = job(folder, state)
    verdict = lose(launcher, folder, told)

    lost = launcher.unrecorded_end(folder, verdict)

    assert lost == (reason, f"Slurm job 17 ended on n1 as {state}")


def test_a_job_that_we_cancelled_has_the_reason_of_the_order(launcher, folder, told):
    record.write_json(folder.path / record.STOP, {"reason": "stopped_by_user"})
    told.ended = job(folder, "CANCELLED")

    lost = launcher.unrecorded_end(folder, lose(launcher, folder, told))

    assert lost.reason is Reason.STOPPED_BY_USER


def test_memory_that_ran_out_while_it_was_stopped_stays_the_reason(launcher, folder, told):
    record.write_json(folder.path / record.STOP, {"reason": "stopped_by_user"})
    told.ended = job(folder, "OUT_OF_MEMORY")

    assert launcher.unrecorded_end(folder, lose(launcher, folder, told)).reason is Reason.OOM_HOST


def test_a_job_that_slurm_has_forgotten_says_so(launcher, folder, told):
    lost = launcher.unrecorded_end(folder, lose(launcher, folder, told))

    assert lost == (Reason.NEVER_STARTED, "Slurm has no record of job 17")


def test_a_job_with_a_verdict_that_is_no_loss_is_not_lost(launcher, folder):
    found = [launcher.unrecorded_end(folder, each) for each in Verdict if each not in LOST]

    assert set(found) == {None}


def test_the_supervisor_ends_a_job_before_slurm_would(launcher, folder):
    document = launcher.adapt({"max_duration_seconds": None}, folder.request())

    assert document["max_duration_seconds"] == 60 * 60 - slurm.END_MARGIN_SECONDS
    assert "CUDA_VISIBLE_DEVICES" in document["inherit"]


def test_a_shorter_limit_of_the_job_is_kept(launcher, folder):
    document = launcher.adapt({"max_duration_seconds": 90.0}, folder.request())

    assert document["max_duration_seconds"] == 90.0


def test_a_member_of_a_gang_is_refused_in_words(launcher, folder):
    gang = Gang(
        node_rank=0, num_nodes=2, master_address="10.0.0.1", master_port=29400,
        own_address="10.0.0.1", rendezvous_id="r",
    )  # fmt: skip
    request = RunRequest.model_validate(folder.request().model_dump() | {"gang": gang})

    with pytest.raises(LaunchRefusedError, match="as one process on one node"):
        launcher.adapt({}, request)


def test_the_script_holds_no_word_of_the_job(folder):
    lines = render_script(folder).splitlines()

    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith(f"{folder.path} --stay")
    assert "demo" not in "".join(lines)
