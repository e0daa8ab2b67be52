"""Instances of NVIDIA GPUs in MIG mode: their share of the whole GPU's datasheet.

Sources: NVIDIA, Multi-Instance GPU User Guide (docs.nvidia.com/datacenter/tesla/mig-user-guide):
"MIG Device Names" (a name is compute slices and memory in GB), "Supported MIG Profiles" (fractions
of memory and of SMs), "Concepts" (a memory slice is an eighth of capacity and of bandwidth). SMs
of an A100's profiles: "List GPU Instance Profiles" there; of an H100's, whose 1g.20gb has more
than a 1g.10gb: ``nvidia-smi mig -lgip`` at jbarrow.ai/field_notes/nvidia-mig. torch counts the
same on an H200.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from planner.specs.cluster import DeviceSpec

# Compute and memory slices of each profile; the last is the whole GPU.
OF_SEVEN = ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8))
OF_FOUR = ((1, 1), (2, 2), (4, 4))
PROFILES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "a30": OF_FOUR,
    "rtx-pro-6000-blackwell": OF_FOUR,
    **dict.fromkeys(("a100", "h100", "h200", "h20", "gh200", "b200", "gb200"), OF_SEVEN),
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
