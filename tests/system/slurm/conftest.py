"""Fixtures of the tests against a real Slurm, which are left out where none can run."""

import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runners.host.agent import Agent
from runners.launchers import scheduler
from runners.launchers.launch import render_argv
from runners.shared.config import Credential, HostDir
from runners.shared.facts import SlurmConfig
from tests.runners.conftest import (  # noqa: F401 -- fixtures
    acceptor,
    attempts,
    credential,
    host_dir,
    redis_server,
)
from tests.runners.test_agent import BENCH
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

    @contextmanager
    def served(code: str | None = None, **options: object) -> Iterator[Agent]:
        host_dir.save_slurm(SlurmConfig.model_validate({"options": {"mem": "100"}, **options}))
        render = (lambda _spec, _folder: [sys.executable, "-c", code]) if code else render_argv
        agent = Agent(host_dir, credential, render=render, bench_command=BENCH)
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            yield agent
        finally:
            agent.stop()
            thread.join(30)
        assert not thread.is_alive()

    return served
