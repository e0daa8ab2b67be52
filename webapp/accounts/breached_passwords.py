"""Refuse passwords that are known from breaches (``SLIPWAY_BREACHED_PASSWORDS``).

The list is a file, or the range API of Have I Been Pwned, which is told the first five hex digits
of a password's SHA-1 and answers with all of its hashes that begin so (k-anonymity). If neither
answers, the password is accepted by the other rules, and a line in the log says so: nobody is
kept from changing a password.
"""

import time
from pathlib import Path

import httpx
import structlog
from django.contrib.auth.models import AbstractBaseUser
from django.core.exceptions import ValidationError

from webapp.core.password_files import has_hash, has_hashes, has_password, sha1_of

LARGEST_BYTES = 1024**2  # a range has 80 KiB
PREFIX_DIGITS = 5
TIMEOUT_SECONDS = 2.0  # of each step
LONGEST_SECONDS = 4.0  # altogether; the answer has about 40 KB
HEADERS = {"User-Agent": "slipway", "Add-Padding": "true"}  # the size tells no prefix
log = structlog.get_logger(__name__)


class BreachedPasswordValidator:
    """Refuses the passwords of a list; ``source`` is the path of a file or the URL of an API."""

    def __init__(self, source: str) -> None:
        self.source = source

    def validate(self, password: str, user: AbstractBaseUser | None = None) -> None:  # noqa: ARG002 (Django's signature)
        """Check a password.

        Raises:
            ValidationError: it is in the list.
        """
        if is_breached(self.source, password):
            raise ValidationError(
                "This password is known from a breach of other sites. Choose another one.",
                code="password_breached",
            )

    def get_help_text(self) -> str:
        """Return the rule for forms."""
        return "Your password cannot be one that is known from breaches."


def is_breached(source: str, password: str) -> bool:
    """Return whether a list has a password; False, with a line in the log, if it fails."""
    try:
        if source.startswith(("https://", "http://")):
            return is_in_range(source, sha1_of(password))
        path = Path(source)
        if not has_hashes(path):
            return has_password(path, password)
        with path.open("rb") as file:
            return has_hash(file, sha1_of(password))
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        log.warning("breached passwords were not checked", source=source, cause=str(error))
        return False


def is_in_range(url: str, digest: str) -> bool:
    """Return whether a range API has a SHA-1, given in capital hex digits.

    Raises:
        httpx.HTTPError: it does not answer, or with another status than 200.
        TimeoutError: its answer takes too long.
    """
    prefix, suffix = digest[:PREFIX_DIGITS], digest[PREFIX_DIGITS:]
    ends_at = time.monotonic() + LONGEST_SECONDS
    with (
        httpx.Client(timeout=TIMEOUT_SECONDS, headers=HEADERS) as client,
        client.stream("GET", f"{url.rstrip('/')}/range/{prefix}") as answer,
    ):
        answer.raise_for_status()
        text = bytearray()
        for part in answer.iter_bytes():
            if time.monotonic() > ends_at:
                raise TimeoutError(f"the answer takes longer than {LONGEST_SECONDS:.0f} s")
            text += part
            if len(text) > LARGEST_BYTES:
                raise httpx.DecodingError(f"the answer has more than {LARGEST_BYTES:,} bytes")
    for line in text.decode("ascii", "replace").split("\n"):
        found, _, count = line.strip().partition(":")
        if found.upper() == suffix:
            return count != "0"  # padding has zero
    return False
