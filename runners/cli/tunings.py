"""Measure a plan's best strategies on its host: ``slipway tune`` and ``slipway tunings``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from runners.cli.groups import group
from runners.cli.output import OutputOption, binary_size, number, seconds, show, table
from runners.cli.series import Series
from runners.cli.server import YesOption, confirm, server, wrote

if TYPE_CHECKING:
    from runners.client.generated import CandidateReply, Slipway, TuningReply

TuningArgument = Annotated[
    str, typer.Argument(metavar="TUNING", help="Id of a tuning, as the list shows it.")
]

tunings = group("Trials of a plan's best strategies on its host.")


def tune(  # noqa: PLR0913 (the command's options)
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Id of a plan of the server.")],
    *,
    host: Annotated[str, typer.Option(help="Name of a host. Default: the plan's own.")] = "",
    trials: Annotated[int, typer.Option(help="Jobs at most, from 2 to 32.")] = 12,
    max_seconds: Annotated[
        float, typer.Option("--seconds", help="Of all trials together, from 60 on.")
    ] = 3600.0,
    trial_seconds: Annotated[
        float, typer.Option(help="To measure in a trial, at the planned speed.")
    ] = 30.0,
    decided_by: Annotated[
        str,
        typer.Option(
            "--figure",
            help="Figure that decides, such as tokens_per_second, ttft_seconds, tpot_seconds, "
            "step_seconds or peak_memory_bytes. Default: by the plan's objective.",
        ),
    ] = "",
    formats: Annotated[
        bool,
        typer.Option(
            "--formats", help="Also try weights that lose more quality than the plan's choice."
        ),
    ] = False,
    key: Annotated[
        str, typer.Option(help="Idempotency key: the same key starts one tuning.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the candidates; start nothing.")
    ] = False,
    yes: YesOption = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the id and return, do not follow.")
    ] = False,
    output: OutputOption = "table",
) -> None:
    """Measure a plan's best strategies on its host, one job after another.

    The plan's own choice comes first. The best one becomes the plan's next version if it is better
    in repeated measurements.
    """
    options: dict[str, Any] = {
        "host": host,
        "trials": trials,
        "max_seconds": max_seconds,
        "trial_seconds": trial_seconds,
        "formats": formats,
        **({"figure": decided_by} if decided_by else {}),
    }
    with server() as client:
        planned = client.start_tuning(plan, options, dry_run=True)
        if output == "table":
            _show_candidates(planned)
            typer.echo(f"At most {trials} trials, {seconds(planned.planned_seconds or 0.0)}.")
        if dry_run:
            if not wrote(planned, output):
                typer.echo("Nothing was started or kept.")
            return
        confirm(f"Tune {planned.name} on {planned.host}?", yes=yes)
        started = client.start_tuning(plan, options, idempotency_key=key or None)
        if detach:
            if not wrote(started, output):
                typer.echo(f"{started.name}: {client.base_url}{started.url}", err=True)
                typer.echo(started.id)
            return
        if output == "table":
            typer.echo(f"{started.name}: {client.base_url}{started.url}", err=True)
        follow(client, started, output)


class Tunings(Series["TuningReply"]):
    """The calls and the words of tunings."""

    NOUN = "tuning"

    def get(self, client: "Slipway", series_id: str) -> "TuningReply":
        """Return a tuning."""
        return client.get_tuning(series_id)

    def stop_call(self, client: "Slipway", series_id: str) -> object:
        """Let the server stop a tuning."""
        return client.stop_tuning(series_id)

    def delete_call(self, client: "Slipway", series_id: str) -> object:
        """Let the server delete a tuning."""
        return client.delete_tuning(series_id)

    def failure(self, series: "TuningReply") -> str:
        """Return why a failed tuning failed."""
        return series.problem

    def title(self, series: "TuningReply") -> str:
        """Return what a question calls it: its name is its plan's."""
        return f"the tuning of {series.name} ({series.id})"


TUNINGS = Tunings()


def follow(client: "Slipway", tuning: "TuningReply", output: str = "table") -> None:
    """Say what each trial becomes until the tuning ends, then what was found.

    In other formats than a table only the last reply is written.

    Raises:
        CliError: the tuning failed.
        Exit: the command was interrupted.
    """
    said: dict[int, str] = {}

    def report(tuning: "TuningReply") -> None:
        for each in tuning.candidates:
            if output == "table":
                _report_candidate(each, said, tuning.unit)

    tuning = TUNINGS.follow(client, tuning, report)
    is_written = wrote(tuning, output)
    TUNINGS.check(tuning)
    if is_written:
        return
    typer.echo(tuning.words)
    if tuning.result:
        typer.echo(f"Version with the best strategy: {tuning.result}")


def _report_candidate(candidate: "CandidateReply", said: dict[int, str], unit: str) -> None:
    state = f"{candidate.state} {candidate.num_measured}"
    if candidate.state == "untried" or state == said.get(candidate.number):
        return
    said[candidate.number] = state
    value = f", {figure(candidate.measured, unit)}" if candidate.measured else ""
    reason = f": {candidate.reason}" if candidate.reason else ""
    words = candidate.state.replace("_", " ")
    typer.echo(f"{candidate.number} {candidate.name}: {words}{value}{reason}", err=True)


def _show_candidates(tuning: "TuningReply") -> None:
    """Print a tuning's candidates, with what was planned and what was measured."""
    rows = [
        (
            str(each.number),
            each.name + (" (chosen)" if _is_chosen(tuning, each) else ""),
            figure(each.predicted, tuning.unit),
            binary_size(each.predicted_peak_memory_bytes),
            "" if each.measured is None else figure(each.measured, tuning.unit),
            each.state.replace("_", " "),
        )
        for each in tuning.candidates
    ]
    heads = ("NO", "CANDIDATE", "PLANNED", "MEMORY", "MEASURED", "STATE")
    show(table(heads, rows, fixed=(0,)))


def figure(value: float, unit: str) -> str:
    """Return a figure of a tuning with its unit.

    >>> figure(1234.5, "tokens_per_second"), figure(0.02, "seconds"), figure(2**30, "bytes")
    ('1,234 tok/s', '20 ms', '1.0 GiB')
    """
    if unit == "bytes":
        return binary_size(value)
    return seconds(value) if unit == "seconds" else f"{number(value)} tok/s"


def _is_chosen(tuning: "TuningReply", candidate: "CandidateReply") -> bool:
    return tuning.state == "succeeded" and tuning.chosen == candidate.number


@tunings.command("list")
def tuning_list(output: OutputOption = "table") -> None:
    """List the teams' tunings, the newest first."""
    with server() as client:
        page = client.list_tunings()
    if wrote(page, output):
        return
    rows = [
        (each.id, each.name, each.state, str(each.num_trials), f"{each.created_at:%F %R}")
        for each in page.items
    ]
    show(table(("ID", "PLAN", "STATE", "TRIALS", "STARTED (UTC)"), rows, fixed=(0,)))


@tunings.command("get")
def tuning_get(tuning: TuningArgument, output: OutputOption = "table") -> None:
    """Show a tuning: its candidates, what was planned, measured and found."""
    with server() as client:
        found = client.get_tuning(tuning)
    if wrote(found, output):
        return
    typer.echo(f"{found.name}  {found.id}  {found.state}")
    _show_candidates(found)
    typer.echo(found.words)
    if found.result:
        typer.echo(f"Version with the best strategy: {found.result}")


@tunings.command("follow")
def tuning_follow(tuning: TuningArgument) -> None:
    """Say what each trial of a tuning becomes, until it ends."""
    with server() as client:
        follow(client, client.get_tuning(tuning))


@tunings.command("stop")
def tuning_stop(tuning: TuningArgument, *, yes: YesOption = False) -> None:
    """Stop the trial that runs, and start no other; what was measured stays."""
    TUNINGS.stop(tuning, yes=yes)


@tunings.command("delete")
def tuning_delete(tuning: TuningArgument, *, yes: YesOption = False) -> None:
    """Take an ended tuning out of the list; its jobs and its version of the plan stay."""
    TUNINGS.delete(tuning, yes=yes)
