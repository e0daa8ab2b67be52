"""A hub, settings with a cache of their own, and a repository of plain files."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runners.hub import download
from runners.hub.listing import Listing, look_up
from runners.hub.names import parse
from runners.hub.settings import HubSettings
from tests.hub.hub_server import Hub
from tests.hub.models import write_files

REPOSITORY = "acme/tiny"
WEIGHTS = "model.safetensors"
SIZE = 3 * 2**20 + 5
FILES = {"config.json": '{"model_type": "llama"}', "tokenizer.json": "{}", WEIGHTS: SIZE}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repositories"
    write_files(folder / REPOSITORY, FILES)
    with Hub(folder) as made:
        yield made


@pytest.fixture
def settings(hub: Hub, tmp_path: Path) -> HubSettings:
    return HubSettings(endpoint=hub.url, cache=tmp_path / "cache", margin_bytes=0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once, and look for a stop often."""
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(download, "POLL_SECONDS", 0.01)


@pytest.fixture
def looked_up(settings: HubSettings) -> Callable[..., Listing]:
    """Look a repository up; fields replace settings."""

    def look(text: str = REPOSITORY, **fields: object) -> Listing:
        return look_up(parse(text), replace(settings, **fields))

    return look
