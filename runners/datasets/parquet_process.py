"""Reads a Parquet file in a subprocess.

Uploads are parsed by a C++ library of 31 MB: a file that crashes it or exhausts memory ends
the subprocess, not the server. A dictionary or run lengths make rows without end of a file of a
few hundred bytes, so the rows together, and the reader's processor time, have limits that grow
with the file.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from io import UnsupportedOperation
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO, cast

from planner.specs.units import MIB

READER = Path(__file__).with_name("parquet.py")
PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZDIR")  # of the environment
MAX_GROUP_BYTES = 512 * 1024**2  # of the columns that are read, as the file states them
MAX_BYTES = 8 * 1024**3  # of the process's address space; a row group's values are far smaller
MIN_ROWS_BYTES = 256 * 1024**2  # that the rows of a file may take, however small it is
ROWS_RATIO = 20  # bytes of rows per byte of a file
START_SECONDS, SLOWEST_BYTES_PER_S = 60, 10 * 1024**2  # of the reader's processor time


class UnreadableTableError(ValueError):
    """The file is not Parquet, is damaged, or has values that JSON cannot represent."""


def rows_in_subprocess(
    file: BinaryIO,
    fields: Collection[str],
    max_line_bytes: int,
    skip: Callable[[Collection[str]], None],
) -> Iterator[tuple[int, bytes]]:
    """Yield each row's number, counted from 1, and the given columns as UTF-8 JSON.

    Rows are truncated a little above ``max_line_bytes``. ``skip`` is called with the names of the
    other columns before the first row.

    Raises:
        UnreadableTableError: the file cannot be read, or its rows are too large or too slow.
    """
    with ExitStack() as stack:
        source = _with_descriptor(file, stack)
        most = max(MIN_ROWS_BYTES, ROWS_RATIO * os.fstat(source.fileno()).st_size)
        seconds = START_SECONDS + most // SLOWEST_BYTES_PER_S
        limits = [str(each) for each in (MAX_GROUP_BYTES, MAX_BYTES, most, seconds)]
        process = subprocess.Popen(
            [sys.executable, "-P", str(READER), *limits, *fields],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        rows = cast("BinaryIO", process.stdout)
        stack.callback(_end, process, rows)
        number = size = 0
        while line := rows.readline(max_line_bytes + 2):
            if not line.endswith(b"\n") and len(line) <= max_line_bytes:
                break  # the process ended within a row
            if line.startswith(b"!"):
                raise UnreadableTableError(line[1:].decode(errors="replace").strip())
            if line.startswith(b"?"):
                skip(json.loads(line[1:]))
                continue
            number += 1
            size += len(line)
            if size > most:
                raise UnreadableTableError(
                    f"its first {number:,} rows take {most // MIB:,} MiB, {ROWS_RATIO} times "
                    "the file, and there are more; write the file without repeated values, or "
                    "divide it"
                )
            yield number, line.removesuffix(b"\n")
        if (status := process.wait()) == -signal.SIGXCPU:
            raise UnreadableTableError(
                f"its reader took more than {seconds} s of processor time; divide the file"
            )
        if status:
            raise UnreadableTableError(
                f"its reader ended with status {status}: the file is damaged, or needs more than "
                f"{MAX_BYTES // 1024**3} GiB of memory"
            )


def _environment() -> dict[str, str]:
    """Return the subprocess's environment, without the server's secrets."""
    env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return {**env, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}


def _with_descriptor(file: BinaryIO, stack: ExitStack) -> BinaryIO:
    """Return a file with a descriptor: the same, or a temporary copy of an in-memory file."""
    try:
        file.fileno()
    except UnsupportedOperation:
        copy: BinaryIO = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        file.seek(0)
        copyfileobj(file, copy)
        copy.flush()
        file = copy
    file.seek(0)
    return file


def _end(process: subprocess.Popen[bytes], rows: BinaryIO) -> None:
    process.kill()
    rows.close()
    process.wait()
