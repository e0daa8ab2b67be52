"""Making the disk what the server wants: each step harmless when repeated."""

import sys
from pathlib import Path

import pytest

from runners.launchers.attempts import AttemptFolder, Verdict
from runners.shared.messages import BeatReply, Needs, StopOrder, WantedAttempt
from runners.shared.reasons import Reason
from runners.supervision import child, procfs
from tests.runners.programs import FOREVER, STUBBORN
from tests.runners.tools import bodies, ids_of, wait_for

A1, A2 = ids_of(__name__)


@pytest.fixture
def reconciler(reconciling):
    return reconciling(FOREVER)


@pytest.fixture
def folder(host_dir) -> AttemptFolder:
    return AttemptFolder(host_dir.attempts / A1)


def reply(**changes: object) -> BeatReply:
    return BeatReply(server_time_ms=0, **changes)


def stop(attempt_id: str = A1) -> StopOrder:
    return StopOrder(attempt_id=attempt_id, reason=Reason.STOPPED_BY_USER, grace_seconds=0.2)


def wanted(acceptor, attempt_id: str = A1) -> WantedAttempt:
    return WantedAttempt(attempt_id=attempt_id, fence=acceptor.want(attempt_id).fence)


def test_wanting_the_same_attempt_again_and_again_starts_it_once(acceptor, reconciler, folder):
    """With what the server sent; and while it runs, it is not forgotten."""
    want = wanted(acceptor)
    for _ in range(4):
        reconciler.apply(reply(wanted=(want, want)))
    assert len(bodies(folder, "started")) == 1
    assert len(procfs.processes_of_attempt(A1)) == 1
    assert folder.request() == acceptor.attempts[A1].request
    reconciler.apply(reply(forget=(A1,)))
    assert folder.spool.is_dir()
    assert folder.verdict(procfs.boot_id()) is Verdict.RUNNING


def test_a_claim_is_told_to_disk_and_what_the_host_found_to_the_server(
    acceptor, reconciler, folder
):
    asked = []
    answer = acceptor.claim
    acceptor.claim = lambda *call: asked.append((folder.claim(), call[1])) or answer(*call)
    needs = Needs(kind="benchmark", memory_bytes=2**60)
    reconciler.claim(wanted(acceptor).model_copy(update={"needs": needs}))
    ((on_disk, request),) = asked
    assert on_disk.claim_id == acceptor.attempts[A1].claim_id
    assert [check.name for check in request.checks if not check.ok] == ["memory"]


def test_a_claim_that_is_repeated_looks_for_the_same_again(acceptor, reconciler):
    want = wanted(acceptor).model_copy(update={"needs": Needs(kind="benchmark")})
    acceptor.is_away = True
    reconciler.claim(want)
    asked = []
    acceptor.is_away, answer = False, acceptor.claim
    acceptor.claim = lambda *call: asked.append(call[1]) or answer(*call)
    reconciler.retry_claims()
    assert {"memory", "disk"} <= {check.name for check in asked[0].checks}


def test_an_attempt_that_will_not_stop_keeps_the_next_one_away(acceptor, reconciler, host_dir):
    reconciler._render = lambda _spec, _folder: [sys.executable, "-c", STUBBORN]
    reconciler.apply(reply(wanted=(wanted(acceptor),)))
    order = stop().model_copy(update={"grace_seconds": 30.0})
    reconciler.stop(order)
    asked = []
    acceptor.claim = lambda *call: asked.append(call[1]) or (409, {"detail": "given back"})
    reconciler.claim(wanted(acceptor, A2).model_copy(update={"needs": Needs(kind="train")}))
    failed = [check for check in asked[0].checks if not check.ok]
    assert [check.name for check in failed] == ["earlier attempts"]
    assert A1 in failed[0].sentence


def test_an_absent_server_leaves_the_claim_to_be_repeated(acceptor, reconciler, folder):
    want = wanted(acceptor)
    acceptor.is_away = True
    reconciler.claim(want)
    assert folder.verdict(procfs.boot_id()) is Verdict.CLAIMING
    acceptor.is_away = False
    reconciler.retry_claims()
    assert folder.verdict(procfs.boot_id()) is Verdict.RUNNING


def test_a_wrong_fence_is_buried_and_not_asked_for_again(acceptor, reconciler, folder):
    acceptor.want(A1)
    reconciler.claim(WantedAttempt(attempt_id=A1, fence="old"))
    assert folder.verdict(procfs.boot_id()) is Verdict.TOMBSTONE
    reconciler.claim(WantedAttempt(attempt_id=A1, fence=acceptor.attempts[A1].fence))
    assert acceptor.attempts[A1].claim_id == ""


def test_stopping_twice_keeps_the_first_order(acceptor, reconciler, folder):
    reconciler.apply(reply(wanted=(wanted(acceptor),)))
    reconciler.apply(reply(stop=(stop(),)))
    later = stop().model_copy(update={"reason": Reason.SUPERSEDED})
    reconciler.apply(reply(stop=(later,)))
    wait_for(folder.exit_record)
    assert folder.exit_record().reason is Reason.STOPPED_BY_USER


def test_an_order_about_what_is_not_here_does_nothing(reconciler, host_dir):
    for attempt_id in ["unknown", "..", "../../etc"]:
        reconciler.apply(reply(stop=(stop(attempt_id),), forget=(attempt_id,)))
        assert list(host_dir.attempts.iterdir()) == [], attempt_id


def test_the_secrets_of_the_host_reach_no_job(acceptor, reconciler, folder, host_dir, credential):
    host_dir.save_credential(credential)
    reconciler.apply(reply(wanted=(wanted(acceptor),)))
    (job,) = procfs.processes_of_attempt(A1)
    process = Path(f"/proc/{job.pid}")
    seen = [(process / name).read_bytes() for name in ("environ", "cmdline")]
    seen += [path.read_bytes() for path in folder.path.rglob("*") if path.is_file()]
    assert not any(b"host-credential" in text or b"command-key" in text for text in seen)


def test_two_jobs_share_the_cores(acceptor, reconciler, host_dir):
    reconciler.apply(reply(wanted=(wanted(acceptor), wanted(acceptor, A2))))
    launches = [child.read_json(host_dir.attempts / key / child.LAUNCH) for key in (A1, A2)]
    cores = int(procfs.usable_cores())
    assert [each["env"]["OMP_NUM_THREADS"] for each in launches] == [
        str(cores),
        str(max(1, cores // 2)),
    ]


def test_a_supervisor_that_fails_is_told_as_our_fault(acceptor, reconciler, folder, monkeypatch):
    monkeypatch.setattr("runners.launchers.launch.start_supervisor", lambda _: 70)
    reconciler.apply(reply(wanted=(wanted(acceptor),)))
    assert folder.exit_record().reason is Reason.INTERNAL
    assert "supervisor.log" in folder.exit_record().last_lines[0]


def test_statuses_leave_out_what_the_server_holds_whole(attempts, reconciler):
    folder = attempts.run(A1)
    reconciler.reap()
    before = [status.phase for status in reconciler.statuses()]
    folder.forget()
    assert (before, reconciler.statuses()) == (["exited"], ())
