"""Disks, interfaces and the kernel's log: read from this machine and from recorded lines."""

import os
import stat
from types import SimpleNamespace

import psutil
import pytest

from runners import inventory, machine

# Source of the format: NVIDIA, XID Errors, "Working with Xid Errors".
LOG = """\
6,1,2,-;usb 1-1: new device
3,5,3,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.
3,6,4,-;NVRM: Xid (PCI:0000:3b:00): 63, pid='<unknown>', Row remapper event
3,7,5,-;NVRM: Xid (PCI:0000:af:00): 31, pid=99, name=python, MMU Fault
"""


@pytest.fixture
def log(tmp_path):
    (tmp_path / "kmsg").write_text(LOG)
    return tmp_path / "kmsg"


@pytest.mark.parametrize("bus_id", ["00000000:3B:00.0", "0000:3b:00.0"])
def test_the_drivers_errors_are_told_by_gpu_whatever_the_spelling(log, bus_id):
    assert machine.xids_of(machine.xids(log), bus_id) == (79, 63)


def test_a_gpu_without_errors_has_none(log):
    assert machine.xids_of(machine.xids(log), "0000:18:00.0") == ()


def test_a_log_that_cannot_be_read_is_told_apart_from_no_errors(tmp_path):
    assert machine.xids(tmp_path / "absent") is None
    assert machine.xids_of(None, "0000:18:00.0") is None


def test_the_kernels_own_log_is_read_without_waiting():
    found = machine.xids()

    assert found is None or isinstance(found, dict)


def test_disks_are_those_that_hold_files(tmp_path):
    for disk in machine.disks():
        assert 0 <= disk.free_bytes <= disk.total_bytes
        assert stat.S_ISDIR(os.stat(disk.path).st_mode) or os.path.isfile(disk.path)  # noqa: PTH113, PTH116 - containers mount files


def test_interfaces_that_are_up_are_listed_without_loopback():
    names = {nic.name for nic in machine.nics()}

    assert "lo" not in names
    assert names <= set(psutil.net_if_addrs())


def test_a_link_of_ten_gigabit_is_said_in_bytes(monkeypatch):
    up = SimpleNamespace(isup=True, speed=10_000)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": up})
    monkeypatch.setattr(psutil, "net_if_addrs", dict)

    (nic,) = machine.nics()

    assert nic.bytes_per_second == 1.25e9


@pytest.fixture
def bus(tmp_path):
    """A PCI bus with a processor's bridge and whatever a test plugs in."""

    def plug(name: str, vendor: str, kind: str):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
        return tmp_path

    plug("0000:00:00.0", "0x8086", "0x060000")
    return plug


@pytest.mark.parametrize(
    ("vendor", "kind", "is_gpu"),
    [
        ("0x10de", "0x030200", True),  # a GPU without a screen
        ("0x10de", "0x030000", True),  # a graphics card
        ("0x10de", "0x040300", False),  # its sound
        ("0x1002", "0x030000", False),  # another maker's
    ],
)
def test_a_gpu_on_the_bus_is_seen_without_its_driver(bus, vendor, kind, is_gpu):
    assert machine.has_nvidia_on_bus(bus("0000:01:00.0", vendor, kind)) is is_gpu


def test_a_gpu_whose_driver_does_not_answer_is_told_why(monkeypatch):
    monkeypatch.setattr(machine, "has_nvidia_on_bus", lambda: True)

    assert inventory.driver_problem()


def test_a_machine_without_a_gpu_has_no_problem_with_its_driver(monkeypatch):
    monkeypatch.setattr(machine, "has_nvidia_on_bus", lambda: False)

    assert inventory.driver_problem() is None


def test_the_facts_of_this_machine_hold_its_inventory(tmp_path):
    facts = inventory.host_facts(tmp_path)

    sizes = [(disk.path, disk.total_bytes) for disk in machine.disks()]  # others write on them
    assert [(disk.path, disk.total_bytes) for disk in facts.disks] == sizes
    assert {nic.name for nic in facts.nics} == {nic.name for nic in machine.nics()}
    assert len(facts.model_dump_json()) < 100_000
