"""``slipway models`` and ``slipway devices``: the planner's catalogs, listed or searched.

``slipway models add`` registers a model of the team on the server; ``team`` lists, ``rename`` and
``delete`` change those models; ``push`` and ``copy`` bring a model's files to a host.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from runners.cli import model_copies, remote_code
from runners.cli.errors import CliError, ExitCode
from runners.cli.output import (
    OutputOption,
    binary_size,
    number,
    show,
    table,
    tokens,
    usd,
    write_document,
)

if TYPE_CHECKING:
    from runners.client.generated import ModelDetail, ModelReply, Slipway

Row = dict[str, Any]


class Catalog(NamedTuple):
    """A catalog: its noun, its rows, the columns of its table; ``find`` shows the last too."""

    noun: str
    rows: Callable[[], list[Row]]
    columns: tuple[str, ...]
    cells: Callable[[Row], tuple[str, ...]]
    named: Callable[[str], Row | None]


def _named_model(text: str) -> Row | None:
    """Return the row of the model that a name stands for, as `slipway plan` reads it."""
    from planner.catalog.models import get_entry
    from planner.specs.base import UnknownModelError

    try:
        known = get_entry(text).id
    except UnknownModelError:
        return None
    return next(row for row in model_rows() if row["id"] == known)


def _named_device(text: str) -> Row | None:
    """Return the row of the device that a text names, with or without a count."""
    from planner.catalog.devices import get_device
    from planner.catalog.hardware_names import read_hardware
    from planner.specs.base import PlannerError

    try:
        return get_device(read_hardware(text).cluster["device"]).model_dump(mode="json")
    except (PlannerError, KeyError):
        return None


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
        binary_size(row["memory_bytes"]),
        f"{number(row['memory_bandwidth_bytes_per_second'] / 1e9)} GB/s",
        f"{number(peak / 1e12)} TFLOP/s" if peak else "",
        usd(price) if price else "",
        " ".join(row["aliases"]),
    )


MODELS = Catalog("model", model_rows, ("Model", "Parameters", "Also"), _model_cells, _named_model)
DEVICES = Catalog(
    "device",
    device_rows,
    ("Device", "Memory", "Bandwidth", "16-bit peak", "Price/h", "Also"),
    _device_cells,
    _named_device,
)


def found_rows(catalog: Catalog, text: str) -> list[Row]:
    """Return the rows whose id, name or alias holds every word of a text, or that it stands for.

    Raises:
        CliError: no row does; the message gives the nearest ids.
    """
    from planner.catalog.reading import nearest_names, search_names

    rows = catalog.rows()
    if found := [rows[at] for at in search_names(text, map(_searched, rows))]:
        return found
    if (named := catalog.named(text)) is not None:
        return [named]
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

    @made.command("list", help=f"List the {catalog.noun}s of the planner's catalog.")
    def whole(output: OutputOption = "table") -> None:
        write_rows(catalog, catalog.rows(), output)

    @made.command("find", help=f"Find {catalog.noun}s whose name holds a text.")
    def find(text: TextArgument, output: OutputOption = "table") -> None:
        write_rows(catalog, found_rows(catalog, text), output, with_aliases=True)

    return made


models = _catalog_app(MODELS)
models.command("push")(model_copies.model_push)
models.command("copy")(model_copies.model_copy)
models.add_typer(remote_code.code, name="code")
devices = _catalog_app(DEVICES)


# A model of the team, by its config.json.

CONFIG = "config.json"


@models.command("add")
def model_add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, a config.json, or a repository of the Hugging Face Hub such as "
            "Qwen/Qwen3-8B; - reads the config.json from standard input.",
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", help="As the team sees it; its folder's or repository's name.")
    ] = "",
    output: OutputOption = "table",
) -> None:
    """Register a model of the team on the server, to plan for it by its name."""
    from runners.cli.server import server, wrote

    is_named = is_repository(source)
    config, usual_name = (None, source) if is_named else read_config(source)
    if not (name or usual_name):
        raise CliError("--name is missing: standard input gives the model none", field="--name")
    named, why = name or usual_name, ""
    with server() as client:
        if is_named:
            added, why = _added_by_name(client, named, source)
        else:
            added = client.add_model({"name": named, "config": config})
    if why:
        typer.echo(f"Only the config.json was sent, as this machine reads it: {why}", err=True)
    if wrote(added, output):
        return
    what = "jobs load its weights by name" if added.source == "hub" else "without weights"
    typer.echo(f"{added.id}  {added.name}: {tokens(added.num_parameters)} parameters, {what}.")


def _added_by_name(client: "Slipway", name: str, source: str) -> "tuple[ModelDetail, str]":
    """Return the model of a repository, and why it has no weights: "" if jobs load them.

    The server may not open a repository that the user may, or be of before it read any.

    Raises:
        ApiError: the server refuses the request, and the repository cannot be read here either.
        CliError: the server needs the config, which cannot be read here.
    """
    from runners.client.transport import ApiError

    body = {"name": name, "repository": source}
    try:
        return client.add_model(body), ""
    except ApiError as error:
        refusal = error
    is_unread = refusal.code == "hub_unreachable"
    is_unknown = any(each["field"] == "repository" for each in refusal.errors)
    if not (is_unread or is_unknown or refusal.code == "repository"):
        raise refusal
    try:
        config = read_config(source)[0]
    except CliError:
        if refusal.code == "repository":
            raise refusal from None
        raise
    if is_unread:
        return client.add_model(body | {"config": config}), ""
    return client.add_model({"name": name, "config": config}), refusal.detail


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Id or name of a model of the team.")
]


@models.command("team")
def models_of_team(output: OutputOption = "table") -> None:
    """List the models of the team: added ones, and what its jobs made."""
    from runners.cli.server import server, wrote

    with server() as client:
        found = _of_team(client)
    if wrote(found, output):
        return
    rows = [
        (each.id, each.name, tokens(each.num_parameters), each.source, each.host) for each in found
    ]
    show(table(("ID", "NAME", "PARAMETERS", "SOURCE", "HOST"), rows, right=(2,), fixed=[0]))


@models.command("rename")
def model_rename(
    model: ModelArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
) -> None:
    """Give a model of the team another name."""
    from runners.cli.server import server

    with server() as client:
        found = client.change_model(_model_of(client, model).id, {"name": name})
    typer.echo(f"{found.id}  {found.name}")


@models.command("delete")
def model_delete(
    model: ModelArgument,
    *,
    files: Annotated[
        bool, typer.Option("--files", help="Also what the job that made it keeps on its host.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model from the team's models."""
    from runners.cli.server import confirm, server

    with server() as client:
        found = _model_of(client, model)
        confirm(f"Delete the model {found.name} ({found.id}){' and its files' * files}?", yes=yes)
        client.delete_model(found.id, files=files)
    typer.echo(f"Deleted {found.name} ({found.id}).")


@models.command("publish")
def model_publish(
    model: ModelArgument,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="On the Hub.")],
    *,
    public: Annotated[
        bool, typer.Option("--public", help="A repository that is made is public.")
    ] = False,
    branch: Annotated[str, typer.Option("--branch", help="Instead of main.")] = "",
    output: OutputOption = "table",
) -> None:
    """Push a model that a job made to the Hub, with a card of its measured figures."""
    from runners.cli.server import server, wrote

    with server() as client:
        found = _model_of(client, model)
        job = client.publish_model(
            found.id,
            {"repository": repository, "revision": branch, "is_private": not public},
        )
    if not wrote(job, output):
        typer.echo(job.id)


def _of_team(client: "Slipway") -> "list[ModelReply]":
    """Return the models of the team, which the list has before those of the catalog."""
    listed = client.paginate(client.list_models, limit=200)
    return list(itertools.takewhile(lambda each: each.source != "catalog", listed))


def _model_of(client: "Slipway", text: str) -> "ModelReply":
    """Return the model of the team with an id or a name.

    Raises:
        CliError: there is none, or several have the name.
    """
    own = _of_team(client)
    found = [each for each in own if text.upper() == each.id or text == each.name]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(each.id for each in found)
        raise CliError(f"MODEL is {text!r}, and several have this name: {ids}", field="MODEL")
    raise CliError(
        f"MODEL is {text!r}, and the team has no such model: `slipway models team` lists them",
        field="MODEL",
    )


def is_repository(source: str) -> bool:
    """Return whether a text names a repository, and neither a folder nor a file here."""
    from runners.cli.plan_request import is_path
    from runners.cli.plans import is_file

    path = Path(source)
    if "/" not in source or is_file(path / CONFIG) or is_file(path):
        return False
    return not is_path(source)


def read_config(source: str) -> tuple[Row, str]:
    """Return the config.json of a folder, a file or a repository, and the model's usual name.

    Raises:
        CliError: there is none, or it is not a JSON object.
    """
    from runners.cli.plans import is_file, read_document

    if source == "-":
        return read_document(source), ""
    path = Path(source)
    if is_file(path / CONFIG):
        return read_document(str(path / CONFIG)), path.resolve().name
    if is_file(path):
        folder = path.resolve().parent.name
        return read_document(source), folder if path.name == CONFIG else path.stem
    if is_repository(source):
        from runners.cli.repositories import read_repository

        return read_repository(source, "MODEL").config, source
    raise CliError(
        f"MODEL is {source!r}: it must be a folder with a {CONFIG}, such a file, or a repository "
        "such as Qwen/Qwen3-8B",
        field="MODEL",
    )
