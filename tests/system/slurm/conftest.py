"""Fixtures of the tests against a real Slurm, which are left out where none can run."""

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from runners.host.agent import Agent
from runners.launchers import scheduler
from runners.shared.config import Credential, HostDir
from runners.shared.slurm import SlurmConfig
from tests.runners.conftest import (  # noqa: F401 -- fixtures
    acceptor,
    attempts,
    credential,
    host_dir,
    redis_server,
)
from tests.system.scheduled import serving
from tests.system.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if reason := Cluster.why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slipway-slurm-"))
    folder.chmod(0o755)  # munge's clients are other users
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


@pytest.fixture
def attempt_ids() -> list[str]:
    """Ids that no other test has: Slurm remembers the jobs of each."""
    return [secrets.token_hex(8) for _ in range(4)]


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("SLURM_CONF", str(running_cluster.config))
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.5)
    monkeypatch.setattr(scheduler, "AWAY_SECONDS", 0.5)
    monkeypatch.setattr(scheduler, "SCHEDULER_SETTLE_SECONDS", 1.0)
    yield running_cluster
    running_cluster.run("scancel", "--user=root")


@pytest.fixture
def serve(
    cluster: Cluster, host_dir: HostDir, credential: Credential, monkeypatch: pytest.MonkeyPatch
) -> Callable:
    """Run an agent of a Slurm host while a block runs; jobs outlive it."""
    monkeypatch.setattr("runners.host.agent.POLL_SECONDS", 0.1)

    def served(code: str | None = None, **options: object) -> AbstractContextManager[Agent]:
        host_dir.save_scheduler(SlurmConfig.model_validate({"options": {"mem": "100"}, **options}))
        return serving(host_dir, credential, code)

    return served
