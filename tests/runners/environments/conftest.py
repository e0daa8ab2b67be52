"""Wheels of two tiny packages as pip's only source, and a host that pins them."""

import shutil

import pytest

from runners.environments.builder import Store, ensure
from runners.shared.config import HostDir
from tests.runners.environments.wheels import make_pins, make_wheel


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "tiny-part", "1.0")
    make_wheel(folder, "tiny-whole", "2.0", needs="tiny-part>=1")
    return folder


def _use_only(wheels, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


@pytest.fixture
def store(host_dir, wheels, monkeypatch) -> Store:
    _use_only(wheels, monkeypatch)
    (host_dir.path / "config.json").write_text('{"min_free_bytes": 0}')
    return make_pins(host_dir)


@pytest.fixture(scope="session")
def tiny_build(wheels, tmp_path_factory):
    """The tiny environment, built once."""
    host_dir = HostDir(tmp_path_factory.mktemp("built") / "host")
    host_dir.make()
    store = make_pins(host_dir)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _use_only(wheels, monkeypatch)
        ensure(store, store.pins("tiny"), print)
    return store.folder(store.pins("tiny"))


@pytest.fixture
def built(store, tiny_build) -> Store:
    """A host on which the tiny environment is built."""
    shutil.copytree(tiny_build, store.folder(store.pins("tiny")), symlinks=True)
    (store.home("tiny") / "build.lock").touch()
    return store
