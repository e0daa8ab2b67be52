"""Fixtures of the host's tests: an in-memory server, a host folder, attempts, a real Redis."""

import contextlib
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runners.host.reconcile import Reconciler
from runners.host.shipping import ServerClient
from runners.shared import timing
from runners.shared.config import Credential, HostConfig, HostDir
from runners.supervision import procfs
from tests.runners.acceptor import Acceptor
from tests.runners.tools import Attempts, RedisServer, ids_of


@pytest.fixture
def acceptor(tmp_path: Path) -> Iterator[Acceptor]:
    with Acceptor(tmp_path / "uploads") as server:
        yield server


@pytest.fixture
def host_dir(tmp_path: Path) -> HostDir:
    made = HostDir(tmp_path / "host")
    made.make()
    return made


@pytest.fixture
def credential(acceptor: Acceptor) -> Credential:
    return Credential(
        server=acceptor.url,
        host_id="h1",
        name="test host",
        credential="host-credential",
        command_key="command-key",
        redis_url=None,
        beat_seconds=0.2,
    )


@pytest.fixture
def attempts(
    host_dir: HostDir, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Attempts]:
    monkeypatch.setenv(
        timing.VARIABLE, "0.2"
    )  # of supervisors: they look after five times as often
    made = Attempts(host_dir, ids_of(request.module.__name__)[0])
    yield made
    made.clean_up()


@pytest.fixture
def client(acceptor: Acceptor) -> Iterator[ServerClient]:
    with contextlib.closing(ServerClient(acceptor.url, "host-credential")) as made:
        yield made


@pytest.fixture
def reconciling(
    client: ServerClient, host_dir: HostDir, attempts: Attempts
) -> Callable[..., Reconciler]:
    """Make a reconciler whose jobs are all the same program; ``attempts`` ends them."""

    def make(code: str, **settings: object) -> Reconciler:
        return Reconciler(
            host_dir, HostConfig(**settings), client, boot_id=procfs.boot_id(),
            render=lambda _spec, _folder: [sys.executable, "-c", code],
        )  # fmt: skip

    return make


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; where none can be mounted, files of that size at most."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not is_mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, limit[1]))
    yield place
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if is_mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small_host_dir(small_disk: Path) -> HostDir:
    made = HostDir(small_disk / "host")
    made.make()
    return made
