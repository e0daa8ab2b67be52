"""Training data of the server: ``slipway data``."""

from pathlib import Path
from typing import Annotated

import typer

from runners.cli.errors import CliError
from runners.cli.groups import group
from runners.cli.output import OutputOption, binary_size, show, table
from runners.cli.server import YesOption, confirm, server, wrote

data = group("Uploaded training data of the team.")


@data.command("list")
def data_list(output: OutputOption = "table") -> None:
    """List the team's uploaded files."""
    with server() as client:
        rows = list(client.paginate(client.list_data))
    if wrote(rows, output):
        return
    shown = [
        (
            each.id,
            each.name,
            f"{each.num_records:,}",
            binary_size(each.size_bytes),
            each.format,
        )
        for each in rows
    ]
    show(table(("ID", "NAME", "RECORDS", "SIZE", "FORMAT"), shown, right=(2, 3), fixed=(0,)))


@data.command("add")
def data_add(
    file: Annotated[Path, typer.Argument(help="JSON, JSON lines, Parquet, CSV or text.")],
    output: OutputOption = "table",
) -> None:
    """Upload a file; it is checked record by record."""
    if not file.is_file():
        raise CliError(f"FILE is {str(file)!r}: there is no such file", field="FILE")
    with server() as client:
        added = client.add_data(file)
    if wrote(added, output):
        return
    typer.echo(f"{added.id}  {added.name}: {added.num_records:,} records. {added.note}".strip())


@data.command("delete")
def data_delete(
    data_id: Annotated[str, typer.Argument(metavar="ID")], *, yes: YesOption = False
) -> None:
    """Delete an uploaded file."""
    with server() as client:
        found = client.get_data(data_id)
        what = f"{found.name} ({found.id})"
        confirm(f"Delete {what}?", yes=yes)
        client.delete_data(found.id)
    typer.echo(f"Deleted {what}.")
