"""What a later attempt of a job takes over from an earlier one, and what it leaves alone."""

import sys

import pytest

from runners.attempts import AttemptFolder
from runners.client import ServerClient
from runners.config import HostConfig
from runners.messages import Wanted
from runners.reasons import Reason
from runners.reconcile import Reconciler, take_over
from runners.supervision import procfs, record
from tests.runners.programs import FOREVER
from tests.runners.tools import ids_of

A1, A2 = ids_of(__name__)


@pytest.fixture
def left(attempts):
    """Make an attempt of a job that has ended and kept a checkpoint."""

    def leave(attempt_id: str, number: int, job_id: str = "j1") -> AttemptFolder:
        folder = attempts.make(attempt_id)
        request = folder.request().model_copy(update={"number": number, "job_id": job_id})
        record.write_json(folder.spec, request.model_dump(mode="json"))
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

    assert take_over(*later, others).attempt_id == "b"
    assert kept(later[0]) == "b"
    assert not others[0].checkpoint.exists()
    assert [kept(other) for other in others[1:]] == ["a", "c", "d"]
    assert take_over(*later, others) is None  # once is enough, however often it is asked
    assert kept(later[0]) == "b"


def test_an_attempt_whose_supervisor_lives_keeps_what_it_has(left, later, monkeypatch):
    monkeypatch.setattr("runners.reconcile.LOCK_PATIENCE_SECONDS", 0.05)
    alive, ended = left("b", 3), left("a", 2)

    with record.locked(alive.lock):
        assert take_over(*later, [alive, ended]).attempt_id == "a"

    assert (kept(alive), kept(later[0])) == ("b", "a")


def test_an_attempt_that_saved_nothing_gives_nothing(attempts, later):
    attempts.make("empty").checkpoint.mkdir()

    assert take_over(*later, [AttemptFolder(attempts.host_dir.attempts / "empty")]) is None


def test_the_next_attempt_that_a_host_starts_finds_the_checkpoint(acceptor, left, host_dir):
    left(A1, 1).settle(Reason.SUPERVISOR_LOST)
    stored = acceptor.want(A2)
    stored.request = stored.request.model_copy(update={"number": 2, "job_id": "j1"})
    client = ServerClient(acceptor.url, "host-credential")
    reconciler = Reconciler(
        host_dir, HostConfig(min_free_bytes=0), client, boot_id=procfs.boot_id(),
        render=lambda _spec, _folder: [sys.executable, "-c", FOREVER],
    )  # fmt: skip

    reconciler.claim(Wanted(attempt_id=A2, fence=stored.fence))
    client.close()

    assert kept(AttemptFolder(host_dir.attempts / A2)) == A1
    assert procfs.marked(A2)
