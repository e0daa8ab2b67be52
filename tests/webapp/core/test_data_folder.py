"""A data folder or a key that cannot be used ends any part of the site with one sentence."""

import os
import subprocess
import sys

import pytest

from tests.stack import ROOT
from webapp.core import site_settings
from webapp.core.site_settings import DataFolderError, secret_key

UVICORN = ["-m", "uvicorn", "webapp.asgi:application", "--port", "9"]


def test_a_key_is_made_once_for_its_owner_only(tmp_path):
    first = secret_key({}, tmp_path)

    assert secret_key({}, tmp_path) == first
    assert (tmp_path / "secret_key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret_key"]


def test_a_key_that_could_not_be_written_leaves_no_empty_file(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(site_settings.os, "fsync", fail)
    with pytest.raises(DataFolderError, match="No space left"):
        secret_key({}, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_an_empty_key_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "secret_key").touch()

    with pytest.raises(DataFolderError, match="Restore it from a backup"):
        secret_key({}, tmp_path)


@pytest.mark.parametrize("words", [["manage.py", "prepare"], UVICORN], ids=["command", "web"])
def test_every_part_ends_with_the_sentence_alone(tmp_path, words):
    (tmp_path / "secret_key").mkdir()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "SLIPWAY_SECRET_KEY"}
        | {"SLIPWAY_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("The site's key")
    assert "cannot be read: Is a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(DataFolderError, match="cannot be made: Not a directory"):
        site_settings.data_folder({"SLIPWAY_DATA_DIR": str(tmp_path / "file" / "data")}, tmp_path)
