"""Which CUDA the driver runs and which one torch was built with, neither of them loaded."""

import importlib.util
import re
import types
from pathlib import Path

_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([0-9]+)\.([0-9]+)'", re.MULTILINE)
FP8_CAPABILITY = (8, 9)  # of the first GPUs that multiply in 8-bit floats: Ada Lovelace
TRITON_CAPABILITY = (7, 0)  # of the first GPUs that torch compiles kernels for: Volta
_CUDA_UNIT = 1000  # NVML says CUDA 12.4 as 12040


def cuda_of_driver(library: types.ModuleType) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver runs, or None where it does not tell."""
    try:
        version = int(library.nvmlSystemGetCudaDriverVersion_v2())
    except (AttributeError, library.NVMLError):
        return None
    return version // _CUDA_UNIT, version % _CUDA_UNIT // 10


def cuda_of_torch() -> tuple[int, int] | None:
    """Return the CUDA that torch was built with, read without loading it; None: without any."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    version = Path(found.origin).with_name("version.py")
    built = _TORCH_CUDA.search(version.read_text()) if version.exists() else None
    return (int(built[1]), int(built[2])) if built else None


def as_text(version: tuple[int, int] | None) -> str | None:
    """Return a version as people write it."""
    return f"{version[0]}.{version[1]}" if version else None
