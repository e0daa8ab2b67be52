"""``slipway models`` and ``slipway devices``: the planner's catalogs, listed or searched."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from runners.cli.errors import CliError, ExitCode
from runners.cli.output import OutputOption, gib, number, show, table, tokens, usd, write_document

Row = dict[str, Any]


class Catalog(NamedTuple):
    """A catalog: its noun, its rows, the columns of its table; ``find`` shows the last too."""

    noun: str
    rows: Callable[[], list[Row]]
    columns: tuple[str, ...]
    cells: Callable[[Row], tuple[str, ...]]


def model_rows() -> list[Row]:
    """Return the models with their published parameters, aliases and source."""
    from planner.catalog.models import list_models

    return [
        {
            "id": entry.id,
            "parameters": entry.published_parameters,
            "aliases": list(entry.aliases),
            "source": entry.source,
            "as_of": entry.as_of,
        }
        for entry in list_models()
    ]


def device_rows() -> list[Row]:
    """Return the devices with all their figures and sources."""
    from planner.catalog.devices import list_devices

    return [device.model_dump(mode="json") for device in list_devices()]


def _model_cells(row: Row) -> tuple[str, ...]:
    known = tokens(row["parameters"]) if row["parameters"] else ""
    return row["id"], known, " ".join(row["aliases"])


def _device_cells(row: Row) -> tuple[str, ...]:
    peaks = row.get("peak_flops_per_second", {})
    peak = peaks.get("bf16") or peaks.get("fp16")
    price = row.get("price_usd_per_hour")
    return (
        row["id"],
        gib(row["memory_bytes"]),
        f"{number(row['memory_bandwidth_bytes_per_second'] / 1e9)} GB/s",
        f"{number(peak / 1e12)} TFLOP/s" if peak else "",
        usd(price) if price else "",
        " ".join(row["aliases"]),
    )


MODELS = Catalog("model", model_rows, ("Model", "Parameters", "Also"), _model_cells)
DEVICES = Catalog(
    "device",
    device_rows,
    ("Device", "Memory", "Bandwidth", "16-bit peak", "Price/h", "Also"),
    _device_cells,
)


def found_rows(catalog: Catalog, text: str) -> list[Row]:
    """Return the rows whose id, name or alias holds every word of a text.

    Raises:
        CliError: no row does; the message gives the nearest ids.
    """
    words = text.lower().split()
    rows = catalog.rows()
    found = [row for row in rows if all(word in _searched(row) for word in words)]
    if found:
        return found
    from planner.catalog.reading import nearest_names

    nearest = ", ".join(nearest_names(text, [row["id"] for row in rows])) or "none"
    raise CliError(
        f"TEXT is {text!r}: no {catalog.noun} of the catalog has it in its name; nearest: "
        f"{nearest}",
        code=f"unknown_{catalog.noun}",
        exit_code=ExitCode.FAILED,
    )


def _searched(row: Row) -> str:
    return " ".join([row["id"], row.get("name") or "", *row.get("aliases", ())]).lower()


def write_rows(
    catalog: Catalog, rows: Sequence[Row], output: str, *, with_aliases: bool = False
) -> None:
    """Print rows of a catalog, with other names of each if wanted."""
    if output != "table":
        write_document(json.dumps(rows, ensure_ascii=False), output)
        return
    width = len(catalog.columns) - (not with_aliases)
    cells = [catalog.cells(row)[:width] for row in rows]
    numbers = range(1, len(catalog.columns) - 1)
    show(table(catalog.columns[:width], cells, right=numbers, fixed=[0]))


TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="A part of the name.")]


def _catalog_app(catalog: Catalog) -> typer.Typer:
    """Return the commands of a catalog: the list, and ``find``."""
    made = typer.Typer(
        help=f"List the {catalog.noun}s of the planner's catalog, or find some by name.",
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,
    )

    @made.callback()
    def listed(context: typer.Context, output: OutputOption = "table") -> None:
        if context.invoked_subcommand is None:
            write_rows(catalog, catalog.rows(), output)

    @made.command("find", help=f"Find {catalog.noun}s whose name holds a text.")
    def find(text: TextArgument, output: OutputOption = "table") -> None:
        write_rows(catalog, found_rows(catalog, text), output, with_aliases=True)

    return made


models = _catalog_app(MODELS)
devices = _catalog_app(DEVICES)
