"""Replays recorded machines through the interfaces of pynvml, amdsmi and vendors' commands.

A recording is a JSON file: ``source`` says which public output its values are from, and
``assumed`` which values that output does not show. The replay has the functions and errors of
pynvml and amdsmi as far as they are recorded, so the product's own code reads it.
"""

import itertools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pynvml

RECORDINGS = Path(__file__).with_name("recordings")
MEBIBYTE = 2**20
LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
ACTIVE = 1


def recording(name: str) -> dict:
    return json.loads((RECORDINGS / f"{name}.json").read_text())


class Nvml:
    """pynvml on a recorded machine: nvidia-smi's "N/A" is NVML's "Not Supported"."""

    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_NVLINK_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON

    def __init__(self, machine: dict) -> None:
        self.machine, self.is_open = machine, True
        for name in dir(pynvml):
            if name.startswith("NVML_DEVICE_ARCH_"):
                setattr(self, name, getattr(pynvml, name))
        for function, key in QUERIES.items():
            setattr(self, function, self._query(key))

    def _query(self, key: str):
        def answer(handle: dict, *_: object):
            value = handle.get(key, "N/A")
            if value == "N/A":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return value

        return answer

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVML's names from here on
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.machine["driver_version"]

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        major, minor = map(int, self.machine["cuda_version"].split("."))
        return major * 1000 + minor * 10

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.machine["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict:  # noqa: N802
        gpu = self.machine["gpus"][index]
        if gpu.get("is_lost"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def nvmlDeviceGetPciInfo(self, gpu: dict) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=gpu["bus_id"])

    def nvmlDeviceGetMemoryInfo(self, device: dict) -> SimpleNamespace:  # noqa: N802
        total, used = (
            self._query(f"memory_{kind}_mib")(device) * MEBIBYTE for kind in ("total", "used")
        )
        return SimpleNamespace(total=total, used=used)

    def nvmlDeviceGetMaxClockInfo(self, gpu: dict, kind: int) -> int:  # noqa: N802
        return self._query({1: "max_sm_mhz", 2: "max_memory_mhz"}[kind])(gpu)

    def nvmlDeviceGetClockInfo(self, gpu: dict, _kind: int) -> int:  # noqa: N802
        return self._query("sm_mhz")(gpu)

    def nvmlDeviceGetUtilizationRates(self, device: dict) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self._query("utilization_percent")(device))

    def nvmlDeviceGetComputeRunningProcesses(self, device: dict) -> list:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in device.get("pids", [])]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: dict) -> int:  # noqa: N802
        return 7 if "mig_devices" in gpu else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: dict, slot: int) -> dict:  # noqa: N802
        for instance in gpu["mig_devices"]:
            if instance["slot"] == slot:
                return instance
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetNvLinkState(self, gpu: dict, link: int) -> int:  # noqa: N802
        if link >= gpu.get("num_nvlinks", 0):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return ACTIVE

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, _gpu: dict, _link: int) -> int:  # noqa: N802
        return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH

    def nvmlDeviceGetFieldValues(self, gpu: dict, _fields: list) -> list:  # noqa: N802
        value = SimpleNamespace(uiVal=self._query("nvlink_mb_per_second")(gpu))
        return [SimpleNamespace(nvmlReturn=0, value=value)]

    def nvmlDeviceGetTopologyCommonAncestor(self, left: dict, right: dict) -> int:  # noqa: N802
        gpus = self.machine["gpus"]
        return LEVELS[self.machine["topology"][gpus.index(left)][gpus.index(right)]]

    c_nvmlGpuFabricInfo_v2_t = pynvml.c_nvmlGpuFabricInfo_v2_t  # noqa: N815

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: dict, info) -> int:  # noqa: N802
        info._obj.state = self._query("fabric_state")(gpu)
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetP2PStatus(self, *_: object) -> int:  # noqa: N802
        return self.machine.get("p2p_status", pynvml.NVML_P2P_STATUS_UNKNOWN)


QUERIES = {
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetArchitecture": "architecture",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetPowerManagementLimit": "power_limit_mw",
    "nvmlDeviceGetPowerManagementDefaultLimit": "default_power_limit_mw",
    "nvmlDeviceGetPowerUsage": "power_mw",
    "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie_max_width",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie_generation",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie_max_generation",
    "nvmlDeviceGetComputeMode": "compute_mode",
    "nvmlDeviceGetPersistenceMode": "persistence",
    "nvmlDeviceGetEccMode": "ecc_mode",
    "nvmlDeviceGetTotalEccErrors": "ecc_errors",
    "nvmlDeviceGetRemappedRows": "remapped_rows",
    "nvmlDeviceGetMigMode": "mig_mode",
    "nvmlDeviceGetNumaNodeId": "numa_node",
    "nvmlDeviceGetGpuInstanceId": "gpu_instance",
    "nvmlDeviceGetComputeInstanceId": "compute_instance",
    "nvmlDeviceGetCurrentClocksEventReasons": "event_reasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "throttle_reasons",
}


class AmdSmiException(Exception):  # noqa: N818 - amdsmi's name
    err_info = "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"


class AmdSmi:
    """amdsmi on a recorded machine: its functions by name, and by what they are asked."""

    AmdSmiException = AmdSmiException
    AmdSmiClkType = SimpleNamespace(GFX="GFX", MEM="MEM")
    AmdSmiTemperatureType = SimpleNamespace(EDGE="EDGE", HOTSPOT="HOTSPOT")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="CURRENT")
    AmdSmiMemoryType = SimpleNamespace(VRAM="VRAM")

    def __init__(self, machine: dict) -> None:
        self.machine = machine

    def __getattr__(self, name: str):
        if not name.startswith("amdsmi_"):
            raise AttributeError(name)

        def answer(handle: dict, *keys: object):
            value = handle["answers"].get(name, "missing")
            for key in keys:
                if isinstance(value, dict) and isinstance(key, str) and key in value:
                    value = value[key]
            if value == "missing":
                raise AmdSmiException
            return value

        return answer

    def amdsmi_init(self) -> None: ...

    def amdsmi_shut_down(self) -> None: ...

    def amdsmi_get_processor_handles(self) -> list:
        return self.machine["gpus"]

    def amdsmi_get_rocm_version(self) -> tuple[bool, str]:
        version = self.machine.get("rocm_version", "")
        return bool(version), version

    def amdsmi_topo_get_link_type(self, left: dict, right: dict) -> dict:
        gpus = self.machine["gpus"]
        is_xgmi = self.machine["link_types"][gpus.index(left)][gpus.index(right)] == "XGMI"
        return {"hops": 1, "type": 2} if is_xgmi else {"hops": 2, "type": 1}

    def amdsmi_is_P2P_accessible(self, *_: object) -> bool:  # noqa: N802
        return self.machine["is_p2p_accessible"]


def commands(machine: dict):
    """Return a ``subprocess.run`` that answers as the recorded machine's commands do."""

    def run(command, **_: object) -> subprocess.CompletedProcess:
        recorded = machine["commands"].get(" ".join(command))
        if recorded is None:
            raise FileNotFoundError(command[0])
        text = recorded if isinstance(recorded, str) else json.dumps(recorded)
        return subprocess.CompletedProcess(command, 0, text, "")

    return run


def bus_of(machine: dict, folder: Path) -> Path:
    """Write the recorded PCI devices as sysfs has them, and return the folder."""
    for address, (vendor, kind) in machine.get("pci", {}).items():
        (folder / address).mkdir(parents=True)
        (folder / address / "vendor").write_text(f"{vendor}\n")
        (folder / address / "class").write_text(f"{kind}\n")
    return folder


def alike(gpu: dict, bus_ids: list[str]) -> list[dict]:
    """Return as many GPUs as bus ids, with UUIDs of their own."""
    numbers = itertools.count()
    return [gpu | {"bus_id": bus, "uuid": gpu["uuid"] % next(numbers)} for bus in bus_ids]
