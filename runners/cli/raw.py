"""``slipway api``: any operation of the API by its name, for what has no command of its own."""

import inspect
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from runners.cli.errors import CliError
from runners.cli.output import Output, OutputOption, show, table
from runners.cli.plans import read_document
from runners.cli.quantities import value_of_field
from runners.cli.server import server, write_reply

LISTS = ("list[", "list ")


def api(
    operation: Annotated[
        str | None, typer.Argument(metavar="OPERATION", help="Its name; without one, the list.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Arguments, and fields of the body."),
    ] = None,
    body: Annotated[
        str | None, typer.Option("--body", metavar="FILE", help="JSON or YAML; - reads.")
    ] = None,
    output: OutputOption = "json",
) -> None:
    """Call an operation of the API and print its reply."""
    from runners.client.generated import Operations

    methods = {
        name: each
        for name, each in inspect.getmembers(Operations, inspect.isfunction)
        if not name.startswith("_")
    }
    if operation is None:
        _show_operations(methods, output)
        return
    method = methods.get(operation)
    if method is None:
        from difflib import get_close_matches

        alike = get_close_matches(operation, methods)
        nearest = f"nearest: {', '.join(alike)}; " if alike else ""
        raise CliError(
            f"OPERATION is {operation!r}: there is none of this name; {nearest}"
            "`slipway api` lists them",
            field="OPERATION",
        )
    call = _arguments(method, arguments or (), body)
    with server() as client:
        if "sink" in inspect.signature(method).parameters:
            getattr(client, operation)(**call, sink=sys.stdout.buffer)
            return
        reply: Any = getattr(client, operation)(**call)
        if isinstance(reply, Iterator):
            for event in reply:
                write_reply({"event": event.name, **event.data}, "json")
        elif reply is not None:
            write_reply(reply, "json" if output == "table" else output)


def _show_operations(methods: dict[str, Any], output: Output) -> None:
    rows = [(name, (each.__doc__ or "").split("\n")[0]) for name, each in methods.items()]
    if output == "table" or sys.stdout.isatty():
        show(table(("OPERATION", "WHAT IT DOES"), rows, fixed=(0,)))
    else:
        write_reply(dict(rows), output)


def _arguments(method: Any, given: Any, body: str | None) -> dict[str, Any]:  # noqa: ANN401 (a function)
    """Return the arguments of an operation: by name, and the others as fields of the body."""
    signature = inspect.signature(method).parameters
    known = set(signature) - {"self", "sink"}
    call: dict[str, Any] = {}
    fields: dict[str, Any] = read_document(body) if body else {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise CliError(f"{text!r} is no argument: write it as NAME=VALUE", field=text)
        if name in known - {"body"}:
            annotation = str(signature[name].annotation)
            if annotation.startswith(LISTS):
                call[name] = value.split(",")
            else:
                call[name] = value if annotation == "str" else value_of_field(name, value)
        elif "body" in known:
            fields[name] = value_of_field(name, value)
        else:
            names = ", ".join(sorted(known)) or "none"
            raise CliError(f"{name} is no argument of this operation: it has {names}", field=name)
    if "body" in known:
        call["body"] = fields
    if "file" in known and "file" in call:
        from pathlib import Path

        call["file"] = Path(str(call["file"]))
    missing = [
        name
        for name, each in signature.items()
        if name in known and each.default is inspect.Parameter.empty and name not in call
    ]
    if missing:
        raise CliError(f"the argument {missing[0]} is missing: {missing[0]}=…", field=missing[0])
    return call
