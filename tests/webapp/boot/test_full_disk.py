"""`up` when it cannot write: its children run on, and what it could not write is told."""

import errno
import os
import signal
from pathlib import Path

import pytest

from tests.webapp.boot.conftest import eventually, is_alive, python_child
from webapp.boot import console, processes, up
from webapp.boot.processes import Child


@pytest.fixture
def full(monkeypatch, tmp_path):
    """Make every write of a text to a file below the test's folder fail, until called."""
    writes = Path.write_text
    is_full = [True]

    def write(path: Path, *words, **options):
        if is_full[0] and path.is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return writes(path, *words, **options)

    monkeypatch.setattr(Path, "write_text", write)
    return lambda: is_full.clear() or is_full.append(False)


def test_children_run_on_when_their_record_cannot_be_written(crew, full):
    child = python_child("host")

    crew.start(child)
    (told,) = crew.tend()

    assert is_alive(child.process.pid)
    assert "processes.json cannot be written" in told
    assert "No space left on device" in told
    assert crew.tend() == []


def test_the_record_is_written_as_soon_as_there_is_room(crew, full):
    crew.start(python_child("host"))
    crew.tend()

    full()

    assert "written again" in crew.tend()[0]
    assert crew.record.exists()


@pytest.mark.faults
def test_a_dead_child_is_started_again_on_a_full_disk(crew, full):
    child = python_child("web")
    crew.start(child)
    first = child.process.pid

    os.kill(first, signal.SIGKILL)
    eventually(lambda: crew.tend() is not None and child.process.pid != first)

    assert is_alive(child.process.pid)


def test_a_child_without_a_log_starts_all_the_same(crew):
    (crew.logs / "web.log").mkdir()  # as little of a file as one that cannot be made
    child = python_child("web")

    crew.start(child)

    assert is_alive(child.process.pid)
    assert "web.log cannot be written" in crew.tend()[0]


def test_a_log_that_cannot_be_cut_stops_nothing(crew, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    child = python_child("web", "print('x' * 200)")
    crew.start(child)
    eventually(lambda: crew.log_of(child).stat().st_size > 100)
    monkeypatch.setattr(Path, "write_bytes", fail)

    processes.cut(crew.log_of(child), cap_bytes=100)


def test_a_child_that_cannot_be_started_now_is_tried_again(crew, tmp_path):
    program = tmp_path / "program"
    child = Child("late", [str(program)], pause_s=0.05)
    crew.start(child)

    assert "late could not be started" in crew.tend()[0]
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)

    eventually(lambda: crew.tend() is not None and child.process is not None)


def test_stopping_leaves_no_traceback_when_the_record_cannot_be_deleted(crew, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    crew.start(python_child("web"))
    monkeypatch.setattr(Path, "unlink", fail)

    crew.stop()

    assert crew.children == []


def test_a_line_that_nobody_can_take_stops_nothing(monkeypatch):
    class Full:
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())

    console.line("web ended")


def test_a_lock_is_taken_though_nothing_can_be_written_into_it(tmp_path):
    class Full:
        def __init__(self, file):
            self.file = file

        def fileno(self):
            return self.file.fileno()

        def truncate(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    with (tmp_path / "up.lock").open("a+") as lock:
        up.take_lock(Full(lock), tmp_path, "http://127.0.0.1:8000")

        assert "already runs" in up.running_elsewhere(tmp_path)


def test_a_read_only_data_folder_is_refused_in_words(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", fail)
    with pytest.raises(console.Problem, match="cannot be written: Read-only file system"):
        up.make_data_folder(tmp_path)


@pytest.fixture
def signals():
    """Give back the handlers that `up` takes."""
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in taken}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.faults
def test_a_start_that_fails_ends_no_job(tmp_path, monkeypatch, signals):
    run = []
    site = up.Site("127.0.0.1", 9, tmp_path)
    (tmp_path / "host").mkdir()
    monkeypatch.setattr(up.Stopping, "_end_jobs", lambda _: run.append("stop-all") or [])
    site.crew.start(python_child("redis"))

    def fail():
        raise console.Problem("Redis did not start.", "")

    monkeypatch.setattr(site, "start", fail)
    with pytest.raises(console.Problem):
        site.live()

    assert run == []
    assert site.crew.children == []
