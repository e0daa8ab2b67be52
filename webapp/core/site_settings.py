"""Settings of the site, from the environment: data folder, secret key, public URL, e-mail."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# The site's data folder and secret key, with a one-sentence error if they are unusable.
#
# The settings import this module, so it does not import Django. Every process of the site ends
# with that sentence instead of a traceback.


KEY_VARIABLE = "SLIPWAY_SECRET_KEY"


class DataFolderError(SystemExit):
    """The folder or the key is unusable; ends the process with its message."""


def data_folder(variables: Mapping[str, str], default: Path) -> Path:
    """Return the site's data folder, created if missing.

    Raises:
        DataFolderError: the folder cannot be created.
    """
    folder = Path(variables.get("SLIPWAY_DATA_DIR", default)).resolve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataFolderError(
            f"The data folder {folder} cannot be created: {error.strerror}. Correct the owner of "
            "the folder above it, or set SLIPWAY_DATA_DIR to another folder."
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
            write_secret(path, secrets.token_urlsafe(48))
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        verb = "read" if path.exists() else "made"
        words = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
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


def write_secret(path: Path, text: str, *, replaces: bool = False) -> None:
    """Write a file atomically with mode 0600; without ``replaces``, an existing file stays.

    With concurrent first writers, one wins.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
        if replaces:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        temporary.unlink(missing_ok=True)


# Settings of a site behind TLS, derived from its public URL.
#
# A loopback installation has none of them: it has no certificate, and browsers would reject secure
# cookies. The settings import this module, so it does not import Django.


YEAR_SECONDS = 31_536_000
# Paths used over plain loopback: health checks and calls of the local host agent.
PLAIN_PATHS = [r"^healthz$", r"^readyz$", r"^api/v1/(hosts|attempts)/"]


class PublicUrlError(ValueError):
    """SLIPWAY_PUBLIC_URL is not the URL of a site."""


def public_hosts(url: str) -> list[str]:
    """Return the host name of a site's public URL as a list."""
    return [name] if url and (name := urlsplit(url).hostname) else []


def public_site(url: str) -> dict[str, Any]:
    """Return the Django settings of a public URL; {} without one.

    Raises:
        PublicUrlError: the URL is not the https URL of a site's root.
    """
    if not url:
        return {}
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.path.strip("/"):
        raise PublicUrlError(
            f"SLIPWAY_PUBLIC_URL is {url!r}: give the https address of the site's first page, "
            "such as https://slipway.example.org, or unset the variable for a site on one machine"
        )
    return {
        "CSRF_TRUSTED_ORIGINS": [f"https://{parts.netloc}"],
        "SESSION_COOKIE_NAME": "__Host-session",
        "SESSION_COOKIE_SECURE": True,
        "SECURE_SSL_REDIRECT": True,
        "SECURE_SSL_HOST": parts.netloc,
        "SECURE_REDIRECT_EXEMPT": PLAIN_PATHS,
        "SECURE_HSTS_SECONDS": YEAR_SECONDS,
        "SECURE_HSTS_INCLUDE_SUBDOMAINS": True,
        # W021: HSTS preloading is permanent for a whole domain, so it is the owner's choice.
        # W003: a subclass of the CSRF middleware is installed.
        "SILENCED_SYSTEM_CHECKS": ["security.W021", "security.W003"],
    }


# E-mail settings from one URL; without it the site sends no e-mail.
#
# The settings import this module, so it does not import Django.


TIMEOUT_SECONDS = 20
# Scheme -> (default port, STARTTLS, implicit TLS).
SCHEMES = {
    "smtp": (25, False, False),
    "smtp+tls": (587, True, False),
    "smtps": (465, False, True),
}


class EmailUrlError(ValueError):
    """SLIPWAY_EMAIL_URL is not a valid mail server URL."""


def email_settings(url: str, sender: str) -> dict[str, Any]:
    """Return the Django settings of a mail server; {} without one.

    Raises:
        EmailUrlError: the URL or the sender is invalid.
    """
    if not url:
        return {}
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise EmailUrlError(f"SLIPWAY_EMAIL_URL: {error}") from error
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise EmailUrlError(
            f"SLIPWAY_EMAIL_URL begins with {parts.scheme!r} and names the server "
            f"{parts.hostname!r}: give it as smtp+tls://user:password@mail.example.org:587, "
            "with smtps:// for TLS from the start and smtp:// for none"
        )
    if "@" not in sender:
        raise EmailUrlError(
            f"SLIPWAY_EMAIL_FROM is {sender!r}: name the address from which e-mail is sent, "
            "such as slipway@example.org"
        )
    default_port, starts_tls, is_tls = SCHEMES[parts.scheme]
    return {
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": port or default_port,
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_TLS": starts_tls,
        "EMAIL_USE_SSL": is_tls,
        "EMAIL_TIMEOUT": TIMEOUT_SECONDS,
        "DEFAULT_FROM_EMAIL": sender,
    }
