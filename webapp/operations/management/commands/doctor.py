"""``manage.py doctor``: report what Slipway can use on this machine, and what is missing."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import redis
from django.conf import settings
from django.core.management.base import BaseCommand

from runners.host import inventory
from runners.host.redis_access import connect
from runners.shared.addresses import own_addresses
from runners.shared.environment import NOT_USED
from runners.shared.redis_address import bare
from webapp.boot import broker
from webapp.boot.console import Problem
from webapp.boot.environment import NEEDED_BYTES, find_chromium
from webapp.boot.up import understood
from webapp.core.site_settings import redis_url

# `off` alone would make Redis skip transactions when it replays its append-only file.
CLOSE_DEFAULT = "ACL SETUSER default off resetpass ~* &* +@all"


class Finding(NamedTuple):
    """One line of the report: topic, whether it is fine, and the details."""

    topic: str
    is_well: bool
    words: str


class Command(BaseCommand):
    """Report findings without changing anything."""

    requires_system_checks = ()  # the report must work on a broken system
    help = "Say what this machine has: Python, Redis, database, disk, memory, GPU, browser."

    def handle(self, *_arguments: Any, **_options: Any) -> None:
        """Print one line per finding."""
        for finding in findings():
            mark = "✓" if finding.is_well else "✗"
            self.stdout.write(f"{mark} {finding.topic:12} {finding.words}")


def findings() -> Iterator[Finding]:
    """Yield the findings in the order in which `up` needs them."""
    python = f"{platform.python_version()} at {sys.executable}"
    yield Finding("Python", sys.version_info >= (3, 11), python)
    yield Finding("torch", is_well=True, words=_torch())
    yield _disk(settings.DATA_DIR)
    memory = psutil.virtual_memory()
    words = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    yield Finding("Memory", memory.available > 2 * 2**30, words)
    yield _redis()
    yield _database()
    yield _gpus()
    yield Finding("Addresses", is_well=True, words=_addresses())
    zone = settings.ZONE_WORDS or settings.TIME_ZONE  # Django has replaced TZ by the zone
    yield Finding("Time", not settings.ZONE_WORDS, zone)
    for line in understood(os.environ):
        yield Finding("Environment", NOT_USED not in line, line)
    browser = find_chromium()
    yield Finding("Chromium", browser is not None, browser or "none: browser tests are left out")


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:  # as in the image of the server
        return "not installed (not needed by the server; a host needs it)"


def _addresses() -> str:
    """Return the machine's addresses, and the names under which the site answers."""
    own = ", ".join(own_addresses()) or "none but loopback"
    names = ", ".join(settings.ALLOWED_HOSTS)
    return (
        f"this machine has {own}; without `up --host 0.0.0.0`, which answers at all of them, the "
        f"site answers to {names}"
    )


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    return Finding("Disk", free > NEEDED_BYTES, f"{free / 1e9:.1f} GB free in {folder}")


def _redis() -> Finding:
    """Return which broker `up` would use; the embedded one is for this machine only."""
    if url := redis_url(os.environ, "REDIS_URL"):
        try:
            broker.check_reachable(url)
        except Problem as problem:
            return Finding("Redis", is_well=False, words=str(problem))
        return _outside_redis(url)
    server = broker.find_server(os.environ.get("PATH", os.defpath))
    if server is None:
        return Finding("Redis", is_well=False, words="none: planning works, launching does not")
    words = f"{server[0]} {'.'.join(map(str, server[1]))}, for this machine only: other hosts "
    return Finding("Redis", is_well=True, words=words + "speak HTTPS, or a rediss:// in REDIS_URL")


def _outside_redis(url: str) -> Finding:
    """Return whether an external Redis accepts unauthenticated clients."""
    with connect(bare(url), settings.REDIS_CA, socket_timeout=5) as nobody:
        try:
            nobody.ping()
        except redis.RedisError:
            return Finding(
                "Redis",
                is_well=True,
                words=f"{broker.url_without_password(url)}, closed to strangers",
            )
    words = (
        f"{broker.url_without_password(url)} lets in whoever reaches it; close its default user: "
    )
    return Finding("Redis", is_well=False, words=words + CLOSE_DEFAULT)


def _database() -> Finding:
    engine = str(settings.DATABASES["default"]["ENGINE"]).rpartition(".")[2]
    return Finding("Database", is_well=True, words=engine)


def _gpus() -> Finding:
    """Return the GPUs that jobs use; without one, why."""
    found = inventory.devices()
    names = [gpu.name for gpu in found.gpus]
    if not names:
        reasons = filter(None, (*found.problems, inventory.driver_problem()))
        return Finding("GPU", is_well=False, words="; ".join(["none", *reasons]))
    return Finding("GPU", is_well=True, words=", ".join(names))
