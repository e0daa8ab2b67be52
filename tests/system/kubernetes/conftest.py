"""An agent of a cluster whose pods are processes of this machine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from runners.host.agent import Agent
from runners.launchers import scheduler
from runners.shared.config import Credential, HostDir
from runners.shared.kubernetes import KubernetesConfig
from tests.runners.cluster.fake import FakeCluster
from tests.runners.conftest import (  # noqa: F401 -- fixtures
    acceptor,
    attempts,
    credential,
    host_dir,
    redis_server,
)
from tests.system.scheduled import serving

CONFIG = {"image": "slipway", "volume_claim": "slipway", "mount_path": "/", "gpus": 0, "cpus": 2}


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Iterator[FakeCluster]:
    made = FakeCluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for name in ("POLL_SECONDS", "AWAY_SECONDS"):
        monkeypatch.setattr(scheduler, name, 0.5)
    yield made
    made.close()


@pytest.fixture
def serve(
    cluster: FakeCluster,
    host_dir: HostDir,
    credential: Credential,
    monkeypatch,
) -> Callable:
    """Run an agent of a cluster's host while a block runs; jobs outlive it."""
    monkeypatch.setattr("runners.host.agent.POLL_SECONDS", 0.1)

    def served(code: str | None = None, **options: object) -> AbstractContextManager[Agent]:
        host_dir.save_scheduler(KubernetesConfig.model_validate({**CONFIG, **options}))
        return serving(host_dir, credential, code)

    return served
