"""Children of `up`: started again, stopped in order, running on where nothing can be written."""

import errno
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.webapp.boot.conftest import eventually, is_alive, python_child, wrote
from webapp.boot import console, processes, up
from webapp.boot.processes import Child
from webapp.core.handover import RELIEF_SECONDS


@pytest.mark.faults
def test_a_killed_child_is_started_again_after_a_pause(group):
    child = python_child("web")
    group.start(child)
    first = child.process.pid
    os.kill(first, signal.SIGKILL)
    events = eventually(group.restart_dead)
    eventually(lambda: group.restart_dead() or child.process.pid != first)
    assert "killed by SIGKILL" in events[0]
    assert is_alive(child.process.pid)
    assert child.process.pid != first


def test_pauses_double_while_a_child_keeps_dying_early(group):
    child = python_child("web", "raise SystemExit(3)")
    group.start(child)
    events = [eventually(group.restart_dead)[0], eventually(group.restart_dead)[0]]
    assert "exit status 3" in events[0]
    assert "again in 0.5 s" in events[0]
    assert "again in 1.0 s" in events[1]


def test_a_child_that_lived_long_starts_again_without_a_longer_pause(group, monkeypatch):
    monkeypatch.setattr(processes, "STEADY_AFTER_S", 0.0)
    child = python_child("web", "raise SystemExit(3)", pause_s=8.0)
    group.start(child)
    event = eventually(group.restart_dead)[0]
    assert "again in 0.5 s" in event


def test_stop_ends_higher_stages_before_lower_ones(group, tmp_path):
    code = (
        "import signal, sys, time\n"
        f"note = lambda *_: (open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1]), sys.exit())\n"
        "signal.signal(signal.SIGTERM, note)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    for stage, name in enumerate(("redis", "web", "host")):
        child = processes.Child(name, [sys.executable, "-c", code, f"{name} "], stage)
        group.start(child)
        eventually(partial(wrote, group.log_of(child), "ready"))
    group.stop()
    assert (tmp_path / "order").read_text() == "host web redis "


def test_stop_leaves_no_process_and_no_record(group):
    children = [python_child("one"), python_child("two")]
    for child in children:
        group.start(child)
    pids = [child.process.pid for child in children]
    group.stop()
    assert not any(map(is_alive, pids))
    assert not group.record.exists()


def test_stop_kills_a_child_that_ignores_term(group):
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    child = python_child("stubborn", code, grace_s=0.2)
    group.start(child)
    eventually(lambda: wrote(group.log_of(child), "ready"))
    group.stop()
    assert child.process.returncode == -signal.SIGKILL


def test_stop_also_ends_what_a_child_started_in_its_group(group):
    code = (
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(inner.pid, flush=True)\ntime.sleep(60)"
    )
    child = python_child("outer", code)
    group.start(child)
    inner = int(eventually(lambda: group.log_of(child).read_text()))
    group.stop()
    eventually(lambda: not is_alive(inner))


def test_stop_in_a_hurry_does_not_wait_for_the_grace(group):
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    group.start(python_child("slow", code, grace_s=3600))
    group.stop(hurry=lambda: True)
    assert group.children == []


@pytest.mark.faults
def test_what_a_relieved_child_left_serves_on_and_ends_with_the_next_death_or_the_stop(group):
    code = (
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(inner.pid, *sys.argv[1:], flush=True)\ntime.sleep(60)"
    )
    child = python_child("outer", code)
    child.is_relieved = True
    group.start(child)
    leaders, inner = [], []
    for started in (1, 2, 3):

        def words(started: int = started) -> list[str]:
            group.restart_dead()
            return group.log_of(child).read_text().splitlines()[started - 1 : started]

        (line,) = eventually(words)
        told = [] if not leaders else ["--after", str(leaders[-1])]
        assert line.split()[1:] == told
        leaders.append(child.process.pid)
        inner.append(int(line.split()[0]))
        assert [is_alive(each) for each in inner[-2:]] == [True] * len(inner[-2:])
        if started < 3:
            os.kill(leaders[-1], signal.SIGKILL)
    assert not is_alive(inner[0])
    group.stop()
    eventually(lambda: not any(map(is_alive, inner)))
    assert RELIEF_SECONDS == processes.RELIEF_S


@pytest.mark.faults
def test_the_next_start_ends_what_a_killed_up_left(group):
    child = python_child("web")
    group.start(child)
    num_ended = processes.end_leftovers(group.record)
    assert num_ended == 1
    assert not is_alive(child.process.pid)
    assert not group.record.exists()


def test_a_stranger_with_a_recorded_number_is_left_alone(tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    record = tmp_path / "processes.json"
    record.write_text(json.dumps([{"pid": stranger.pid, "started": "1"}]))
    try:
        assert processes.end_leftovers(record) == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_record_that_cannot_be_read_means_no_leftovers(tmp_path):
    record = tmp_path / "processes.json"
    assert processes.end_leftovers(record) == 0  # absent
    for content in ("", "not json"):
        record.write_text(content)
        assert processes.end_leftovers(record) == 0, content


def test_a_zombie_counts_as_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        eventually(lambda: processes.start_time_of(child.pid) is None)
    finally:
        child.wait()


def test_of_a_long_log_the_younger_half_is_kept_from_a_line_or_a_character_on(tmp_path):
    log = tmp_path / "web.log"
    for written, kept in [
        ("a" * 600 + "b" * 501, "[600 bytes were cut here]\n" + "b" * 501),
        ("é\n" * 200 + "日本語\n" * 60, "[700 bytes were cut here]\n" + "日本語\n" * 50),
        ("é\n" * 200 + "日本語\n" * 61, "[710 bytes were cut here]\n" + "日本語\n" * 50),
        ("é" * 350 + "\n" + "日" * 166, "[701 bytes were cut here]\n" + "日" * 166),
        ("日" * 400 + "x", "[702 bytes were cut here]\n" + "日" * 166 + "x"),
    ]:
        log.write_text(written, "utf-8")
        processes.cut(log, cap_bytes=1000)
        assert log.read_bytes() == b""
        assert (tmp_path / "web.log.1").read_text("utf-8") == kept


def test_a_child_goes_on_writing_to_a_log_that_was_cut(group, monkeypatch):
    monkeypatch.setattr(processes, "LOG_CAP_BYTES", 100)
    code = "import time\nwhile True: print('x' * 60, flush=True); time.sleep(0.01)"
    child = python_child("chatty", code)
    group.start(child)
    eventually(lambda: group.log_of(child).stat().st_size > 100)
    processes.cut(group.log_of(child), cap_bytes=100)
    eventually(lambda: wrote(group.log_of(child), "xxx"))
    assert b"\0" not in group.log_of(child).read_bytes()


def test_the_tail_shows_a_child_s_last_words(group):
    child = python_child("web", "print('first')\nprint('last words')")
    group.start(child)
    child.process.wait()
    assert group.tail(child, num_lines=1) == "last words"


def test_children_of_one_stage_stop_side_by_side(group, tmp_path):
    """Each ends only when all four were asked to; stopped in turn, they would be killed."""
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        f"place = Path({str(tmp_path)!r})\n"
        "def end(*_):\n"
        "    (place / f'asked-{os.getpid()}').touch()\n"
        "    while len(list(place.glob('asked-*'))) < 4: time.sleep(0.01)\n"
        "    (place / f'ended-{os.getpid()}').touch()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    for name in ("web", "control", "ticker", "more"):
        child = python_child(name, code)
        group.start(child)
        eventually(partial(wrote, group.log_of(child), "ready"))

    group.stop()

    assert len(list(tmp_path.glob("ended-*"))) == 4


# `up` when it cannot write: its children run on, and what it could not write is told.


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


def test_children_run_on_when_their_record_cannot_be_written(group, full):
    child = python_child("host")
    group.start(child)
    (told,) = group.restart_dead()
    assert is_alive(child.process.pid)
    assert "processes.json cannot be written" in told
    assert "No space left on device" in told
    assert group.restart_dead() == []


def test_the_record_is_written_as_soon_as_there_is_room(group, full):
    group.start(python_child("host"))
    group.restart_dead()
    full()
    assert "written again" in group.restart_dead()[0]
    assert group.record.exists()


@pytest.mark.faults
def test_a_dead_child_is_started_again_on_a_full_disk(group, full):
    child = python_child("web")
    group.start(child)
    first = child.process.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: group.restart_dead() is not None and child.process.pid != first)
    assert is_alive(child.process.pid)


def test_a_child_without_a_log_starts_all_the_same(group):
    (group.logs / "web.log").mkdir()  # as little of a file as one that cannot be made
    child = python_child("web")
    group.start(child)
    assert is_alive(child.process.pid)
    assert "web.log cannot be written" in group.restart_dead()[0]


def test_a_log_that_cannot_be_cut_stops_nothing(group, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    child = python_child("web", "print('x' * 200)")
    group.start(child)
    eventually(lambda: group.log_of(child).stat().st_size > 100)
    monkeypatch.setattr(Path, "write_bytes", fail)

    processes.cut(group.log_of(child), cap_bytes=100)


def test_a_child_that_cannot_be_started_now_is_tried_again(group, tmp_path):
    program = tmp_path / "program"
    child = Child("late", [str(program)], pause_s=0.05)
    group.start(child)
    assert "late could not be started" in group.restart_dead()[0]
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    eventually(lambda: group.restart_dead() is not None and child.process is not None)


def test_stopping_leaves_no_traceback_when_the_record_cannot_be_deleted(group, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    group.start(python_child("web"))
    monkeypatch.setattr(Path, "unlink", fail)

    group.stop()

    assert group.children == []


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
    site.group.start(python_child("redis"))

    def fail():
        raise console.Problem("Redis did not start.", "")

    monkeypatch.setattr(site, "start", fail)
    with pytest.raises(console.Problem):
        site.live()

    assert run == []
    assert site.group.children == []
