"""Preflight: checks whether this host can run an attempt now, before it is claimed.

Each check measures the machine's present state. A check that cannot be done counts as failed:
a returned attempt costs half a minute, a failed one costs a run.
"""

import contextlib
import importlib.metadata
import importlib.util
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from runners import inventory, launch, preflight_gpus, preflight_weights
from runners.config import HostConfig, HostDir
from runners.environments.builder import needed_bytes
from runners.environments.store import PinsError, Store
from runners.jobspec import ArtefactModel, FolderModel
from runners.launch import LaunchRefusedError
from runners.messages import MAIN, Needs, PreflightCheck, no, yes
from runners.preflight_weights import FolderQuery
from runners.processes import compiler_name
from runners.supervision import memory

GIB = 2**30
# Distributions that job processes import; quantised dtypes need an additional library.
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
DTYPE_PACKAGES = {"int8": "torchao", "fp8": "torchao", "int4": "bitsandbytes"}
KIND_PACKAGES = {
    "compress": ("accelerate", "compressed-tensors", "gguf"),
    "serve": ("uvicorn", "Jinja2"),
}
_SAME_VERSION = "Install the server's version on the host and start its agent again."
INSTALL = "Install what is missing on the host: pip install 'slipway[worker,gpu]'."


class StoppingAttempt(NamedTuple):
    """A running attempt with a stop order: its id and its GPUs."""

    attempt_id: str
    gpus: frozenset[str]


class Place(NamedTuple):
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


def run_checks(needs: Needs, place: Place) -> tuple[PreflightCheck, ...]:
    """Run and return every check of an attempt's needs."""
    with inventory.gpu_library() as library:
        return tuple(_checks(needs, place, library))


def _checks(
    needs: Needs, place: Place, library: inventory.Library | None
) -> Iterator[PreflightCheck]:
    yield _kind(needs)
    yield _packages(needs) if needs.environment == MAIN else _environment(needs, place)
    yield _disk(place)
    yield from _compiler(needs)
    if place.config.slurm:  # Slurm manages the node's free resources
        if needs.model is not None:
            yield from _model(needs, needs.model, place)
        return
    if blocking := _blocking(needs, place.leaving):
        yield no(
            "earlier attempts",
            f"An attempt that is stopping still runs here: {', '.join(blocking)}.",
            "Wait until it is gone; the job is tried again.",
        )
    if needs.model is not None:
        yield from _model(needs, needs.model, place)
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
    yield from preflight_gpus.usable(
        preflight_gpus.given(inventory.gpu_facts(library), needs.gpus)
    )


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
    if needs.kind in launch.JOB_MODULES:
        return yes("kind", f"This host runs {needs.kind} jobs.")
    known = ", ".join(launch.JOB_MODULES)
    return no(
        "kind",
        f"This host runs {known}, not {needs.kind}.",
        _SAME_VERSION,
    )


def _packages(needs: Needs) -> PreflightCheck:
    of_kind = KIND_PACKAGES.get(needs.kind, ())
    formats = (needs.weight_dtype, needs.compute_dtype)
    required = (*PACKAGES, *of_kind, *filter(None, map(DTYPE_PACKAGES.get, formats)))
    versions = {name: _version(name) for name in required}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
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
    needs: Needs, place: Place, library: inventory.Library | None, *, has_gpus: bool
) -> Iterator[PreflightCheck]:
    """Check the host's driver and GPUs against the job's environment."""
    if needs.environment == MAIN:
        if library and has_gpus:
            yield preflight_gpus.runtime_check(library)
        if needs.compute_dtype == "fp8":
            gpu_facts = inventory.gpu_facts(library) if library else []
            yield preflight_gpus.narrow_products(preflight_gpus.given(gpu_facts, needs.gpus))
        if needs.attention == "flex":
            gpu_facts = inventory.gpu_facts(library) if library else []
            yield preflight_gpus.block_attention(preflight_gpus.given(gpu_facts, needs.gpus))
        return
    with contextlib.suppress(PinsError):  # reported by the environment check
        pins = Store(place.host_dir).pins(needs.environment)
        yield from preflight_gpus.checks(pins, library, needs.gpus)
        yield from preflight_gpus.division_checks(pins, library, needs)


def _environment(needs: Needs, place: Place) -> PreflightCheck:
    """Check the job's environment; a missing one is built before the job starts."""
    store = Store(place.host_dir)
    try:
        pins = store.pins(needs.environment)
    except PinsError as error:
        return no("environment", f"{str(error)[:500]}.", _SAME_VERSION)
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


def _disk(place: Place) -> PreflightCheck:
    free, least = shutil.disk_usage(place.host_dir.path).free, place.config.min_free_bytes
    figures = {"free_bytes": float(free), "needed_bytes": float(least)}
    sentence = f"{free / GIB:.1f} GiB of disk are free; a job starts with {least / GIB:.1f}."
    if free >= least:
        return yes("disk", sentence, **figures)
    remedy = 'Free some space on the host, or lower "min_free_bytes" in its config.json.'
    return no("disk", sentence, remedy, **figures)


def _model(
    needs: Needs, model: FolderModel | ArtefactModel, place: Place
) -> Iterator[PreflightCheck]:
    """Check the model's folder, and show its size by its files, the planner and the engine."""
    try:
        confined = launch.confine_model(model, place.model_roots, place.host_dir.attempts)
    except LaunchRefusedError as refusal:
        remedy = "Put the model below one of the host's model folders, or choose another model."
        yield no("model", f"{str(refusal)[:500]}.", remedy)
        return
    where = getattr(confined, "path", None)
    if where is None:
        yield yes("model", "The model is there: an earlier attempt's output.")
        return
    yield yes("model", f"The model is there: {str(where)[:300]}.")
    roots = tuple(root.resolve() for root in place.model_roots)
    query = FolderQuery(Path(where), roots, place.host_dir.path, needs.context_tokens)
    is_login_node = place.config.slurm is not None
    wanted = preflight_weights.Wanted(needs.environment, needs.memory_bytes, is_login_node)
    yield from preflight_weights.checks(wanted, query)


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


def _memory(needs: Needs, place: Place) -> PreflightCheck:
    """Check the predicted peak against free memory and the memory limits."""
    headrooms = {"are available": psutil.virtual_memory().available}
    if (room := memory.memory_headroom()) is not None:
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
    found = [f"{who(pid)} on GPU {gpu.number}" for gpu in gpus for pid in gpu.foreign_pids]
    if not found:
        return yes("foreign processes", "No other process uses its GPUs.")
    return no(
        "foreign processes",
        f"Somebody else uses its GPUs: {'; '.join(found)[:480]}.",
        "Ask their owners to end them, or cordon those GPUs.",
        processes=float(len(found)),
    )


def who(pid: int) -> str:
    """Return a process's description: pid, name and user."""
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()}, {process.username()})"
    except psutil.Error:
        return f"process {pid}"
