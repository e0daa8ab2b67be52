"""Reads the CUDA and ROCm versions of the driver and of torch without loading torch."""

import importlib.util
import re
import types
from pathlib import Path

_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([0-9]+)\.([0-9]+)'", re.MULTILINE)
_TORCH_HIP = re.compile(r"^hip\b[^=]*=\s*'([0-9]+)\.([0-9]+)", re.MULTILINE)
FP8_CAPABILITY = (8, 9)  # the first with FP8 matrix products: Ada Lovelace
TRITON_CAPABILITY = (7, 0)  # the first that torch compiles Triton kernels for: Volta
_CUDA_UNIT = 1000  # NVML reports CUDA 12.4 as 12040


def cuda_of_driver(library: types.ModuleType) -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, or None if unknown."""
    try:  # amdsmi has neither the function nor the error
        version = int(library.nvmlSystemGetCudaDriverVersion_v2())
    except AttributeError:
        return None
    except library.NVMLError:
        return None
    return version // _CUDA_UNIT, version % _CUDA_UNIT // 10


def cuda_of_torch() -> tuple[int, int] | None:
    """Return torch's CUDA version, read without importing torch, or None for another build."""
    return _version_in_torch(_TORCH_CUDA)


def rocm_of_torch() -> tuple[int, int] | None:
    """Return torch's ROCm version, read without importing torch, or None for another build."""
    return _version_in_torch(_TORCH_HIP)


def _version_in_torch(pattern: re.Pattern[str]) -> tuple[int, int] | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    built = pattern.search(version.read_text()) if version.exists() else None
    return (int(built[1]), int(built[2])) if built else None


def as_text(version: tuple[int, int] | None) -> str | None:
    """Return a version as text, such as "12.4"."""
    return f"{version[0]}.{version[1]}" if version else None
