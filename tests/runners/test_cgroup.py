"""How much a control group still allows, in both of the kernel's layouts."""

from pathlib import Path

import pytest

from runners.supervision.memory import memory_headroom

MIB = 2**20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path / "proc"


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_version_two_counts_what_the_kernel_can_take_back_as_free(tmp_path, proc):
    (proc / "self/cgroup").write_text("0::/job\n")
    group(tmp_path / "cg" / "job", memory__max=100 * MIB, memory__current=70 * MIB)
    (tmp_path / "cg/job/memory.stat").write_text(f"anon 5\ninactive_file {20 * MIB}\n")

    assert memory_headroom(proc, tmp_path / "cg") == 50 * MIB


def test_version_one_reads_its_own_files(tmp_path, proc):
    (proc / "self/cgroup").write_text("5:devices:/\n4:memory:/job\n")
    group(
        tmp_path / "cg/memory/job",
        memory__limit_in_bytes=100 * MIB,
        memory__usage_in_bytes=30 * MIB,
    )

    assert memory_headroom(proc, tmp_path / "cg") == 70 * MIB


def test_a_tighter_group_above_counts(tmp_path, proc):
    (proc / "self/cgroup").write_text("0::/team/job\n")
    group(tmp_path / "cg/team", memory__max=50 * MIB, memory__current=10 * MIB)
    group(tmp_path / "cg/team/job", memory__max=100 * MIB, memory__current=10 * MIB)

    assert memory_headroom(proc, tmp_path / "cg") == 40 * MIB


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_no_limit_is_none(tmp_path, proc, limit):
    (proc / "self/cgroup").write_text("0::/job\n")
    group(tmp_path / "cg/job", memory__max=limit, memory__current=1)

    assert memory_headroom(proc, tmp_path / "cg") is None


def test_a_machine_without_control_groups_has_no_limit(tmp_path):
    assert memory_headroom(tmp_path / "proc", tmp_path / "cg") is None
