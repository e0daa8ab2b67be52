"""What the files of an attempt mean, how an end gets settled, and what a later one takes over."""

import json
import os
import shutil
import time

import pytest

from runners.host.preflight import HostState, run_checks
from runners.host.reconcile import take_over_checkpoint
from runners.jobspec import GenerateSpec, TrainSpec
from runners.jobspec.base import DemoModel
from runners.launchers.attempts import AttemptFolder, Verdict, attempt_folders
from runners.shared.config import HostConfig
from runners.shared.log_text import shortened
from runners.shared.messages import Needs, PreflightCheck, WantedAttempt
from runners.shared.reasons import Reason
from runners.shared.spool import SpoolWriter
from runners.supervision import child, procfs
from tests.runners.programs import DAEMON, FOREVER, SAY, is_ready
from tests.runners.tools import bodies, events_of, ids_of, wait_for

# What the files of an attempt mean to an agent that starts, and how an end gets settled.

A1, A2 = ids_of(__name__)
EARLIER = "01JRESVMEDRESVMEDRESVMED01"
GENERATES = GenerateSpec(model=DemoModel(), resume_from=EARLIER)

BOOT = procfs.boot_id()


def kill_supervisor(folder):
    identity = child.read_json(folder.path / child.SUPERVISOR)
    os.kill(identity["pid"], 9)
    wait_for(lambda: not child.is_locked(folder.lock))


def test_a_held_lock_means_running_and_a_supervisor_that_left_no_record_is_lost(attempts):
    folder = attempts.start(code=FOREVER)
    assert folder.verdict(BOOT) is Verdict.RUNNING
    kill_supervisor(folder)
    assert folder.verdict(BOOT) is Verdict.SUPERVISOR_LOST


def test_an_exit_record_means_finished_in_any_boot_and_a_damaged_one_counts_as_none(attempts):
    folder = attempts.run()
    assert folder.verdict(BOOT) is Verdict.FINISHED
    assert folder.verdict("another-boot") is Verdict.FINISHED
    (folder.path / "exit.json").write_bytes(b"{")
    assert folder.verdict(BOOT) is Verdict.SUPERVISOR_LOST


def test_what_the_files_of_an_attempt_without_a_supervisor_mean(attempts):
    folder = attempts.make()
    assert folder.verdict(BOOT) is Verdict.NEVER_STARTED
    assert folder.verdict("another-boot") is Verdict.HOST_REBOOTED
    for damage in (b"", b"\0" * 300, b'{"attempt_id": "a1"'):
        folder.spec.write_bytes(damage)
        assert folder.verdict(BOOT) is Verdict.DAMAGED, damage
    folder.spec.unlink()
    assert folder.verdict(BOOT) is Verdict.CLAIMING
    unreadable, buried = attempts.make("unreadable"), attempts.make("buried")
    (unreadable.path / "claim.json").write_bytes(b"\0\0")
    buried.mark_claim_rejected()
    assert unreadable.verdict(BOOT) is Verdict.DAMAGED
    assert buried.verdict(BOOT) is Verdict.TOMBSTONE


def test_an_attempt_of_a_newer_agent_that_was_taken_back_is_not_damaged(attempts):
    folder = attempts.make()
    for name in ("claim.json", "spec.json"):
        document = child.read_json(folder.path / name)
        child.write_json(folder.path / name, {**document, "of_a_newer_agent": 1})
    assert folder.verdict(BOOT) is Verdict.NEVER_STARTED  # as a job that waits in a scheduler


def test_a_forgotten_attempt_keeps_its_output_and_loses_its_spool(attempts):
    folder = attempts.run(code="import os; os.mkdir('output'); open('output/model', 'w')")
    folder.forget()
    assert folder.verdict(BOOT) is Verdict.FORGOTTEN
    assert not folder.spool.exists()
    assert (folder.output / "model").exists()


def test_the_reaper_writes_the_end_of_a_lost_attempt_and_not_of_a_living_one(attempts):
    folder = attempts.start(code=FOREVER)
    folder.settle(Reason.SUPERVISOR_LOST)
    assert folder.exit_record() is None
    assert not folder.is_settled
    kill_supervisor(folder)
    folder.settle(Reason.SUPERVISOR_LOST)
    assert folder.exit_record().reason is Reason.SUPERVISOR_LOST
    assert folder.exit_record().by == "reaper"
    assert events_of(folder)[-1]["kind"] == "exited"


def test_settling_twice_tells_the_end_once(attempts):
    folder = attempts.make()
    folder.settle(Reason.NEVER_STARTED)
    folder.settle(Reason.HOST_REBOOTED)
    assert [body["reason"] for body in bodies(folder, "exited")] == ["never_started"]


def test_an_end_that_only_spool_or_record_tells_is_written_to_the_other(attempts):
    folder = attempts.run(code="raise SystemExit(7)")
    (folder.path / "exit.json").unlink()
    folder.settle(Reason.SUPERVISOR_LOST)
    assert folder.exit_record().exit_code == 7
    assert len(bodies(folder, "exited")) == 1
    folder = attempts.run(f"recorded-{A1}", code="raise SystemExit(7)")
    tail = next(folder.spool.glob("*.jsonl"))
    tail.write_bytes(b"".join(tail.read_bytes().splitlines(keepends=True)[:-1]))
    folder.settle(Reason.INTERNAL)
    assert bodies(folder, "exited")[0]["exit_code"] == 7


@pytest.mark.faults
def test_settling_leaves_no_daemon_of_a_lost_supervisor(attempts):
    folder = attempts.start(code=DAEMON + FOREVER)
    wait_for(lambda: is_ready(folder))
    kill_supervisor(folder)
    wait_for(lambda: len(procfs.processes_of_attempt(A1)) == 1)  # the job went with its supervisor
    folder.settle(Reason.SUPERVISOR_LOST)
    assert procfs.processes_of_attempt(A1) == []


def test_the_announced_output_outlives_the_spool(attempts):
    announce = "say('artefact', name='model', kind='model', total_bytes={0}, files={{'a': {0}}}, sha256={{'a': '0' * 64}})\n"
    folder = attempts.run(code=SAY + announce.format(1) + announce.format(2))
    folder.settle(Reason.INTERNAL)
    folder.forget()
    assert [artefact.total_bytes for artefact in folder.artefacts()] == [2]


def test_an_attempt_is_stored_once_its_last_event_is_acknowledged(attempts):
    folder = attempts.run()
    folder.settle(Reason.INTERNAL)
    last_seq = len(events_of(folder))
    folder.save_acked_seq(last_seq - 1)
    before = folder.is_stored
    folder.save_acked_seq(last_seq)
    assert (before, folder.is_stored) == (False, True)


def test_a_claim_is_made_once_and_a_quarantined_folder_is_kept_elsewhere(attempts, host_dir):
    folder = attempts.make()
    assert folder.make_claim("another fence", BOOT) == folder.claim()
    assert folder.claim().fence == "fence"
    place = folder.quarantine(host_dir.quarantine)
    assert (place / "spec.json").exists()
    assert attempt_folders(host_dir.attempts) == []


def test_a_folder_that_no_attempt_can_have_made_is_not_an_attempt(host_dir):
    for name in (".hidden", "a b", "..x", "a" * 65):
        (host_dir.attempts / name).mkdir()
    (host_dir.attempts / "01KA-x_9").mkdir()
    assert [folder.attempt_id for folder in attempt_folders(host_dir.attempts)] == ["01KA-x_9"]


def test_events_go_on_after_a_lost_supervisor_without_a_gap(attempts):
    folder = attempts.make()
    SpoolWriter(folder.spool).append("phase", {"name": "train"})
    folder.settle(Reason.SUPERVISOR_LOST)
    assert [event["seq"] for event in events_of(folder)] == [1, 2]


# Small files that are whole or absent, locks, and the space kept for the last word.

END = {"exit_code": 1, "reason": "exit_nonzero", "last_lines": []}


def test_a_document_replaces_the_old_one_whole_or_leaves_it(tmp_path, monkeypatch):
    child.write_json(tmp_path / "x.json", {"a": 1})
    child.write_json(tmp_path / "x.json", {"b": 2})
    assert child.read_json(tmp_path / "x.json") == {"b": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    with pytest.raises(OSError, match="No space left"):
        child.write_json(tmp_path / "x.json", {"c": 3})
    assert child.read_json(tmp_path / "x.json") == {"b": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_damaged_or_absent_document_is_none(tmp_path):
    for damage in [b"", b"{", b"\0\0", b"[1]", b"\xff"]:
        (tmp_path / "x.json").write_bytes(damage)
        assert child.read_json(tmp_path / "x.json") is None, damage
    assert child.read_json(tmp_path / "absent.json") is None


def test_a_lock_is_held_by_one(tmp_path):
    with child.locked(tmp_path / "lock"):
        assert child.is_locked(tmp_path / "lock")
        with pytest.raises(child.LockedError, match="held by another"):
            with child.locked(tmp_path / "lock"):
                pass
    assert not child.is_locked(tmp_path / "lock")


def test_a_patient_waiter_gets_a_lock_that_is_freed_meanwhile(tmp_path):
    if pid := os.fork():
        os.waitpid(pid, 0)  # the grandchild below holds the lock by now
        with child.locked(tmp_path / "lock", timeout_seconds=5.0):
            held = True
        assert held
        return
    with child.locked(tmp_path / "lock"):
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)


def test_the_exit_record_uses_the_space_kept_for_it_and_loses_its_oldest_lines(tmp_path):
    child.reserve_exit_slot(tmp_path)
    assert (tmp_path / "exit.slot").stat().st_size == child.SLOT_BYTES
    child.write_exit_record(tmp_path, END)
    assert json.loads((tmp_path / "exit.json").read_text()) == END
    assert not (tmp_path / "exit.slot").exists()
    lines = [f"line {number} " + "\x01" * 100 for number in range(100)]
    written = child.write_exit_record(tmp_path, END | {"last_lines": lines})
    assert written["last_lines"][-1] == lines[-1]
    assert 0 < len(written["last_lines"]) < 100
    assert (tmp_path / "exit.json").stat().st_size <= child.SLOT_BYTES
    longest = shortened("🚢" * 9999)
    assert child.write_exit_record(tmp_path, END | {"last_lines": [longest]})["last_lines"]


# What a later attempt of a job takes over from an earlier one, and what it leaves alone.


@pytest.fixture
def left(attempts):
    """Make an attempt of a job that has ended and kept a checkpoint."""

    def leave(attempt_id: str, number: int, job_id: str = "j1") -> AttemptFolder:
        folder = attempts.make(attempt_id)
        request = folder.request().model_copy(update={"number": number, "job_id": job_id})
        child.write_json(folder.spec, request.model_dump(mode="json"))
        (folder.checkpoint / "step-00000003").mkdir(parents=True)
        (folder.checkpoint / "step-00000003" / "state.json").write_text(attempt_id)
        return folder

    return leave


@pytest.fixture
def later(attempts):
    """The folder of the job's fourth attempt, and what it is to run."""
    folder = attempts.make(A2)
    return folder, folder.request().model_copy(update={"number": 4})


def kept(folder: AttemptFolder) -> str:
    return (folder.checkpoint / "step-00000003" / "state.json").read_text()


def test_the_newest_earlier_attempt_of_the_same_job_gives_what_it_kept(left, later):
    others = [left("b", 3), left("a", 2), left("c", 3, job_id="j2"), left("d", 5)]
    assert take_over_checkpoint(*later, others).attempt_id == "b"
    assert kept(later[0]) == "b"
    assert not others[0].checkpoint.exists()
    assert [kept(other) for other in others[1:]] == ["a", "c", "d"]
    assert (
        take_over_checkpoint(*later, others) is None
    )  # once is enough, however often it is asked
    assert kept(later[0]) == "b"


def test_an_attempt_whose_supervisor_lives_keeps_what_it_has(left, later, monkeypatch):
    monkeypatch.setattr("runners.host.reconcile.SUPERVISOR_END_SECONDS", 0.05)
    alive, ended = left("b", 3), left("a", 2)
    with child.locked(alive.lock):
        assert take_over_checkpoint(*later, [alive, ended]).attempt_id == "a"
    assert (kept(alive), kept(later[0])) == ("b", "a")


def test_an_attempt_that_saved_nothing_gives_nothing(attempts, later):
    attempts.make("empty").checkpoint.mkdir()
    assert (
        take_over_checkpoint(*later, [AttemptFolder(attempts.host_dir.attempts / "empty")]) is None
    )


def test_an_attempt_goes_on_from_a_copy_of_what_the_job_that_it_resumes_left(left, later):
    folder, request = later
    spec = TrainSpec(resume_from=EARLIER)
    resuming = request.model_copy(update={"spec": spec, "number": 2})
    older, newest = left("c", 1, job_id=EARLIER), left("d", 2, job_id=EARLIER)
    assert take_over_checkpoint(folder, resuming, [older, newest]).attempt_id == "d"
    assert (kept(folder), kept(newest), kept(older)) == ("d", "d", "c")  # to be resumed again
    copied, original = (
        each.checkpoint / "step-00000003" / "state.json" for each in (folder, newest)
    )
    assert copied.stat().st_ino == original.stat().st_ino  # a training writes into no file again
    shutil.rmtree(folder.checkpoint)
    other = request.model_copy(update={"spec": GENERATES, "number": 2})
    assert take_over_checkpoint(folder, other, [newest]).attempt_id == "d"
    copied.write_text("more answers")
    assert kept(newest) == "d"
    shutil.rmtree(folder.checkpoint)
    own = left("e", 1)  # of the resuming job, before it was retried
    assert take_over_checkpoint(folder, resuming, [newest, own]).attempt_id == "e"


def test_a_resumed_job_is_refused_where_nothing_is_left_to_go_on_from(
    acceptor, left, host_dir, reconciling
):
    place = HostState(host_dir, HostConfig(), (host_dir.models,))
    needs = Needs(kind="train", resume_from=EARLIER)

    def check() -> PreflightCheck:
        return {each.name: each for each in run_checks(needs, place)}["checkpoint"]

    assert (check().ok, "from the start" in check().remedy) == (False, True)
    stored = acceptor.want(A2)
    stored.request = stored.request.model_copy(update={"spec": TrainSpec(resume_from=EARLIER)})
    reconciling(FOREVER, min_free_bytes=0).claim(WantedAttempt(attempt_id=A2, fence=stored.fence))
    record = AttemptFolder(host_dir.attempts / A2).exit_record()
    assert record.reason == Reason.MODEL_OR_DATA_MISSING
    assert record.last_lines == (f"Job {EARLIER} left no checkpoint on this host.",)
    left(A1, 1, job_id=EARLIER)
    assert (check().ok, A1 in check().sentence) == (True, True)


def test_the_next_attempt_that_a_host_starts_finds_the_checkpoint(
    acceptor, left, host_dir, reconciling
):
    left(A1, 1).settle(Reason.SUPERVISOR_LOST)
    stored = acceptor.want(A2)
    stored.request = stored.request.model_copy(update={"number": 2, "job_id": "j1"})
    reconciler = reconciling(FOREVER, min_free_bytes=0)
    reconciler.claim(WantedAttempt(attempt_id=A2, fence=stored.fence))
    assert kept(AttemptFolder(host_dir.attempts / A2)) == A1
    assert procfs.processes_of_attempt(A2)
