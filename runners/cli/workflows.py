"""Jobs that follow one another: ``slipway workflows``, and their start by ``slipway launch``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runners.cli.errors import CliError
from runners.cli.groups import group
from runners.cli.output import (
    OutputOption,
    between,
    binary_size,
    seconds,
    show,
    state_words,
    table,
    usd,
)
from runners.cli.quantities import value_of_field
from runners.cli.series import Series
from runners.cli.server import YesOption, confirm, server, wrote

if TYPE_CHECKING:
    from runners.client.generated import Slipway, StepReply, WorkflowReply

WorkflowArgument = Annotated[
    str, typer.Argument(metavar="WORKFLOW", help="Id of a workflow, as the list shows it.")
]

workflows = group("Jobs that follow one another.")


def read_sweep(texts: Sequence[str]) -> dict[str, list[object]]:
    """Return the values of ``--sweep FIELD=VALUE,VALUE`` options, by the fields' paths.

    Raises:
        CliError: an option has not this form, or names a field twice.
    """
    found: dict[str, list[object]] = {}
    for text in texts:
        path, equals, values = (part.strip() for part in text.partition("="))
        if not equals or "." not in path or not values or path in found:
            raise CliError(
                f"--sweep is {text!r}: write each field once as FIELD=VALUE,VALUE, such as "
                "workload.learning_rate=1e-4,3e-4",
                field="--sweep",
            )
        found[path] = [value_of_field(path, each.strip()) for each in values.split(",")]
    return found


def as_workflow(
    document: dict[str, Any],
    *,
    sweep: Mapping[str, Sequence[object]],
    hardware: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a file's document as a workflow; ``options``: of the launch, for its last step.

    Raises:
        CliError: it has steps and a sweep is given too, or an option that is the steps' own.
    """
    if "steps" not in document:
        launch = {**(document.pop("launch", None) or {}), **options}
        step = {**document, "sweep": dict(sweep), **({"launch": launch} if launch else {})}
        name = str(launch.pop("name", "") or document.get("name") or "")
        document = {"steps": [step], **({"name": name} if name else {})}
    elif others := ["sweep"] * bool(sweep) + sorted(set(options) - {"name"}):
        given = f"--{others[0].replace('_', '-')}"
        raise CliError(
            f"{given} is of one job, and the file has steps: write it into the step", field=given
        )
    elif options:
        document = {**document, **options}
    if hardware and document["steps"]:
        document["steps"][0]["hardware"] = dict(hardware)
    return document


def workflow_launch(
    client: "Slipway",
    document: Mapping[str, Any],
    *,
    key: str,
    dry_run: bool,
    yes: bool,
    detach: bool,
    output: str,
) -> None:
    """Show how a workflow is planned, ask, start it, and follow it to its end."""
    planned = client.start_workflow(document, dry_run=True).workflow
    if output == "table":
        _show_steps(planned)
    if dry_run:
        if not wrote(planned, output):
            typer.echo(f"{planned.name}: possible. Nothing was launched or kept.")
        return
    confirm(f"Launch it? {planned.name}.", yes=yes)
    started = client.start_workflow(document, idempotency_key=key or None)
    workflow = started.workflow
    if not wrote(started, output):
        typer.echo(f"{workflow.name}: {client.base_url}{workflow.url}", err=True)
        if started.endpoint_key:
            typer.echo(f"Its endpoint's key, not shown again: {started.endpoint_key}", err=True)
    if detach:
        if output == "table":
            typer.echo(workflow.id)
        return
    follow(client, workflow)


class Workflows(Series["WorkflowReply"]):
    """The calls and the words of workflows."""

    NOUN = "workflow"

    def get(self, client: "Slipway", series_id: str) -> "WorkflowReply":
        """Return a workflow."""
        return client.get_workflow(series_id)

    def stop_call(self, client: "Slipway", series_id: str) -> object:
        """Let the server stop a workflow."""
        return client.stop_workflow(series_id)

    def delete_call(self, client: "Slipway", series_id: str) -> object:
        """Let the server delete a workflow."""
        return client.delete_workflow(series_id)

    def is_over(self, series: "WorkflowReply") -> bool:
        """Return whether it has ended, or only its endpoint runs."""
        return super().is_over(series) or _is_served(series.steps[-1])

    def failure(self, series: "WorkflowReply") -> str:
        """Return why a step was not started, and how the workflow goes on."""
        why = next((each.problem for each in series.steps if each.problem), "")
        return f"{why} `slipway workflows resume {series.id}` goes on from there".strip()


WORKFLOWS = Workflows()


def follow(client: "Slipway", workflow: "WorkflowReply") -> None:
    """Say what each step becomes until the workflow ends, or only its endpoint runs.

    Raises:
        CliError: the workflow failed.
        Exit: the command was interrupted.
    """
    said: dict[tuple[int, int], str] = {}

    def report(workflow: "WorkflowReply") -> None:
        for step in workflow.steps:
            _report_step(step, said, len(workflow.steps))

    WORKFLOWS.check(WORKFLOWS.follow(client, workflow, report))


def _report_step(step: "StepReply", said: dict[tuple[int, int], str], count: int) -> None:
    state = step.job_state or step.state
    place = (step.position, step.variant)
    if state in {"waiting", said.get(place, "")}:
        return
    said[place] = state
    job = f": {step.job}" if step.job else ""
    typer.echo(f"{len(said)}/{count} {step.name} is {state_words(state)}{job}", err=True)


def _is_served(step: "StepReply") -> bool:
    return step.goal == "serve" and step.state == "running" and step.job_state == "running"


def _show_steps(workflow: "WorkflowReply") -> None:
    """Print a workflow's steps, with what was planned and what was measured."""
    rows = [
        (
            each.name,
            each.state if not each.job_state else state_words(each.job_state),
            _planned(each),
            "" if each.elapsed_seconds is None else seconds(each.elapsed_seconds),
            _result(each),
            each.job or "",
        )
        for each in workflow.steps
    ]
    show(table(("STEP", "STATE", "PLANNED", "RAN", "MEASURED", "JOB"), rows, fixed=(5,)))
    sums = workflow.forecast
    words = []
    if duration := sums.get("duration_seconds"):
        low, high = duration.low, duration.high
        range_ = f" ({between(seconds(low), seconds(high))})" if low and high else ""
        words.append(f"planned {seconds(duration.value)}{range_}")
    if disk := sums.get("disk_bytes"):
        words.append(f"{binary_size(disk.value)} of models")
    if price := sums.get("cost_usd"):
        words.append(usd(price.value))
    if words:
        typer.echo(", ".join(words))


def _planned(step: "StepReply") -> str:
    figure = step.forecast.get("duration_seconds")
    return seconds(figure.value) if figure else ""


def _result(step: "StepReply") -> str:
    """Return the figures by which a step is compared, at most two."""
    found = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in step.measured.items()]
    return ", ".join(found[:2]) + (" (best)" if step.is_best else "")


@workflows.command("list")
def workflow_list(output: OutputOption = "table") -> None:
    """List the teams' workflows, the newest first."""
    with server() as client:
        page = client.list_workflows()
    if wrote(page, output):
        return
    rows = [
        (
            each.id,
            each.name,
            each.state,
            f"{sum(step.state == 'succeeded' for step in each.steps)} of {len(each.steps)}",
            f"{each.created_at:%F %R}",
        )
        for each in page.items
    ]
    show(table(("ID", "NAME", "STATE", "DONE", "STARTED (UTC)"), rows, fixed=(0,)))


@workflows.command("get")
def workflow_get(workflow: WorkflowArgument, output: OutputOption = "table") -> None:
    """Show a workflow: its steps, what was planned, and what they measured."""
    with server() as client:
        found = client.get_workflow(workflow)
    if wrote(found, output):
        return
    typer.echo(f"{found.name}  {found.id}  {found.state}")
    _show_steps(found)
    show_problems(found)


def show_problems(workflow: "WorkflowReply") -> None:
    """Print why steps were not started."""
    for each in workflow.steps:
        if each.problem:
            typer.echo(f"{each.name}: {each.problem}")


@workflows.command("follow")
def workflow_follow(workflow: WorkflowArgument) -> None:
    """Say what each step of a workflow becomes, until it ends."""
    with server() as client:
        follow(client, client.get_workflow(workflow))


@workflows.command("stop")
def workflow_stop(workflow: WorkflowArgument, *, yes: YesOption = False) -> None:
    """Stop what runs of a workflow; the steps that wait are not started."""
    WORKFLOWS.stop(workflow, yes=yes)


@workflows.command("resume")
def workflow_resume(workflow: WorkflowArgument, output: OutputOption = "table") -> None:
    """Go on with a failed or stopped workflow; what has succeeded stays."""
    with server() as client:
        done = client.resume_workflow(workflow)
    if not wrote(done, output):
        typer.echo(f"{done.id} is {done.state}.")


@workflows.command("delete")
def workflow_delete(workflow: WorkflowArgument, *, yes: YesOption = False) -> None:
    """Take an ended workflow out of the list; its jobs, models and plans stay."""
    WORKFLOWS.delete(workflow, yes=yes)
