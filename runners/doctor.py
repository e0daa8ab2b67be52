"""Checks a host's requirements; each failed check has a remedy."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import redis

from runners import inventory, preflight_gpus
from runners.client import RefusedError, ServerClient, ServerError
from runners.config import Credential, HostConfigError, HostDir
from runners.facts import GpuFacts
from runners.redis_access import connect
from runners.redis_address import UnsafeAddressError
from runners.supervision import procfs

OLDEST_PYTHON = (3, 11)


class Check(NamedTuple):
    """The result of one check."""

    name: str
    is_ok: bool
    words: str


def checks(host_dir: HostDir) -> list[Check]:
    """Run and return every check."""
    return [*_machine(host_dir), *_enrolment(host_dir)]


def _machine(host_dir: HostDir) -> Iterator[Check]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    yield Check(
        "Python", sys.version_info[:2] >= OLDEST_PYTHON, f"{version}; 3.11 or newer is needed"
    )
    has_proc = procfs.read_process(os.getpid()) is not None and hasattr(os, "pidfd_open")
    yield Check("Linux", has_proc, "/proc and pidfd are needed to watch over jobs")
    existing = next(path for path in (host_dir.path, *host_dir.path.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    needed = host_dir.config().min_free_bytes
    yield Check(
        "Disk",
        free >= needed,
        f"{free / 2**30:.1f} GiB free, {needed / 2**30:.1f} GiB needed for a new attempt",
    )
    if host_dir.path.exists():
        yield _folder(host_dir)
    versions = inventory.package_versions()
    yield Check(
        "torch",
        "torch" in versions,
        versions.get("torch") or "not installed: pip install 'slipway[worker,gpu]'",
    )
    yield from _gpus()


def _gpus() -> Iterator[Check]:
    """Check the GPUs of every vendor, and torch's build against their driver."""
    found = inventory.devices()
    words = ", ".join(device_words(gpu) for gpu in found.gpus)
    yield Check("GPU", is_ok=True, words=words or "none: jobs run on the processor")
    for gpu in found.other_gpus:
        yield Check("Other GPU", is_ok=True, words=f"{device_words(gpu)}: jobs do not use it")
    silence = None if found.gpus else inventory.driver_problem()
    for problem in filter(None, (*found.problems, silence)):
        yield Check("GPU driver", is_ok=bool(found.gpus), words=problem)
    with inventory.gpu_library() as library:
        if library and found.gpus:
            runtime = preflight_gpus.runtime_check(library)
            words = " ".join(filter(None, [runtime.sentence, runtime.remedy]))
            yield Check("torch and driver", runtime.ok, words)


def device_words(gpu: GpuFacts) -> str:
    """Return a GPU's name, memory and what could not be read of it."""
    shared = " shared with the host" if gpu.shares_host_memory else ""
    parts = [f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB{shared})"]
    return "; ".join([*parts, *(f"not read: {each}" for each in gpu.unread)])


def _folder(host_dir: HostDir) -> Check:
    is_open = host_dir.is_open()
    remedy = f"open to other users; make it yours alone: chmod 700 {host_dir.path}"
    words = remedy if is_open else f"{host_dir.path} is closed to other users"
    return Check("Folder", not is_open, words)


def _enrolment(host_dir: HostDir) -> Iterator[Check]:
    try:
        credential = host_dir.credential()
    except HostConfigError as error:
        yield Check("Credential", is_ok=False, words=str(error))
        return
    yield Check("Credential", is_ok=True, words=f"{credential.name} at {credential.server}")
    yield _server(credential)
    if credential.worker_url:
        yield _broker(credential.worker_url, host_dir.redis_ca())


def _server(credential: Credential) -> Check:
    client = ServerClient(credential.server, credential.credential)
    try:
        client.received_bytes("doctor", "doctor", PurePosixPath("doctor"))  # does not exist
    except RefusedError as refusal:
        is_out = refusal.is_unauthorized
        words = f"{refusal}; enrol this host again" if is_out else "answers"
        return Check("Server", not is_out, words)
    except ServerError as error:
        return Check("Server", is_ok=False, words=str(error))
    finally:
        client.close()
    return Check("Server", is_ok=True, words="answers")


def _broker(url: str, ca_file: Path | None) -> Check:
    try:
        broker = connect(url, ca_file, socket_timeout=2.0, socket_connect_timeout=1.0)
    except UnsafeAddressError as error:
        return Check("Redis", is_ok=False, words=str(error))
    try:
        broker.ping()
    except redis.RedisError as error:
        words = f"{error}; work continues over HTTP, starts and stops are a few seconds slower"
        return Check("Redis", is_ok=False, words=words)
    finally:
        broker.close()
    return Check("Redis", is_ok=True, words="answers")
