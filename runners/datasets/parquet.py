"""Reads the rows of a Parquet file as JSON lines with pyarrow.

Only the columns of known formats are read, a few rows at a time. Memory is bounded by one row
group's columns, whose stated size is limited. As a program it reads the file at standard
input; ``parquet_process`` starts it.
"""

import json
import os
import resource
import sys
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_AT_A_TIME = 256
MAX_NAMES_BYTES = 16 * 1024**2  # of one string in the file's metadata
LEAST_ROW_BYTES = 3  # {} and the end of the line
NAMED_ROWS = 100  # of a file without a known column: more than errors are shown


class ParquetError(ValueError):
    """The file is not Parquet, is damaged, or has values that JSON cannot represent."""


def rows_of(
    file: BinaryIO, fields: Collection[str], max_group_bytes: int, max_rows_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Yield each row's number, counted from 1, and the given columns as UTF-8 JSON.

    Number 0 comes first, with a list of the other columns' names.

    ``max_group_bytes`` limits the read columns of one row group, ``max_rows_bytes`` the number of
    rows that the file states. If the file has none of the columns, its first rows have all column
    names with null values, so that the caller can list them.

    Raises:
        ParquetError: the file cannot be read, or is too large: a row group, or the stated rows.
    """
    try:
        table = pq.ParquetFile(
            file,
            thrift_string_size_limit=MAX_NAMES_BYTES,
            thrift_container_size_limit=MAX_NAMES_BYTES,
        )
        names = list(table.schema_arrow.names)
        _check_names(names)
        selected = [name for name in names if name in fields]
        unread = [name for name in names if name not in fields]
        yield 0, json.dumps(unread if selected else []).encode()
        _check_groups(table, selected, max_group_bytes)
        _check_rows(table.metadata.num_rows, max_rows_bytes // LEAST_ROW_BYTES)
        if not selected:
            yield from _empty_rows(min(table.metadata.num_rows, NAMED_ROWS), names)
            return
        number = 0
        for batch in table.iter_batches(batch_size=ROWS_AT_A_TIME, columns=selected):
            for row in batch.to_pylist():
                number += 1
                yield number, _line(number, row)
    except ParquetError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # a struct with a field twice
        first = str(error).partition("\n")[0].rstrip(".")
        raise ParquetError(f"it cannot be read as Parquet ({first[:200]})") from None


def _check_names(names: list[str]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ParquetError(f"it has the column “{repeated[:80]}” twice; keep one")


def _check_groups(table: pq.ParquetFile, selected: Collection[str], most: int) -> None:
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        columns = (group.column(each) for each in range(group.num_columns))
        size = sum(
            each.total_uncompressed_size
            for each in columns
            if each.path_in_schema.partition(".")[0] in selected
        )
        if size > most:
            raise ParquetError(
                f"row group {number + 1} holds {size // 1024**2:,} MiB; "
                f"{most // 1024**2} MiB are read at once. Write it with smaller row "
                "groups"
            )


def _check_rows(stated: int, most: int) -> None:
    if not 0 <= stated <= most:
        raise ParquetError(
            f"it states {stated:,} rows, and a file of its size may have {most:,}; divide it"
        )


def _empty_rows(count: int, names: list[str]) -> Iterator[tuple[int, bytes]]:
    line = json.dumps(dict.fromkeys(names)).encode()
    for number in range(1, count + 1):
        yield number, line


def _line(number: int, row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except (TypeError, UnicodeEncodeError):
        types = ", ".join(f"{name}: {type(value).__name__}" for name, value in row.items())
        raise ParquetError(
            f"row {number} has a value other than text, numbers or lists of them ({types[:200]})"
        ) from None


def main(arguments: list[str]) -> int:
    """Write the rows of the file at standard input as lines.

    An error line begins with ``!``, the line of the columns that are not read with ``?``.
    Arguments: the byte limits of a row group, of the address space and of all rows, the seconds of
    processor time, then the columns.
    """
    max_group_bytes, max_bytes, max_rows_bytes, seconds = map(int, arguments[:4])
    fields = arguments[4:]
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = sys.stdout.buffer
    try:
        with os.fdopen(0, "rb") as file:
            for number, line in rows_of(file, fields, max_group_bytes, max_rows_bytes):
                out.write((line if number else b"?" + line) + b"\n")
    except (ParquetError, MemoryError) as error:
        out.write(b"!" + (str(error) or "it takes too much memory").encode() + b"\n")
    except BrokenPipeError:  # the reader closed the pipe
        os._exit(0)
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
