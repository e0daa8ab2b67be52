"""What commands print: tables for people, JSON and YAML for programs, numbers with units.

Tables have no borders, so that they read the same in a terminal, a pipe and a log. rich leaves
colours out where the output is no terminal or ``NO_COLOR`` is set.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Output = Literal["table", "json", "yaml"]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="table for people, json or yaml for programs.")
]
TRAILING = re.compile(r" +$", re.MULTILINE)
GUTTER, LEAST_WRAPPED = 2, 8  # blanks after a column; the least width of one that wraps
UNWRAPPED_COLUMNS = 100_000  # more than any row has
SLOW_SECONDS = 0.5  # a command that takes longer shows that it runs


def write_document(json_text: str, output: str) -> None:
    """Write a JSON document to standard output as it is, or as YAML."""
    if output == "json":
        sys.stdout.write(json_text + "\n")
        sys.stdout.flush()  # a closed pipe is reported here, not while Python ends
        return
    import yaml

    yaml.safe_dump(json.loads(json_text), sys.stdout, sort_keys=False, allow_unicode=True)


def show(*parts: "RenderableType", style: str | None = None) -> None:
    """Print text and tables to standard output, without blanks at the ends of lines.

    They are as wide as the terminal or ``COLUMNS``; elsewhere nothing is wrapped, so that a row
    of a table is one line of a pipe or a file.
    """
    from rich.console import Console

    is_wrapped = sys.stdout.isatty() or os.environ.get("COLUMNS")
    width = None if is_wrapped else UNWRAPPED_COLUMNS
    console = Console(highlight=False, emoji=False, markup=False, width=width)
    with console.capture() as captured:
        for part in parts:
            left_out = _fit_columns(part, console.width)
            console.print(part, style=style)
            if left_out:
                columns = ", ".join(left_out)
                console.print(f"Not shown in {console.width} columns: {columns}")
    sys.stdout.write(TRAILING.sub("", captured.get()))
    sys.stdout.flush()


def _fit_columns(part: "RenderableType", width: int) -> list[str]:
    """Take the last columns that never wrap off a table that is too wide; return their titles.

    A figure that is cut is a wrong figure, so it is left out whole.
    """
    from rich.cells import cell_len
    from rich.table import Table

    if not isinstance(part, Table) or not part.show_header:
        return []

    def need(column: Any) -> int:  # noqa: ANN401 (rich's column)
        cells = [str(cell) for cell in (column.header, *column.cells)]
        if column.no_wrap:
            return max(map(cell_len, cells)) + GUTTER
        return LEAST_WRAPPED + GUTTER

    left_out: list[str] = []
    while len(part.columns) > 1 and sum(map(need, part.columns)) - GUTTER > width:
        at = max((i for i, each in enumerate(part.columns) if i and each.no_wrap), default=None)
        left_out.insert(
            0, str(part.columns.pop(len(part.columns) - 1 if at is None else at).header)
        )
    if len(part.columns) == 1:
        part.columns[0].no_wrap = False
    return left_out


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    fixed: Sequence[int] = (),
) -> "Table":
    """Return a table without borders; ``right`` are columns of numbers, ``fixed`` never wrap."""
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for index, title in enumerate(columns):
        justify: Literal["left", "right"] = "right" if index in right else "left"
        is_fixed = index in right or index in fixed
        made.add_column(title, justify=justify, overflow="fold", no_wrap=is_fixed)
    for row in rows:
        made.add_row(*row)
    return made


def bullets(lines: Iterable[str]) -> "Table":
    """Return lines as a list, each with its further lines below its own begin."""
    from rich.table import Table

    made = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        made.add_row("-", line)
    return made


@contextlib.contextmanager
def progress(words: str) -> Iterator[None]:
    """Show on standard error that a slow block runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    import threading

    shown: list[Any] = []

    def show() -> None:
        from rich.console import Console

        status = Console(stderr=True).status(f"{words} …")
        shown.append(status)
        status.start()

    timer = threading.Timer(SLOW_SECONDS, show)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for status in shown:
            status.stop()


# Numbers as text: three significant digits, the unit after a blank.


def number(value: float) -> str:
    """Return a number with three significant digits, whole from 100 on.

    >>> number(3210.4), number(61.234), number(0.01234)
    ('3,210', '61.2', '0.0123')
    """
    if abs(value) >= 100 or value == 0:  # noqa: PLR2004 - three digits before the point
        return f"{value:,.0f}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """Return a duration in a suitable unit.

    >>> seconds(0.0123), seconds(5.5), seconds(7200), seconds(1e7)
    ('12.3 ms', '5.5 s', '2 h', '116 days')
    """
    for size, unit in ((86_400 * 2, "days"), (3600, "h"), (60, "min")):
        if value >= size:
            return f"{number(value / (86_400 if unit == 'days' else size))} {unit}"
    return f"{number(value * 1000)} ms" if value < 1 else f"{number(value)} s"


def binary_size(value: float) -> str:
    """Return bytes of memory or disk in GiB, below a tenth of one in MiB, KiB or B.

    >>> binary_size(85899345920), binary_size(38_400_000), binary_size(2100), binary_size(49)
    ('80.0 GiB', '36.6 MiB', '2.05 KiB', '49 B')
    """
    if value < 2**10:
        return f"{number(value)} B"
    if value < 2**20:
        return f"{number(value / 2**10)} KiB"
    if value < 2**30 / 10:
        return f"{number(value / 2**20)} MiB"
    return f"{value / 2**30:,.1f} GiB"


def usd(value: float) -> str:
    """Return an amount of money.

    >>> usd(0.0123), usd(4.1), usd(12345.6)
    ('$0.0123', '$4.10', '$12,346')
    """
    if abs(value) >= 100:  # noqa: PLR2004 - cents no longer matter
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 1 else f"${value:.3g}"


def between(low: str, high: str, word: str = " to ") -> str:
    """Return two quantities with a word between them, and the unit once if it is the same.

    >>> between("183 ms", "789 ms"), between("429 ms", "1.85 s"), between("324", "955")
    ('183 to 789 ms', '429 ms to 1.85 s', '324 to 955')
    """
    value, blank, unit = low.partition(" ")
    is_same = blank and high.endswith(f" {unit}")
    return f"{value if is_same else low}{word}{high}"


def capitalised(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def state_words(state: str) -> str:
    """Return a job's state as it follows “is”: ``queued``, ``in preflight``."""
    return "in preflight" if state == "preflight" else state


def counted(value: int, noun: str, nouns: str = "") -> str:
    """Return a number of things.

    >>> counted(1, "plan"), counted(2000, "strategy", "strategies")
    ('1 plan', '2,000 strategies')
    """
    return f"{value:,} {noun if value == 1 else nouns or noun + 's'}"


def percent(value: float) -> str:
    """Return a ratio in per cent.

    >>> percent(0.4123)
    '41.2 %'
    """
    return f"{number(value * 100)} %"


def tokens(value: float) -> str:
    """Return a number of tokens, parameters or requests, from a million on with its unit.

    >>> tokens(16384), tokens(8_030_261_248)
    ('16,384', '8.03 B')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:,.0f}"
