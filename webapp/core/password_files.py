"""Files of breached passwords: searched where they are, never loaded.

Two forms are taken: a list of passwords, one on each line, and SHA-1 hashes in ascending order
with the number of breaches after a colon, as Have I Been Pwned publishes them (``HASH:count``).
Hashes are found by bisection, in a file of 40 GB within some 40 reads; a list is read through.
"""

import hashlib
import mmap
import os
import re
from pathlib import Path
from typing import BinaryIO

HASH = re.compile(rb"[0-9A-Fa-f]{40}(:\d+)?\r?\n?")
OTHER_HASH = re.compile(rb"[0-9A-Fa-f]{32}:\d+\r?\n?")  # NTLM, published beside SHA-1
DIGITS = 40
BOM = b"\xef\xbb\xbf"
NUM_SAMPLES = 64


class PasswordFileError(ValueError):
    """A file cannot be used; the message says why, as the end of a sentence."""


def sha1_of(password: str) -> str:
    """Return the SHA-1 of a password in capital hex digits, the key of such lists."""
    return hashlib.sha1(password.encode(), usedforsecurity=False).hexdigest().upper()


def has_hashes(path: Path) -> bool:
    """Check a file, and return whether it has hashes; False for a list of passwords.

    Raises:
        PasswordFileError: it cannot be read, is empty, has other hashes, or is not in order.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            _seek_beginning(file)
            first = file.readline(1024)
            if not first.strip():
                raise PasswordFileError("which is empty or begins with an empty line")
            if OTHER_HASH.fullmatch(first):
                raise PasswordFileError("which has NTLM hashes; download the SHA-1 ones")
            if not HASH.fullmatch(first):
                return False
            before = b""
            for number in range(NUM_SAMPLES):
                _seek_line(file, size * number // NUM_SAMPLES)
                line = file.readline(1024)
                if line and not HASH.fullmatch(line):
                    raise PasswordFileError(f"which has a line that is no hash: {line[:60]!r}")
                if line and line[:DIGITS].upper() < before:
                    raise PasswordFileError(
                        "whose hashes are not in order; sort them with `LC_ALL=C sort`"
                    )
                before = line[:DIGITS].upper() or before
    except OSError as error:
        raise PasswordFileError(f"which cannot be read: {error.strerror}") from None
    return True


def _seek_beginning(file: BinaryIO) -> int:
    """Go to the first line, after a byte order mark, and return its offset."""
    file.seek(0)
    return file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)


def _seek_line(file: BinaryIO, offset: int) -> int:
    """Go to the first line that begins at an offset or after it, and return where."""
    beginning = _seek_beginning(file)
    if offset > beginning:
        file.seek(offset - 1)
        file.readline()
    return file.tell()


def has_hash(file: BinaryIO, digest: str) -> bool:
    """Return whether a file of sorted hashes has one, in O(log n) reads.

    Args:
        file: an open file, each line of which begins with 40 hex digits, ascending.
        digest: 40 hex digits.
    """
    wanted = digest.upper().encode()
    low, high = _seek_beginning(file), file.seek(0, os.SEEK_END)
    while low < high:  # a line with the hash begins in [low, high), at low if not later
        middle = (low + high) // 2
        start = _seek_line(file, middle) if middle > low else file.seek(low)
        if start >= high:
            high = middle
            continue
        line = file.readline()
        found = line[:DIGITS].upper()
        if found == wanted:
            return True
        if found < wanted:
            low = start + len(line)
        else:
            high = middle
    return False


def has_password(path: Path, password: str) -> bool:
    """Return whether a list has a password, as it was typed or in small letters.

    Raises:
        OSError: the file cannot be read.
    """
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        return any(
            _has_line(text, each.encode()) for each in dict.fromkeys((password, password.lower()))
        )


def _has_line(text: mmap.mmap, line: bytes) -> bool:
    place = text.find(line) if b"\n" not in line else -1
    while place >= 0:
        before, after = text[max(place - 1, 0) : place], text[place + len(line) :][:1]
        if before in (b"", b"\n") and after in (b"", b"\r", b"\n"):
            return True
        place = text.find(line, place + 1)
    return False
