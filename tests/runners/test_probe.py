"""What a host says about itself.

The GPU values below have the shape that NVML's Python binding returns; no GPU was there when
this was written, so they are a recorded shape and not a measurement.
"""

import os
import sys
import types

import pytest

from runners import inventory
from runners.supervision import procfs


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


def test_a_gpu_is_described_in_base_units():
    (gpu,) = inventory.gpu_facts(recorded_nvml())

    assert (gpu.name, gpu.memory_bytes) == ("NVIDIA H100 80GB HBM3", 85520809984)
    assert (gpu.compute_capability, gpu.power_limit_watts) == ("9.0", 700.0)


def test_each_gpu_has_its_own_index_and_uuid():
    gpus = list(inventory.gpu_facts(recorded_nvml(4)))

    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert len({gpu.uuid for gpu in gpus}) == 4


def test_what_a_gpu_says_of_its_health_is_told():
    library = recorded_nvml()
    library.nvmlDeviceGetEccMode = lambda _: [1, 1]
    library.nvmlDeviceGetTotalEccErrors = lambda _handle, kind, _counter: (3, 1)[kind]
    library.nvmlDeviceGetRemappedRows = lambda _: (0, 1, 1, 0)
    library.nvmlDeviceGetMigMode = lambda _: [0, 0]

    (gpu,) = inventory.gpu_facts(library)

    assert (gpu.has_ecc, gpu.ecc_corrected_errors, gpu.ecc_uncorrected_errors) == (True, 3, 1)
    assert (gpu.needs_reset, gpu.is_worn_out, gpu.is_partitioned) == (True, False, False)


def test_a_gpu_that_says_nothing_of_its_health_is_listed_all_the_same():
    (gpu,) = inventory.gpu_facts(recorded_nvml())

    assert (gpu.has_ecc, gpu.needs_reset, gpu.xids) == (None, None, None)


def test_the_load_of_a_gpu_is_a_share_and_watts():
    (load,) = inventory.gpu_loads(recorded_nvml())

    assert (load.utilization, load.power_watts) == (0.37, 123.456)
    assert (load.memory_used_bytes, load.temperature_celsius) == (2**30, 41)


def test_a_gpu_process_that_is_no_attempts_is_foreign():
    (load,) = inventory.gpu_loads(recorded_nvml())

    assert load.foreign_pids == (os.getpid(),)


def test_a_gpu_process_of_an_attempt_is_not_foreign(monkeypatch):
    monkeypatch.setattr(procfs, "is_marked", lambda _: True)

    (load,) = inventory.gpu_loads(recorded_nvml())

    assert load.foreign_pids == ()


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetCudaComputeCapability"]
)
def test_a_gpu_that_does_not_tell_everything_is_listed_all_the_same(name):
    library = recorded_nvml()
    setattr(library, name, library.refuse)

    (gpu,) = inventory.gpu_facts(library)

    assert None in (gpu.power_limit_watts, gpu.compute_capability)


@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetComputeRunningProcesses",
    ],
)
def test_a_sensor_that_is_missing_leaves_the_rest_of_the_load(name):
    library = recorded_nvml()
    setattr(library, name, library.refuse)

    (load,) = inventory.gpu_loads(library)

    assert load.utilization == 0.37


def test_a_host_without_a_gpu_binding_has_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with inventory.nvml() as library:
        assert library is None


def test_the_facts_of_this_machine_are_its_own(tmp_path):
    facts = inventory.host_facts(tmp_path)

    assert facts.boot_id == procfs.boot_id()
    assert facts.cpu_count == len(os.sched_getaffinity(0))
    assert 2**28 < facts.memory_bytes < 2**45
    assert 0 < facts.disk_free_bytes <= facts.disk_total_bytes
    assert "torch" in facts.packages


def test_the_processor_is_called_what_it_calls_itself(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Processor\n"
    )

    assert inventory.cpu_model(tmp_path / "cpuinfo") == "Intel(R) Xeon(R) Processor"


def test_a_processor_without_a_name_is_called_by_its_architecture(tmp_path):
    assert inventory.cpu_model(tmp_path / "absent")


def test_the_distribution_is_named(tmp_path):
    (tmp_path / "os-release").write_text('NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12"\n')

    assert inventory.os_name(tmp_path / "os-release") == "Debian GNU/Linux 12"
    assert inventory.os_name(tmp_path / "absent") == "Linux"
