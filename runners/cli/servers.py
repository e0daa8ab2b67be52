"""Servers that somebody else started, watched by the server: ``slipway servers``."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runners.cli.errors import CliError
from runners.cli.groups import group
from runners.cli.output import OutputOption, number, seconds, show, table
from runners.cli.server import YesOption, confirm, row_named, server, wrote

if TYPE_CHECKING:
    from runners.client.generated import ServerDetail, ServerReply, Slipway

ServerArgument = Annotated[
    str, typer.Argument(metavar="SERVER", help="Name, address or id of an observed server.")
]
PlanOption = Annotated[
    str | None,
    typer.Option("--plan", metavar="ID", help="Saved plan to stand beside it; '' for none."),
]
KeyOption = Annotated[
    bool,
    typer.Option("--key", help="Read its key from standard input, or ask for it, typed hidden."),
]
NoKeyOption = Annotated[bool, typer.Option("--no-key", help="Ask it without a key from now on.")]
HostOption = Annotated[
    str | None,
    typer.Option("--host", metavar="SLUG", help="Host that it runs on; '' for none."),
]
servers = group("Servers that somebody else started, with their figures.")


def _of(client: "Slipway", name: str) -> "ServerReply":
    """Return the observed server with a name, an address or an id.

    Raises:
        CliError: there is none.
    """
    rows = client.paginate(client.list_servers)
    return row_named(rows, name, ("name", "id", "address"), "observed server")


def _words(row: "ServerReply") -> str:
    if row.silent_since is not None:
        return f"not answering since {row.silent_since.astimezone():%d %b %H:%M:%S}"
    return "not seen yet" if row.state == "unknown" else str(row.state)


def _figure(figures: Mapping[str, float], name: str) -> str:
    value = figures.get(name)
    return "" if value is None else number(value)


@servers.command("list")
def server_list(output: OutputOption = "table") -> None:
    """List the teams' observed servers, the newest first."""
    with server() as client:
        rows = list(client.paginate(client.list_servers))
    if wrote(rows, output):
        return
    shown = [
        (
            each.id,
            each.name,
            _words(each),
            f"{each.engine} {each.release}".strip(),
            _figure(each.figures, "running_requests"),
            _figure(each.figures, "tokens_per_second"),
        )
        for each in rows
    ]
    show(table(("ID", "NAME", "STATE", "ENGINE", "RUNNING", "TOKENS/S"), shown, fixed=(0,)))


@servers.command("add")
def server_add(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Its address, such as http://10.0.0.5:8000.")
    ],
    *,
    name: Annotated[str, typer.Option("--name", help="Default: its address.")] = "",
    plan: PlanOption = None,
    key: KeyOption = False,
    host: HostOption = None,
    output: OutputOption = "table",
) -> None:
    """Watch a server from now on; it is only read, and runs on untouched."""
    sent = {"address": url, "name": name, **_links(plan, host), **_key(is_asked=key)}
    with server() as client:
        made = client.add_server(sent)
    if wrote(made, output):
        return
    typer.echo(f"{made.name} is watched: {made.id}")


def _key(*, is_asked: bool) -> dict[str, Any]:
    """Return the key as a field; a command line would show it to everybody of the machine."""
    if not is_asked:
        return {}
    is_typed = sys.stdin.isatty()
    key = typer.prompt("Key", hide_input=True) if is_typed else sys.stdin.read().strip()
    if not key:
        raise CliError("there is no key on standard input; give it there", field="--key")
    return {"key": key}


def _links(plan: str | None, host: str | None) -> dict[str, Any]:
    """Return the fields that were given; an empty text is none."""
    sent: dict[str, Any] = {} if plan is None else {"plan": plan or None}
    return sent | ({} if host is None else {"host": host or None})


@servers.command("show")
def server_show(observed: ServerArgument, output: OutputOption = "table") -> None:
    """Show a server's models and figures, and what its plan says of them."""
    with server() as client:
        found = client.get_server(_of(client, observed).id)
    if wrote(found, output):
        return
    _show(found)


def _show(row: "ServerDetail") -> None:
    typer.echo(f"{row.name}  {row.id}  {_words(row)}")
    if row.problem:
        typer.echo(row.problem)
    engine = f"{row.engine or 'engine not recognised'} {row.release}".strip()
    typer.echo(f"{row.address}, {engine}{f', plan {row.plan}' if row.plan else ''}")
    for each in row.models:
        length = f", up to {each.max_model_len:,} tokens a request" if each.max_model_len else ""
        typer.echo(f"model {each.name}{length}")
    compared = {each.name: each for each in row.compared}
    shown = []
    for name, value in sorted(row.window.figures.items()):
        said = compared.get(name)
        interval = ""
        if said is not None and said.low is not None and said.high is not None:
            interval = f"{number(said.low)} to {number(said.high)}"
        predicted = "" if said is None or said.predicted is None else number(said.predicted)
        shown.append((name, number(value), predicted, interval, said.note if said else ""))
    if not shown:
        return
    typer.echo(f"Measured in the last {seconds(row.window.seconds)}:")
    show(table(("FIGURE", "MEASURED", "PREDICTED", "80 % INTERVAL", "NOTE"), shown))
    if row.compared_concurrency is not None:
        typer.echo(
            f"Predicted (modelled) for {row.compared_concurrency} requests in flight, as was "
            "measured. This calibrates nothing."
        )


@servers.command("change")
def server_change(
    observed: ServerArgument,
    *,
    name: Annotated[str | None, typer.Option("--name", help="Another name.")] = None,
    plan: PlanOption = None,
    key: KeyOption = False,
    no_key: NoKeyOption = False,
    host: HostOption = None,
    output: OutputOption = "table",
) -> None:
    """Change what a server is called, and what stands beside it."""
    if key and no_key:
        raise CliError("--key and --no-key exclude each other; give one", field="--no-key")
    sent = {**({} if name is None else {"name": name}), **_links(plan, host), **_key(is_asked=key)}
    if no_key:
        sent["key"] = ""
    with server() as client:
        changed = client.change_server(_of(client, observed).id, sent)
    if wrote(changed, output):
        return
    _show(changed)


@servers.command("remove")
def server_remove(observed: ServerArgument, *, yes: YesOption = False) -> None:
    """Watch a server no longer, and delete its figures; the server runs on."""
    with server() as client:
        found = _of(client, observed)
        confirm(f"Remove {found.name}, {_words(found)}? The server runs on.", yes=yes)
        client.remove_server(found.id)
    typer.echo(f"{found.name} is watched no longer.")
