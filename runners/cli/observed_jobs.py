"""Jobs that somebody else gave to a scheduler, observed by the server: ``slipway observed``."""

from typing import TYPE_CHECKING, Annotated

import typer

from runners.cli.groups import group
from runners.cli.output import OutputOption, number, seconds, show, table
from runners.cli.server import YesOption, confirm, row_named, server, wrote

if TYPE_CHECKING:
    from runners.client.generated import ObservedJobReply, Slipway

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Id in the scheduler, name or id of an observed job.")
]
observed = group("Jobs that somebody else gave to a host's scheduler, with their figures.")


def _of(client: "Slipway", name: str) -> "ObservedJobReply":
    """Return the observed job with an id or a name.

    Raises:
        CliError: there is none, or several.
    """
    rows = client.paginate(client.list_observed_jobs)
    return row_named(rows, name, ("job_id", "id", "name"), "observed job")


def _words(row: "ObservedJobReply") -> str:
    code = "" if row.exit_code is None else f", exit code {row.exit_code}"
    ended = f", signal {row.signal}" if row.signal else code
    return f"{row.state or 'not read yet'}{ended if row.has_ended else ''}"


def _elapsed(row: "ObservedJobReply") -> str:
    return "" if row.elapsed_seconds is None else seconds(row.elapsed_seconds)


@observed.command("list")
def observed_list(output: OutputOption = "table") -> None:
    """List the teams' observed jobs, the newest first."""
    with server() as client:
        rows = list(client.paginate(client.list_observed_jobs))
    if wrote(rows, output):
        return
    shown = [
        (
            each.job_id,
            each.name,
            each.host,
            _words(each),
            "" if each.devices is None else str(each.devices),
            _elapsed(each),
        )
        for each in rows
    ]
    show(table(("JOB", "NAME", "HOST", "STATE", "GPUS", "RUNS FOR"), shown, fixed=(0,)))


@observed.command("add")
def observed_add(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Slug of the host.")],
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="The scheduler's id, such as 17, or a pod's name.")
    ],
    *,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="ID", help="Saved plan to stand beside it."),
    ] = None,
    output: OutputOption = "table",
) -> None:
    """Observe a job from now on, only reading; added again, it gets that plan."""
    with server() as client:
        made = client.observe_job({"host": host, "job_id": job, "plan": plan or None})
    if wrote(made, output):
        return
    typer.echo(f"{made.job_id} of {made.host} is observed: {made.id}")


@observed.command("show")
def observed_show(job: JobArgument, output: OutputOption = "table") -> None:
    """Show a job's state, figures and last lines, and what its plan says of them."""
    with server() as client:
        found = client.get_observed_job(_of(client, job).id)
    if wrote(found, output):
        return
    typer.echo(f"{found.job_id}  {found.name}  {_words(found)}  {_elapsed(found)}".rstrip())
    for words in (found.problem, found.detail, found.nodes, *found.addresses):
        if words:
            typer.echo(words)
    shown = []
    for each in found.figures:
        has_interval = each.low is not None and each.high is not None
        interval = f"{number(each.low or 0.0)} to {number(each.high or 0.0)}"
        predicted = "" if each.predicted is None else number(each.predicted)
        row = (each.name, number(each.measured), predicted, interval if has_interval else "")
        shown.append(row)
    if shown:
        show(table(("FIGURE", "MEASURED", "PREDICTED", "80 % INTERVAL"), shown))
    for line in found.log or [found.log_problem]:
        typer.echo(line)


@observed.command("remove")
def observed_remove(job: JobArgument, *, yes: YesOption = False) -> None:
    """Observe a job no longer; the job runs on."""
    with server() as client:
        found = _of(client, job)
        confirm(f"Remove {found.job_id}, {_words(found)}? The job runs on.", yes=yes)
        client.remove_observed_job(found.id)
    typer.echo(f"{found.job_id} is observed no longer.")
