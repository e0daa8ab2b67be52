"""Fixtures of the tests against a real Ray, which are left out where it is not installed."""

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
from runners.shared.ray import RayConfig
from tests.runners.conftest import (  # noqa: F401 -- fixtures
    acceptor,
    attempts,
    credential,
    host_dir,
    redis_server,
)
from tests.system.ray.cluster import CPUS, GPUS, Cluster
from tests.system.scheduled import serving


@pytest.fixture(scope="session")
def cluster_of_three() -> Iterator[Cluster]:
    if reason := Cluster.why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def attempt_ids() -> list[str]:
    """Ids that no other test has: Ray remembers the jobs of each."""
    return [secrets.token_hex(8) for _ in range(4)]


@pytest.fixture
def cluster(cluster_of_three: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in ("POLL_SECONDS", "AWAY_SECONDS", "SCHEDULER_SETTLE_SECONDS"):
        monkeypatch.setattr(scheduler, name, 0.5)
    return cluster_of_three


@pytest.fixture
def serve(
    cluster: Cluster, host_dir: HostDir, credential: Credential, monkeypatch: pytest.MonkeyPatch
) -> Callable:
    """Run an agent of a Ray host while a block runs; jobs outlive it."""
    monkeypatch.setattr("runners.host.agent.POLL_SECONDS", 0.1)

    def served(code: str | None = None, **options: object) -> AbstractContextManager[Agent]:
        usual = {
            "address": cluster.address,
            "python": cluster.python,
            "gpus": GPUS,
            "cpus": CPUS,
        }
        host_dir.save_scheduler(RayConfig.model_validate({**usual, **options}))
        return serving(host_dir, credential, code)

    return served
