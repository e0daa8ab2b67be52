"""What a host says about its machine: identity, disks, GPUs, links and its way to the server."""

import os
import stat
import sys
import types
from types import SimpleNamespace

import psutil
import pytest

from runners.devices import topology
from runners.host import inventory
from runners.shared import machine
from runners.shared.machine import machine_id
from runners.supervision import procfs
from tests.runners.nvml import Machine, dgx_h100, refuse, two_bridged_pairs, workstation

# Which machine this is: the same for every user and after every boot, and not its own name.

RESULTS_PATH = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def said(tmp_path):
    """Return a function that says which machine one with this identifier is."""

    def say(text: str) -> str | None:
        path = tmp_path / "machine-id"
        path.write_text(text)
        return machine_id(path)

    return say


def test_it_is_the_same_each_time_and_another_on_another_machine(said):
    assert said(f"{RESULTS_PATH}\n") == said(RESULTS_PATH)
    assert said(RESULTS_PATH) != said(RESULTS_PATH[::-1])


def test_the_machines_own_identifier_does_not_leave_it(said):
    found = said(RESULTS_PATH)
    assert len(found) == 64
    assert RESULTS_PATH not in found
    assert bytes.fromhex(RESULTS_PATH) not in bytes.fromhex(found)


def test_what_is_no_identifier_says_nothing(said, tmp_path):
    for text in ["", "uninitialized\n", "0" * 32, "zz" * 16, RESULTS_PATH + "00"]:
        assert said(text) is None, text
    assert machine_id(tmp_path / "not-there") is None


def test_the_facts_of_this_machine_are_its_own_and_hold_its_inventory_and_user(tmp_path):
    facts = inventory.host_facts(tmp_path)
    assert facts.machine_id == machine_id()
    assert facts.user_id == os.getuid()
    sizes = [(disk.path, disk.total_bytes) for disk in machine.disks()]  # others write on them
    assert [(disk.path, disk.total_bytes) for disk in facts.disks] == sizes
    assert {nic.name for nic in facts.nics} == {nic.name for nic in machine.nics()}
    assert len(facts.model_dump_json()) < 100_000
    assert facts.boot_id == procfs.boot_id()
    assert facts.cpu_count == len(os.sched_getaffinity(0))
    assert 2**28 < facts.memory_bytes < 2**45
    assert 0 < facts.disk_free_bytes <= facts.disk_total_bytes
    assert "torch" in facts.packages


# Disks, interfaces and the kernel's log: read from this machine and from recorded lines.

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


def test_the_drivers_errors_are_told_by_gpu_and_no_log_is_told_apart_from_no_errors(log, tmp_path):
    for bus_id in ["00000000:3B:00.0", "0000:3b:00.0"]:
        assert machine.xids_of(machine.xids(log), bus_id) == (79, 63), bus_id
    assert machine.xids_of(machine.xids(log), "0000:18:00.0") == ()
    assert machine.xids(tmp_path / "absent") is None
    assert machine.xids_of(None, "0000:18:00.0") is None
    found = machine.xids()
    assert found is None or isinstance(found, dict)


def test_disks_are_those_that_hold_files(tmp_path):
    for disk in machine.disks():
        assert 0 <= disk.free_bytes <= disk.total_bytes
        assert stat.S_ISDIR(os.stat(disk.path).st_mode) or os.path.isfile(disk.path)  # noqa: PTH113, PTH116 - containers mount files


def test_interfaces_that_are_up_are_listed_without_loopback_and_in_bytes_per_second(monkeypatch):
    names = {nic.name for nic in machine.nics()}
    assert "lo" not in names
    assert names <= set(psutil.net_if_addrs())
    up = SimpleNamespace(isup=True, speed=10_000)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": up})
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    (nic,) = machine.nics()
    assert nic.bytes_per_second == 1.25e9


@pytest.fixture
def bus(tmp_path):
    """A PCI bus with a processor's bridge and whatever a test plugs in."""

    def plug(name: str, vendor: str, kind: str):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
        return tmp_path

    plug("0000:00:00.0", "0x8086", "0x060000")
    return plug


def test_a_gpu_on_the_bus_is_seen_without_its_driver(bus):
    for vendor, kind, is_gpu in [
        ("0x10de", "0x030200", True),  # a GPU without a screen
        ("0x10de", "0x030000", True),  # a graphics card
        ("0x10de", "0x040300", False),  # its sound
        ("0x1002", "0x030000", False),  # another maker's
    ]:
        assert machine.has_nvidia_on_bus(bus("0000:01:00.0", vendor, kind)) is is_gpu, vendor


def test_a_host_without_a_gpu_binding_or_with_a_silent_driver_is_told(monkeypatch):
    monkeypatch.setattr(machine, "has_nvidia_on_bus", lambda: True)
    assert inventory.driver_problem()
    monkeypatch.setattr(machine, "has_nvidia_on_bus", lambda: False)
    assert inventory.driver_problem() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with inventory.nvml() as library:
        assert library is None


# What a host says about itself.
#
# The GPU values below have the shape that NVML's Python binding returns; no GPU was there when
# this was written, so they are a recorded shape and not a measurement.


class NotSupportedError(Exception):
    pass


def recorded_nvml(num_gpus: int = 1) -> types.SimpleNamespace:
    def refuse(*_: object) -> None:
        raise NotSupportedError

    return types.SimpleNamespace(
        NVMLError=NotSupportedError,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetCount=lambda: num_gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: f"GPU-5b5f4dd2-000{index}",
        nvmlDeviceGetName=lambda _: b"NVIDIA H100 80GB HBM3",
        nvmlDeviceGetMemoryInfo=lambda _: types.SimpleNamespace(total=85520809984, used=2**30),
        nvmlDeviceGetCudaComputeCapability=lambda _: (9, 0),
        nvmlDeviceGetPowerManagementLimit=lambda _: 700_000,
        nvmlDeviceGetPowerUsage=lambda _: 123_456,
        nvmlDeviceGetUtilizationRates=lambda _: types.SimpleNamespace(gpu=37),
        nvmlDeviceGetTemperature=lambda _handle, _sensor: 41,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [types.SimpleNamespace(pid=os.getpid())],
        refuse=refuse,
    )


def test_each_gpu_is_described_in_base_units_with_its_own_index_and_uuid():
    (gpu,) = inventory.gpu_facts(recorded_nvml())
    assert (gpu.name, gpu.memory_bytes) == ("NVIDIA H100 80GB HBM3", 85520809984)
    assert (gpu.compute_capability, gpu.power_limit_watts) == ("9.0", 700.0)
    gpus = list(inventory.gpu_facts(recorded_nvml(4)))
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert len({gpu.uuid for gpu in gpus}) == 4


def test_what_a_gpu_says_of_its_health_is_told_and_silence_is_listed_all_the_same():
    library = recorded_nvml()
    library.nvmlDeviceGetEccMode = lambda _: [1, 1]
    library.nvmlDeviceGetTotalEccErrors = lambda _handle, kind, _counter: (3, 1)[kind]
    library.nvmlDeviceGetRemappedRows = lambda _: (0, 1, 1, 0)
    library.nvmlDeviceGetMigMode = lambda _: [0, 0]
    (gpu,) = inventory.gpu_facts(library)
    assert (gpu.has_ecc, gpu.ecc_corrected_errors, gpu.ecc_uncorrected_errors) == (True, 3, 1)
    assert (gpu.needs_reset, gpu.is_worn_out, gpu.is_partitioned) == (True, False, False)
    (gpu,) = inventory.gpu_facts(recorded_nvml())
    assert (gpu.has_ecc, gpu.needs_reset, gpu.xids) == (None, None, None)


def test_the_load_of_a_gpu_is_a_share_and_watts_and_a_process_of_no_attempt_is_foreign(
    monkeypatch,
):
    (load,) = inventory.gpu_loads(recorded_nvml())
    assert (load.utilization, load.power_watts) == (0.37, 123.456)
    assert (load.memory_used_bytes, load.temperature_celsius) == (2**30, 41)
    assert load.foreign_pids == (os.getpid(),)
    monkeypatch.setattr(procfs, "is_marked", lambda _: True)
    (load,) = inventory.gpu_loads(recorded_nvml())
    assert load.foreign_pids == ()


def test_a_gpu_that_does_not_tell_everything_is_listed_with_the_rest():
    for name in ["nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetCudaComputeCapability"]:
        library = recorded_nvml()
        setattr(library, name, library.refuse)
        (gpu,) = inventory.gpu_facts(library)
        assert None in (gpu.power_limit_watts, gpu.compute_capability), name

    for name in [
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetComputeRunningProcesses",
    ]:
        library = recorded_nvml()
        setattr(library, name, library.refuse)
        (load,) = inventory.gpu_loads(library)
        assert load.utilization == 0.37, name


def test_processor_and_distribution_are_called_what_they_call_themselves(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Processor\n"
    )
    assert inventory.cpu_model(tmp_path / "cpuinfo") == "Intel(R) Xeon(R) Processor"
    assert inventory.cpu_model(tmp_path / "absent")
    (tmp_path / "os-release").write_text('NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12"\n')
    assert inventory.os_name(tmp_path / "os-release") == "Debian GNU/Linux 12"
    assert inventory.os_name(tmp_path / "absent") == "Linux"


# How GPUs reach each other, on machines whose tables are published.


def test_pairs_are_told_by_links_bridges_or_their_way_over_pcie():
    rows = topology.matrix(dgx_h100())
    assert len(rows) == 8
    assert rows[0] == ("X", *["NV18"] * 7)
    rows = topology.matrix(two_bridged_pairs())
    assert rows[0] == ("X", "NV4", "SYS", "SYS")
    assert rows[3] == ("SYS", "SYS", "NV4", "X")
    assert topology.matrix(workstation()) == (("X", "PHB"), ("PHB", "X"))
    for each in (dgx_h100(), two_bridged_pairs(), workstation()):
        rows = topology.matrix(each)
        assert rows == tuple(zip(*rows, strict=True))
    assert topology.matrix(Machine(1)) == ()


def test_a_driver_that_does_not_tell_or_a_binding_without_the_question_is_no_error():
    machine = workstation()
    machine.nvmlDeviceGetTopologyCommonAncestor = refuse
    assert topology.matrix(machine) == (("X", "?"), ("?", "X"))
    assert topology.query_nvml(workstation(), 0, "nvmlDeviceGetSomethingNew") is None
