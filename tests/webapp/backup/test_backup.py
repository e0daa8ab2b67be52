"""A backup of a real data folder by the commands that a person runs, and its return."""

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.stack import ROOT, copy_migrated
from webapp.operations.database_copies import Manifest

FILL = """
from django.contrib.auth.models import User
from webapp.accounts.models import Team
from webapp.accounts.secrets import secret_store
from django.core.management import call_command
call_command("ensure_admin")
secret_store(team=Team.objects.first(), name="HF_TOKEN", value="hf_0123456789", by=User.objects.first())
"""
OPEN = """
from webapp.accounts.models import Team
from webapp.accounts.secrets import secrets_open
print(secrets_open(team_id=Team.objects.first().pk, names=["HF_TOKEN"]))
"""
WEIGHTS = "artefacts/01ATTEMPT/model/model.safetensors"


def manage(data: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"DATABASE_URL", "SLIPWAY_SECRET_KEY"}}
    return subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=ROOT,
        env=kept | {"SLIPWAY_DATA_DIR": str(data)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A site's folder with an account, a secret, an artefact and a file of training data."""
    made = tmp_path_factory.mktemp("site") / "data"
    copy_migrated(made)
    done = manage(made, "shell", "-c", FILL)
    assert done.returncode == 0, done.stderr
    for name, text in ((WEIGHTS, "weights"), (f"{WEIGHTS}.part", "half"), ("datasets/01D", "{}")):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


@pytest.fixture(scope="module")
def backup(data) -> Path:
    folder = data.parent / "backup"
    with closing(sqlite3.connect(data / "slipway.sqlite3", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")  # somebody writes meanwhile
        writer.execute("UPDATE auth_user SET first_name = 'unfinished'")
        done = manage(data, "backup", str(folder))
        writer.execute("ROLLBACK")
    assert done.returncode == 0, done.stderr
    assert "all read again and found whole" in done.stdout
    return folder


@pytest.fixture
def site(data, tmp_path) -> Path:
    """A copy of the site that a test may change."""
    return Path(shutil.copytree(data, tmp_path / "data"))


@pytest.fixture
def copy_of(backup, tmp_path) -> Path:
    """A copy of the backup that a test may spoil."""
    return Path(shutil.copytree(backup, tmp_path / "copy"))


def change(folder: Path, **fields) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))


def refused(data: Path, *words: str, **variables: str) -> str:
    done = manage(data, "restore", *words, **variables)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_backup_comes_back_in_a_new_folder_with_rows_keys_and_files(backup, tmp_path):
    done = manage(tmp_path / "new", "restore", str(backup))
    opened = manage(tmp_path / "new", "shell", "-v", "0", "-c", OPEN)
    assert done.returncode == 0, done.stderr
    assert "hf_0123456789" in opened.stdout, opened.stderr
    assert (tmp_path / "new" / WEIGHTS).read_text() == "weights"
    assert (tmp_path / "new" / "datasets" / "01D").read_text() == "{}"
    assert not (tmp_path / "new" / f"{WEIGHTS}.part").exists()
    assert (tmp_path / "new" / "secret_key").stat().st_mode & 0o077 == 0


def test_the_manifest_says_version_schema_and_digest_of_every_file(backup):
    manifest = Manifest.model_validate_json((backup / "manifest.json").read_text())
    found = {
        path.relative_to(backup).as_posix() for path in backup.rglob("*") if path.is_file()
    } - {"manifest.json"}
    assert set(manifest.files) == found
    assert any(name.startswith("jobs.0") for name in manifest.schema_names)
    assert manifest.rows["default"]["auth_user"] == 1
    assert backup.stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.slow
def test_artefacts_can_be_left_out(data, tmp_path):
    done = manage(data, "backup", str(tmp_path / "slim"), "--without-artefacts")
    assert "Left out: the artefacts" in done.stdout
    assert not (tmp_path / "slim" / "files" / "artefacts").exists()
    assert (tmp_path / "slim" / "files" / "datasets" / "01D").exists()


@pytest.mark.slow
@pytest.mark.slow
def test_a_folder_that_is_there_is_not_written_over(data, backup):
    done = manage(data, "backup", str(backup))
    assert done.returncode == 1
    assert "exists already" in done.stderr


@pytest.mark.slow
def test_a_database_that_is_not_empty_stays_without_the_flag(backup, site):
    (site / "secret_key").write_text("of the site that was there")
    assert "not empty" in refused(site, str(backup))
    done = manage(site, "restore", str(backup), "--overwrite")
    assert done.returncode == 0, done.stderr
    (aside,) = site.glob("before-restore-*")
    assert (aside / "secret_key").read_text() == "of the site that was there"
    assert (aside / "slipway.sqlite3").stat().st_size
    assert (site / "secret_key").read_text() == (backup / "files" / "secret_key").read_text()


def test_a_running_site_is_never_written_over(backup, tmp_path):
    with (tmp_path / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "A site runs in" in refused(tmp_path, str(backup), "--overwrite")


@pytest.mark.slow
def test_a_database_that_another_process_has_open_is_never_written_over(backup, site):
    with closing(sqlite3.connect(site / "slipway.sqlite3")) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("SELECT count(*) FROM auth_user").fetchone()
        assert "in use by another process" in refused(site, str(backup), "--overwrite")


@pytest.mark.slow
@pytest.mark.slow
def test_a_damaged_database_can_be_replaced(backup, tmp_path):
    (tmp_path / "slipway.sqlite3").write_text("no database at all, but long enough" * 100)
    done = manage(tmp_path, "restore", str(backup), "--overwrite")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_backup_of_a_newer_schema_is_refused_with_both_versions(copy_of, tmp_path):
    migrations = json.loads((copy_of / "manifest.json").read_text())["migrations"]
    change(copy_of, version="9.9", migrations=migrations | {"hosts": ["9999_future"]})
    words = refused(tmp_path / "new", str(copy_of))
    assert "The backup (made by 9.9)" in words
    assert "hosts.9999_future" in words
    assert "this is Slipway 0.1.0, which knows hosts.00" in words


@pytest.mark.slow
@pytest.mark.slow
def test_a_backup_of_a_newer_format_names_the_version_to_use(copy_of, tmp_path):
    change(copy_of, format=2, version="9.9")
    assert "format 2" in refused(tmp_path / "new", str(copy_of))


@pytest.mark.parametrize(
    "name",
    ["databases/default.sqlite3", pytest.param(f"files/{WEIGHTS}", marks=pytest.mark.slow)],
)
def test_a_damaged_backup_is_refused_by_the_file(copy_of, tmp_path, name):
    with (copy_of / name).open("r+b") as file:
        file.write(b"x")
    assert f"{name} is damaged" in refused(tmp_path / "new", str(copy_of))
    assert not (tmp_path / "new" / "slipway.sqlite3").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "holds no complete backup"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "files" / "secret_key").unlink(), "is missing"),
        (lambda folder: change(folder, engine="postgresql"), "DATABASE_URL names sqlite"),
    ],
    ids=["no-manifest", "damaged-manifest", "missing-file", "other-database"],
)
def test_what_cannot_be_restored_says_why(copy_of, tmp_path, spoil, words):
    spoil(copy_of)
    assert words in refused(tmp_path / "new", str(copy_of))


@pytest.mark.slow
def test_a_check_reads_everything_and_changes_nothing(backup, data):
    before = (data / "slipway.sqlite3").stat().st_mtime_ns
    done = manage(data, "restore", str(backup), "--check")
    assert "is whole and can be restored here" in done.stdout
    assert (data / "slipway.sqlite3").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.slow
def test_a_key_of_the_environment_is_named_and_asked_for_again(site, tmp_path):
    key = {"SLIPWAY_SECRET_KEY": "a-key-that-only-the-environment-holds"}
    done = manage(site, "backup", str(tmp_path / "b"), **key)
    assert "Not in it: the key in SLIPWAY_SECRET_KEY" in done.stdout
    assert key["SLIPWAY_SECRET_KEY"] not in (tmp_path / "b" / "manifest.json").read_text()
    assert "SLIPWAY_SECRET_KEY is not set" in refused(tmp_path / "n", str(tmp_path / "b"))
    other = {"SLIPWAY_SECRET_KEY": "another"}
    assert "has another value" in refused(tmp_path / "n", str(tmp_path / "b"), **other)
    assert manage(tmp_path / "n", "restore", str(tmp_path / "b"), **key).returncode == 0


def test_a_full_disk_leaves_no_half_backup(data, tmp_path, monkeypatch):
    from django.conf import settings

    from webapp.operations import backup as archive

    monkeypatch.setattr(settings, "DATA_DIR", data)
    monkeypatch.setattr(settings, "ARTEFACTS_DIR", data / "artefacts")
    monkeypatch.setattr(settings, "DATASETS_DIR", data / "datasets")
    monkeypatch.setattr(archive, "database_file", lambda _: data / "slipway.sqlite3")
    monkeypatch.setattr(archive, "digest_of", _full)
    with pytest.raises(archive.BackupError, match="No space left"):
        archive.create(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def _full(path: Path):
    raise OSError(28, "No space left on device", str(path))
