"""Processes by pid and start time: trees, markers, signals that cannot hit a stranger."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runners.supervision import procfs
from tests.runners.tools import wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
NEST = (
    "import subprocess,sys,time;"
    "subprocess.Popen([sys.executable,'-c','import time; time.sleep(60)']); time.sleep(60)"
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def ticks(process: subprocess.Popen) -> int:
    return procfs.read_process(process.pid).start_ticks


def test_this_process_is_found_with_its_parent_and_memory():
    me = procfs.read_process(os.getpid())

    assert me.parent == os.getppid()
    assert me.is_alive
    assert 2**20 < me.rss_bytes < 2**34


def test_a_name_with_a_bracket_in_it_does_not_confuse_the_fields():
    script = "import ctypes,time; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); print(1,flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()

        assert procfs.read_process(process.pid).parent == os.getpid()
        process.kill()


def test_a_pid_that_nobody_has_is_no_process():
    assert procfs.read_process(2**22 + 1) is None


def test_descendants_include_grandchildren():
    with subprocess.Popen([sys.executable, "-c", NEST], start_new_session=True) as process:
        wait_for(lambda: procfs.descendants(process.pid))

        found = procfs.descendants(os.getpid())
        os.killpg(process.pid, signal.SIGKILL)

    assert {process.pid} < {each.pid for each in found}


def test_sampled_descendants_are_the_tree(monkeypatch):
    def pids() -> set[int]:
        return {each.pid for each in procfs.sampled_descendants(process.pid)}

    with subprocess.Popen([sys.executable, "-c", NEST], start_new_session=True) as process:
        wait_for(lambda: procfs.descendants(process.pid))
        whole = {each.pid for each in procfs.descendants(process.pid)}
        sampled = pids()
        monkeypatch.setattr(procfs, "_children", lambda _pid: None)
        without_lists = pids()
        os.killpg(process.pid, signal.SIGKILL)

    assert sampled == without_lists == whole


def test_a_kernel_without_lists_of_children_is_told_from_a_thread_that_ended(
    tmp_path, monkeypatch
):
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    monkeypatch.setattr(procfs, "PROC", tmp_path)
    own = tmp_path / "self" / "task" / str(os.getpid()) / "children"

    assert procfs._children(7) is None
    own.parent.mkdir(parents=True)
    own.touch()
    assert procfs._children(7) == []
    assert procfs._children(8) == []  # it has ended


def test_a_zombie_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: not procfs.read_process(process.pid).is_alive)

    assert process.pid not in {each.pid for each in procfs.descendants(os.getpid())}
    process.wait()


def test_a_signal_reaches_the_process_that_was_meant(sleeper):
    assert procfs.send_signal(sleeper.pid, ticks(sleeper), signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL


def test_a_signal_spares_the_process_that_got_the_pid_later(sleeper):
    assert not procfs.send_signal(sleeper.pid, ticks(sleeper) - 1, signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_sweep_kills_what_carries_the_marker_and_nothing_else(sleeper):
    environment = {**os.environ, procfs.MARKER: "swept"}
    with subprocess.Popen(SLEEP, env=environment) as marked:
        wait_for(lambda: procfs.marked("swept"))

        assert procfs.sweep("swept") == 1
        assert marked.wait() in (-signal.SIGKILL, 0)  # 0: the sweep itself reaped it

    assert sleeper.poll() is None


def test_a_marker_is_matched_whole(sleeper):
    environment = {**os.environ, procfs.MARKER: "attempt-10"}
    with subprocess.Popen(SLEEP, env=environment) as other:
        wait_for(lambda: procfs.is_marked(other.pid))

        assert procfs.marked("attempt-1") == []
        other.kill()


def test_an_unmarked_process_is_foreign(sleeper):
    assert not procfs.is_marked(sleeper.pid)


def test_the_boot_id_can_be_read_from_elsewhere(tmp_path):
    path = tmp_path / "boot_id"
    path.write_text("another-boot\n")

    assert procfs.boot_id(path) == "another-boot"


def make_cgroup(tmp_path, line: str, counter: str, text: str) -> tuple[object, object]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:cpu:/x\n{line}\n")
    path = tmp_path / "cgroup" / counter
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


def test_memory_kills_are_counted_in_control_groups_of_version_2(tmp_path):
    events = "low 0\nhigh 0\noom 3\noom_kill 2\n"
    places = make_cgroup(tmp_path, "0::/user/job", "user/job/memory.events", events)

    assert procfs.oom_kills(*places) == 2


def test_memory_kills_are_counted_in_control_groups_of_version_1(tmp_path):
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
    places = make_cgroup(tmp_path, "4:memory:/job", "memory/job/memory.oom_control", control)

    assert procfs.oom_kills(*places) == 4


def test_no_control_group_means_no_memory_kill(tmp_path):
    assert procfs.oom_kills(tmp_path, tmp_path) == 0
