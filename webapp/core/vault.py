"""Encryption at rest with keys that are not stored in the database.

The keys are Fernet keys, newest first: encryption uses the first, decryption tries all. They come
from ``SLIPWAY_SECRETS_KEYS`` or from a file of the data folder that only its owner can read.
"""

import os
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings

from webapp.core.site_settings import (
    SECRETS_VARIABLE,
    SettingError,
    secrets_keys,
    write_secret,
)

VARIABLE = SECRETS_VARIABLE
FILE_NAME = "secrets.keys"


class VaultError(Exception):
    """No key decrypts a stored text, or the keys are invalid; the message says what to do."""


def key_file() -> Path:
    """Return the path of the key file, used if the environment sets no keys."""
    return Path(settings.DATA_DIR) / FILE_NAME


def keys() -> list[str]:
    """Return the keys, newest first; a first key is created if there is none.

    Raises:
        VaultError: this user cannot read the key file, or a key of the environment is invalid.
    """
    try:
        if given := secrets_keys(os.environ):
            return given
    except SettingError as error:
        raise VaultError(f"{error}") from None
    path = key_file()
    try:
        if not path.exists():
            write_secret(path, Fernet.generate_key().decode() + "\n")
        return path.read_text().split()
    except PermissionError as error:
        raise VaultError(
            f"The keys in {path} cannot be read: {error.strerror}. Correct the file's owner and "
            f"mode, or set {VARIABLE}."
        ) from None


def add_key() -> None:
    """Add a new key in front of the others.

    Raises:
        VaultError: the keys are set in the environment and must be changed there.
    """
    _refuse_environment()
    _replace_keys([Fernet.generate_key().decode(), *keys()])


def drop_old_keys() -> int:
    """Delete all keys but the newest; return the number of deleted keys."""
    _refuse_environment()
    newest, *old = keys()
    _replace_keys([newest])
    return len(old)


def _replace_keys(lines: list[str]) -> None:
    write_secret(key_file(), "\n".join(lines) + "\n", replaces=True)


def has_own_file() -> bool:
    """Return whether the keys are in the data folder, not in the environment."""
    return not os.environ.get(VARIABLE, "").strip()


def _refuse_environment() -> None:
    if not has_own_file():
        raise VaultError(
            f"The keys come from {VARIABLE}, which this command cannot change. Insert a new key "
            f"at the start of {VARIABLE}, restart the site, then rotate again."
        )


def _fernet() -> MultiFernet:
    try:
        return MultiFernet([Fernet(key) for key in keys()])
    except ValueError as error:
        raise VaultError(
            f"A key in {VARIABLE} or {key_file()} is invalid: {error}. Create a key with `python "
            "-c 'from cryptography.fernet import Fernet; print(Fernet.generate_key())'`."
        ) from None


def seal(text: str) -> str:
    """Return a text encrypted with the newest key."""
    return _fernet().encrypt(text.encode()).decode()


def unseal(sealed: str) -> str:
    """Return the decrypted text.

    Raises:
        VaultError: no key decrypts the text, or the text was modified.
    """
    try:
        return _fernet().decrypt(sealed.encode()).decode()
    except InvalidToken:
        raise VaultError(
            f"No key decrypts this secret. Restore the key that encrypted it "
            f"({key_file()} or {VARIABLE}), or store the secret again."
        ) from None


def reseal(sealed: str) -> str:
    """Return the text encrypted again with the newest key.

    Raises:
        VaultError: no key decrypts the text.
    """
    return seal(unseal(sealed))
