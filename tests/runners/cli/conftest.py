"""The command line, called in this process with folders of its own."""

from typing import NamedTuple

import pytest

from runners.cli.main import main


class Done(NamedTuple):
    """A finished command: its exit code and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Let configuration and plans lie in a new folder, and nothing name a server or a width."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("SLIPWAY_SERVER", "SLIPWAY_TOKEN", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def slipway(folders, capsys):
    """Return a way to run one command."""

    def run(*arguments):
        code = main(arguments)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run
