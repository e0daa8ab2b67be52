"""Checks before the start: port, public URL, data folder, lock, host names."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from webapp.boot import console
from webapp.core.public_site import PublicUrlError, public_site

LAST_PORT = 65_535
NEEDED_BYTES = 500_000_000  # databases, logs and the first artefacts


def address(host: str, port: int) -> str:
    """Return the URL of the site for a browser on this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- compared only
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def running_elsewhere(data: Path) -> str | None:
    """Return a sentence on the ``up`` that runs in this data folder, or None."""
    try:
        with (data / "up.lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner_sentence(data)
    except OSError:
        return None
    return None


def check_port(host: str, port: int, *, running: str | None) -> None:
    """Raise a problem if Slipway already runs here or another program uses the port."""
    if running:
        raise console.Problem(
            running, "Stop it with Ctrl-C there, or set another SLIPWAY_DATA_DIR."
        )
    if not 0 < port <= LAST_PORT:
        raise console.Problem(
            f"--port is {port}: ports are 1 to {LAST_PORT}.", "Leave it out for port 8000."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise console.Problem(
                f"Port {port} on {host} cannot be used: {error.strerror or error}.",
                f"Try `python3 manage.py up --port {port + 1}`, or stop the program that has it.",
            ) from error


def check_public_url(url: str) -> None:
    """Raise a problem if the site's public URL is invalid."""
    try:
        public_site(url)
    except PublicUrlError as error:
        raise console.Problem(f"{error}.", "Correct the variable and start again.") from error


def make_data_folder(data: Path) -> None:
    """Create the data folder with mode 0700; raise a problem if the disk is nearly full."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        (data / "up.lock").touch(mode=0o600)
    except OSError as error:
        raise console.Problem(
            f"The data folder {data} cannot be written: {error.strerror}.",
            "Correct its owner, or set SLIPWAY_DATA_DIR to another folder.",
        ) from error
    free = shutil.disk_usage(data).free
    if free < NEEDED_BYTES:
        raise console.Problem(
            f"The data folder {data} has {free / 1e6:.0f} MB free; "
            f"Slipway needs at least {NEEDED_BYTES / 1e6:.0f} MB.",
            "Free some space, or set SLIPWAY_DATA_DIR to a folder on a larger disk.",
        )


def take_lock(lock: IO[str], data: Path, url: str) -> None:
    """Lock the data folder until this process ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise console.Problem(
            _owner_sentence(data), "Stop it with Ctrl-C there, or set another SLIPWAY_DATA_DIR."
        ) from error
    with contextlib.suppress(OSError):  # the lock works without its content
        lock.truncate(0)
        json.dump({"pid": os.getpid(), "url": url}, lock)
        lock.flush()


def _owner_sentence(data: Path) -> str:
    try:
        owner = json.loads((data / "up.lock").read_text("utf-8"))
    except (OSError, ValueError):
        owner = {"pid": "?", "url": "an address not yet known"}
    return f"Slipway already runs at {owner['url']} (process {owner['pid']}, data in {data})."


def allowed_hosts(host: str, variables: Mapping[str, str]) -> list[str]:
    """Return the allowed host names of the site, given the bound address."""
    names = [variables.get("SLIPWAY_ALLOWED_HOSTS", "")]
    if host in ("0.0.0.0", "::"):  # noqa: S104 -- compared, not bound
        names += [socket.gethostname(), socket.getfqdn(), *_own_addresses()]
    else:
        names.append(f"[{host}]" if ":" in host else host)
    return list(dict.fromkeys(filter(None, names)))


def _own_addresses() -> list[str]:
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, family=socket.AF_INET)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in entries]
