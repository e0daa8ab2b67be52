"""One host and one tiny trained model for all job tests; torch gets a single thread."""

from pathlib import Path

import pytest

from runners.jobspec import ArtefactModel, CompressSpec
from tests.runners.conftest import (  # noqa: F401 -- fixtures
    acceptor,
    attempts,
    credential,
    host_dir,
    redis_server,
    small_disk,
    small_host_dir,
)
from tests.runners.jobs.compress.conftest import layer  # noqa: F401 -- a fixture
from tests.runners.jobs.conftest import (  # noqa: F401 -- fixtures
    drawn_alike,
    emitter,
    events_path,
    host,
    make_job,
)
from tests.runners.jobs.tiny import SHORT, tiny_training
from tests.system.jobs.harness import Finished, Host


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:  # libraries warn of their own affairs
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def trained(host: Host) -> Finished:
    return host.run_once("trained", tiny_training())


@pytest.fixture(scope="session")
def trained_model(trained: Finished) -> ArtefactModel:
    assert trained.returncode == 0, trained.stderr
    return ArtefactModel(attempt_id="trained")


@pytest.fixture(scope="session")
def int8(host: Host, trained_model: ArtefactModel) -> Finished:
    spec = CompressSpec(model=trained_model, method="int8", **SHORT)
    return host.run_once("int8", spec)


@pytest.fixture(scope="session")
def int4(host: Host, trained_model: ArtefactModel) -> Finished:
    spec = CompressSpec(model=trained_model, method="nf4", **SHORT)
    return host.run_once("int4", spec)
