"""The device catalog: dense peaks, bandwidths and sizes, by slug or alias."""

import csv
import re
from functools import cache

from planner.catalog.instances import price_of
from planner.catalog.mig import instance_of, profile_of_driver
from planner.catalog.nearest import nearest_names
from planner.catalog.reading import data_text
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
