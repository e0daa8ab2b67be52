"""Encryption at rest with keys that are not stored in the database.

A stored text is ``v2:`` and the URL-safe base64 of a random 96-bit nonce, the AES-256-GCM
ciphertext and its 128-bit tag (NIST SP 800-38D). Its associated data names its owner, so that a
text copied to another owner does not decrypt. Older versions stored Fernet tokens (AES-128-CBC
with HMAC-SHA256); they still decrypt, and ``reseal`` replaces them.

The keys are 32 random bytes each, written as Fernet keys are, newest first: encryption uses the
first, decryption tries all. They come from ``SLIPWAY_SECRETS_KEYS`` or from a file of the data
folder that only its owner can read.
"""

import base64
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

from webapp.core.site_settings import (
    SECRETS_VARIABLE,
    SettingError,
    secrets_keys,
    write_secret,
)

VARIABLE = SECRETS_VARIABLE
FILE_NAME = "secrets.keys"
PREFIX = "v2:"  # no Fernet token has a colon
NONCE_BYTES, KEY_BYTES = 12, 32
DERIVATION = b"slipway vault AES-256-GCM"  # keeps this use of a key apart from Fernet's


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


def _checked_keys() -> list[str]:
    """Return the keys, newest first.

    Raises:
        VaultError: there is no key, or one is not 32 bytes in base64.
    """
    found = keys()
    try:
        MultiFernet([Fernet(key) for key in found])
    except ValueError as error:
        raise VaultError(
            f"A key in {VARIABLE} or {key_file()} is invalid: {error}. Create a key with `python "
            "-c 'from cryptography.fernet import Fernet; print(Fernet.generate_key())'`."
        ) from None
    return found


def _cipher(key: str) -> AESGCM:
    """Return AES-256-GCM with the key that HKDF-SHA256 (RFC 5869) derives from one of ours."""
    derivation = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=DERIVATION)
    return AESGCM(derivation.derive(base64.urlsafe_b64decode(key)))


def seal(text: str, *, owner: str) -> str:
    """Return a text encrypted with the newest key, to be decrypted for ``owner`` only."""
    nonce = os.urandom(NONCE_BYTES)
    sealed = _cipher(_checked_keys()[0]).encrypt(nonce, text.encode(), owner.encode())
    return PREFIX + base64.urlsafe_b64encode(nonce + sealed).decode()


def unseal(sealed: str, *, owner: str) -> str:
    """Return the decrypted text; a Fernet token of an older version names no owner.

    Raises:
        VaultError: no key decrypts the text for ``owner``, or the text was modified.
    """
    available = _checked_keys()
    if sealed.startswith(PREFIX):
        for key in available:
            try:
                stored = base64.urlsafe_b64decode(sealed.removeprefix(PREFIX))
                nonce, ciphertext = stored[:NONCE_BYTES], stored[NONCE_BYTES:]
                return _cipher(key).decrypt(nonce, ciphertext, owner.encode()).decode()
            except (InvalidTag, ValueError):
                continue
    else:
        try:
            return MultiFernet([Fernet(key) for key in available]).decrypt(sealed).decode()
        except (InvalidToken, ValueError):
            pass
    raise VaultError(
        "No key decrypts this secret, or it was encrypted for another secret or team. Restore the "
        f"key that encrypted it ({key_file()} or {VARIABLE}), or store the secret again."
    )


def reseal(sealed: str, *, owner: str) -> str:
    """Return the text encrypted again with the newest key.

    Raises:
        VaultError: no key decrypts the text for ``owner``.
    """
    return seal(unseal(sealed, owner=owner), owner=owner)
