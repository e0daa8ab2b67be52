"""Recorded machines of every vendor, read by the product's code, and which GPUs are visible."""

import itertools
import platform
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from runners.devices import amd, nvidia, topology
from runners.devices.topology import (
    CudaDevice,
    cuda_selected,
    cuda_visible,
    is_order_known,
    rocm_visible,
)
from runners.host import commands as command_line
from runners.host import inventory, preflight
from runners.host.inventory import TorchDevice, device_differences, devices_here
from runners.jobs import energy, runtime
from runners.shared import machine
from runners.shared.messages import Needs
from tests.runners.devices.replay import QUERIES, AmdSmi, Nvml, alike, bus_of, commands, recording

# The inventory of recorded machines of every vendor, read by the product's own code.

MEBIBYTE = 2**20


@pytest.fixture
def replayed(monkeypatch, tmp_path):
    """Put a recorded machine in the place of this one."""
    numbers = itertools.count()
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "xids", dict)

    def put(name: str, *, torch_rocm: tuple[int, int] | None = None) -> dict:
        recorded = recording(name)
        if "alike" in recorded:
            recorded["gpus"] = alike(recorded["alike"], recorded["bus_ids"])
        is_amd = "link_types" in recorded
        nvml = Nvml(recorded) if "driver_version" in recorded else None
        monkeypatch.setattr(inventory, "_initialised_nvml", lambda: nvml)
        monkeypatch.setattr(machine, "has_nvidia_on_bus", lambda: nvml is not None)
        has_amd = is_amd or "-by-" in name
        monkeypatch.setattr(machine, "has_amd_on_bus", lambda: has_amd)
        monkeypatch.setattr(
            amd, "importlib", SimpleNamespace(import_module=_module(recorded, is_amd=is_amd))
        )
        monkeypatch.setattr(topology, "rocm_of_torch", lambda: torch_rocm)
        monkeypatch.setattr(preflight, "rocm_of_torch", lambda: torch_rocm)
        monkeypatch.setattr(
            machine, "PCI_DEVICES", bus_of(recorded, tmp_path / str(next(numbers)))
        )
        monkeypatch.setattr(platform, "system", lambda: recorded.get("system", "Linux"))
        monkeypatch.setattr(subprocess, "run", commands({"commands": {}} | recorded))
        return recorded

    return put


def _module(machine: dict, *, is_amd: bool):
    def import_module(name: str):
        if not is_amd:
            raise KeyError("libamd_smi.so")  # what amdsmi 7.0.2 raises without ROCm
        return AmdSmi(machine)

    return import_module


ROCM = (7, 0)
# name, torch's ROCm; of the machine: GPUs, other GPUs; of the first GPU: fields.
MACHINES = [
    (
        "a100-mig", None, 2, 0,
        {
            "name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "memory_bytes": 19968 * MEBIBYTE,
            "uuid": "MIG-5b1e6c4a-6d3e-5f3c-9a57-1f0d1c2b3a41",
            "parent_uuid": "GPU-27b94a00-ed54-5c24-b1fd-1054085de32a",
            "compute_capability": "8.0", "is_partitioned": True, "has_ecc": True,
            "ecc_corrected_errors": None, "needs_reset": None, "power_limit_watts": 400.0,
        },
    ),
    (
        "rtx-4090-and-3060", None, 2, 0,
        {
            "name": "NVIDIA GeForce RTX 3060", "memory_bytes": 12288 * MEBIBYTE, "has_ecc": None,
            "architecture": "Ampere", "pcie_generation": 1, "pcie_max_generation": 4,
            "num_links": 0, "max_clock_hertz": 2.145e9, "compute_mode": "default", "unread": (),
        },
    ),
    (
        "two-a5000-pcie", None, 2, 0,
        {"has_ecc": False, "needs_reset": False, "num_links": 0, "power_limit_watts": 230.0},
    ),
    (
        "eight-h100", None, 8, 0,
        {
            "name": "NVIDIA H100 80GB HBM3", "num_links": 18, "link_bytes_per_second": 2.6562e10,
            "is_persistent": True, "fabric_state": "completed",
            "ecc_uncorrected_errors": 0, "is_partitioned": False,
        },
    ),
    (
        "laptop-3070-ti", None, 1, 0,
        {"power_limit_watts": None, "unread": ("power limit: Not Supported",), "pcie_width": 8},
    ),
    (
        "driver-too-old", None, 1, 0,
        {"compute_capability": "7.5", "architecture": None, "pcie_generation": None},
    ),
    (
        "dgx-spark", None, 1, 0,
        {
            "name": "NVIDIA GB10", "shares_host_memory": True, "compute_capability": "12.1",
            "architecture": "Blackwell", "unread": ("power limit: Not Supported",),
        },
    ),
    (
        "eight-mi300x", ROCM, 8, 0,
        {
            "name": "AMD Instinct MI300X", "vendor": "amd", "architecture": "gfx942",
            "uuid": "GPU-8af705259683161c", "memory_bytes": 196592 * MEBIBYTE,
            "power_limit_watts": 750.0, "max_clock_hertz": 2.1e9, "pcie_width": 16,
            "partition": None, "numa_node": None, "unread": (),
        },
    ),
    ("eight-mi300x", None, 0, 8, {}),
    (
        "four-mi250x", ROCM, 8, 0,
        {
            "name": "AMD Instinct MI250X", "architecture": "gfx90a",
            "memory_bytes": 65520 * MEBIBYTE, "power_limit_watts": 560.0,
            "uuid": "GPU-61f2504172da5ee8",
            "unread": (f"PCIe link: {AmdSmi.AmdSmiException.err_info}",),
        },
    ),
    (
        "mi300x-cpx", ROCM, 8, 0,
        {"partition": "CPX/NPS4", "memory_bytes": 24574 * MEBIBYTE, "power_limit_watts": None},
    ),
    (
        "mi300x-by-command", ROCM, 1, 0,
        {
            "name": "AMD Instinct MI300X", "uuid": "GPU-6f1f0a2b3c4d5e6f",
            "memory_bytes": 196592 * MEBIBYTE, "power_limit_watts": 750.0,
            "max_clock_hertz": 2.1e9, "pcie_max_generation": 5, "pcie_width": 16,
        },
    ),
    (
        "mi250x-by-rocm-smi", ROCM, 2, 0,
        {
            "name": "AMD Instinct MI250X", "architecture": "gfx90a", "power_limit_watts": 560.0,
            "uuid": "GPU-61f2504172da5ee8", "memory_bytes": 68702699520,
            "pci_bus_id": "0000:c1:00.0", "max_clock_hertz": None, "pcie_width": None,
        },
    ),
    (
        "apple-m3-max", None, 0, 1,
        {
            "name": "Apple M3 Max (40 GPU cores)", "vendor": "apple", "architecture": "Metal 3",
            "memory_bytes": 64 * 2**30, "usable_memory_bytes": 56 * 2**30,
        },
    ),
    (
        "intel-arc-b65", None, 0, 1,
        {
            "name": "Intel(R) Arc(TM) Pro B65 Graphics", "vendor": "intel", "unread": (),
            "memory_bytes": 34242297856, "pcie_max_width": None, "pci_bus_id": "0000:51:00.0",
        },
    ),
]  # fmt: skip


def test_a_recorded_machine_has_this_inventory(replayed):
    wrong = []
    for name, torch_rocm, num_gpus, num_others, first in MACHINES:
        replayed(name, torch_rocm=torch_rocm)
        found = inventory.devices()
        listed = (*found.gpus, *found.other_gpus)
        with inventory.gpu_library() as library:
            loads = list(inventory.gpu_loads(library)) if library else []
        got = [
            (len(found.gpus), len(found.other_gpus)),
            {key: getattr(listed[0], key) for key in first},
            len({gpu.uuid for gpu in listed}),
            [gpu.index for gpu in found.gpus],
            [load.uuid for load in loads],
        ]
        uuids = [gpu.uuid for gpu in found.gpus]
        expected = [(num_gpus, num_others), first, len(listed), list(range(num_gpus)), uuids]
        if got != expected:
            wrong.append((name, got, expected))
    assert not wrong, wrong


def test_the_links_and_the_peer_access_of_a_machine(replayed):
    for name, row, accesses in [
        ("a100-mig", ("X", "SAME"), set()),
        ("rtx-4090-and-3060", ("X", "SYS"), {False}),
        ("two-a5000-pcie", ("X", "NODE"), {True}),
        ("eight-h100", ("X", *["NV18"] * 7), {True}),
        ("eight-mi300x", ("X", *["XGMI"] * 7), {True}),
        ("four-mi250x", ("X", *["XGMI"] * 7), {True}),
        ("mi300x-cpx", ("X", *["SAME"] * 7), {True}),
        ("dgx-spark", None, set()),
    ]:
        replayed(name, torch_rocm=ROCM if "mi" in name and "mig" not in name else None)
        found = inventory.devices()
        assert (found.topology[0] if found.topology else None) == row, (name, row, accesses)
        assert {each for row in found.peer_access for each in row if each is not None} == accesses


def test_the_load_of_a_machine(replayed):
    for name, slowed_by, watts, celsius in [
        ("laptop-3070-ti", ("heat (hardware)",), None, 48),  # by the older name of the reasons
        ("eight-h100", (), 68.57, 29),  # idle is usual
        ("a100-mig", (), None, 36),  # the board's power is no instance's
        ("eight-mi300x", ("heat (hardware)",), 142.0, 47),  # by the violation status
        ("four-mi250x", ("heat (hardware)",), 90.0, 35),  # by the metrics table
        ("mi300x-by-command", (), 210.0, 47),
        ("mi250x-by-rocm-smi", (), 90.0, 37),
    ]:
        replayed(name, torch_rocm=ROCM if "mi" in name and "mig" not in name else None)
        with inventory.gpu_library() as library:
            first = next(iter(inventory.gpu_loads(library)))
        assert (first.slowed_by, first.power_watts, first.temperature_celsius) == (
            slowed_by, watts, celsius,
        )  # fmt: skip


def test_memory_that_nvml_does_not_support_is_the_hosts(replayed):
    import psutil

    replayed("dgx-spark")
    with inventory.gpu_library() as library:
        (gpu,), (load,) = inventory.gpu_facts(library), inventory.gpu_loads(library)
    assert gpu.memory_bytes == psutil.virtual_memory().total
    assert 0 < load.memory_used_bytes < gpu.memory_bytes


def test_what_is_missing_is_named(replayed):
    for name, change, torch_rocm, words in [
        ("eight-h100", lambda m: m["gpus"][3].update(is_lost=True), None, "GPU 3 does not answer"),
        (
            "a100-mig", lambda m: m["gpus"][0].update(mig_devices=[]), None,
            "is in MIG mode without an instance",
        ),
        ("eight-mi300x", dict, None, "torch here is not built for ROCm"),
        ("mi300x-by-command", lambda m: m["commands"].clear(), ROCM, "amd-smi is not installed; rocm-smi is not installed"),
        ("mi300x-by-command", lambda m: m["commands"].clear(), ROCM, "libamd_smi.so"),
        (
            "intel-arc-b65", lambda m: m["commands"].clear(), None,
            "Intel GPU at 0000:51:00.0: xpu-smi is not installed",
        ),
        (
            "intel-arc-b65",
            lambda m: m["commands"].update({"xpu-smi discovery -j": {"device_list": []}}),
            None, "see that this user is in the group render",
        ),
        ("apple-m3-max", lambda m: m["commands"].clear(), None, "system_profiler is not installed"),
    ]:  # fmt: skip
        machine = replayed(name, torch_rocm=torch_rocm)
        change(machine)
        assert words in "; ".join(inventory.devices().problems), (name, change, torch_rocm, words)


def test_torch_and_the_driver_are_held_together(replayed, monkeypatch):
    for name, torch_cuda, torch_rocm, is_ok, words in [
        ("driver-too-old", (13, 0), None, False, "the driver runs up to 11.2"),
        ("dgx-spark", (13, 0), None, True, "the driver runs up to 13.0"),
        (
            "eight-mi300x",
            None,
            ROCM,
            True,
            "torch is built with ROCm 7.0; the host has ROCm 7.0.2",
        ),
    ]:
        replayed(name, torch_rocm=torch_rocm)
        monkeypatch.setattr(preflight, "cuda_of_torch", lambda found=torch_cuda: found)
        with inventory.gpu_library() as library:
            check = preflight.runtime_check(library)
        assert check.ok is is_ok, (name, torch_cuda, torch_rocm, is_ok, words)
        assert words in check.sentence, (name, torch_cuda, torch_rocm, is_ok, words)


def test_gpus_that_cuda_would_not_give_are_refused(replayed):
    for name, num_gpus, change, failed in [
        ("a100-mig", 1, {}, set()),
        ("a100-mig", 2, {}, {"MIG"}),
        ("two-a5000-pcie", 2, {}, set()),
        ("two-a5000-pcie", 2, {"compute_mode": 2}, {"compute mode"}),
        ("eight-h100", 8, {}, set()),
        ("eight-h100", 8, {"fabric_state": 1}, {"NVSwitch"}),
    ]:
        machine = replayed(name)
        machine["gpus"][0].update(change)
        with inventory.gpu_library() as library:
            gpus = list(inventory.gpu_facts(library))[:num_gpus]
        assert {
            check.name for check in preflight.unusable_gpu_checks(gpus) if not check.ok
        } == failed


def test_amd_gpus_are_judged_by_their_architecture(replayed):
    for name, fp8, flex in [("eight-mi300x", True, True), ("four-mi250x", False, True)]:
        replayed(name, torch_rocm=ROCM)
        gpus = inventory.devices().gpus
        assert preflight.fp8_check(gpus).ok is fp8, (name, fp8, flex)
        assert preflight.flex_attention_check(gpus).ok is flex, (name, fp8, flex)


def test_an_agent_that_sees_some_gpus_lists_those(replayed, monkeypatch):
    for variables, indices, words in [
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1], "CUDA counts from the fastest GPU"),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1], "1 of 2 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-d6889ff6"}, [0], "1 of 2 GPUs are hidden"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5c1d,GPU-d688"}, [1, 0], ""),  # torch's order
        ({"CUDA_VISIBLE_DEVICES": ""}, [], "2 of 2 GPUs are hidden"),
    ]:
        replayed("rtx-4090-and-3060")
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            found = inventory.devices()
        assert [gpu.index for gpu in found.gpus] == indices, variables
        assert words in "; ".join(found.problems), variables


def test_the_devices_of_a_host_are_compared_with_those_that_torch_sees(replayed):
    replayed("eight-h100")
    devices = devices_here()
    seen = [TorchDevice(each.name, each.uuid, each.memory_bytes - 2**30) for each in devices]

    first = devices[0]
    assert (first.links, first.clock_hertz) == (("X", *["NV18"] * 7), 345e6)
    assert (first.power_watts, first.power_limit_watts, first.slowed_by) == (68.57, 700.0, ())
    assert device_differences(devices, seen) == []
    for changed, words in [
        (seen[:7], "torch sees 7 GPUs of 8"),
        ([seen[1], seen[0], *seen[2:]], "torch counts GPU 0 as its number 1"),
        ([*seen[:7], seen[7]._replace(uuid="GPU-else")], "torch's number 7, NVIDIA H100"),
        ([seen[0]._replace(memory_bytes=2**30), *seen[1:]], "torch sees 1.0 GiB of GPU 0"),
        ([seen[0]._replace(name="NVIDIA T4"), *seen[1:]], "is NVIDIA T4 to torch"),
    ]:
        assert words in "; ".join(device_differences(devices, changed))


def test_a_gpu_that_is_lost_between_two_queries_is_left_out(replayed, monkeypatch):
    machine = replayed("two-a5000-pcie")
    read_facts = nvidia.facts

    def lose_one_after(*arguments):
        found = list(read_facts(*arguments))
        machine["gpus"][1]["is_lost"] = True
        return found

    monkeypatch.setattr(nvidia, "facts", lose_one_after)
    devices = devices_here()
    machine["gpus"][1]["is_lost"] = False
    with inventory.gpu_library() as library:
        loads = list(inventory.gpu_loads(library))[:1]
        monkeypatch.setattr(nvidia, "loads", lambda _: loads)
        gpus = preflight.gpus_of(Needs(kind="train"), library)

    assert [device.index for device in devices] == [gpu.number for gpu in gpus] == [0]


def test_a_uuid_as_hip_gives_it_is_the_same_gpu(replayed):
    replayed("eight-mi300x", torch_rocm=ROCM)
    devices = devices_here()
    seen = [
        TorchDevice(each.name, each.uuid.removeprefix("GPU-").encode().hex(), each.memory_bytes)
        for each in devices
    ]
    assert device_differences(devices, seen) == []


def test_a_job_reads_the_gpus_that_it_was_given(replayed, monkeypatch):
    for name, value, indices in [
        ("a100-mig", None, [0]),
        ("a100-mig", "MIG-c8d1f7e2-0b44-5a1d-8f6e-2e9b7d6c5a02", [1]),
        ("two-a5000-pcie", "GPU-12345678-aaaa-bbbb-cccc-0123456789a1", [1]),
        ("two-a5000-pcie", "1,0", [1, 0]),
    ]:
        machine = replayed(name)
        with monkeypatch.context() as patch:
            if value is not None:
                patch.setenv("CUDA_VISIBLE_DEVICES", value)
            listed = nvidia.visible_devices(Nvml(machine), env={})
            assert [each.index for each in energy.visible(listed)] == indices, (name, value)


def test_a_job_on_amd_gpus_reads_those_that_it_was_given(replayed, monkeypatch):
    replayed("eight-mi300x", torch_rocm=ROCM)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-dc91284879207f2b")
    assert runtime.amd_sample()() == {
        "gpu0_memory_bytes": 283.0 * MEBIBYTE,
        "gpu0_utilization": 0.37,
        "gpu0_power_watts": 142.0,
    }


def test_the_doctor_tells_of_the_gpus(replayed, monkeypatch):
    for name, checks in [
        (
            "driver-too-old",
            {
                "GPU": (True, "GeForce GTX 1660 Ti (6 GiB)"),
                "torch and driver": (False, "runs up to 11.2. Install a newer driver"),
            },
        ),
        (
            "apple-m3-max",
            {
                "GPU": (True, "none: jobs run on the processor"),
                "Other GPU": (True, "Apple M3 Max (40 GPU cores) (64 GiB shared with the host)"),
            },
        ),
    ]:
        replayed(name)
        monkeypatch.setattr(preflight, "cuda_of_torch", lambda: (13, 0))
        found = {check.name: (check.is_ok, check.words) for check in command_line._gpus()}
        assert set(found) == set(checks), (name, checks)
        for topic, (is_ok, words) in checks.items():
            assert found[topic][0] is is_ok, (name, checks)
            assert words in found[topic][1], (name, checks)


def test_the_replay_and_the_readers_ask_nvml_for_functions_that_it_has():
    sources = "".join(Path(module.__file__).read_text() for module in (nvidia, topology))
    asked = set(re.findall(r'"(nvml(?:Device|System)\w+)"', sources)) | set(QUERIES)
    assert len(asked) > 20
    assert [name for name in asked if not hasattr(pynvml, name)] == []


# Which GPUs a process sees, by the published rules of CUDA and of ROCm.

GPUS = [CudaDevice(f"GPU-{digit}932f937-d72c", place) for place, digit in enumerate("8887")]
GPUS[1] = CudaDevice("GPU-8aaaa937-d72c", 1)
GPUS[2] = CudaDevice("GPU-8bbbb937-d72c", 2)
INSTANCES = [
    CudaDevice("GPU-11111111-d72c", 0, name="H100"),
    CudaDevice("MIG-aa", 1, is_instance=True, path="MIG-GPU-2222-d72c/1/0"),
    CudaDevice("MIG-ab", 1, is_instance=True, path="MIG-GPU-2222-d72c/2/0"),
]


def test_cuda_selects_whole_gpus():
    for value, seen in [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,1", [2, 1]),
        (" 2 , 1 ", [2, 1]),
        ("0,2,-1,1", [0, 2]),  # the list ends at the first invalid entry
        ("2,9,1", [2]),
        ("1gpu2,2ampere", [1, 2]),  # read as strtoul does
        ("0,1,0", []),  # repeated: an error
        ("GPU-8bbbb937-d72c,GPU-7932f937-d72c", [2, 3]),
        ("GPU-8b,GPU-7", [2, 3]),  # enough digits to tell
        ("GPU-7,GPU-8", [3]),  # not enough: three begin so
        ("GPU-7,GPU-793", []),
        ("GPU-7,1", [3]),  # entries of one kind
        ("1,GPU-7", [1]),
        ("MIG-aa", []),
    ]:
        env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert cuda_visible(GPUS, env) == cuda_selected(GPUS, env) == seen, (value, seen)


def test_cuda_gives_a_process_one_mig_instance():
    for value, selected, visible in [
        (None, [0, 1, 2], [1]),  # one instance, and no GPU beside it
        ("0", [0], [0]),
        ("1", [1], [1]),  # the first instance of that GPU
        ("MIG-ab", [2], [2]),
        ("MIG-aa,MIG-ab", [1, 2], [1]),
        ("MIG-GPU-2222-d72c/2/0", [2], [2]),  # as drivers before R470 name it
        ("GPU-2222", [1], [1]),
        ("MIG-a", [], []),  # a MIG UUID is written in full
        ("2", [], []),
    ]:
        env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert cuda_selected(INSTANCES, env) == selected, (value, selected, visible)
        assert cuda_visible(INSTANCES, env) == visible, (value, selected, visible)


def test_cudas_own_order_is_known_only_among_equals_or_by_bus():
    for names, order, is_known in [
        (["A", "A"], None, True),
        (["A", "B"], None, False),
        (["A", "B"], "FASTEST_FIRST", False),
        (["A", "B"], "PCI_BUS_ID", True),
    ]:
        devices = [CudaDevice(name, place, name=name) for place, name in enumerate(names)]
        assert is_order_known(devices, {"CUDA_DEVICE_ORDER": order} if order else {}) is is_known


UUIDS = ["GPU-8af705259683161c", "GPU-8bc1284879207f2b", "GPU-dc91284879207f2b"]


def test_rocr_selects_first_and_hip_among_the_rest():
    for rocr, hip, cuda, seen in [
        (None, None, None, [0, 1, 2]),
        ("", None, None, []),
        ("2,0", None, None, [2, 0]),
        ("0x2", None, None, [2]),  # read as strtol does
        ("0,GPU-DC91284879207F2B", None, None, [0, 2]),
        ("gpu-dc", None, None, [2]),
        ("GPU-8,0", None, None, []),  # two begin so
        ("2,2,1", None, None, [2]),  # a repeated one ends the list
        ("1,0gpu", None, None, [1]),
        (None, "1", None, [1]),
        (None, "", "1", [1]),  # empty is unset
        (None, "", "", [0, 1, 2]),
        (None, "0,0,2", None, [0, 2]),  # a repeated one is left out
        (None, "2,-1,1", None, [2]),
        (None, "GPU-8bc1284879207f2b", None, [1]),
        (None, "2", "0", [2]),
        ("2,1", "1", None, [1]),  # HIP counts what ROCR left
        ("2,1", "2", None, []),
        ("2,1", None, "0", [2]),
        ("2", "GPU-8af705259683161c", None, []),
    ]:
        given = {
            "ROCR_VISIBLE_DEVICES": rocr, "HIP_VISIBLE_DEVICES": hip, "CUDA_VISIBLE_DEVICES": cuda,
        }  # fmt: skip
        env = {name: value for name, value in given.items() if value is not None}
        assert rocm_visible(UUIDS, env) == seen, (rocr, hip, cuda, seen)
