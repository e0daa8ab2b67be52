"""The environment of object stores, built for real, and a download with the library in it."""

import sys
from pathlib import Path

import pytest

from runners.environments.builder import Store, pip_variables
from runners.hub.object_store import STORE_ENVIRONMENT
from runners.jobspec import FolderModel, GenerateSpec
from runners.shared.config import HostDir
from tests.runners.jobs.test_fetch_from_store import (  # noqa: F401 (store is a fixture)
    MODEL,
    WEIGHTS,
    Attempt,
    store,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_host_builds_the_environment_and_downloads_with_it(tmp_path, store):
    attempt = Attempt(tmp_path / "host", store, GenerateSpec(model=FolderModel(path=MODEL)))
    attempt.program = "import runners.jobs.fetch as fetch; fetch.main()"
    attempt.variables = pip_variables()
    ended = attempt.run(seconds=500)
    assert ended.returncode == 0, ended.stderr
    host = Store(HostDir(tmp_path / "host"))
    built = host.pins(STORE_ENVIRONMENT)
    assert host.is_ready(built)
    assert str(host.python(built)) != sys.executable
    read = Path(attempt.request.spec.model.path, "model.safetensors").read_bytes()
    assert read == (store.folder / WEIGHTS).read_bytes()
