"""The site's data folder and secret key, with a one-sentence error if they are unusable.

The settings import this module, so it does not import Django. Every process of the site ends with
that sentence instead of a traceback.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

KEY_VARIABLE = "SLIPWAY_SECRET_KEY"


class DataFolderError(SystemExit):
    """The folder or the key is unusable; ends the process with its message."""


def data_folder(variables: Mapping[str, str], default: Path) -> Path:
    """Return the site's data folder, created if missing.

    Raises:
        DataFolderError: it cannot be created.
    """
    folder = Path(variables.get("SLIPWAY_DATA_DIR", default)).resolve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataFolderError(
            f"The data folder {folder} cannot be made: {error.strerror}. Correct the owner of the "
            "folder above it, or set SLIPWAY_DATA_DIR to another folder."
        ) from None
    return folder


def secret_key(variables: Mapping[str, str], folder: Path) -> str:
    """Return the site's secret from the environment, or from a 0600 file created on first use.

    The file is written atomically, so that it is never incomplete.

    Raises:
        DataFolderError: the file cannot be read or created, or it is empty.
    """
    if given := variables.get(KEY_VARIABLE):
        return given
    path = folder / "secret_key"
    try:
        if not path.exists():
            _write(path, secrets.token_urlsafe(48))
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        verb = "read" if path.exists() else "made"
        words = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DataFolderError(
            f"The site's key {path} cannot be {verb}: {words}. Correct its owner and mode (it is "
            f"for the user that runs the site), restore it from a backup, or set {KEY_VARIABLE}."
        ) from None
    if not key:
        raise DataFolderError(
            f"The site's key {path} is empty. Restore it from a backup. Without one, delete the "
            "file: a new key is made, everybody logs in again, and hosts enrol again."
        )
    return key


def _write(path: Path, key: str) -> None:
    """Create the file atomically; with concurrent writers, the first wins."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        temporary.unlink(missing_ok=True)
