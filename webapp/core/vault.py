"""Encryption at rest with keys that the database does not hold.

The keys are Fernet's, the newest first: new texts take the first, old ones open with any. They
come from ``SLIPWAY_SECRETS_KEYS`` or from a file of the data folder that its owner alone reads.
"""

import os
import secrets
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings

VARIABLE = "SLIPWAY_SECRETS_KEYS"
FILE_NAME = "secrets.keys"


class VaultError(Exception):
    """A stored text that no key opens, or keys that are none; the text says the way out."""


def key_file() -> Path:
    """Return where the keys lie when the environment does not hold them."""
    return Path(settings.DATA_DIR) / FILE_NAME


def keys() -> list[str]:
    """Return the keys, the newest first; the first one is made when there is none."""
    if given := os.environ.get(VARIABLE):
        return [key.strip() for key in given.split(",") if key.strip()]
    path = key_file()
    if not path.exists():
        _write(path, [Fernet.generate_key().decode()], is_new=True)
    return path.read_text().split()


def add_key() -> None:
    """Put a new key before the others.

    Raises:
        VaultError: the keys are the environment's, where whoever sets it adds one.
    """
    _refuse_environment()
    _write(key_file(), [Fernet.generate_key().decode(), *keys()])


def drop_old_keys() -> int:
    """Keep the newest key alone; return how many went."""
    _refuse_environment()
    newest, *old = keys()
    _write(key_file(), [newest])
    return len(old)


def has_own_file() -> bool:
    """Return whether the keys are the data folder's and not the environment's."""
    return not os.environ.get(VARIABLE)


def _refuse_environment() -> None:
    if not has_own_file():
        raise VaultError(f"The keys stand in {VARIABLE}: put a new one first there, then rotate.")


def _write(path: Path, lines: list[str], *, is_new: bool = False) -> None:
    """Write the keys whole, closed to everybody else; of two first writers one wins."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fsync(handle)
    if not is_new:
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _fernet() -> MultiFernet:
    try:
        return MultiFernet([Fernet(key) for key in keys()])
    except ValueError as error:
        raise VaultError(
            f"A key in {VARIABLE} or {key_file()} is none: {error}. Make one with "
            "`python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key())'`."
        ) from None


def seal(text: str) -> str:
    """Return a text encrypted with the newest key."""
    return _fernet().encrypt(text.encode()).decode()


def unseal(sealed: str) -> str:
    """Return what was sealed.

    Raises:
        VaultError: none of the keys opens it, or it was changed.
    """
    try:
        return _fernet().decrypt(sealed.encode()).decode()
    except InvalidToken:
        raise VaultError(
            f"None of the keys opens this secret. Put the key back that it was sealed with "
            f"({key_file()} or {VARIABLE}), or store the secret anew."
        ) from None


def reseal(sealed: str) -> str:
    """Return the same text under the newest key.

    Raises:
        VaultError: none of the keys opens it.
    """
    return seal(unseal(sealed))
