"""A cap on memory is the kernel's: made below this process's own group, and gone afterwards."""

import subprocess
import sys

import pytest

from runners.supervision.memory import NoMemoryCapError, memory_cap, own_group

MIB = 1024**2
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


@pytest.mark.parametrize(
    ("is_second", "name"), [(False, "memory.limit_in_bytes"), (True, "memory.max")]
)
def test_the_limit_is_written_in_the_words_of_either_version(tmp_path, is_second, name):
    proc, cgroups, group = machine(tmp_path, is_second=is_second)

    assert own_group(proc, cgroups) == (group, name)


def test_where_there_are_no_groups_no_cap_is_promised(tmp_path):
    with pytest.raises(NoMemoryCapError, match=r"no memory controller is there.*run it as root"):
        with memory_cap("ours", MIB, tmp_path, tmp_path):
            pass


def test_where_none_may_be_made_the_reason_is_told(tmp_path):
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
