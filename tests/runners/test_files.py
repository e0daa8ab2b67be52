"""What ended attempts keep on a host's disk, and its deletion on an order."""

import os

import pytest

from runners.host.files import JobFiles
from runners.launchers.attempts import AttemptFolder
from runners.shared.config import HostDir
from runners.shared.messages import BeatReply, FilesOrder
from runners.shared.spool import SpoolWriter
from runners.supervision import child

FIRST, SECOND = "01M8H1FMD2XRYDQH6R4P5GTAE1", "01M8H1FMD2XRYDQH6R4P5GTAE2"


@pytest.fixture
def host_dir(tmp_path) -> HostDir:
    place = HostDir(tmp_path)
    place.make()
    return place


def attempt(host_dir: HostDir, attempt_id: str, *, ended: bool = True) -> AttemptFolder:
    """Return an attempt with 3 bytes of checkpoint and 5 of output."""
    folder = AttemptFolder(host_dir.attempts / attempt_id)
    folder.make_claim("fence", "boot")
    for place, text in ((folder.checkpoint / "step-1", "abc"), (folder.output / "model", "hello")):
        place.mkdir(parents=True, exist_ok=True)
        (place / "weights").write_text(text)
    if ended:
        (folder.path / "settled").touch()
        folder.forget()
        folder.mark_uploaded()
    return folder


def kept(files: JobFiles) -> dict[str, tuple[int, int]]:
    return {
        each.attempt_id: (each.checkpoint_bytes, each.output_bytes)
        for each in files.news(everything=True) or ()
    }


def order(files: JobFiles, **parts: str) -> None:
    files.obey([FilesOrder(attempt_id=key, part=part) for key, part in parts.items()])
    files.step()


def test_a_report_has_what_ended_attempts_keep_and_shared_files_once(host_dir):
    files = JobFiles(host_dir)
    assert files.news(everything=True) is None  # nothing is measured yet
    earlier, _running = attempt(host_dir, FIRST), attempt(host_dir, SECOND, ended=False)
    files.step()
    assert kept(files) == {FIRST: (3, 5)}
    files.mark_reported()
    assert files.news(everything=False) is None
    resumed = attempt(host_dir, SECOND)  # ends now
    shared = resumed.checkpoint / "step-1" / "weights"
    shared.unlink()
    os.link(earlier.checkpoint / "step-1" / "weights", shared)
    files.step()
    assert kept(files) == {FIRST: (0, 5), SECOND: (3, 5)}


def test_an_order_deletes_its_part_and_is_reported_even_if_nothing_was_left(host_dir):
    files, folder = JobFiles(host_dir), attempt(host_dir, FIRST)
    order(files, **{FIRST: "checkpoint"})
    assert kept(files) == {FIRST: (0, 5)}
    assert not folder.checkpoint.exists()
    files.mark_reported()
    order(files, **{FIRST: "checkpoint"})  # again: the server did not hear of it
    assert files.news(everything=False) is not None
    order(files, **{FIRST: "all"})
    assert (kept(files), folder.claim() is not None) == ({}, True)
    assert sorted(each.name for each in folder.path.iterdir() if each.is_dir()) == []


def test_nothing_is_deleted_of_what_runs_uploads_or_is_unknown(host_dir):
    files = JobFiles(host_dir)
    running, uploading = attempt(host_dir, FIRST, ended=False), attempt(host_dir, SECOND)
    (uploading.path / "uploaded").unlink()
    order(files, **{FIRST: "all", SECOND: "all", "01M8H1FMD2XRYDQH6R4P5GTAE3": "all"})
    assert (running.output.exists(), kept(files)) == (True, {SECOND: (3, 5)})
    SpoolWriter(running.spool).close()
    uploading.mark_uploaded()
    with child.locked(uploading.lock):
        files.step()
    assert "held by another process" in files.problems[0]
    files.step()  # the order stands
    assert (kept(files), files.problems) == ({}, [])


def test_an_interrupted_deletion_goes_on_and_never_leaves_half_a_checkpoint(host_dir):
    files, folder = JobFiles(host_dir), attempt(host_dir, FIRST)
    folder.checkpoint.rename(folder.path / "checkpoint.deleted")  # killed here
    files.step()
    assert (kept(files), (folder.path / "checkpoint.deleted").exists()) == ({FIRST: (0, 5)}, False)


def test_an_order_that_only_a_newer_server_knows_is_left_out():
    orders = [{"attempt_id": "a", "part": "logs"}, {"attempt_id": "b", "part": "all"}]
    reply = BeatReply.model_validate({"server_time_ms": 1, "delete_files": orders})
    assert [each.attempt_id for each in reply.delete_files] == ["b"]
