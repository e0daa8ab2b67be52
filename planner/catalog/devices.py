"""Devices of the catalog, and the offers of cloud instances with them."""

import csv
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from pydantic import NonNegativeFloat, PositiveInt

from planner.catalog.device_names import DeviceNames, NamedDevice, Sizes, is_named_size
from planner.catalog.reading import data_text, nearest_names
from planner.specs.base import Dtype, SparseSpec, UnknownDeviceError, UnknownInstanceError
from planner.specs.cluster import DeviceSpec
from planner.specs.units import GIB

# ---------------------------------------------------------------------------
# Cloud offers: devices per hourly price, with source, region and date.
# ---------------------------------------------------------------------------


OFFER_NUMBERS = ("vcpus", "host_memory_bytes")
OFFER_TEXTS = ("gpu", "region", "tier", "as_of", "source", "notes")


class Instance(SparseSpec):
    """One offer: a number of devices for an hourly price, as of a date.

    ``device`` is a catalog id, absent if the device catalog does not have the GPU. A spot offer
    can be revoked; its price is the lowest observed one.
    """

    id: str
    provider: str
    gpu: str
    device: str | None = None
    devices: PositiveInt
    vcpus: PositiveInt | None = None
    host_memory_bytes: PositiveInt | None = None
    region: str | None = None
    price_usd_per_hour: NonNegativeFloat
    price_usd_per_device_hour: NonNegativeFloat
    tier: str
    is_spot: bool
    as_of: str
    source: str
    notes: str | None = None

    @property
    def price_source(self) -> str:
        """Return the source of the price: offer, collector and date."""
        spot = "spot price" if self.is_spot else f"{self.tier} price"
        return f"{spot} of {self.id}, {self.source}, {self.as_of}"


def _instance(row: dict[str, str]) -> Instance:
    price, devices = float(row["usd_per_hour"]), int(row["devices"])
    return Instance(
        id=row["id"],
        provider=row["provider"],
        device=row["device"] or None,
        devices=devices,
        price_usd_per_hour=price,
        price_usd_per_device_hour=price / devices,
        is_spot=row["spot"] == "yes",
        **{name: row[name] or None for name in OFFER_TEXTS},
        **{name: int(row[name]) if row[name] else None for name in OFFER_NUMBERS},
    )


@cache
def _instances() -> dict[str, Instance]:
    rows = csv.DictReader(data_text("instances.csv").splitlines())
    return {row["id"]: _instance(row) for row in rows}


@cache
def _offers_by_name() -> dict[str, str]:
    """Return offer ids by name: the id, and the instance type if it is unique.

    ``aws/p5.48xlarge`` is also ``p5.48xlarge``.
    """
    ids_by_type: dict[str, list[str]] = {}
    for instance_id in _instances():
        ids_by_type.setdefault(instance_id.split("/", 1)[1], []).append(instance_id)
    unique = {name: ids[0] for name, ids in ids_by_type.items() if len(ids) == 1}
    return {**unique, **{instance_id: instance_id for instance_id in _instances()}}


def list_instances() -> tuple[Instance, ...]:
    """Return every offer, in file order."""
    return tuple(_instances().values())


@cache
def largest_offer(device: str) -> Instance | None:
    """Return the offer of one machine with the most of a device, None if there is none."""
    offers = (each for each in list_instances() if each.device == device)
    return max(offers, key=lambda each: each.devices, default=None)


def find_instance(name: str) -> Instance | None:
    """Return an offer by its id, or by its type if only one provider has it, or None."""
    instance_id = _offers_by_name().get(name.strip().lower())
    return None if instance_id is None else _instances()[instance_id]


def get_instance(name: str) -> Instance:
    """Return an offer by its id, or by its type if only one provider has it.

    Raises:
        UnknownInstanceError: the catalog has no such name; the message gives the nearest ones.
    """
    instance = find_instance(name)
    if instance is None:
        nearest = nearest_names(name.strip().lower(), _instances())
        raise UnknownInstanceError(
            f"no instance {name!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
            "any other offer can be given as a cluster whose device has price_usd_per_hour",
            "cluster.instance",
            nearest=nearest,
        )
    return instance


def offers_for(device_id: str, *, spot: bool = False) -> tuple[Instance, ...]:
    """Return the offers of a device, cheapest per device first; without spot by default."""
    offers = [offer for offer in list_instances() if offer.device == device_id]
    selected = [offer for offer in offers if spot or not offer.is_spot]
    return tuple(sorted(selected, key=lambda offer: (offer.price_usd_per_device_hour, offer.id)))


@cache
def price_of(device_id: str) -> dict[str, object]:
    """Return the median price per device-hour of the newest firm offers, with its source."""
    firm = offers_for(device_id)
    if not firm:
        return {}
    newest = max(offer.as_of[:4] for offer in firm)
    recent = [offer for offer in firm if offer.as_of.startswith(newest)]
    providers = sorted({offer.provider for offer in recent})
    collectors = sorted({offer.source.split(" ")[0] for offer in recent})
    day = max(offer.as_of for offer in recent)
    source_text = (
        f"median of {len(recent)} on-demand offers of {', '.join(providers)}, "
        f"collected by {', '.join(collectors)}, {day}"
    )
    hourly = statistics.median(offer.price_usd_per_device_hour for offer in recent)
    return {"price_usd_per_hour": round(hourly, 6), "price_source": source_text}


# ---------------------------------------------------------------------------
# The device catalog: peaks, bandwidths, sizes; MIG instances; a host's own device.
# ---------------------------------------------------------------------------


# Instances of NVIDIA GPUs in MIG mode: their share of the whole GPU's datasheet.
#
# Sources: NVIDIA, Multi-Instance GPU User Guide (docs.nvidia.com/datacenter/tesla/mig-user-guide):
# "MIG Device Names" (a name is compute slices and memory in GB), "Supported MIG Profiles"
# (fractions of memory and of SMs), "Concepts" (a memory slice is an eighth of capacity and of
# bandwidth). SMs of an A100's profiles: "List GPU Instance Profiles" there; of an H100's, whose
# 1g.20gb has more than a 1g.10gb: ``nvidia-smi mig -lgip`` at jbarrow.ai/field_notes/nvidia-mig.
# torch counts the same on an H200.


# Compute and memory slices of each profile; the last is the whole GPU.
SEVEN_SLICE_PROFILES = ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8))
FOUR_SLICE_PROFILES = ((1, 1), (2, 2), (4, 4))
PROFILES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "a30": FOUR_SLICE_PROFILES,
    "rtx-pro-6000-blackwell": FOUR_SLICE_PROFILES,
    **dict.fromkeys(
        ("a100", "h100", "h200", "h20", "gh200", "b200", "gb200"), SEVEN_SLICE_PROFILES
    ),
}
# Chip or catalog id -> SMs of the whole GPU, and of each profile.
MULTIPROCESSORS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "a100": (108, (14, 14, 28, 42, 56, 98)),
    "h100-sxm5-80gb": (132, (16, 26, 32, 60, 64, 132)),
    "h200-sxm-141gb": (132, (16, 26, 32, 60, 64, 132)),
}
NAME = re.compile(r"(.+) MIG (\d)g\.(\d+)gb(?:[+-][a-z.]+)?")
MOST_ROUNDING = 0.1  # of the memory: names are rounded to a gigabyte
BYTES_PER_GB = 2**30  # as the names count


class Profile(NamedTuple):
    """A GPU instance's profile: compute slices and memory in GB, as in "3g.40gb"."""

    compute_slices: int
    memory_gb: int


def profile_of_driver(name: str) -> tuple[str, Profile] | None:
    """Return the whole GPU's name and the profile of an instance's name, or None.

    A compute instance, which is a part of a GPU instance, has no profile here.

    >>> profile_of_driver("NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    ('NVIDIA A100-SXM4-80GB', Profile(compute_slices=3, memory_gb=40))
    >>> profile_of_driver("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb")
    """
    found = NAME.fullmatch(name)
    return (found[1], Profile(int(found[2]), int(found[3]))) if found else None


def instance_of(gpu: DeviceSpec, profile: Profile) -> DeviceSpec | None:
    """Return an instance as a device, or None if the GPU has no such profile.

    It has its part of memory, bandwidth and SMs. Instances have no links to each other; price and
    power are of the whole GPU and are left out.
    """
    profiles = next((each for chip, each in PROFILES.items() if _is_of(gpu.id, chip)), ())
    known = next((each for each in profiles if _is_named(each, profile, profiles[-1], gpu)), None)
    if known is None:
        return None
    all_compute_slices, all_memory_slices = profiles[-1]
    share = known[1] / all_memory_slices
    compute = known[0] / all_compute_slices
    for chip, (whole, counts) in MULTIPROCESSORS.items():
        if _is_of(gpu.id, chip):
            compute = counts[profiles.index(known)] / whole
    words = f"{profile.compute_slices}g.{profile.memory_gb}gb"
    return gpu.model_copy(
        update={
            "id": f"{gpu.id}-mig-{words.replace('.', '-')}",
            "name": f"{gpu.name} MIG {words}",
            "aliases": (),
            "memory_bytes": int(gpu.memory_bytes * share),
            "memory_bandwidth_bytes_per_second": gpu.memory_bandwidth_bytes_per_second * share,
            "peak_flops_per_second": {
                dtype: rate * compute for dtype, rate in gpu.peak_flops_per_second.items()
            },
            "achieved_flops_per_second": {
                dtype: rate * compute for dtype, rate in gpu.achieved_flops_per_second.items()
            },
            "intra_node_bandwidth_bytes_per_second": None,
            "link": None,
            "tdp_watts": None,
            "price_usd_per_hour": None,
            "price_source": None,
            "source": f"{gpu.source or 'data sheet'}; {known[1]}/{all_memory_slices} of the "
            f"memory and {compute:.1%} of the SMs by NVIDIA's MIG User Guide",
        }
    )


def _is_named(
    slices: tuple[int, int], profile: Profile, whole: tuple[int, int], gpu: DeviceSpec
) -> bool:
    """Return whether a name's compute slices and memory are those of a GPU's profile."""
    named = profile.memory_gb * BYTES_PER_GB / gpu.memory_bytes
    share = slices[1] / whole[1]
    return slices[0] == profile.compute_slices and abs(named - share) <= MOST_ROUNDING * share


def _is_of(device_id: str, chip: str) -> bool:
    return device_id == chip or device_id.startswith(f"{chip}-")


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


def _device(row: dict[str, str]) -> DeviceSpec:
    fields: dict[str, object] = {name: row[name] or None for name in TEXTS}
    fields.update({name: float(row[name]) for name in NUMBERS if row[name]})
    peaks = _rates(row, DTYPE_BY_COLUMN)
    if row["vendor"] == "AMD" and "nvfp4" in peaks:  # the 4-bit floats of AMD are MXFP4
        peaks["mxfp4"] = peaks.pop("nvfp4")
    return DeviceSpec.model_validate(
        {
            **fields,
            "memory_bytes": int(row["memory_bytes"]),
            "peak_flops_per_second": peaks,
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
    memory_bytes = _devices()[names[sized[1]]].memory_bytes
    return names[sized[1]] if is_named_size(memory_bytes, int(sized[2])) else None


@cache
def memory_sizes() -> dict[str, Sizes]:
    """Return the memory sizes of the devices that were sold with several, by device."""
    rows = csv.DictReader(data_text("memory_sizes.csv").splitlines())
    return {
        row["device"]: Sizes(row["chip"], tuple(map(int, row["sizes_gib"].split(";"))))
        for row in rows
    }


@cache
def _names() -> DeviceNames:
    devices = _devices()
    return DeviceNames(
        {each.id: (each.id, *each.aliases, each.name or each.id) for each in devices.values()},
        {each.id: each.memory_bytes for each in devices.values()},
        memory_sizes(),
    )


@lru_cache(maxsize=4096)
def find_device(name: str) -> DeviceSpec | None:
    """Return a device by id, alias or full name in any spelling, or None.

    A memory size in the name is one with which the device was sold, as in "m2 8gb".

    >>> [find_device(name).id for name in ("rtx4090", "4060 Ti 8GB", "macbook air m2 8gb")]
    ['rtx-4090', 'rtx-4060-ti-8gb', 'apple-m2-10gpu-8gb']
    """
    exact = _id_of(device_slug(name))
    found = _names().find(name) if exact is None else NamedDevice(exact)
    if found is None:
        return None
    device = _devices()[found.id]
    return device if found.memory_gib is None else _of_size(device, found.memory_gib)


def _of_size(device: DeviceSpec, memory_gib: int) -> DeviceSpec:
    """Return a device with another of the memory sizes with which it was sold."""
    return device.model_copy(
        update={
            "id": f"{device.id}-{memory_gib}gb",
            "name": f"{device.name} {memory_gib}GB",
            "aliases": (),
            "memory_bytes": memory_gib * GIB,
        }
    )


@cache
def devices_of_every_size() -> tuple[DeviceSpec, ...]:
    """Return every device of the catalog with each memory size with which it was sold."""
    return tuple(
        each
        for device in list_devices()
        for each in (
            device,
            *(
                _of_size(device, size)
                for size in (memory_sizes()[device.id].gib if device.id in memory_sizes() else ())
                if size * GIB != device.memory_bytes
            ),
        )
    )


def nearest_devices(name: str) -> tuple[str, ...]:
    """Return the names of devices that are most like an unknown one.

    Of a known device with a memory with which it was not sold they are those with the sizes sold.
    """
    bare = re.sub(r"[-\s]*\d+\s*(?:gi?b|g)$", "", name.strip(), flags=re.IGNORECASE)
    device = find_device(bare) if bare != name.strip() else None
    if device is not None and device.id in memory_sizes():
        chip = memory_sizes()[device.id].chip
        return tuple(
            f"{each}-{size}gb"
            for each, sizes in memory_sizes().items()
            if sizes.chip == chip
            for size in sizes.gib
        )
    return nearest_names(device_slug(name), _ids_by_name())


def get_device(name: str) -> DeviceSpec:
    """Return a device by id, alias or full name.

    Raises:
        UnknownDeviceError: the catalog has no such name; the message gives the nearest ones.
    """
    device = find_device(name)
    if device is None:
        nearest = nearest_devices(name)
        raise UnknownDeviceError(
            f"no device {name!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
            "any other device can be given as an object with memory_bytes, "
            "memory_bandwidth_bytes_per_second and peak_flops_per_second",
            "cluster.device",
            nearest=nearest,
        )
    return device


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
    if device.kind != "uma":
        return None
    whole = device.memory_bytes
    match device.vendor:
        case "Apple":
            size = whole / GIB
            shares = (share for most, share in APPLE_SHARES if size <= most)
            share = next(shares, APPLE_LARGEST_SHARE)
            old = APPLE_OLD_SHARES[size > APPLE_OLD_SMALL]
            return UnifiedMemory(
                visible_bytes=whole,
                usable_bytes=share * whole,
                assured_bytes=min(old, share) * whole,
                otherwise="before macOS 26",
                advice="macOS 26 or a larger sysctl iogpu.wired_limit_mb",
            )
        case "NVIDIA":
            visible = NVIDIA_VISIBLE * whole
            usable = visible - min(NVIDIA_SYSTEM_BYTES, (1 - NVIDIA_VISIBLE) * whole)
            return UnifiedMemory(visible, usable, usable)
        case "AMD":
            return _driver_limited_memory(
                AMD_FIRMWARE_SHARE * whole,
                AMD_DEFAULT_SHARE * whole,
                otherwise="with Linux's default GTT",
                advice="a larger ttm.pages_limit, or memory reserved in the firmware",
            )
        case "Intel":
            return _driver_limited_memory(
                INTEL_SHARE * whole,
                INTEL_OLD_SHARE * whole,
                otherwise="with drivers before 2025",
                advice="a newer graphics driver",
            )
        case _:
            return None


def _driver_limited_memory(
    usable_bytes: float, assured_bytes: float, *, otherwise: str, advice: str
) -> UnifiedMemory:
    """Return the limits of a GPU that sees only the bytes that its driver lets it use."""
    return UnifiedMemory(usable_bytes, usable_bytes, assured_bytes, otherwise, advice)


# The device of a host: as its datasheet states it, and as its measured rates make it.
#
# A GPU in the catalog has the published figures with the memory that its driver reports. Measured
# rates replace published ones; any other device, such as a CPU, has its measured rates alone.


class DriverDevice(NamedTuple):
    """A device as its driver, or the kernel, describes it.

    ``is_partition``: a part of a GPU whose name is that of the whole, such as AMD's CPX.
    ``shares_host_memory``: ``memory_bytes`` is the host's, of which the catalog knows the part.
    """

    name: str
    kind: str  # "gpu" or "cpu"
    memory_bytes: int
    is_partition: bool = False
    shares_host_memory: bool = False


class MeasuredRates(NamedTuple):
    """What a device achieves; None and absent dtypes were not measured.

    ``runtime_memory_bytes`` and ``training_memory_bytes`` are a job process's memory without its
    model, and that of training in addition to tensors. ``source`` and ``as_of`` (an ISO date) say
    who measured them and when.
    """

    memory_bandwidth_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    source: str
    as_of: str | None = None
    host_to_device_bytes_per_second: float | None = None
    op_overhead_seconds: float | None = None
    runtime_memory_bytes: int | None = None
    training_memory_bytes: int | None = None


class HostDevice(NamedTuple):
    """A host's device by its datasheet and with its measured rates; None where there is none."""

    datasheet: DeviceSpec | None
    measured: DeviceSpec | None


def host_device(
    device: DriverDevice, rates: MeasuredRates | None, *, device_id: str = "this-host"
) -> HostDevice:
    """Return a host's device; ``device_id`` names it where the catalog does not know it."""
    datasheet = _datasheet(device)
    return HostDevice(datasheet, rates and _measured(device, datasheet, rates, device_id))


def _datasheet(device: DriverDevice) -> DeviceSpec | None:
    published = device_of_driver(device.name) if device.kind == "gpu" else None
    if published is None or device.is_partition:
        return None
    if device.shares_host_memory or published.kind == "uma":
        return published  # the planner takes the host's share off
    return published.model_copy(update={"memory_bytes": device.memory_bytes})


def _measured(
    device: DriverDevice, datasheet: DeviceSpec | None, rates: MeasuredRates, device_id: str
) -> DeviceSpec:
    base: dict[str, Any] = {
        "id": device_id,
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "peak_flops_per_second": {},
    }
    if datasheet is not None:
        base = datasheet.model_dump(mode="json")
    measured: dict[str, Any] = {
        "memory_bandwidth_bytes_per_second": rates.memory_bandwidth_bytes_per_second,
        "peak_flops_per_second": {**base["peak_flops_per_second"], **rates.flops_per_second},
        "host_to_device_bandwidth_bytes_per_second": rates.host_to_device_bytes_per_second,
        "op_overhead_seconds": rates.op_overhead_seconds,
        "runtime_overhead_bytes": rates.runtime_memory_bytes,
        "training_overhead_bytes": rates.training_memory_bytes,
        "provenance": "measured",
        "source": rates.source,
        "as_of": rates.as_of,
    }
    known = {name: value for name, value in measured.items() if value is not None}
    return DeviceSpec.model_validate({**base, **known})
