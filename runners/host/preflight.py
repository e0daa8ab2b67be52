"""Checks before a launch: memory, disk, ports, environment, GPUs."""

import contextlib
import importlib.metadata
import importlib.util
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from planner.specs.units import GIB
from runners.devices import amd
from runners.devices.topology import (
    FP8_CAPABILITY,
    TRITON_CAPABILITY,
    cuda_of_driver,
    cuda_of_torch,
    rocm_of_torch,
)
from runners.environments.builder import Pins, PinsError, Store, Version, needed_bytes
from runners.host import inventory, preflight_hub, preflight_weights
from runners.host.preflight_weights import FolderQuery
from runners.jobspec import FolderModel, HubModel, StoredModel
from runners.jobspec.base import is_store_url
from runners.jobspec.engines import OWN, running_on
from runners.jobspec.kinds import KINDS
from runners.launchers import attempts, launch
from runners.launchers.launch import LaunchRefusedError
from runners.shared.config import HostConfig, HostDir
from runners.shared.facts import GpuFacts
from runners.shared.messages import MAIN, MAX_SENTENCE, Needs, PreflightCheck, no, yes
from runners.supervision import procfs
from runners.supervision.child import compiler_name

# ---------------------------------------------------------------------------
# Preflight checks of GPU environments: compute capability, driver, C compiler.
# ---------------------------------------------------------------------------


# AMD's with FP8 matrix products (CDNA 3 and 4, RDNA 4), and without Triton (GCN).
AMD_FP8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")
AMD_WITHOUT_TRITON = ("gfx7", "gfx8", "gfx900", "gfx902", "gfx906")
COMPILERS = ("cc", "gcc", "clang")  # Triton compiles its kernel launchers with one of them


def checks(
    pins: Pins, library: inventory.Library | None, gpu_uuids: Sequence[str]
) -> Iterator[PreflightCheck]:
    """Yield the GPU checks of an environment; none if it needs no GPU.

    ``gpu_uuids``: uuids of the attempt's GPUs; empty: all GPUs.
    """
    if pins.cuda is None:
        return
    allocated = allocated_gpus(inventory.gpu_facts(library) if library else [], gpu_uuids)
    gpus = [gpu for gpu in allocated if gpu.vendor == "nvidia"]
    yield _gpu(pins, gpus, allocated)
    if library and gpus:
        yield driver_check(cuda_of_driver(library), pins.cuda, f"The environment {pins.name}")
    yield _c_compiler_check(pins)


def division_checks(
    pins: Pins, library: inventory.Library | None, needs: Needs
) -> Iterator[PreflightCheck]:
    """Yield whether split engines have enough GPUs and the package for KV cache transfer."""
    if needs.num_gpus:
        facts = list(inventory.gpu_facts(library)) if library else []
        allotted = [gpu for gpu in facts if not needs.gpus or gpu.uuid in needs.gpus]
        sentence = f"The job's engines take {needs.num_gpus} GPUs of their own"
        if len(allotted) < needs.num_gpus:
            yield no(
                "engines",
                f"{sentence}, and this host has {len(allotted)} for it.",
                f"Choose a host with {needs.num_gpus} free GPUs, or a plan without a split.",
            )
        else:
            yield yes("engines", f"{sentence}, and this host has them.")
    pinned = {line.partition("==")[0].lower() for line in pins.packages}
    if missing := [name for name in needs.packages if name not in pinned]:
        yield no(
            "transfer",
            f"The environment {pins.name} of this host pins no {', '.join(missing)[:200]}, over "
            "which the cache of a prompt travels from one engine to the other.",
            f"Add it to the host's own pins of {pins.name}, or remove that file: the shipped one "
            "has it.",
        )


def allocated_gpus(gpus: Iterable[GpuFacts], uuids: Sequence[str]) -> list[GpuFacts]:
    """Return the GPUs whose uuid is in ``uuids``; all if it is empty."""
    return [gpu for gpu in gpus if not uuids or gpu.uuid in uuids]


def unusable_gpu_checks(gpus: Sequence[GpuFacts]) -> Iterator[PreflightCheck]:
    """Yield a failed check where CUDA would not give the job the GPUs that it was given."""
    closed = [gpu for gpu in gpus if gpu.compute_mode == "prohibited"]
    if closed:
        named = ", ".join(f"GPU {gpu.index}" for gpu in closed)[:400]
        yield no(
            "compute mode",
            f"Computing on {named} is prohibited.",
            "Allow it on the host: nvidia-smi -c DEFAULT.",
        )
    waiting = [gpu for gpu in gpus if gpu.fabric_state not in (None, "completed")]
    if waiting:
        named = ", ".join(f"GPU {gpu.index} ({gpu.fabric_state})" for gpu in waiting)[:400]
        yield no(
            "NVSwitch",
            f"Not registered with the NVSwitches, so that CUDA does not start: {named}.",
            "Start the fabric manager on the host: systemctl start nvidia-fabricmanager.",
        )
    instances = [gpu for gpu in gpus if gpu.parent_uuid]
    if instances and len(gpus) > 1:
        named = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in instances)[:400]
        yield no(
            "MIG",
            f"A process gets one MIG instance and no GPU beside it; the job was given {len(gpus)} "
            f"GPUs, of which MIG instances are {named}.",
            "Give the job one device, or switch MIG off: nvidia-smi -mig 0.",
        )


def runtime_check(library: inventory.Library) -> PreflightCheck:
    """Check whether torch is built for the driver of the GPUs that jobs use."""
    if not amd.is_amdsmi(library):
        return driver_check(cuda_of_driver(library), cuda_of_torch())
    built, rocm = rocm_of_torch(), amd.rocm_version(library)
    if built is None:
        remedy = "Install a torch for ROCm on the host, as pytorch.org says."
        return no("driver", "torch is built without ROCm, so no GPU would be used.", remedy)
    here = f"; the host has ROCm {rocm}" if rocm else ""
    return yes("driver", f"torch is built with ROCm {built[0]}.{built[1]}{here}.")


def fp8_check(gpus: Sequence[GpuFacts]) -> PreflightCheck:
    """Check whether an attempt's GPUs support FP8 matrix products; CPUs emulate them."""
    minimum = _requirement(FP8_CAPABILITY, gpus, AMD_FP8)
    if not gpus:
        return yes(
            "fp8", "No GPU is used: products in 8-bit floats are emulated, which is slower."
        )
    too_old = _too_old(gpus, FP8_CAPABILITY)
    if not too_old:
        return yes("fp8", f"{len(gpus)} GPUs {minimum} multiply in 8-bit floats.")
    return no(
        "fp8",
        f"Products in 8-bit floats need GPUs {minimum}; {too_old}.",
        "Choose a host with newer GPUs, or train with products in BF16.",
    )


def flex_attention_check(gpus: Sequence[GpuFacts]) -> PreflightCheck:
    """Check whether an attempt's GPUs can train with FlexAttention; CPUs cannot."""
    too_old = _too_old(gpus, TRITON_CAPABILITY)
    minimum = _requirement(TRITON_CAPABILITY, gpus, ("gfx908",))
    if gpus and not too_old:
        return yes("flex", f"{len(gpus)} GPUs {minimum} train with FlexAttention.")
    why = too_old or "processors have no backward pass of it"
    return no(
        "flex",
        f"FlexAttention trains on GPUs {minimum}; {why}.",
        "Choose a host with such GPUs, or the attention kernel Fused (SDPA).",
    )


def _gpu(pins: Pins, gpus: Sequence[GpuFacts], allocated: Sequence[GpuFacts]) -> PreflightCheck:
    least = pins.compute_capability or (0, 0)
    minimum = _requirement(least)
    if not gpus:
        why = (
            ", ".join(sorted({gpu.name for gpu in allocated}))
            or inventory.driver_problem()
            or "no NVIDIA driver and no NVIDIA GPU answer here"
        )
        cuda = f"{pins.cuda[0]}.{pins.cuda[1]}" if pins.cuda else ""
        return no(
            "GPU",
            f"The environment {pins.name} runs on NVIDIA GPUs {minimum}, with a driver for CUDA "
            f"{cuda}, and this host has none: {why[:200]}.",
            "Choose a host with such a GPU, or an engine that runs on processors: "
            f"{'; '.join(each.words for each in running_on('cpu'))}.",
        )
    too_old = _too_old(gpus, least)
    if not too_old:
        return yes("GPU", f"{len(gpus)} GPUs {minimum}, as {pins.name} needs.")
    return no(
        "GPU",
        f"The environment {pins.name} needs GPUs {minimum}; {too_old}.",
        f"Choose a host with newer GPUs, or the engine {OWN}.",
    )


def _requirement(
    least: Version, gpus: Sequence[GpuFacts] = (), amd_names: Sequence[str] = ()
) -> str:
    if any(gpu.vendor == "amd" for gpu in gpus):
        return f"of architecture {' or '.join(amd_names)} or newer"
    return f"of compute capability {least[0]}.{least[1]} or newer"


def _too_old(gpus: Sequence[GpuFacts], least: Version) -> str:
    """Return a phrase naming the GPUs below a compute capability, or ""."""
    old = [gpu for gpu in gpus if _is_too_old(gpu, least)]
    named = ", ".join(
        f"{gpu.name} ({gpu.compute_capability or gpu.architecture or 'unknown'})" for gpu in old
    )
    return f"too old are {named[:400]}" if old else ""


def _is_too_old(gpu: GpuFacts, least: Version) -> bool:
    if gpu.vendor != "amd":
        major, _, minor = (gpu.compute_capability or "0.0").partition(".")
        return (int(major), int(minor or 0)) < least
    architecture = gpu.architecture or "unknown"
    if least == FP8_CAPABILITY:
        return architecture not in AMD_FP8
    return architecture.startswith((*AMD_WITHOUT_TRITON, "unknown"))


def _c_compiler_check(pins: Pins) -> PreflightCheck:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler:
        return yes("compiler", f"A C compiler is {compiler}.")
    return no(
        "compiler",
        f"{pins.name} compiles kernels as it starts, and this host has none of "
        f"{', '.join(COMPILERS)}.",
        "Install a C compiler on the host, such as gcc.",
    )


def driver_check(
    driver: Version | None, built_with: Version | None, what: str = "torch"
) -> PreflightCheck:
    """Check whether the driver supports the CUDA version of torch or an environment.

    A driver supports all minor versions of its CUDA major version.

    Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility".
    """
    if built_with is None:
        remedy = "Install a torch with CUDA on the host, as pytorch.org says for its driver."
        return no("driver", "torch is built without CUDA, so no GPU would be used.", remedy)
    built = f"{what} is built with CUDA {built_with[0]}.{built_with[1]}"
    if driver is None:
        return no("driver", f"{built}, and the driver does not say what it runs.", _UPDATE)
    sentence = f"{built}; the driver runs up to {driver[0]}.{driver[1]}."
    if driver[0] >= built_with[0]:
        return yes("driver", sentence)
    return no("driver", sentence, _UPDATE)


_UPDATE = "Install a newer driver on the host, or a torch that is built for this one."


# ---------------------------------------------------------------------------
# Preflight: checks whether this host can run an attempt now, before it is claimed.
#
# Each check measures the machine's present state. A check that cannot be done counts as failed:
# a returned attempt costs half a minute, a failed one costs a run.
# ---------------------------------------------------------------------------


# Distributions that job processes import; quantised dtypes need an additional library.
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
DTYPE_PACKAGES = {"int8": "torchao", "fp8": "torchao", "int4": "bitsandbytes"}
_SAME_VERSION = "Install the server's version on the host and start its agent again."
INSTALL = "Install what is missing on the host: pip install 'slipway[worker,gpu]'."


class StoppingAttempt(NamedTuple):
    """A running attempt with a stop order: its id and its GPUs."""

    attempt_id: str
    gpus: frozenset[str]


class HostState(NamedTuple):
    """The host's state that the checks need."""

    host_dir: HostDir
    config: HostConfig
    model_roots: Sequence[Path]
    leaving: Sequence[StoppingAttempt] = ()


class Gpu(NamedTuple):
    """The present state of one of the attempt's GPUs, from its vendor's library."""

    number: int
    uuid: str
    free_bytes: int
    foreign_pids: tuple[int, ...]


def run_checks(needs: Needs, place: HostState) -> tuple[PreflightCheck, ...]:
    """Run and return every check of an attempt's needs."""
    with inventory.gpu_library() as library:
        return tuple(_checks(needs, place, library))


def _checks(
    needs: Needs, place: HostState, library: inventory.Library | None
) -> Iterator[PreflightCheck]:
    yield _kind(needs)
    yield _packages(needs) if needs.environment == MAIN else _environment(needs, place)
    yield _disk(place)
    yield from _compiler(needs)
    if place.config.scheduler:  # it manages the node's free resources
        yield from _sources(needs, place)
        return
    if blocking := _blocking(needs, place.leaving):
        yield no(
            "earlier attempts",
            f"An attempt that is stopping still runs here: {', '.join(blocking)}.",
            "Wait until it is gone; the job is tried again.",
        )
    yield from _sources(needs, place)
    if needs.resume_from:
        yield _checkpoint(needs.resume_from, place)
    if needs.ports:
        yield _ports(needs.ports)
    gpus = gpus_of(needs, library) if library else []
    yield from _hardware(needs, place, library, has_gpus=bool(gpus))
    if missing := set(needs.gpus) - {gpu.uuid for gpu in gpus}:
        missing_uuids = ", ".join(sorted(missing))[:400]
        yield no(
            "GPUs",
            f"This host no longer has {missing_uuids}, which the job was given.",
            "See on the host's page which GPUs it reports; cordon the one that is gone.",
        )
    if library is None or not gpus:
        yield _memory(needs, place)
        return
    yield _gpu_memory(needs, gpus)
    yield _foreign(gpus)
    yield from unusable_gpu_checks(allocated_gpus(inventory.gpu_facts(library), needs.gpus))


# Checks of every host


def _blocking(needs: Needs, stopping: Sequence[StoppingAttempt]) -> list[str]:
    """Return the stopping attempts that still hold this attempt's GPUs."""
    requested_gpus = set(needs.gpus)
    return [
        each.attempt_id
        for each in stopping
        if not requested_gpus or not each.gpus or requested_gpus & each.gpus
    ]


def _kind(needs: Needs) -> PreflightCheck:
    if needs.kind in KINDS:
        return yes("kind", f"This host runs {needs.kind} jobs.")
    known = ", ".join(KINDS)
    return no(
        "kind",
        f"This host runs {known}, not {needs.kind}.",
        _SAME_VERSION,
    )


def _versions_for(needs: Needs) -> dict[str, str | None]:
    """Return the versions of the agent's packages that a job imports, None of absent ones."""
    of_kind = KINDS[needs.kind].packages if needs.kind in KINDS else ()
    formats = (needs.weight_dtype, needs.compute_dtype)
    required = (*PACKAGES, *of_kind, *filter(None, map(DTYPE_PACKAGES.get, formats)))
    return {name: _version(name) for name in required}


def _lacking_for(needs: Needs) -> list[str]:
    return [name for name, version in _versions_for(needs).items() if version is None]


def _packages(needs: Needs) -> PreflightCheck:
    versions = _versions_for(needs)
    if missing := _lacking_for(needs):
        return no("packages", f"Not installed here: {', '.join(missing)}.", INSTALL)
    return yes("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _compiler(needs: Needs) -> Iterator[PreflightCheck]:
    if not needs.compiles:
        return
    compiler = compiler_name()
    if path := shutil.which(compiler):
        yield yes("compiler", f"{compiler} is {path}.")
        return
    yield no(
        "compiler",
        f"The job compiles kernels, and this host has no {compiler}.",
        f"Install {compiler} on the host, or launch without compiled kernels.",
    )


def _hardware(
    needs: Needs, place: HostState, library: inventory.Library | None, *, has_gpus: bool
) -> Iterator[PreflightCheck]:
    if needs.environment == MAIN:
        if library and has_gpus:
            yield runtime_check(library)
        if needs.compute_dtype == "fp8":
            gpu_facts = inventory.gpu_facts(library) if library else []
            yield fp8_check(allocated_gpus(gpu_facts, needs.gpus))
        if needs.attention == "flex":
            gpu_facts = inventory.gpu_facts(library) if library else []
            yield flex_attention_check(allocated_gpus(gpu_facts, needs.gpus))
        return
    with contextlib.suppress(PinsError):  # reported by the environment check
        pins = Store(place.host_dir).pins(needs.environment)
        yield from checks(pins, library, needs.gpus)
        yield from division_checks(pins, library, needs)


def _environment(needs: Needs, place: HostState) -> PreflightCheck:
    """Check the job's environment; a missing one is built before the job starts."""
    store = Store(place.host_dir)
    try:
        pins = store.pins(needs.environment)
    except PinsError as error:
        return no("environment", f"{str(error)[:500]}.", _SAME_VERSION)
    if pins.is_beside_main and (lacking := _lacking_for(needs)):  # it has the agent's packages
        return no("environment", f"Not installed here: {', '.join(lacking)}.", INSTALL)
    named = f"The environment {pins.name}, {len(pins.packages)} packages,"
    if store.is_ready(pins):
        return yes("environment", f"{named} is built here.")
    free = shutil.disk_usage(place.host_dir.path).free
    needed = needed_bytes(pins) + place.config.min_free_bytes
    figures = {"free_bytes": float(free), "needed_bytes": float(needed)}
    sentence = f"{named} is not built here; the job builds it first, with {needed / GIB:.1f} GiB"
    if free >= needed:
        return yes("environment", f"{sentence} of disk.", **figures)
    remedy = f"Free {(needed - free) / GIB:.1f} GiB on the host, or remove another environment."
    return no("environment", f"{sentence} of disk; {free / GIB:.1f} are free.", remedy, **figures)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _disk(place: HostState) -> PreflightCheck:
    free, least = shutil.disk_usage(place.host_dir.path).free, place.config.min_free_bytes
    figures = {"free_bytes": float(free), "needed_bytes": float(least)}
    sentence = f"{free / GIB:.1f} GiB of disk are free; a job starts with {least / GIB:.1f}."
    if free >= least:
        return yes("disk", sentence, **figures)
    remedy = 'Free some space on the host, or lower "min_free_bytes" in its config.json.'
    return no("disk", sentence, remedy, **figures)


def _sources(needs: Needs, place: HostState) -> Iterator[PreflightCheck]:
    """Check the model and the data sets that a job names."""
    least = place.config.min_free_bytes
    if needs.model is not None:
        for check in _model(needs, needs.model, place):
            yield check
            least += int(check.figures.get("missing_bytes", 0))
    if needs.teacher is not None:
        yield _teacher(needs, needs.teacher, place, least)
    for data in needs.data:
        yield preflight_hub.check(data, place.host_dir.path, place.config.min_free_bytes)


def _teacher(
    needs: Needs, teacher: StoredModel, place: HostState, least_free_bytes: int
) -> PreflightCheck:
    """Check that a distillation's teacher is there or can be downloaded beside the model."""
    if isinstance(teacher, HubModel):
        path = place.host_dir.path
        check = preflight_hub.check(teacher, path, least_free_bytes, needs.trusted_code)
    else:
        check = _confined(teacher, place)[0]
    sentence = f"Teacher: {check.sentence}"[:MAX_SENTENCE]
    return check.model_copy(update={"name": "teacher", "sentence": sentence})


def _confined(model: StoredModel, place: HostState) -> tuple[PreflightCheck, Path | None]:
    """Return whether a folder or an attempt's output is there, and the folder to read."""
    stores = place.config.object_stores
    try:
        confined = launch.confine_model(model, place.model_roots, place.host_dir.attempts, stores)
    except LaunchRefusedError as refusal:
        remedy = "Put the model below one of the host's model folders, or choose another model."
        return no("model", f"{str(refusal)[:500]}.", remedy), None
    if isinstance(confined, FolderModel) and is_store_url(confined.path):
        return preflight_hub.check_store(confined.path, place.host_dir), None
    where = getattr(confined, "path", None)
    if where is None:
        return yes("model", "The model is there: an earlier attempt's output."), None
    return yes("model", f"The model is there: {str(where)[:300]}."), Path(where)


def _model(needs: Needs, model: StoredModel, place: HostState) -> Iterator[PreflightCheck]:
    """Check the model's folder, and show its size by its files, the planner and the engine."""
    if isinstance(model, HubModel):
        least = place.config.min_free_bytes
        yield preflight_hub.check(model, place.host_dir.path, least, needs.trusted_code)
        return
    check, folder = _confined(model, place)
    yield check
    if folder is None:
        return
    roots = tuple(root.resolve() for root in place.model_roots)
    query = FolderQuery(folder, roots, place.host_dir.path, needs.context_tokens)
    is_login_node = place.config.scheduler is not None
    wanted = preflight_weights.EngineNeeds(needs.environment, needs.memory_bytes, is_login_node)
    yield from preflight_weights.checks(wanted, query)


def nothing_to_resume(job_id: str) -> str:
    """Return the sentence for a job that this host has no checkpoint of."""
    return f"Job {job_id} left no checkpoint on this host."


def _checkpoint(job_id: str, place: HostState) -> PreflightCheck:
    found = attempts.with_checkpoint(attempts.attempt_folders(place.host_dir.attempts), job_id)
    if not found:
        remedy = "Run the job again from the start, or resume the last one that trained."
        return no("checkpoint", nothing_to_resume(job_id), remedy)
    return yes("checkpoint", f"Attempt {found[0].attempt_id} left what the job goes on from.")


def _ports(ports: Sequence[int]) -> PreflightCheck:
    taken = [port for port in ports if not _is_free(port)]
    listed = ", ".join(map(str, taken or ports))
    if not taken:
        return yes("ports", f"Free: {listed}.")
    return no(
        "ports",
        f"Somebody listens on {listed} already.",
        "End what listens there, or run the job when it has ended.",
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", port))
        except OSError:
            return False
    return True


# Memory


def _memory(needs: Needs, place: HostState) -> PreflightCheck:
    """Check the predicted peak against free memory and the memory limits."""
    headrooms = {"are available": psutil.virtual_memory().available}
    if (room := procfs.memory_headroom()) is not None:
        headrooms["are left to this host's control group"] = room
    if place.config.job_memory_bytes:
        headrooms["are what this host lets a job take"] = place.config.job_memory_bytes
    words, have = min(headrooms.items(), key=lambda each: each[1])
    return _enough("memory", f"{have / GIB:.2f} GiB of memory {words}", have, needs.memory_bytes)


def _gpu_memory(needs: Needs, gpus: Sequence[Gpu]) -> PreflightCheck:
    fullest = min(gpus, key=lambda gpu: gpu.free_bytes)
    which = f"GPU {fullest.number}" if len(gpus) == 1 else f"GPU {fullest.number}, the fullest,"
    start = f"{which} has {fullest.free_bytes / GIB:.2f} GiB free"
    return _enough("GPU memory", start, fullest.free_bytes, needs.memory_bytes)


def _enough(name: str, start: str, have: int, need: int) -> PreflightCheck:
    figures = {"available_bytes": float(have), "needed_bytes": float(need)}
    if not need:
        return yes(name, f"{start}; no peak was predicted for this job.", **figures)
    sentence = f"{start}; the job is predicted to need at least {need / GIB:.2f}."
    if have >= need:
        return yes(name, sentence, **figures)
    remedy = (
        f"Free {(need - have) / GIB:.2f} GiB there, or plan again with a smaller batch or a "
        "narrower weight dtype."
    )
    return no(name, sentence, remedy, **figures)


# GPUs


def gpus_of(needs: Needs, library: inventory.Library) -> list[Gpu]:
    """Return the present state of an attempt's GPUs; without a list, of all GPUs."""
    loads = {load.uuid: load for load in inventory.gpu_loads(library)}
    return [
        Gpu(
            gpu.index,
            gpu.uuid,
            gpu.memory_bytes - loads[gpu.uuid].memory_used_bytes,
            loads[gpu.uuid].foreign_pids,
        )
        for gpu in inventory.gpu_facts(library)
        if gpu.uuid in loads  # a GPU can be lost between the two queries
        and (not needs.gpus or gpu.uuid in needs.gpus)
    ]


def _foreign(gpus: Sequence[Gpu]) -> PreflightCheck:
    """Check for GPU processes of other programs; they are reported, never killed."""
    processes = [
        f"{process_description(pid)} on GPU {gpu.number}"
        for gpu in gpus
        for pid in gpu.foreign_pids
    ]
    if not processes:
        return yes("foreign processes", "No other process uses its GPUs.")
    return no(
        "foreign processes",
        f"Somebody else uses its GPUs: {'; '.join(processes)[:480]}.",
        "Ask their owners to end them, or cordon those GPUs.",
        processes=float(len(processes)),
    )


def process_description(pid: int) -> str:
    """Return a process's description: pid, name and user."""
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()}, {process.username()})"
    except psutil.Error:
        return f"process {pid}"
