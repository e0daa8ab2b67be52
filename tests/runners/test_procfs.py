"""Processes, control groups and clocks as the supervisor reads them, and a cap on memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.devices.nvidia import slowed_by
from runners.shared.messages import EndConditions
from runners.supervision import procfs
from runners.supervision.procfs import (
    CLOCK_TICKS_PER_SECOND,
    Clocks,
    InterferenceWatch,
    NoMemoryCapError,
    Process,
    TreeSampler,
    memory_cap,
    memory_headroom,
    own_group,
    usable_cores,
)
from tests.runners.tools import wait_for

# Processes by pid and start time: trees, markers, signals that cannot hit a stranger.

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


def test_this_process_is_found_with_its_parent_and_memory_and_nobody_under_a_free_pid():
    me = procfs.read_process(os.getpid())
    assert me.parent == os.getppid()
    assert me.is_alive
    assert 2**20 < me.rss_bytes < 2**34
    assert procfs.read_process(2**22 + 1) is None


def test_a_name_with_a_bracket_in_it_does_not_confuse_the_fields():
    script = "import ctypes,time; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); print(1,flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert procfs.read_process(process.pid).parent == os.getpid()
        process.kill()


def test_descendants_and_their_samples_are_the_whole_tree(monkeypatch):
    def pids() -> set[int]:
        return {each.pid for each in procfs.sampled_descendants(process.pid)}

    with subprocess.Popen([sys.executable, "-c", NEST], start_new_session=True) as process:
        wait_for(lambda: procfs.descendants(process.pid))
        ours = {each.pid for each in procfs.descendants(os.getpid())}
        whole = {each.pid for each in procfs.descendants(process.pid)}
        sampled = pids()
        monkeypatch.setattr(procfs, "_children", lambda _pid: None)
        without_lists = pids()
        os.killpg(process.pid, signal.SIGKILL)

    assert {process.pid} < {process.pid} | whole <= ours
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


def test_a_signal_spares_the_process_that_got_the_pid_later_and_reaches_the_meant_one(sleeper):
    assert not procfs.send_signal(sleeper.pid, ticks(sleeper) - 1, signal.SIGKILL)
    assert sleeper.poll() is None
    assert procfs.send_signal(sleeper.pid, ticks(sleeper), signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL


def test_a_sweep_kills_what_carries_the_marker_and_nothing_else(sleeper):
    environment = {**os.environ, procfs.MARKER: "swept"}
    with subprocess.Popen(SLEEP, env=environment) as marked:
        wait_for(lambda: procfs.processes_of_attempt("swept"))
        assert procfs.sweep("swept") == 1
        assert marked.wait() in (-signal.SIGKILL, 0)  # 0: the sweep itself reaped it
    assert sleeper.poll() is None


def test_a_marker_is_matched_whole_and_an_unmarked_process_is_foreign(sleeper):
    environment = {**os.environ, procfs.MARKER: "attempt-10"}
    with subprocess.Popen(SLEEP, env=environment) as other:
        wait_for(lambda: procfs.is_marked(other.pid))
        assert procfs.processes_of_attempt("attempt-1") == []
        other.kill()
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


def test_memory_kills_are_counted_in_control_groups_of_either_version(tmp_path):
    second = "low 0\nhigh 0\noom 3\noom_kill 2\n"
    places = make_cgroup(tmp_path / "2", "0::/user/job", "user/job/memory.events", second)
    assert procfs.oom_kills(*places) == 2
    first = "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
    places = make_cgroup(tmp_path / "1", "4:memory:/job", "memory/job/memory.oom_control", first)
    assert procfs.oom_kills(*places) == 4
    assert procfs.oom_kills(tmp_path, tmp_path) == 0  # there is none


# Memory and processor use of a tree from successive looks.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def process(pid: int, cpu_seconds: float = 0.0, rss_bytes: int = 0, start: int = 1) -> Process:
    return Process(pid, 1, "R", start, round(cpu_seconds * CLOCK_TICKS_PER_SECOND), rss_bytes)


def sampled(*looks: tuple[float, list[Process]]) -> tuple[TreeSampler, dict[str, float]]:
    """Look at a tree so many seconds after each other; return what the last look found."""
    clock = Clock()
    sampler = TreeSampler(clock)
    for seconds, tree in looks:
        clock.now += seconds
        values = sampler.sample(tree)
    return sampler, values


def test_memory_is_summed_over_the_tree_and_its_peak_is_kept():
    first = [process(1, rss_bytes=100), process(2, rss_bytes=50)]
    sampler, values = sampled((1, first), (1, [process(1, rss_bytes=20)]))
    assert (values["rss_bytes"], sampler.peak_rss_bytes) == (20, 150)


def test_the_use_of_a_processor_is_that_of_the_processes_that_are_there():
    for first, seconds, second, expected in [
        ([process(1, 5.0), process(2, 7.0)], 2, [process(1, 7.0), process(2, 9.0)], 2.0),
        # A process that got an old pid counts from its own start.
        ([process(1, 5.0, start=1)], 1, [process(1, 0.5, start=9)], 0.5),
        ([process(1, 5.0), process(2, 9.0)], 1, [process(1, 5.0)], 0.0),  # one has ended
    ]:
        _, values = sampled((1, first), (seconds, second))
        assert values["cpu_utilization"] == expected, (first, second)


# How much a control group still allows, in both of the kernel's layouts.

MIB = 2**20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path / "proc"


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_the_tightest_group_of_either_version_counts_what_can_be_taken_back_as_free(
    tmp_path, proc
):
    (proc / "self/cgroup").write_text("0::/job\n")
    group(tmp_path / "cg" / "job", memory__max=100 * MIB, memory__current=70 * MIB)
    (tmp_path / "cg/job/memory.stat").write_text(f"anon 5\ninactive_file {20 * MIB}\n")
    assert memory_headroom(proc, tmp_path / "cg") == 50 * MIB

    (proc / "self/cgroup").write_text("5:devices:/\n4:memory:/job\n")
    group(
        tmp_path / "cg/memory/job",
        memory__limit_in_bytes=100 * MIB,
        memory__usage_in_bytes=30 * MIB,
    )
    assert memory_headroom(proc, tmp_path / "cg") == 70 * MIB

    (proc / "self/cgroup").write_text("0::/team/job\n")
    group(tmp_path / "cg/team", memory__max=50 * MIB, memory__current=10 * MIB)
    group(tmp_path / "cg/team/job", memory__max=100 * MIB, memory__current=10 * MIB)
    assert memory_headroom(proc, tmp_path / "cg") == 40 * MIB


def test_no_limit_and_no_control_group_are_none(tmp_path, proc):
    for limit in ["max", str(2**63 - 4096)]:
        (proc / "self/cgroup").write_text("0::/job\n")
        group(tmp_path / "cg/job", memory__max=limit, memory__current=1)
        assert memory_headroom(proc, tmp_path / "cg") is None, limit
    assert memory_headroom(tmp_path / "none", tmp_path / "none") is None


# A cap on memory is the kernel's: made below this process's own group, and gone afterwards.

TAKES = "import sys; sys.stdin.readline(); sys.stdout.write(str(len(bytearray(b'1') * {size})))"


def machine(root, *, is_second):
    """A made-up /proc and /sys/fs/cgroup with one group of either version."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/jobs\n" if is_second else "4:memory:/jobs\n")
    group = cgroups / "jobs" if is_second else cgroups / "memory/jobs"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("")
    return proc, cgroups, group


def test_the_limit_is_written_in_the_words_of_either_version(tmp_path):
    for is_second, name in [(False, "memory.limit_in_bytes"), (True, "memory.max")]:
        proc, cgroups, group = machine(tmp_path / name, is_second=is_second)
        assert own_group(proc, cgroups) == (group, name)


def test_where_no_group_is_or_may_be_made_the_reason_is_told(tmp_path):
    with pytest.raises(NoMemoryCapError, match=r"no memory controller is there.*run it as root"):
        with memory_cap("ours", MIB, tmp_path, tmp_path):
            pass
    proc, cgroups, group = machine(tmp_path, is_second=True)
    (group / "ours").write_text("in the way")
    with pytest.raises(NoMemoryCapError, match=r"File exists.*run it as root"):
        with memory_cap("ours", MIB, proc, cgroups):
            pass


@pytest.mark.parametrize(("size", "is_held"), [(1, True), (256, False)])
def test_a_process_under_the_cap_gets_no_more_than_that(size, is_held):
    code = TAKES.format(size=size * MIB)
    try:
        with memory_cap(f"slipway-test-{size}", 64 * MIB) as cap:
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            cap.take_in(process.pid)
            out, _ = process.communicate(b"go\n", timeout=60)
            assert own_group()
    except NoMemoryCapError as error:
        pytest.skip(str(error))

    assert (process.returncode == 0) is is_held
    assert out == (str(size * MIB).encode() if is_held else b"")


# What disturbed a run is added up from /proc, from control groups and from three clocks.

GROUP = "/slipway"


class Box:
    """A machine of files: four cores, each of which the test lets be busy."""

    def __init__(self, root, monkeypatch, cores: int = 4) -> None:
        self.proc, self.cgroups, self.cpus = root / "proc", root / "cgroup", root / "cpu"
        self.group = self.cgroups / GROUP.lstrip("/")
        for folder in (self.proc / "self", self.group):
            folder.mkdir(parents=True)
        (self.proc / "self/cgroup").write_text(f"0::{GROUP}\n")
        self.cores, self.busy, self.now = cores, 1000.0, Clocks(5000.0, 100.0, 100.0)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
        self.write()

    def write(self) -> None:
        ticks = int(self.busy * CLOCK_TICKS_PER_SECOND)
        lines = [f"cpu  {ticks} 0 0 999 5 0 0 0 0 0", *(f"cpu{n} 0" for n in range(self.cores))]
        (self.proc / "stat").write_text("\n".join([*lines, "intr 1"]))

    def watch(self) -> InterferenceWatch:
        return InterferenceWatch(lambda: self.now, self.proc, self.cgroups, self.cpus)

    def passes(self, seconds: float, busy_cores: float = 0.0, *, jump=0.0, sleep=0.0) -> None:
        wall, monotonic, boot = self.now
        self.now = Clocks(
            wall + seconds + sleep + jump, monotonic + seconds, boot + seconds + sleep
        )
        self.busy += seconds * busy_cores
        self.write()


@pytest.fixture
def box(tmp_path, monkeypatch):
    return Box(tmp_path, monkeypatch)


def test_what_others_take_is_what_is_busy_without_the_run_over_time(tmp_path, monkeypatch):
    for number, (usable, looks, taken) in enumerate([
        (4, [(10.0, 3.0, 1.0)], 2.0),
        (4, [(10.0, 4.0, 4.0)], 0.0),  # it fills the machine, and disturbs itself not
        (4, [(30.0, 1.0, 1.0), (10.0, 3.0, 1.0)], 0.5),
        (2, [(10.0, 4.0, 2.0)], 0.0),  # a neighbour on another core takes nothing of it
    ]):  # fmt: skip
        box = Box(tmp_path / str(number), monkeypatch)
        monkeypatch.setattr("os.sched_getaffinity", lambda _, usable=usable: set(range(usable)))
        watch = box.watch()
        for seconds, busy, own in looks:
            box.passes(seconds, busy)
            watch.update(own)
        assert watch.conditions()["taken_cores"] == (taken and pytest.approx(taken)), looks
        assert watch.conditions()["usable_cores"] == usable


def test_others_of_a_limited_group_take_of_its_limit(tmp_path, monkeypatch):
    """The machine is mostly idle; the group's two cores are not."""
    for limit, usage in [
        (("cpu.max", "200000 100000"), ("cpu.stat", "usage_usec {us}\nuser_usec 1")),
        (("cpu.cfs_quota_us", "200000"), ("cpuacct.usage", "{us}000")),  # version 1
    ]:
        box = Box(tmp_path / limit[0], monkeypatch)
        (box.group / limit[0]).write_text(limit[1])
        (box.group / "cpu.cfs_period_us").write_text("100000")
        (box.group / usage[0]).write_text(usage[1].format(us=0))
        watch = box.watch()
        box.passes(10.0, 2.0)
        (box.group / usage[0]).write_text(usage[1].format(us=20_000_000))
        watch.update(0.2)
        assert watch.conditions()["usable_cores"] == usable_cores(box.proc, box.cgroups) == 2.0
        assert watch.conditions()["taken_cores"] == pytest.approx(1.8), limit


def test_a_clock_that_is_set_is_told_from_a_machine_that_slept(box):
    watch = box.watch()
    box.passes(10.0, jump=-3600.0)
    watch.update(0.0)
    box.passes(10.0, sleep=60.0)
    watch.update(0.0)
    box.passes(10.0, jump=0.2)  # steered
    watch.update(0.0)
    found = watch.conditions()
    assert found["clock_jump_seconds"] == pytest.approx(3600.0)
    assert found["suspended_seconds"] == pytest.approx(60.0)


def test_the_hottest_core_says_how_long_heat_held_the_run_down(box):
    files = []
    for number in range(2):
        folder = box.cpus / f"cpu{number}/thermal_throttle"
        folder.mkdir(parents=True)
        files.append(folder / "core_throttle_total_time_ms")
        files[-1].write_text("500")
    watch = box.watch()
    box.passes(10.0)
    files[1].write_text("3500")
    watch.update(0.0)
    assert watch.conditions()["heat_throttled_ratio"] == pytest.approx(0.3)


def test_where_nothing_can_be_read_nothing_is_said(tmp_path):
    now = Clocks(1.0, 1.0, 1.0)
    watch = InterferenceWatch(lambda: now, tmp_path, tmp_path, tmp_path)
    watch.update(1.0)
    assert watch.conditions() == {"clock_jump_seconds": 0.0, "suspended_seconds": 0.0}


def test_this_machine_is_read_as_the_wire_carries_it():
    watch = InterferenceWatch()
    burning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        watch.update(0.0)
    finally:
        burning.kill()
        burning.wait()
    found = EndConditions.model_validate(watch.conditions())
    assert found.clock_jump_seconds == 0.0
    assert 0.0 <= found.taken_cores <= found.usable_cores


def test_a_gpu_that_heat_or_its_board_holds_down_is_told_from_a_usual_one():
    for reasons, expected in [
        (None, ()),
        (0x1 | 0x4, ()),  # idle, power cap: usual
        (0x20 | 0x4, ("heat (software)",)),
        (0x48, ("hardware slowdown", "heat (hardware)")),
    ]:
        assert slowed_by(reasons) == expected, (reasons, expected)
