"""Jobs of the server: ``ps``, ``get``, ``logs``, ``events``, ``metrics``, ``stop`` and more."""

import io
import json
import sys
import tarfile
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from runners.cli.errors import CliError, ExitCode
from runners.cli.output import (
    OutputOption,
    binary_size,
    number,
    percent,
    seconds,
    show,
    state_words,
    table,
    usd,
    write_document,
)
from runners.cli.server import (
    JobArgument,
    YesOption,
    complete_host,
    complete_job,
    confirm,
    job_id_of,
    server,
    write_reply,
    wrote,
)

if TYPE_CHECKING:
    from runners.client.generated import (
        HistoryReply,
        JobDetail,
        JobReply,
        Slipway,
        StoredFilesReply,
    )
    from runners.client.transport import Event

OPEN_STATES = "queued,preflight,starting,running,stopping"
RankOption = Annotated[
    int, typer.Option("--rank", help="Of a job on several hosts: which one, from 0.")
]


def ps(
    *,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Ended jobs, too, the newest 50.")
    ] = False,
    state: Annotated[str, typer.Option("--state", help="Such as running or failed,stopped.")] = "",
    host: Annotated[
        str, typer.Option("--host", help="Slug of a host.", autocompletion=complete_host)
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every two seconds.")
    ] = False,
    output: OutputOption = "table",
) -> None:
    """List jobs, the newest first: those that have not ended, unless --all."""
    wanted = state or ("" if everything else OPEN_STATES)
    with server() as client:
        while True:
            page = client.list_jobs(state=wanted, host=host)
            if not wrote(page, output):
                if watch and sys.stdout.isatty():
                    typer.echo("\x1b[2J\x1b[H", nl=False)
                _show_jobs(page.items)
            if not watch:
                return
            time.sleep(2.0)


def _show_jobs(jobs: "list[JobReply]") -> None:
    if not jobs:
        typer.echo("No job. `slipway launch` starts one; `slipway ps -a` lists ended ones.")
        return
    rows = [
        (
            job.id,
            " ".join(job.name.split()),
            job.kind,
            job.state,
            " ".join((job.progress.words or "").split()),
            job.host or job.pool,
            seconds(job.elapsed_seconds) if job.started_at else "",
        )
        for job in jobs
    ]
    columns = ("ID", "NAME", "KIND", "STATE", "PROGRESS", "HOST", "TIME")
    show(table(columns, rows, right=(6,), fixed=(0, 3)))


def get(job: JobArgument, output: OutputOption = "table") -> None:
    """Show a job: its state, why it waits or ended, and measured beside predicted figures."""
    with server() as client:
        found = client.get_job(job_id_of(client, job))
        if wrote(found, output):
            return
        typer.echo(f"{found.name}  {found.id}")
        lines = [
            ("state", found.state + (f": {found.progress.words}" if found.progress.words else "")),
            ("where", found.host or found.pool),
            ("kind", f"{found.kind} of {found.model}" if found.model else found.kind),
            ("time", seconds(found.elapsed_seconds) if found.started_at else "not started"),
        ]
        if found.waiting:
            lines.append(("waits", found.waiting))
        if found.endpoint:
            lines.append(("endpoint", f"{found.endpoint.url}, model {found.endpoint.model}"))
        if found.outcome:
            lines.append(("ended", f"{found.outcome.sentence} {found.outcome.next_step}".strip()))
        lines.append(("page", client.base_url + found.url))
        show(table(("", ""), lines))
        show_figures(client, found.id)


def show_figures(client: "Slipway", job_id: str) -> None:
    """Print a job's figures: measured beside predicted, with the ratio."""
    figures = client.get_job_figures(job_id).figures
    rows = [
        (
            each.label,
            _figure(each.measured, each.unit),
            _figure(each.predicted, each.unit),
            _interval(each.predicted_low, each.predicted_high, each.unit),
            "" if each.ratio is None else f"{each.ratio:.2f}",
        )
        for each in figures
    ]
    if rows:
        columns = ("FIGURE", "MEASURED", "PREDICTED", "80 % INTERVAL", "RATIO")
        show(table(columns, rows, right=(1, 2, 3, 4)))


# Unit of the API -> how its figures are written.
UNITS: dict[str, Callable[[float], str]] = {
    "seconds": seconds,
    "bytes": binary_size,
    "share": percent,
    "ratio": lambda value: f"{value:.3g}",
    "count": lambda value: f"{value:,.0f}",
    "tokens_per_second": lambda value: f"{number(value)} tok/s",
    "requests_per_second": lambda value: f"{number(value)} req/s",
    "usd": usd,
}


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    write = UNITS.get(unit)
    return write(value) if write else f"{number(value)} {unit.replace('_', ' ')}".strip()


def _interval(low: float | None, high: float | None, unit: str) -> str:
    """Return the interval of a prediction; its first number without the unit if that is equal."""
    if low is None or high is None:
        return ""
    first, last = _figure(low, unit), _figure(high, unit)
    value, _, name = first.partition(" ")
    return f"{value if name and last.endswith(f' {name}') else first} to {last}"


def logs(
    job: JobArgument,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends.")
    ] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", help="How many last lines.")] = 200,
    grep: Annotated[str, typer.Option("--grep", help="Only lines that contain this.")] = "",
    rank: RankOption = 0,
    output: OutputOption = "table",
) -> None:
    """Print a job's log; Ctrl-C ends the command and never the job.

    With --follow, -o json writes one line and -o yaml one document for each line of the log.
    """
    with server() as client:
        job_id = job_id_of(client, job)
        if follow:
            has_ended = follow_job(client, job_id, rank=rank, grep=grep, output=output)
            finished(client, job_id, has_ended)
            return
        found = client.get_job_log(job_id, limit=tail, q=grep, rank=rank)
        if wrote(found, output):
            return
        for line in found.lines:
            typer.echo(line.text)
        if not found.lines:
            state = state_words(client.get_job(job_id).state)
            of_it = f" with {grep!r}" if grep else ""
            typer.echo(f"No lines{of_it}: the job is {state}.", err=True)


def follow_job(
    client: "Slipway",
    job_id: str,
    *,
    rank: int = 0,
    grep: str = "",
    quiet: bool = False,
    output: str = "table",
) -> bool:
    """Print a job's log until it ends; return whether it ended rather than the command.

    What the command says of the job goes to standard error, so that standard output is the log:
    its text, or with an ``output`` of json or yaml the API's events.
    """
    state = ""
    try:
        for event in client.follow_job(job_id, kinds="log,state", rank=rank):
            if event.name == "log" and grep.lower() in event.data["text"].lower() and not quiet:
                if output == "table":
                    typer.echo(event.data["text"])
                else:
                    if output == "yaml":
                        typer.echo("---")
                    write_document(json.dumps(event.data, ensure_ascii=False), output)
            elif event.name == "state":
                state = _show_state(event, state)
    except KeyboardInterrupt:
        typer.echo(
            f"\nThe job goes on. `slipway logs -f {job_id}` follows it, `slipway stop {job_id}` "
            "stops it.",
            err=True,
        )
        return False
    return True


def _show_state(event: "Event", before: str) -> str:
    """Print a new state and return it."""
    state = str(event.data["state"])
    if state != before:
        where = event.data.get("host") or event.data.get("pool")
        typer.echo(f"[{state} on {where}]", err=True)
    return state


def finished(client: "Slipway", job_id: str, has_ended: bool) -> None:  # noqa: FBT001 (of follow_job)
    """End a command as its job ended: with an error unless it succeeded.

    Raises:
        Exit: the command was interrupted.
        CliError: the job did not succeed.
    """
    if not has_ended:
        raise typer.Exit(ExitCode.INTERRUPTED)
    job = client.get_job(job_id)
    if job.state in {"succeeded", "stopped"}:
        return
    why = f"{job.outcome.sentence} {job.outcome.next_step}" if job.outcome else ""
    raise CliError(
        f"the job {job.state}. {why}".strip(),
        code=job.outcome.reason if job.outcome else job.state,
        exit_code=ExitCode.FAILED,
    )


def events(job: JobArgument, rank: RankOption = 0, output: OutputOption = "table") -> None:
    """List what happened to a job: who did what and why, and what its supervisor reported.

    The log, metrics and progress are left out; with -o json or yaml, only what the supervisor
    reported is listed, its progress included.
    """
    with server() as client:
        job_id, after = job_id_of(client, job), 0
        reply = client.list_job_events(job_id, rank=rank)
        history, found = reply.history, []
        while reply.events:
            found += [each for each in reply.events if each.kind not in {"log", "metric"}]
            after = reply.last_seq
            reply = client.list_job_events(job_id, after=after, rank=rank)
    if wrote(found, output):
        return
    reported = [
        (each.at, f"{each.seq}", each.kind, _fields_in_words(each.body))
        for each in found
        if each.kind != "progress"
    ]
    done = [(each.at, "", each.kind, _history_words(each)) for each in history]
    rows = [
        (number, f"{at:%Y-%m-%d %H:%M:%S}Z", kind, what)
        for at, number, kind, what in sorted([*done, *reported], key=lambda row: row[0])
    ]
    show(table(("NUMBER", "AT", "KIND", "WHAT"), rows, right=(0,), fixed=(1, 2)))


def _fields_in_words(body: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in body.items())[:200]


def _history_words(event: "HistoryReply") -> str:
    """Return for example ``preflight to starting, by host:box``, with the reason if any."""
    states = " to ".join(state for state in (event.from_state, event.to_state) if state)
    parts = [part for part in (states, f"by {event.actor}") if part]
    return ", ".join(parts) + (f": {event.reason}" if event.reason not in {"", "ok"} else "")


def metrics(
    job: JobArgument,
    names: Annotated[
        list[str] | None, typer.Argument(help="Such as loss; without one, the figures.")
    ] = None,
    rank: RankOption = 0,
    output: OutputOption = "table",
) -> None:
    """Print a job's figures, or the points of metrics over time."""
    with server() as client:
        job_id = job_id_of(client, job)
        if not names:
            if not wrote(client.get_job_figures(job_id), output):
                show_figures(client, job_id)
            return
        reported = client.get_job_series(job_id, rank=rank).reported
        _refuse_unknown(names, reported)
        reply = client.get_job_series(job_id, metrics=",".join(names), rank=rank)
    if wrote(reply, output):
        return
    for each in reply.series:
        rows = [
            (seconds((t - each.t_ms[0]) / 1000), _figure(value, ""))
            for t, value in zip(each.t_ms, each.value, strict=True)
        ]
        show(table(("TIME", each.metric), rows, right=(0, 1)))


def _refuse_unknown(names: Sequence[str], reported: Sequence[str]) -> None:
    """Refuse a metric that a job has not reported, with those that it has.

    Raises:
        CliError: a name is not among them.
    """
    unknown = [name for name in names if name not in reported]
    if not unknown:
        return
    raise CliError(
        f"NAMES has {', '.join(map(repr, unknown))}, which this job has not reported; it has "
        f"{', '.join(reported) or 'none yet'}",
        code="not_found",
        exit_code=ExitCode.FAILED,
        field="NAMES",
    )


def stop(
    job: JobArgument,
    *,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until the job has ended and saved its results.")
    ] = False,
    yes: YesOption = False,
    output: OutputOption = "table",
) -> None:
    """Stop a job; its supervisor lets it save its results first.

    A job that has ended already is left as it is, with exit status 0.
    """
    from runners.client.transport import ApiError

    with server() as client:
        job_id = job_id_of(client, job)
        found = client.get_job(job_id)
        had_ended = found.is_final
        if not had_ended:
            if job_id != job.upper():
                confirm(f"Stop the job {job} ({job_id})?", yes=yes)
            try:
                found = client.stop_job(job_id)
            except ApiError:
                found = client.get_job(job_id)
                if not found.is_final:
                    raise
                had_ended = True
            if wait and not found.is_final:
                follow_job(client, job_id, quiet=True)
                found = client.get_job(job_id)
    if output != "table":
        write_reply(found, output)
    elif had_ended:
        typer.echo(f"{found.name} ({found.id}) has ended already: {found.state}.")
    else:
        typer.echo(f"{found.name} ({found.id}) is {state_words(found.state)}.")


DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Do not follow the job.")]


def resume(
    job: JobArgument,
    *,
    num_hosts: Annotated[
        int | None,
        typer.Option("--hosts", min=1, help="Of a training on several hosts: on how many."),
    ] = None,
    detach: DetachOption = False,
    output: OutputOption = "table",
) -> None:
    """Go on from the checkpoint of an ended job, on its hosts, and follow the new job.

    Of a batch generation the finished answers are kept, of a compression the finished layers. A
    training on several hosts goes on on as many; without one that is lost, choose fewer.
    """
    with server() as client:
        job_id = job_id_of(client, job)
        new = client.resume_job(job_id, num_hosts=num_hosts)
        _follow_new(client, new, f"resumes {job_id}", output, detach=detach)


def rerun(
    job: JobArgument, *, detach: DetachOption = False, output: OutputOption = "table"
) -> None:
    """Run a job again from the start with the same spec, and follow the new job."""
    with server() as client:
        job_id = job_id_of(client, job)
        _follow_new(
            client, client.run_job_again(job_id), f"reruns {job_id}", output, detach=detach
        )


def _follow_new(
    client: "Slipway", new: "JobDetail", words: str, output: str, *, detach: bool
) -> None:
    typer.echo(f"{new.name} is {state_words(new.state)}: {new.id}, {words}", err=True)
    wrote(new, output)
    follow_or_name(client, new.id, output, detach=detach)


def follow_or_name(client: "Slipway", job_id: str, output: str, *, detach: bool) -> None:
    """Follow a new job to its end; with ``detach`` print its id alone."""
    if not detach:
        finished(client, job_id, follow_job(client, job_id, quiet=output != "table"))
    elif output == "table":
        typer.echo(job_id)


def clone(job: JobArgument, output: OutputOption = "table") -> None:
    """Make a draft plan of a job, with its launch options; nothing is launched."""
    with server() as client:
        plan = client.plan_from_job(job_id_of(client, job), {"how": "clone"})
        if wrote(plan, output):
            return
        typer.echo(f"{plan.id}  {plan.name}")
        typer.echo(f"{client.base_url}{plan.url}")


def compare(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB JOB...", help="Two or more jobs.", autocompletion=complete_job
        ),
    ],
    output: OutputOption = "table",
) -> None:
    """Put the figures of jobs side by side, and the settings in which they differ."""
    with server() as client:
        found = client.compare_jobs(job=[job_id_of(client, each) for each in jobs])
    if wrote(found, output):
        return
    rows = []
    for each in found.figures:
        cells = [
            f"{_figure(cell.measured, each.unit)}{f'  {cell.change}' if cell.change else ''}"
            for cell in each.cells
        ]
        rows.append((each.label, *cells))
    show(table(("FIGURE", *found.names), rows, right=range(1, len(found.names) + 1)))
    if found.settings:
        typer.echo()
        show(
            table(
                ("SETTING", *found.names),
                [(each.name, *each.values) for each in found.settings],
            )
        )


def artefacts(
    job: JobArgument,
    name: Annotated[str | None, typer.Argument(help="Which one to download.")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder to unpack it into; . without it.")
    ] = None,
    output: OutputOption = "table",
) -> None:
    """List what a job made, or download one into a folder."""
    with server() as client:
        job_id = job_id_of(client, job)
        if name is None:
            found = list(client.paginate(client.list_artefacts, job_id))
            if wrote(found, output):
                return
            rows = [
                (
                    each.name,
                    each.kind,
                    binary_size(each.total_bytes),
                    "" if each.is_complete else "arriving",
                )
                for each in found
            ]
            show(table(("NAME", "KIND", "SIZE", ""), rows, right=(2,)))
            return
        folder = to or Path()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{job_id}-{name.replace('/', '-')}.part").open("w+b") as file:
            part = Path(file.name)
            try:
                num_bytes = client.download_artefact(job_id, name, file)
                file.seek(0)
                unpacked = _unpack(file, folder)
            finally:
                part.unlink(missing_ok=True)
    typer.echo(f"{unpacked} ({binary_size(num_bytes)})")


def _unpack(file: "io.BufferedRandom", folder: Path) -> Path:
    """Unpack an artefact; return its folder. Names that leave the folder are refused."""
    with tarfile.open(fileobj=file) as archive:
        archive.extractall(folder, filter="data")
        roots = {member.name.split("/")[0] for member in archive.getmembers()}
    return folder / next(iter(roots), "")


def files(
    job: JobArgument,
    *,
    delete_part: Annotated[
        Literal["", "checkpoint", "all"],
        typer.Option(
            "--delete",
            metavar="PART",
            help="checkpoint: it can no longer be resumed; all: what it made, too.",
        ),
    ] = "",
    yes: YesOption = False,
    output: OutputOption = "table",
) -> None:
    """List what an ended job keeps on the disks of its hosts, or delete it there."""
    with server() as client:
        job_id = job_id_of(client, job)
        found = list(client.paginate(client.list_job_files, job_id))
        if delete_part:
            parts = ("checkpoint", "output") if delete_part == "all" else ("checkpoint",)
            size = sum(getattr(each, f"{part}_bytes") for each in found for part in parts)
            what = "all files" if delete_part == "all" else "the checkpoint"
            confirm(f"Delete {what} of {job} ({binary_size(size)}) from its hosts?", yes=yes)
            found = list(client.delete_job_files(job_id, part=delete_part).items)
    write_files(found, output)


def write_files(found: "list[StoredFilesReply]", output: str) -> None:
    """Print what ended jobs keep on hosts."""
    if wrote(found, output):
        return
    rows = [
        (
            each.job,
            each.job_name,
            each.host,
            binary_size(each.checkpoint_bytes),
            binary_size(each.output_bytes),
            f"deletes {each.pending}" if each.pending else "",
        )
        for each in found
    ]
    show(table(("JOB", "NAME", "HOST", "CHECKPOINT", "OUTPUT", ""), rows, right=(3, 4), fixed=[0]))


def delete(job: JobArgument, *, yes: YesOption = False) -> None:
    """Delete an ended job from the history; its measurements stay with its host."""
    with server() as client:
        found = client.get_job(job_id_of(client, job))
        what = f"{found.name} ({found.id})"
        confirm(f"Delete the job {what}, {found.state}, from the history?", yes=yes)
        client.delete_job(found.id)
    typer.echo(f"Deleted {what}.")


def open_page(job: JobArgument) -> None:
    """Open a job's page in the browser, or print its address."""
    with server() as client:
        address = client.base_url + client.get_job(job_id_of(client, job)).url
    typer.echo(address)
    if sys.stdout.isatty():
        webbrowser.open(address)
