"""Links between GPUs, GPUs that a process may see, and vendors' commands."""

import functools
import importlib.util
import json
import re
import subprocess
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runners.shared.log_text import QUOTED_CHARACTERS, last_line, plain, shortened

# ---------------------------------------------------------------------------
# The GPU interconnect topology of a host: NVLink, or the PCIe path.
# ---------------------------------------------------------------------------


SELF = "X"
# NVML's common ancestor levels, in the notation of ``nvidia-smi topo -m``.
PCIE = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
UNKNOWN = "?"
SAME = "SAME"  # MIG instances or partitions of one GPU
MAX_LINKS = 18  # for bindings that do not say NVML's own maximum
_MEMORY_READ, _GRANTED = 0, 0  # nvml.h: NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK
_ENABLED = 1
_SWITCH = 2


def matrix(
    library: types.ModuleType, handles: Sequence[Any] | None = None
) -> tuple[tuple[str, ...], ...]:
    """Return the connection type of each pair of GPUs; an empty tuple for a single GPU.

    ``handles``: of the GPUs; of a MIG instance, that of its GPU. Default: all.
    """
    if handles is None:
        count = library.nvmlDeviceGetCount()
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    if len(handles) <= 1:
        return ()
    buses = [_bus(query_nvml(library, handle, "nvmlDeviceGetPciInfo")) for handle in handles]
    links = [_links(library, handle) for handle in handles]
    return tuple(
        tuple(
            SELF if row == column else _link(library, handles, buses, links, (row, column))
            for column in range(len(handles))
        )
        for row in range(len(handles))
    )


def peer_access(
    library: types.ModuleType, handles: Sequence[Any]
) -> tuple[tuple[bool | None, ...], ...]:
    """Return for each pair of GPUs whether one reads the other's memory directly.

    None: the driver does not say, or the pair is one GPU.
    """
    if len(handles) <= 1:
        return ()
    return tuple(
        tuple(None if row is column else _grants(library, row, column) for column in handles)
        for row in handles
    )


def _grants(library: types.ModuleType, row: object, column: object) -> bool | None:
    status = query_nvml(library, row, "nvmlDeviceGetP2PStatus", column, _MEMORY_READ)
    return None if status is None else status == _GRANTED


def num_links(library: types.ModuleType, handle: object) -> int:
    """Return how many NVLinks of a GPU are active."""
    return sum(_links(library, handle).values())


def query_nvml(library: types.ModuleType, handle: object, name: str, *arguments: object) -> Any:  # noqa: ANN401 - NVML is untyped
    """Return the result of an NVML query, or None if GPU or driver does not support it."""
    function = getattr(library, name, None)
    if function is None:
        return None
    try:
        return function(handle, *arguments)
    except library.NVMLError:
        return None


def query_system(library: types.ModuleType, name: str) -> Any:  # noqa: ANN401 - NVML is untyped
    """Return the result of an NVML query about the whole host, or None."""
    function = getattr(library, name, None)
    if function is None:
        return None
    try:
        return function()
    except library.NVMLError:
        return None


def _link(
    library: types.ModuleType,
    handles: Sequence[Any],
    buses: list[str],
    links: list[Counter[str]],
    pair: tuple[int, int],
) -> str:
    row, column = pair
    if handles[row] is handles[column]:
        return SAME
    through_switch = min(links[row][SWITCHED], links[column][SWITCHED])
    if num_links := links[row][buses[column]] or through_switch:
        return f"NV{num_links}"
    query = functools.partial(query_nvml, library, handles[row])
    level = query("nvmlDeviceGetTopologyCommonAncestor", handles[column])
    return PCIE.get(level, UNKNOWN)


SWITCHED = "switch"


def _links(library: types.ModuleType, handle: object) -> Counter[str]:
    """Return the number of NVLinks to each bus id, or to an NVSwitch."""
    return Counter(_ends(library, handle))


def _ends(library: types.ModuleType, handle: object) -> Iterator[str]:
    for link in range(getattr(library, "NVML_NVLINK_MAX_LINKS", MAX_LINKS)):
        if query_nvml(library, handle, "nvmlDeviceGetNvLinkState", link) != _ENABLED:
            continue
        kind = query_nvml(library, handle, "nvmlDeviceGetNvLinkRemoteDeviceType", link)
        if kind == _SWITCH:
            yield SWITCHED
        else:
            yield _bus(query_nvml(library, handle, "nvmlDeviceGetNvLinkRemotePciInfo", link))


def _bus(info: Any) -> str:  # noqa: ANN401 - NVML is untyped
    """Return a bus id in a canonical form; drivers write the domain with 4 or 8 digits."""
    if info is None:
        return ""
    value = info.busId
    text = (value.decode() if isinstance(value, bytes) else str(value)).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}"


# ---------------------------------------------------------------------------
# Which GPUs a process sees, by the rules of CUDA and ROCm, and the versions of both.
# ---------------------------------------------------------------------------


CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
VARIABLES = (CUDA, HIP, ROCR)
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
_INTEGER = re.compile(r"[+-]?[0-9]+")
_ROCR_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)")
_ROCR_UUID = re.compile(r"GPU-[0-9a-f]{16}")
_LEAST_ROCR_UUID = len("GPU-0")


class CudaDevice(NamedTuple):
    """A GPU or a MIG instance; ``gpu`` is the GPU's place in the order of PCI buses.

    ``name``: the GPU's model; ``path``: an instance's name for drivers before R470.
    """

    uuid: str
    gpu: int
    is_instance: bool = False
    name: str = ""
    path: str = ""


def cuda_selected(devices: Sequence[CudaDevice], env: Mapping[str, str]) -> list[int]:
    """Return the places in ``devices`` that ``CUDA_VISIBLE_DEVICES`` selects, in its order.

    The list ends at its first invalid entry; a repeated one hides all.
    """
    value = env.get(CUDA)
    if value is None:
        return list(range(len(devices)))
    chosen: list[int] = []
    for found in _cuda_entries(devices, value):
        if found is None:
            break
        if set(found) & set(chosen):
            return []
        chosen += found
    return chosen


def cuda_visible(devices: Sequence[CudaDevice], env: Mapping[str, str]) -> list[int]:
    """Return the places in ``devices`` that one process gets from CUDA.

    A process gets one MIG instance, and no whole GPU beside it.
    """
    selected = cuda_selected(devices, env)
    instances = [place for place in selected if devices[place].is_instance]
    return instances[:1] or selected


def is_order_known(devices: Sequence[CudaDevice], env: Mapping[str, str]) -> bool:
    """Return whether CUDA counts the GPUs as NVML does.

    CUDA puts the fastest first, by a rule that is not published, unless told to use the bus.
    """
    return env.get(ORDER) == BY_BUS or len({each.name for each in devices}) <= 1


def _cuda_entries(devices: Sequence[CudaDevice], value: str) -> Iterator[list[int] | None]:
    """Yield the places that each entry names; None for an invalid one."""
    entries = [entry.strip() for entry in value.split(",")]
    kind = next((kind for kind in ("GPU-", "MIG-") if entries[0].startswith(kind)), "")
    for entry in entries:
        if kind and not entry.startswith(kind):
            yield None
        elif kind == "MIG-":
            yield _one([entry in {each.uuid, each.path} for each in devices])
        elif kind:
            yield _of_gpu(devices, {each.gpu for each in devices if _is_on(each, entry)})
        else:
            number = _INTEGER.match(entry)
            yield _of_gpu(devices, {int(number[0])}) if number else None


def _is_on(device: CudaDevice, prefix: str) -> bool:
    whole = device.path.partition("/")[0].removeprefix("MIG-") if device.is_instance else ""
    return (whole or device.uuid).startswith(prefix)


def _of_gpu(devices: Sequence[CudaDevice], gpus: set[int]) -> list[int] | None:
    """Return the device of one GPU, the first of its MIG instances; None if not exactly one."""
    places = [place for place, each in enumerate(devices) if {each.gpu} == gpus]
    return places[:1] or None


def _one(matches: Sequence[bool]) -> list[int] | None:
    return [matches.index(True)] if matches.count(True) == 1 else None


def rocm_visible(uuids: Sequence[str], env: Mapping[str, str]) -> list[int]:
    """Return the places in ``uuids`` that a HIP process sees, in its order.

    ROCR selects first; HIP's indices count what is left. HIP reads CUDA's variable where its
    own is empty. Empty, ROCR's hides all and HIP's nothing.
    """
    seen = _rocr(uuids, env[ROCR]) if ROCR in env else list(range(len(uuids)))
    value = env.get(HIP) or env.get(CUDA) or ""
    if not value:
        return seen
    chosen: list[int] = []
    for entry in value.split(","):
        place = _hip_place([uuids[each] for each in seen], entry)
        if place is None:
            break
        if seen[place] not in chosen:
            chosen.append(seen[place])
    return chosen


def _rocr(uuids: Sequence[str], value: str) -> list[int]:
    chosen: list[int] = []
    for entry in (each.strip() for each in value.split(",") if value):
        if entry.upper().startswith("G"):
            is_long = len(entry) >= _LEAST_ROCR_UUID
            found = _one([is_long and each.upper().startswith(entry.upper()) for each in uuids])
            place = found[0] if found else -1
        else:
            place = int(entry, 0) if _ROCR_INTEGER.fullmatch(entry) else -1
        if not 0 <= place < len(uuids) or place in chosen:
            break
        chosen.append(place)
    return chosen


def _hip_place(uuids: Sequence[str], entry: str) -> int | None:
    if entry.startswith("GPU-"):
        found = _one([each.lower() == entry.lower() for each in uuids])
        return found[0] if found else None
    return int(entry) if entry.isdecimal() and int(entry) < len(uuids) else None


def job_variables(uuids: Sequence[str], indices: Sequence[int]) -> dict[str, str]:
    """Return the variables with which a job sees these GPUs; unset ``VARIABLES`` beside them.

    AMD GPUs are selected for ROCR, by index where one has no unique id. HIP's and CUDA's own
    would select again among them; torch takes an empty one for no GPU.
    """
    if not any(is_amd(uuid) for uuid in uuids):
        return {CUDA: ",".join(uuids)} if uuids else {}
    has_ids = all(_ROCR_UUID.fullmatch(uuid) for uuid in uuids)
    return {ROCR: ",".join(uuids if has_ids else map(str, indices))}


def is_amd(uuid: str) -> bool:
    """Return whether a device's identifier is one that ``amd.facts`` gives."""
    return bool(_ROCR_UUID.match(uuid)) or uuid.startswith("PCI-")


# Reads the CUDA and ROCm versions of the driver and of torch without loading torch.


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


# ---------------------------------------------------------------------------
# Runs a vendor's command and reads the JSON that it prints.
# ---------------------------------------------------------------------------


TIMEOUT_SECONDS = 20.0  # xpu-smi starts its daemon first


class CommandUnavailableError(Exception):
    """A vendor's command is missing or failed; the text says which and why."""


def read_text(command: Sequence[str]) -> str:
    """Return what a command prints.

    Raises:
        CommandUnavailableError: the command is missing, takes too long, or fails.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        raise CommandUnavailableError(f"{command[0]} is not installed") from None
    except PermissionError:
        raise CommandUnavailableError(f"no permission to run {command[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandUnavailableError(f"{command[0]} did not answer: {error}") from None
    if done.returncode:
        output = last_line(done.stderr.strip() or done.stdout, f"code {done.returncode}")
        raise CommandUnavailableError(f"{' '.join(command)} failed: {output}")
    return done.stdout


def read_json(command: Sequence[str]) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON that a command prints; some print warnings before it.

    Raises:
        CommandUnavailableError: the command is missing, fails, or does not print valid JSON.
    """
    printed = read_text(command)
    starts = [at for at in (printed.find("{"), printed.find("[")) if at >= 0]
    try:
        return json.loads(printed[min(starts, default=0) :])
    except ValueError:
        begin = shortened(" ".join(plain(printed).split()), QUOTED_CHARACTERS)
        raise CommandUnavailableError(
            f"{' '.join(command)} did not print valid JSON: {begin or 'nothing'}"
        ) from None
