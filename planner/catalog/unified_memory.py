"""How much of a unified memory the GPU may take, by vendor, size and operating system.

Apple: Metal's ``recommendedMaxWorkingSetSize``, as llama.cpp prints it. macOS 26 raised it:
11.84 of 16 GiB, 17.76 of 24, 24.96 of 32, 28.08 of 36, 37.44 of 48, 51.84 of 64, 107.52 of 128
(ggml_metal_device_init logs of M1 to M5; antirez/ds4 PR 893), about 222.7 of 256 (raullenchai/
Rapid-MLX PR 183) and 464 of 512. Before, it was two thirds up to 32 GiB (10.67 of 16, 16 of 24,
21.33 of 32) and three quarters above (48 of 64, 72 of 96; ggml-org/llama.cpp issues 687, 1870,
2011, 3213). Machines of 16 GiB keep two thirds: wiring more freezes them (osaurus-ai/vmlx-swift
PR 421), because macOS itself takes 4 to 5 GiB.

NVIDIA: a DGX Spark shows 121.69 of 128 GiB to CUDA (GLM-5.3-Flash-EXL3-2x-DGX-Sparks issue 47), a
Jetson AGX Orin about 61.4 of 64; the system's own memory comes out of it.

AMD: Linux maps half of the memory for the GPU (the GTT: 62.5 of 125 GiB, lhl/strix-halo-testing
issue 4) unless ``ttm.pages_limit`` raises it; firmware reserves at most three quarters.

Intel: drivers share 57 % with the GPU, 18 of 32 GiB (IGCIT issue 1536), older ones half.
"""

from dataclasses import dataclass

from planner.specs.cluster import DeviceSpec

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
