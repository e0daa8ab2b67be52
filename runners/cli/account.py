"""``slipway login``, ``logout``, ``whoami``, ``tokens`` and ``secrets``."""

import sys
from typing import Annotated

import typer

from runners.cli.config import TOKEN, config_path, load_config, write_private
from runners.cli.errors import CliError, ExitCode
from runners.cli.groups import group
from runners.cli.output import OutputOption, number, show, table
from runners.cli.server import YesOption as Yes
from runners.cli.server import confirm, refused, server, wrote

SCOPES = ("read", "plan", "launch", "admin")


def login(
    address: Annotated[str, typer.Argument(metavar="SERVER", help="Its address in a browser.")],
    token: Annotated[
        str | None,
        typer.Option("--token", help="An access token; - reads it from standard input."),
    ] = None,
) -> None:
    """Keep a server's address and an access token for it on this machine."""
    from runners.client.generated import Slipway
    from runners.client.transport import ApiError, UnreachableError, server_url

    try:
        url = server_url(address if "://" in address else f"http://{address}")
    except ValueError as error:
        raise CliError(f"SERVER: {error}", field="SERVER") from error
    text = _token_of(token, url)
    try:
        with Slipway(url, text) as client:
            me = client.get_me()
    except ApiError as error:
        raise refused(error) from error
    except UnreachableError as error:
        raise CliError(str(error), code="unreachable", exit_code=ExitCode.FAILED) from error
    write_private(config_path(), f'server = "{url}"\ntoken = "{text}"\n')
    typer.echo(
        f"Logged in to {url} as {me.user} in {me.team.name}, with the scope {me.scope}. "
        f"Kept in {config_path()}."
    )


def _token_of(given: str | None, url: str) -> str:
    """Return the token: of the option, of standard input, or as it is typed."""
    if given == "-" or (given is None and not sys.stdin.isatty()):
        given = sys.stdin.readline()
    elif given is None:
        typer.echo(f"Make an access token at {url}/settings/tokens/ and paste it here.", err=True)
        given = typer.prompt("Token", hide_input=True)
    text = given.strip()
    if not text.isascii() or not text.isprintable() or any(c in text for c in '"\\ ') or not text:
        raise CliError(
            f"the token has {len(text)} characters and is none that Slipway makes: copy it from "
            f"{url}/settings/tokens/, it begins with slp_",
            field="--token",
        )
    return text


def logout() -> None:
    """Forget the server and the token of this machine; the token itself stays valid."""
    path = config_path()
    known = load_config()
    path.unlink(missing_ok=True)
    if known.server:
        typer.echo(f"Forgotten. Revoke the token at {known.server}/settings/tokens/.")
    else:
        typer.echo("Nobody was logged in.")
    if load_config().token:
        typer.echo(f"{TOKEN} is still set in the environment.", err=True)


def whoami(output: OutputOption = "table") -> None:
    """Show who calls the server, with which scope, in which team."""
    with server() as client:
        me = client.get_me()
        if wrote(me, output):
            return
        typer.echo(f"{me.user} in {me.team.name} ({me.team.role}), scope {me.scope}")
        if me.budget_gpu_hours is not None and me.rest_gpu_hours is not None:
            typer.echo(
                f"{number(me.rest_gpu_hours)} of {number(me.budget_gpu_hours)} GPU-hours are left"
            )
        typer.echo(client.base_url)


tokens = group("Access tokens of the server.")


@tokens.command("list")
def token_list(output: OutputOption = "table") -> None:
    """List your access tokens in the team; an admin sees the team's."""
    with server() as client:
        rows = list(client.paginate(client.list_tokens))
    if wrote(rows, output):
        return
    shown = [
        (
            each.id,
            each.name,
            each.scope,
            each.user,
            f"{each.last_used_at:%Y-%m-%d %H:%M}" if each.last_used_at else "never",
            "revoked" if each.revoked_at else f"{each.expires_at:%Y-%m-%d}",
            "" if each.budget_gpu_hours is None else f"{number(each.budget_gpu_hours)} GPU-h",
        )
        for each in rows
    ]
    columns = ("ID", "NAME", "SCOPE", "ACCOUNT", "LAST USED", "EXPIRES", "BUDGET")
    show(table(columns, shown, fixed=(0,)))


@tokens.command("make", hidden=True)
@tokens.command("add")
def token_make(
    name: Annotated[str, typer.Argument(help="Where it will be used.")],
    scope: Annotated[str, typer.Option("--scope", help="read, plan, launch or admin.")] = "read",
    days: Annotated[float, typer.Option("--days", help="How long it is valid.")] = 90,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="HOURS",
            help="GPU-hours that its launches may take together; no limit without it.",
        ),
    ] = None,
    *,
    service: Annotated[
        bool, typer.Option("--service", help="With an account of its own, as an admin.")
    ] = False,
    output: OutputOption = "table",
) -> None:
    """Make an access token and print it; it is not shown again."""
    with server() as client:
        made = client.make_token(
            {
                "name": name,
                "scope": scope,
                "days": days,
                "is_service": service,
                "budget_gpu_hours": budget,
            }
        )
    if not wrote(made, output):
        typer.echo(made.token)


@tokens.command("revoke")
def token_revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="From `slipway tokens list`.")],
    *,
    yes: Yes = False,
) -> None:
    """Revoke an access token at once."""
    confirm(f"Revoke the token {token_id}?", yes=yes)
    with server() as client:
        client.revoke_token(token_id)
    typer.echo(f"Revoked {token_id}.")


secrets = group("Secrets that jobs receive by name.")


@secrets.command("list")
def secret_list(output: OutputOption = "table") -> None:
    """List the names of the team's secrets; values are never shown."""
    with server() as client:
        rows = list(client.paginate(client.list_secrets))
    if wrote(rows, output):
        return
    shown = [(each.name, each.changed_by, f"{each.changed_at:%Y-%m-%d %H:%M}") for each in rows]
    show(table(("NAME", "STORED BY", "AT"), shown))


@secrets.command("set", hidden=True)
@secrets.command("add")
def secret_set(name: Annotated[str, typer.Argument(help="Such as HF_TOKEN.")]) -> None:
    """Store a secret; its value is read from standard input, or typed hidden."""
    value = (
        typer.prompt("Value", hide_input=True)
        if sys.stdin.isatty()
        else sys.stdin.read().removesuffix("\n")
    )
    with server() as client:
        client.set_secret(name, {"value": value})
    typer.echo(f"{name} is stored.")


@secrets.command("delete")
def secret_delete(name: str, *, yes: Yes = False) -> None:
    """Delete a secret; jobs that name it no longer start."""
    confirm(f"Delete the secret {name}?", yes=yes)
    with server() as client:
        client.delete_secret(name)
    typer.echo(f"Deleted {name}.")
