"""``slipway models code``: repositories whose own code the team's jobs may run."""

from typing import Annotated

import typer

from runners.cli.errors import CliError
from runners.cli.groups import group
from runners.cli.output import OutputOption, show, table
from runners.cli.server import YesOption, confirm, server, wrote

code = group("Repositories whose own code jobs may run, each at one commit.")
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="As org/name@COMMIT, with 40 digits.")
]


@code.command("list")
def code_list(output: OutputOption = "table") -> None:
    """List the repositories and commits whose code is allowed."""
    with server() as client:
        found = list(client.paginate(client.list_trusted_code))
    if wrote(found, output):
        return
    rows = [
        (each.repository, each.commit, each.allowed_by, f"{each.created_at:%Y-%m-%d}", each.reason)
        for each in found
    ]
    show(table(("MODEL", "COMMIT", "ALLOWED BY", "ON", "REASON"), rows, fixed=(0, 1)))


@code.command("allow")
def code_allow(
    model: ModelArgument,
    reason: Annotated[str, typer.Option("--reason", help="Who read it, and what it is for.")] = "",
    *,
    yes: YesOption = False,
    output: OutputOption = "table",
) -> None:
    """Let jobs run the code of a repository at one commit, which you have read; for admins."""
    confirm(f"Let jobs run the code of {model} on the team's hosts?", yes=yes)
    with server() as client:
        allowed = client.allow_code({"model": model, "reason": reason})
    if not wrote(allowed, output):
        typer.echo(f"{allowed.repository}@{allowed.commit} may run; no other commit may.")


@code.command("forbid")
def code_forbid(model: ModelArgument) -> None:
    """Withdraw the permission; jobs that run already go on."""
    with server() as client:
        found = [
            each
            for each in client.paginate(client.list_trusted_code)
            if f"{each.repository}@{each.commit}" == model
        ]
        if not found:
            raise CliError(
                f"MODEL is {model!r}: no such code is allowed; see `slipway models code list`",
                field="MODEL",
            )
        client.forbid_code(found[0].id)
    typer.echo(f"{model} no longer runs in new jobs.")
