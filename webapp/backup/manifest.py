"""The contents of a backup in ``manifest.json``, and their verification."""

import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

FORMAT = 1
NAME = "manifest.json"
PIECE_BYTES = 1024 * 1024
Engine = Literal["sqlite", "postgresql"]


class BackupError(Exception):
    """A backup cannot be created, read or restored; the message says why and what to do."""


class StoredFile(BaseModel):
    """One file of a backup."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: NonNegativeInt
    sha256: str


class KeyCheck(BaseModel):
    """Salted digest that verifies a key of the environment without containing it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    salt: str
    digest: str

    @classmethod
    def of(cls, key: str) -> "KeyCheck":
        """Return the check of a key."""
        salt = secrets.token_hex(16)
        return cls(salt=salt, digest=_slow_digest(key, salt))

    def matches(self, key: str) -> bool:
        """Return whether ``key`` is the key."""
        return secrets.compare_digest(self.digest, _slow_digest(key, self.salt))


class Manifest(BaseModel):
    """Contents of a backup; paths are relative to its folder, ``rows`` counts by table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    version: str
    made_at: datetime
    engine: Engine
    migrations: dict[str, list[str]]
    rows: dict[str, dict[str, NonNegativeInt]]  # by database alias
    has_artefacts: bool
    environment_keys: dict[str, KeyCheck]  # by environment variable; without the values
    files: dict[str, StoredFile]

    @property
    def schema_names(self) -> list[str]:
        """Return the last migration of every app, as ``app.0012_name``."""
        return [f"{app}.{names[-1]}" for app, names in sorted(self.migrations.items()) if names]

    @property
    def num_bytes(self) -> int:
        """Return the total size of all files."""
        return sum(file.num_bytes for file in self.files.values())


def _slow_digest(key: str, salt: str) -> str:
    """Return an expensive digest (scrypt), because the environment's key may be weak."""
    digest = hashlib.scrypt(key.encode(), salt=bytes.fromhex(salt), n=2**14, r=8, p=1)
    return digest.hex()


def digest_of(path: Path) -> StoredFile:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredFile(num_bytes=path.stat().st_size, sha256=digest)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a backup without verifying its files.

    Raises:
        BackupError: there is no backup, it is damaged, or its format is newer.
    """
    path = folder / NAME
    try:
        document = json.loads(path.read_text("utf-8"))
        number = document.get("format") if isinstance(document, dict) else None
        if isinstance(number, int) and number > FORMAT:
            raise BackupError(
                f"{folder} is a backup of format {number}; this version reads {FORMAT}. "
                f"Restore it with the version that made it ({document.get('version')})."
            )
        return Manifest.model_validate(document)
    except OSError as error:
        raise BackupError(
            f"{folder} holds no whole backup: {NAME} cannot be read ({error.strerror}). Give the "
            "folder that `python3 manage.py backup` wrote."
        ) from None
    except (ValidationError, ValueError) as error:
        where = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
        raise BackupError(f"{path} is damaged: {where}. Take another backup.") from None


def verify(folder: Path) -> Manifest:
    """Return a backup's manifest after verifying every file.

    Raises:
        BackupError: a file is missing or damaged.
    """
    manifest = read_manifest(folder)
    for name, stored in manifest.files.items():
        _verify_file(folder, name, stored)
    return manifest


def _verify_file(folder: Path, name: str, stored: StoredFile) -> None:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BackupError(f"{NAME} names {name}, which is outside of {folder}.")
    if not path.is_file():
        raise BackupError(f"{path} is missing. Take another backup.")
    found = digest_of(path)
    if found != stored:
        raise BackupError(
            f"{path} is damaged: it has {found.num_bytes:,} bytes with SHA-256 "
            f"{found.sha256[:12]}…, written were {stored.num_bytes:,} with {stored.sha256[:12]}…. "
            "Take another backup."
        )


def same_rows(expected: Mapping[str, int], found: Mapping[str, int]) -> str:
    """Return a phrase on the first table whose number of rows differs; "" if none does."""
    for table in sorted(expected.keys() | found.keys()):
        if expected.get(table) != found.get(table):
            return f"{table} has {found.get(table)} rows instead of {expected.get(table)}"
    return ""
