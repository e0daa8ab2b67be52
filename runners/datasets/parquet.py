"""The rows of a Parquet file, each as the line of JSON that it would be (pyarrow reads it).

Only the columns that some format has are read, a few rows at a time: what a file takes in memory
is one row group's columns, which the file itself states and which are limited.
"""

import json
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_AT_A_TIME = 256
MAX_GROUP_BYTES = 512 * 1024**2  # of the columns that are read, as the file states them
MAX_NAMES_BYTES = 16 * 1024**2  # of any one text of the file's own description


class ParquetError(ValueError):
    """A file that is no Parquet, is damaged, or holds what no line of JSON can."""


def rows_of(file: BinaryIO, fields: Collection[str]) -> Iterator[tuple[int, bytes]]:
    """Yield each row with its number, counted from 1, as UTF-8 JSON of the given columns.

    A file without any of them yields its rows with every column's name and no value, so that
    whoever reads them can say which columns there are.

    Raises:
        ParquetError: it cannot be read, with the reason; or a row group is too large.
    """
    try:
        table = pq.ParquetFile(
            file,
            thrift_string_size_limit=MAX_NAMES_BYTES,
            thrift_container_size_limit=MAX_NAMES_BYTES,
        )
        names = list(table.schema_arrow.names)
        wanted = [name for name in names if name in fields]
        _check_groups(table, wanted)
        if not wanted:
            yield from _empty_rows(table.metadata.num_rows, names)
            return
        number = 0
        for batch in table.iter_batches(batch_size=ROWS_AT_A_TIME, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield number, _line(number, row)
    except (pa.ArrowException, OSError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise ParquetError(f"it cannot be read as Parquet ({first[:200]})") from None


def _check_groups(table: pq.ParquetFile, wanted: Collection[str]) -> None:
    """Refuse row groups whose columns would not fit in memory."""
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        columns = (group.column(each) for each in range(group.num_columns))
        size = sum(
            each.total_uncompressed_size
            for each in columns
            if each.path_in_schema.partition(".")[0] in wanted
        )
        if size > MAX_GROUP_BYTES:
            raise ParquetError(
                f"row group {number + 1} holds {size // 1024**2:,} MiB; "
                f"{MAX_GROUP_BYTES // 1024**2} MiB are read at once. Write it with smaller row "
                "groups"
            )


def _empty_rows(count: int, names: list[str]) -> Iterator[tuple[int, bytes]]:
    line = json.dumps(dict.fromkeys(names)).encode()
    for number in range(1, count + 1):
        yield number, line


def _line(number: int, row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except (TypeError, UnicodeEncodeError):
        found = ", ".join(f"{name}: {type(value).__name__}" for name, value in row.items())
        raise ParquetError(
            f"row {number} holds what is no text, number or list of them ({found[:200]})"
        ) from None
