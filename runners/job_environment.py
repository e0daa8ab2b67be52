"""A job's environment variables: the agent's that are passed on, and those of its devices.

Every other variable stays with the agent: credentials, and loader or interpreter hooks
(``LD_PRELOAD``, ``PYTHONSTARTUP``) that run code in the job.
"""

import os
import re
from collections.abc import Mapping, Sequence

from runners.devices.visibility import BY_BUS, ORDER, job_variables
from runners.places import RunDevice

# Names that are passed on, and whole families of names by their prefix ("NCCL_*"), by reason.
PASSED = {
    "the user, the locale and the folders of programs, caches and temporary files": (
        "HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "XDG_CACHE_HOME",
    ),
    # The operator's own value: a driver's or toolkit's folder that ldconfig does not list.
    "where the GPU libraries and their toolkit are": (
        "CUDA_HOME", "CUDA_PATH", "HIP_PATH", "LD_LIBRARY_PATH", "ROCM_PATH",
    ),
    # Cluster documentation asks for them, and a wrong interface is a hang, not an error.
    "the interfaces and transports of collectives": (
        "FI_*", "GLOO_SOCKET_IFNAME", "NCCL_*", "RCCL_*", "TORCH_NCCL_*", "UCX_*",
    ),
    "the compilers of kernels and the caches of what they built": (
        "CC", "CUDA_CACHE_*", "CXX", "TORCHINDUCTOR_CACHE_DIR", "TORCH_CUDA_ARCH_LIST",
        "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR",
    ),
    "the settings of drivers, allocators and kernel libraries": (
        "AMD_SERIALIZE_KERNEL", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING", "HSA_*", "MIOPEN_*",
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
    ),
    # They hold unless the job was assigned devices of its own.
    "the devices that the agent may use": (
        "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    ),
}  # fmt: skip
# A family may gain a name that carries a credential.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_NAMES = frozenset(name for names in PASSED.values() for name in names)
_FAMILIES = tuple(name.removesuffix("*") for name in sorted(_NAMES) if name.endswith("*"))
# Indices into what another variable left visible: dropped when devices are named by UUID.
_BY_INDEX = frozenset(
    {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
)


def passed_variables(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the given variables that a job receives."""
    return {name: value for name, value in given.items() if _is_passed(name)}


def _is_passed(name: str) -> bool:
    return name in _NAMES or (name.startswith(_FAMILIES) and not _SECRET.search(name))


def with_devices(env: Mapping[str, str], devices: Sequence[RunDevice]) -> dict[str, str]:
    """Return the environment of a job that sees these devices alone.

    GPUs are named by UUID, which is stable across reboots; a job without any keeps what the agent
    may use.
    """
    gpus = [device for device in devices if device.kind == "gpu"]
    visible = job_variables([gpu.uuid for gpu in gpus], [gpu.index for gpu in gpus])
    # Ordered as in nvidia-smi, so that an index in a message is the one that NVML shows.
    order = {ORDER: BY_BUS}
    if not visible:
        return order | dict(env)
    return order | {name: value for name, value in env.items() if name not in _BY_INDEX} | visible
