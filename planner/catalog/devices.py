"""The device catalog: dense peaks, bandwidths and sizes, by slug, alias or driver name."""

import csv
import re
from dataclasses import dataclass
from functools import cache

from planner.catalog.instances import price_of
from planner.catalog.mig import instance_of, profile_of_driver
from planner.catalog.reading import data_text, nearest_names
from planner.errors import UnknownDeviceError
from planner.specs.base import Dtype
from planner.specs.cluster import DeviceSpec

AS_OF = "2026-08"
DTYPE_BY_COLUMN: dict[str, Dtype] = {
    "peak_fp32": "fp32",
    "peak_tf32": "tf32",
    "peak_bf16": "bf16",
    "peak_fp16": "fp16",
    "peak_fp8": "fp8",
    "peak_int8": "int8",
    "peak_fp4": "nvfp4",
    "peak_int4": "int4",
}
ACHIEVED_BY_COLUMN: dict[str, Dtype] = {"achieved_bf16": "bf16", "achieved_fp8": "fp8"}
NUMBERS = (
    "memory_bandwidth_bytes_per_second",
    "intra_node_bandwidth_bytes_per_second",
    "host_to_device_bandwidth_bytes_per_second",
    "tdp_watts",
)
# Vendor and product-line words in names, ignored in lookups.
MAKERS = frozenset(
    {"nvidia", "amd", "intel", "google", "aws", "geforce", "tesla", "instinct", "radeon"}
)
SIZE = re.compile(r"(.+)-(\d+)gb")
SIZE_ROUNDING = 0.1  # names are rounded, in gigabytes or gibibytes
# Driver names that omit or spell differently the form factor -> catalog id.
DRIVER_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm5-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA H200 NVL": "h200-nvl-141gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
}
# Boards of two dies, each a device of its own to the driver and to torch.
TWO_DIES = ("mi250", "mi250x")
TEXTS = ("id", "name", "vendor", "kind", "link", "source", "notes")


def device_slug(name: str) -> str:
    """Return a device's name as a catalog id: lower case, hyphens between words.

    >>> device_slug("H100-SXM5-80GB")
    'h100-sxm5-80gb'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _rates(row: dict[str, str], columns: dict[str, Dtype]) -> dict[Dtype, float]:
    return {dtype: float(row[column]) for column, dtype in columns.items() if row[column]}


def _peaks(row: dict[str, str]) -> dict[Dtype, float]:
    """Return the dense peaks; the 4-bit floats of AMD are MXFP4, those of NVIDIA NVFP4."""
    peaks = _rates(row, DTYPE_BY_COLUMN)
    if row["vendor"] == "AMD" and "nvfp4" in peaks:
        peaks["mxfp4"] = peaks.pop("nvfp4")
    return peaks


def _device(row: dict[str, str]) -> DeviceSpec:
    fields: dict[str, object] = {name: row[name] or None for name in TEXTS}
    fields.update({name: float(row[name]) for name in NUMBERS if row[name]})
    return DeviceSpec.model_validate(
        {
            **fields,
            "memory_bytes": int(row["memory_bytes"]),
            "peak_flops_per_second": _peaks(row),
            "achieved_flops_per_second": _rates(row, ACHIEVED_BY_COLUMN),
            "aliases": tuple(a for a in row["aliases"].split(";") if a),
            "as_of": AS_OF,
            **price_of(row["id"]),
        }
    )


@cache
def _devices() -> dict[str, DeviceSpec]:
    rows = csv.DictReader(data_text("devices.csv").splitlines())
    return {row["id"]: _device(row) for row in rows}


def _without_maker(slug: str) -> str:
    return "-".join(word for word in slug.split("-") if word not in MAKERS)


@cache
def _ids_by_name() -> dict[str, str]:
    names: dict[str, str] = {}
    for device in _devices().values():
        for name in (*device.aliases, device.name or device.id):
            names.setdefault(device_slug(name), device.id)
    return {**names, **{device_id: device_id for device_id in _devices()}}


@cache
def _ids_by_short_name() -> dict[str, str]:
    return {_without_maker(name): device_id for name, device_id in _ids_by_name().items()}


def list_devices() -> tuple[DeviceSpec, ...]:
    """Return every device of the catalog, in file order."""
    return tuple(_devices().values())


def _id_of(slug: str) -> str | None:
    """Return the catalog id of a slug, with or without vendor and memory size."""
    names, short_name = _ids_by_short_name(), _without_maker(slug)
    device_id = _ids_by_name().get(slug) or names.get(short_name)
    sized = SIZE.fullmatch(short_name)
    if device_id or sized is None or sized[1] not in names:
        return device_id
    named_bytes, memory_bytes = float(sized[2]) * 1e9, _devices()[names[sized[1]]].memory_bytes
    return names[sized[1]] if abs(memory_bytes / named_bytes - 1.0) <= SIZE_ROUNDING else None


def get_device(name: str) -> DeviceSpec:
    """Return a device by id, alias or full name.

    Raises:
        UnknownDeviceError: the catalog has no such name; the message gives the nearest ones.
    """
    device_id = _id_of(device_slug(name))
    if device_id is None:
        nearest = nearest_names(device_slug(name), _ids_by_name())
        raise UnknownDeviceError(
            f"no device {name!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
            "any other device can be given as an object with memory_bytes, "
            "memory_bandwidth_bytes_per_second and peak_flops_per_second",
            "cluster.device",
            nearest=nearest,
        )
    return _devices()[device_id]


def device_of_driver(name: str) -> DeviceSpec | None:
    """Return the device that a driver names, with or without the brand, or None.

    Of a board with two dies it is one die: half of the figures that data sheets state. Of a MIG
    instance it is the instance's share of its GPU.
    """
    if (instance := profile_of_driver(name)) is not None:
        gpu = device_of_driver(instance[0])
        return None if gpu is None else instance_of(gpu, instance[1])
    bare = name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("Tesla ")
    for spelling in (DRIVER_NAMES.get(name, name), bare):
        device_id = _id_of(device_slug(spelling))
        if device_id is not None:
            device = _devices()[device_id]
            return _one_die(device) if device_id in TWO_DIES else device
    return None


def _one_die(board: DeviceSpec) -> DeviceSpec:
    """Return half of a board."""
    halves = {dtype: rate / 2 for dtype, rate in board.peak_flops_per_second.items()}
    watts = board.tdp_watts
    return board.model_copy(
        update={
            "memory_bytes": board.memory_bytes // 2,
            "memory_bandwidth_bytes_per_second": board.memory_bandwidth_bytes_per_second / 2,
            "peak_flops_per_second": halves,
            "tdp_watts": watts and watts / 2,
        }
    )


# How much of a unified memory the GPU may take, by vendor, size and operating system.
#
# Apple: Metal's ``recommendedMaxWorkingSetSize``, as llama.cpp prints it. macOS 26 raised it:
# 11.84 of 16 GiB, 17.76 of 24, 24.96 of 32, 28.08 of 36, 37.44 of 48, 51.84 of 64, 107.52 of 128
# (ggml_metal_device_init logs of M1 to M5; antirez/ds4 PR 893), about 222.7 of 256 (raullenchai/
# Rapid-MLX PR 183) and 464 of 512. Before, it was two thirds up to 32 GiB (10.67 of 16, 16 of 24,
# 21.33 of 32) and three quarters above (48 of 64, 72 of 96; ggml-org/llama.cpp issues 687, 1870,
# 2011, 3213). Machines of 16 GiB keep two thirds: wiring more freezes them (osaurus-ai/vmlx-swift
# PR 421), because macOS itself takes 4 to 5 GiB.
#
# NVIDIA: a DGX Spark shows 121.69 of 128 GiB to CUDA (GLM-5.3-Flash-EXL3-2x-DGX-Sparks issue 47),
# a Jetson AGX Orin about 61.4 of 64; the system's own memory comes out of it.
#
# AMD: Linux maps half of the memory for the GPU (the GTT: 62.5 of 125 GiB, lhl/strix-halo-testing
# issue 4) unless ``ttm.pages_limit`` raises it; firmware reserves at most three quarters.
#
# Intel: drivers share 57 % with the GPU, 18 of 32 GiB (IGCIT issue 1536), older ones half.


GIB = 1024**3
# The largest memory of a class of Macs in GiB, and the share that macOS 26 gives to the GPU.
APPLE_SHARES = (
    (16, 2 / 3),
    (24, 0.74),
    (48, 0.78),
    (96, 0.81),
    (192, 0.84),
    (256, 0.87),
)
APPLE_LARGEST_SHARE = 0.90
APPLE_OLD_SMALL, APPLE_OLD_SHARES = 32, (2 / 3, 0.75)
NVIDIA_VISIBLE, NVIDIA_SYSTEM_BYTES = 0.95, 4 * GIB
AMD_FIRMWARE_SHARE, AMD_DEFAULT_SHARE = 0.75, 0.5
INTEL_SHARE, INTEL_OLD_SHARE = 0.57, 0.5


@dataclass(frozen=True)
class UnifiedMemory:
    """The bytes that a GPU sees of a unified memory and may use of them.

    ``assured_bytes`` are usable with any supported release and setting of the operating system;
    ``otherwise`` names those releases or settings, and ``advice`` what more needs.
    """

    visible_bytes: float
    usable_bytes: float
    assured_bytes: float
    otherwise: str = ""
    advice: str = ""


def unified_memory(device: DeviceSpec) -> UnifiedMemory | None:
    """Return the limits of a unified memory, or None if its vendor's rule is not known.

    >>> mac = DeviceSpec(kind="uma", vendor="Apple", memory_bytes=128 * GIB,
    ...                  memory_bandwidth_bytes_per_second=1)
    >>> round(unified_memory(mac).usable_bytes / GIB, 2)
    107.52
    """
    rule = {"Apple": _apple, "NVIDIA": _nvidia, "AMD": _amd, "Intel": _intel}.get(
        device.vendor or ""
    )
    return rule(device.memory_bytes) if rule and device.kind == "uma" else None


def _apple(whole: int) -> UnifiedMemory:
    size = whole / GIB
    share = next((share for most, share in APPLE_SHARES if size <= most), APPLE_LARGEST_SHARE)
    old = APPLE_OLD_SHARES[size > APPLE_OLD_SMALL]
    return UnifiedMemory(
        visible_bytes=whole,
        usable_bytes=share * whole,
        assured_bytes=min(old, share) * whole,
        otherwise="before macOS 26",
        advice="macOS 26 or a larger sysctl iogpu.wired_limit_mb",
    )


def _nvidia(whole: int) -> UnifiedMemory:
    visible = NVIDIA_VISIBLE * whole
    usable = visible - min(NVIDIA_SYSTEM_BYTES, (1 - NVIDIA_VISIBLE) * whole)
    return UnifiedMemory(visible, usable, usable)


def _amd(whole: int) -> UnifiedMemory:
    usable = AMD_FIRMWARE_SHARE * whole
    return UnifiedMemory(
        visible_bytes=usable,
        usable_bytes=usable,
        assured_bytes=AMD_DEFAULT_SHARE * whole,
        otherwise="with Linux's default GTT",
        advice="a larger ttm.pages_limit, or memory reserved in the firmware",
    )


def _intel(whole: int) -> UnifiedMemory:
    usable = INTEL_SHARE * whole
    return UnifiedMemory(
        visible_bytes=usable,
        usable_bytes=usable,
        assured_bytes=INTEL_OLD_SHARE * whole,
        otherwise="with drivers before 2025",
        advice="a newer graphics driver",
    )
