import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from tests.webapp.boot.conftest import eventually, is_alive, python_child, wrote
from webapp.boot import processes


@pytest.mark.faults
def test_a_killed_child_is_started_again_after_a_pause(crew):
    child = python_child("web")
    crew.start(child)
    first = child.process.pid

    os.kill(first, signal.SIGKILL)
    events = eventually(crew.tend)
    eventually(lambda: crew.tend() or child.process.pid != first)

    assert "killed by SIGKILL" in events[0]
    assert is_alive(child.process.pid)
    assert child.process.pid != first


def test_pauses_double_while_a_child_keeps_dying_early(crew):
    child = python_child("web", "raise SystemExit(3)")
    crew.start(child)

    events = [eventually(crew.tend)[0], eventually(crew.tend)[0]]

    assert "exit status 3" in events[0]
    assert "again in 0.5 s" in events[0]
    assert "again in 1.0 s" in events[1]


def test_a_child_that_lived_long_starts_again_without_a_longer_pause(crew, monkeypatch):
    monkeypatch.setattr(processes, "STEADY_AFTER_S", 0.0)
    child = python_child("web", "raise SystemExit(3)", pause_s=8.0)
    crew.start(child)

    event = eventually(crew.tend)[0]

    assert "again in 0.5 s" in event


def test_stop_ends_higher_stages_before_lower_ones(crew, tmp_path):
    code = (
        "import signal, sys, time\n"
        f"note = lambda *_: (open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1]), sys.exit())\n"
        "signal.signal(signal.SIGTERM, note)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    for stage, name in enumerate(("redis", "web", "host")):
        child = processes.Child(name, [sys.executable, "-c", code, f"{name} "], stage)
        crew.start(child)
        eventually(partial(wrote, crew.log_of(child), "ready"))

    crew.stop()

    assert (tmp_path / "order").read_text() == "host web redis "


def test_stop_leaves_no_process_and_no_record(crew):
    children = [python_child("one"), python_child("two")]
    for child in children:
        crew.start(child)
    pids = [child.process.pid for child in children]

    crew.stop()

    assert not any(map(is_alive, pids))
    assert not crew.record.exists()


def test_stop_kills_a_child_that_ignores_term(crew):
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    child = python_child("stubborn", code, grace_s=0.2)
    crew.start(child)
    eventually(lambda: wrote(crew.log_of(child), "ready"))

    crew.stop()

    assert child.process.returncode == -signal.SIGKILL


def test_stop_also_ends_what_a_child_started_in_its_group(crew):
    code = (
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(inner.pid, flush=True)\ntime.sleep(60)"
    )
    child = python_child("outer", code)
    crew.start(child)
    inner = int(eventually(lambda: crew.log_of(child).read_text()))

    crew.stop()

    eventually(lambda: not is_alive(inner))


def test_stop_in_a_hurry_does_not_wait_for_the_grace(crew):
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    crew.start(python_child("slow", code, grace_s=3600))

    crew.stop(hurry=lambda: True)

    assert crew.children == []


@pytest.mark.faults
def test_the_next_start_ends_what_a_killed_up_left(crew):
    child = python_child("web")
    crew.start(child)

    num_ended = processes.end_leftovers(crew.record)

    assert num_ended == 1
    assert not is_alive(child.process.pid)
    assert not crew.record.exists()


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


@pytest.mark.parametrize("content", ["", "not json", None], ids=["empty", "damaged", "absent"])
def test_a_record_that_cannot_be_read_means_no_leftovers(tmp_path, content):
    record = tmp_path / "processes.json"
    if content is not None:
        record.write_text(content)

    assert processes.end_leftovers(record) == 0


def test_a_zombie_counts_as_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        eventually(lambda: processes.started(child.pid) is None)
    finally:
        child.wait()


def test_a_long_log_is_cut_and_its_younger_half_kept(tmp_path):
    log = tmp_path / "web.log"
    log.write_bytes(b"a" * 600 + b"b" * 500)

    processes.cut(log, cap_bytes=1000)

    assert log.read_bytes() == b""
    assert (tmp_path / "web.log.1").read_bytes() == b"b" * 500


def test_a_child_goes_on_writing_to_a_log_that_was_cut(crew, monkeypatch):
    monkeypatch.setattr(processes, "LOG_CAP_BYTES", 100)
    code = "import time\nwhile True: print('x' * 60, flush=True); time.sleep(0.01)"
    child = python_child("chatty", code)
    crew.start(child)
    eventually(lambda: crew.log_of(child).stat().st_size > 100)

    processes.cut(crew.log_of(child), cap_bytes=100)

    eventually(lambda: wrote(crew.log_of(child), "xxx"))
    assert b"\0" not in crew.log_of(child).read_bytes()


def test_the_tail_shows_a_child_s_last_words(crew):
    child = python_child("web", "print('first')\nprint('last words')")
    crew.start(child)
    child.process.wait()

    assert crew.tail(child, num_lines=1) == "last words"


def test_children_of_one_stage_stop_side_by_side(crew, tmp_path):
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
        crew.start(child)
        eventually(partial(wrote, crew.log_of(child), "ready"))

    crew.stop()

    assert len(list(tmp_path.glob("ended-*"))) == 4
