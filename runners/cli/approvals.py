"""Launches that a person of the team has to approve: ``slipway approvals``, ``launch --wait``."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from runners.cli.errors import CliError, ExitCode
from runners.cli.groups import group
from runners.cli.output import OutputOption, show, table
from runners.cli.server import YesOption, confirm, server, wrote

if TYPE_CHECKING:
    from runners.client.generated import LaunchRequestReply, Slipway

POLL_SECONDS = 5.0

approvals = group("Launches that wait for an approval.")


@approvals.command("list")
def approval_list(output: OutputOption = "table") -> None:
    """List the launches that wait for an approval, the oldest first."""
    with server() as client:
        rows = list(client.paginate(client.list_launch_requests))
    if wrote(rows, output):
        return
    shown = [
        (each.id, each.plan_name, each.asked_by, f"{each.asked_at:%F %R}", each.reason)
        for each in rows
    ]
    show(table(("ID", "PLAN", "ASKED BY", "AT (UTC)", "REASON"), shown, fixed=(0,)))


@approvals.command("withdraw")
def approval_withdraw(
    request_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the request.")] = "",
    yes: YesOption = False,
    output: OutputOption = "table",
) -> None:
    """Withdraw a launch that you asked for and that nobody has decided on."""
    with server() as client:
        found = client.get_launch_request(request_id)
        confirm(f"Withdraw the request to launch {found.plan_name} ({found.id})?", yes=yes)
        done = client.withdraw_launch_request(found.id, {"reason": reason})
    if wrote(done, output):
        return
    typer.echo(f"Withdrew {done.id}.")


def decision_of(client: "Slipway", made: "LaunchRequestReply") -> "LaunchRequestReply":
    """Wait until a person approves a launch, and return the request with its job.

    Raises:
        CliError: the launch is denied or withdrawn, or waiting is interrupted.
    """
    try:
        while made.state == "waiting":
            time.sleep(POLL_SECONDS)
            made = client.get_launch_request(made.id)
    except KeyboardInterrupt:
        raise CliError(
            f"the request goes on waiting; `slipway approvals withdraw {made.id}` withdraws it",
            code="interrupted",
            exit_code=ExitCode.FAILED,
        ) from None
    if made.state == "approved" and made.job:
        return made
    words = "withdrawn" if made.withdrawn else made.state
    if made.state == "approved":
        words = "approved, and its job is deleted"
    why = f": {made.answer}" if made.answer else ""
    raise CliError(
        f"the launch of {made.plan_name} was {words} by {made.decided_by or 'somebody'}{why}",
        code="denied",
        exit_code=ExitCode.DENIED,
    )
