"""A host folder and the parts of a job, for tests that start no job process."""

import os
import threading
from pathlib import Path

import pytest
import torch

from runners.jobs.events import Emitter
from runners.jobs.runtime import Job
from runners.jobspec import JobSpec
from runners.shared.messages import RunRequest
from tests.system.jobs.harness import Host

torch.set_num_threads(1)
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive our forks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:  # libraries warn of their own affairs
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def drawn_alike() -> None:
    """Let torch draw the same numbers in a test whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("jobs") / "host")


@pytest.fixture
def events_path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def emitter(events_path: Path) -> Emitter:
    return Emitter(os.open(events_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))


@pytest.fixture
def make_job(host: Host, tmp_path: Path, emitter: Emitter):
    def make(spec: JobSpec) -> Job:
        request = RunRequest(attempt_id="a1", job_id="j1", number=1, fence="f", spec=spec)
        folder = tmp_path / "attempt"
        folder.mkdir(exist_ok=True)
        return Job(folder, host.path, request, emitter, threading.Event())

    return make
