"""What disturbed a run is added up from /proc, from control groups and from three clocks."""

import subprocess
import sys
import time

import pytest

from runners.devices.nvidia import slowed_by
from runners.messages import EndConditions
from runners.supervision.procfs import CLOCK_TICKS_PER_SECOND, Clocks, InterferenceWatch

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


def test_what_others_take_is_what_is_busy_without_the_run(box):
    watch = box.watch()

    box.passes(10.0, 3.0)
    watch.update(1.0)

    assert watch.found()["taken_cores"] == pytest.approx(2.0)
    assert watch.found()["usable_cores"] == 4.0


def test_a_run_that_fills_the_machine_disturbs_itself_not(box):
    watch = box.watch()

    box.passes(10.0, 4.0)
    watch.update(4.0)

    assert watch.found()["taken_cores"] == 0.0


def test_the_mean_is_over_time(box):
    watch = box.watch()

    box.passes(30.0, 1.0)
    watch.update(1.0)
    box.passes(10.0, 3.0)
    watch.update(1.0)

    assert watch.found()["taken_cores"] == pytest.approx(0.5)


def test_a_neighbour_on_another_core_takes_nothing_of_a_run_with_two(box, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    watch = box.watch()

    box.passes(10.0, 4.0)
    watch.update(2.0)

    assert watch.found()["taken_cores"] == 0.0


@pytest.mark.parametrize(
    ("limit", "usage"),
    [
        (("cpu.max", "200000 100000"), ("cpu.stat", "usage_usec {us}\nuser_usec 1")),
        (("cpu.cfs_quota_us", "200000"), ("cpuacct.usage", "{us}000")),
    ],
    ids=["version 2", "version 1"],
)
def test_others_of_a_limited_group_take_of_its_limit(box, limit, usage):
    """The machine is mostly idle; the group's two cores are not."""
    (box.group / limit[0]).write_text(limit[1])
    (box.group / "cpu.cfs_period_us").write_text("100000")
    (box.group / usage[0]).write_text(usage[1].format(us=0))
    watch = box.watch()

    box.passes(10.0, 2.0)
    (box.group / usage[0]).write_text(usage[1].format(us=20_000_000))
    watch.update(0.2)

    assert watch.found()["usable_cores"] == 2.0
    assert watch.found()["taken_cores"] == pytest.approx(1.8)


def test_a_clock_that_is_set_is_told_from_a_machine_that_slept(box):
    watch = box.watch()

    box.passes(10.0, jump=-3600.0)
    watch.update(0.0)
    box.passes(10.0, sleep=60.0)
    watch.update(0.0)
    box.passes(10.0, jump=0.2)  # steered
    watch.update(0.0)

    found = watch.found()
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

    assert watch.found()["heat_throttled_ratio"] == pytest.approx(0.3)


def test_where_nothing_can_be_read_nothing_is_said(tmp_path):
    now = Clocks(1.0, 1.0, 1.0)
    watch = InterferenceWatch(lambda: now, tmp_path, tmp_path, tmp_path)

    watch.update(1.0)

    assert watch.found() == {"clock_jump_seconds": 0.0, "suspended_seconds": 0.0}


def test_this_machine_is_read_as_the_wire_carries_it():
    watch = InterferenceWatch()
    burning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        watch.update(0.0)
    finally:
        burning.kill()
        burning.wait()

    found = EndConditions.model_validate(watch.found())
    assert found.clock_jump_seconds == 0.0
    assert 0.0 <= found.taken_cores <= found.usable_cores


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (None, ()),
        (0x1 | 0x4, ()),  # idle, power cap: usual
        (0x20 | 0x4, ("heat (software)",)),
        (0x48, ("hardware slowdown", "heat (hardware)")),
    ],
)
def test_a_gpu_that_heat_or_its_board_holds_down_is_told_from_a_usual_one(reasons, expected):
    assert slowed_by(reasons) == expected
