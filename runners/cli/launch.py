"""``slipway launch``, ``verify`` and ``plans``: plans of the server, and what they start."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from runners.cli.approvals import decision_of
from runners.cli.errors import CliError, ExitCode
from runners.cli.groups import group
from runners.cli.jobs import DetachOption, finished, follow_job, follow_or_name, show_figures
from runners.cli.option_fields import FieldOption, Texts, give_options, read_options
from runners.cli.output import OutputOption, bullets, show, state_words
from runners.cli.plans import ID, complete_plan, load_plan, read_document
from runners.cli.server import (
    LOGIN,
    OVER_BUDGET,
    Completions,
    YesOption,
    complete_host,
    complete_server_plan,
    confirm,
    has_server,
    server,
    write_reply,
    wrote,
)
from runners.cli.settings import place_of, read_setting
from runners.cli.workflows import as_workflow, read_sweep, workflow_launch
from runners.plans.launch import Launch

if TYPE_CHECKING:
    from planner.specs.estimate import PlanAnswer
    from runners.client.generated import (
        Launched,
        LaunchRequestReply,
        PlanReply,
        Slipway,
        VerdictReply,
    )
    from runners.client.transport import ApiError

ULID_LENGTH = 26


class ToLaunch(NamedTuple):
    """A plan of the server, or a document with the plan that it would be, which is not kept."""

    plan: "PlanReply"
    document: dict[str, Any] | None
    launch: dict[str, Any]  # of the document

    def start(
        self,
        client: "Slipway",
        options: Mapping[str, Any],
        *,
        key: str = "",
        dry_run: bool = False,
    ) -> "Launched":
        """Launch it with options over those of the document, or only check that it can be."""
        wanted, once = {**self.launch, **options}, None if dry_run else key or None
        if self.document is None:
            plan_id = self.plan.id
            return client.launch_plan(plan_id, wanted, dry_run=dry_run, idempotency_key=once)
        document = {**self.document, "launch": wanted}
        return client.launch_document(document, dry_run=dry_run, idempotency_key=once)


def complete_any_plan(incomplete: str) -> Completions:
    """Return plans kept on this machine, then those of the server."""
    kept = [(each, "on this machine") for each in complete_plan(incomplete)]
    return [*kept, *complete_server_plan(incomplete)]


PlanArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PLAN",
        help="Id of a plan: of the server, or one kept on this machine.",
        autocompletion=complete_any_plan,
    ),
]
ServerPlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", autocompletion=complete_server_plan)
]
FileOption = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="FILE", help="A job.yaml; - reads standard input."),
]
OnOption = Annotated[
    str,
    typer.Option("--on", help="A host of the server, by name.", autocompletion=complete_host),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A field of the file, by its path."),
]
LONGEST_KEY = 64  # characters of an idempotency key, as the API has it
# Of a launch's fields; the others are set in a file or by --set.
OPTIONS = (
    FieldOption(("--run",), "run"),
    FieldOption(("--engine",), "engine"),
    FieldOption(("--name",), "name"),
    FieldOption(("--hours",), "max_duration_seconds"),
    FieldOption(("--secret",), "secrets"),
    FieldOption(("--partition",), "partition"),
    FieldOption(("--account",), "account"),
    FieldOption(("--qos",), "qos"),
    FieldOption(("--reservation",), "reservation"),
    FieldOption(("--queue",), "queue"),
    FieldOption(("--priority-class",), "priority_class"),
    FieldOption(("--engine-args",), "engine_args"),
)


def launch(  # noqa: PLR0913 (the command's options)
    plan: PlanArgument = None,
    *,
    file: FileOption = None,
    on: OnOption = "",
    set_: SetOption = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="FIELD=VALUE,VALUE",
            help="Values of a field of the file: a job for each combination.",
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            "--key", help="Idempotency key: a repetition with it launches nothing more for a day."
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, check the launch, and keep nothing.")
    ] = False,
    approval: Annotated[
        str,
        typer.Option(
            "--request-approval",
            metavar="REASON",
            help="Ask a person of the team to approve the launch, and launch nothing now.",
        ),
    ] = "",
    wait: Annotated[
        bool,
        typer.Option("--wait", help="With --request-approval: wait for it, and follow the job."),
    ] = False,
    yes: YesOption = False,
    detach: DetachOption = False,
    output: OutputOption = "table",
    **texts: Any,
) -> None:
    """Launch a plan as a job: show it, ask, and follow it. Ctrl-C never stops the job.

    A file with steps is launched as a workflow. A launch of a file that is refused or not
    confirmed keeps no plan.
    """
    from runners.client.transport import ApiError

    _check_key(key)
    _check_wait(wait=wait, approval=approval)
    options = read_options(Launch, OPTIONS, texts)
    with server() as client:
        document = None if file is None else read_document(file)
        if sweep or "steps" in (document or {}):
            _launch_workflow(
                client, plan, document, on=on, settings=set_ or (), sweep=sweep or (),
                options=options, approval=approval, key=key, dry_run=dry_run, yes=yes,
                detach=detach, output=output,
            )  # fmt: skip
            return
        wanted = _to_launch(client, plan, document, on=on, settings=set_ or ())
        title = wanted.plan.launch.title
        _check(client, wanted.plan, output)
        if approval and not dry_run:
            confirm(f"Request its approval? {title}.", yes=yes)
            made = _request_approval(client, wanted, options, approval, key=key)
            _show_request(client, made, output, wait=wait, detach=detach)
            return
        if not dry_run:
            confirm(f"Launch it? {title}.", yes=yes)
        try:
            launched = wanted.start(client, options, key=key, dry_run=dry_run)
        except ApiError as error:
            if error.code != OVER_BUDGET:
                raise
            command = _command(plan, file, on=on, settings=set_ or (), texts=texts)
            raise _over_budget(error, command) from error
        for note in launched.notes if output == "table" else ():
            typer.echo(note, err=True)
        if dry_run:
            if output == "table":
                typer.echo(f"{title}: possible. Nothing was launched or kept.")
                typer.echo(wanted.plan.launch.text)
                if launched.command:
                    typer.echo(f"The engine's command:\n{launched.command}")
            else:
                write_reply(wanted.plan, output)
            return
        job = launched.job
        if not wrote(launched, output):
            typer.echo(f"{job.name} is {state_words(job.state)}: {job.id}", err=True)
            if launched.endpoint_key:
                typer.echo(f"Its key, not shown again: {launched.endpoint_key}", err=True)
        follow_or_name(client, job.id, output, detach=detach)


give_options(launch, {each: Launch.model_fields[each.field] for each in OPTIONS})


def _launch_workflow(  # noqa: PLR0913 (the command's options)
    client: "Slipway",
    plan: str | None,
    document: dict[str, Any] | None,
    *,
    on: str,
    settings: Sequence[str],
    sweep: Sequence[str],
    options: Mapping[str, Any],
    approval: str,
    key: str,
    dry_run: bool,
    yes: bool,
    detach: bool,
    output: str,
) -> None:
    """Launch a file's steps, or its one job for each value of a sweep.

    Raises:
        CliError: an option is not of a workflow.
    """
    if document is None or plan is not None:
        raise CliError("--sweep varies a field of a file: name it with --file", field="--sweep")
    if approval:
        raise CliError(
            "a workflow is started by who may launch: leave --request-approval out",
            field="--request-approval",
        )
    _set(document, settings)
    hardware = (_place(client, on) or {"host": on}) if on else None
    workflow = as_workflow(document, sweep=read_sweep(sweep), hardware=hardware, options=options)
    workflow_launch(
        client, workflow, key=key, dry_run=dry_run, yes=yes, detach=detach, output=output
    )


def _set(document: dict[str, Any], settings: Sequence[str]) -> None:
    """Set fields of a document by their paths; a named training text is the one that is read."""
    from runners.plans.training_data import follow_data  # helps of commands load no planner

    read = list(map(read_setting, settings))
    for path, value in read:
        place, last = place_of(document, path)
        place[last] = value
    changed = [path.removeprefix("workload.") for path, _ in read if path.startswith("workload.")]
    if changed and isinstance(document.get("workload"), dict):
        document["workload"] = follow_data(document["workload"], changed)


def _to_launch(
    client: "Slipway",
    plan: str | None,
    document: dict[str, Any] | None,
    *,
    on: str,
    settings: Sequence[str],
) -> ToLaunch:
    """Return what a command is to launch, planned on the server but not kept there.

    Raises:
        CliError: neither a plan nor a file is named, or both, or there is no such plan.
    """
    if (plan is None) == (document is None):
        raise CliError("name a PLAN, or a file with --file", field="PLAN")
    if document is not None:
        _set(document, settings)
        if on:
            document["hardware"] = _place(client, on) or {"host": on}
        launch = dict(document.pop("launch", None) or {})
        return ToLaunch(client.create_plan(document, keep=False), document, launch)
    plan = str(plan)
    if len(plan) == ULID_LENGTH:
        return ToLaunch(client.get_plan(plan.upper()), None, {})
    if not ID.fullmatch(plan):
        raise CliError(
            f"PLAN is {plan!r}: it is an id that `slipway plan` or a plan's page shows",
            field="PLAN",
        )
    answer = load_plan(plan)
    if answer.request is None:
        raise CliError(f"the plan {plan} holds no request: plan again", field="PLAN")
    request = answer.request.model_dump(mode="json")
    measured = answer.request.host_calibration  # of the server's host that it was planned for
    on = on or (measured.host if measured else "")
    place = (_place(client, on) if on else None) or {"host": on}
    shown = client.create_plan_from_request({"request": request, **place}, keep=False)
    return ToLaunch(shown, shown.document, {})


def _check_key(key: str) -> None:
    """Refuse an idempotency key that the server would not take.

    Raises:
        CliError: it is too long, or has characters other than printable ASCII.
    """
    if len(key) > LONGEST_KEY or not key.isascii() or not key.isprintable():
        raise CliError(
            f"--key has {len(key)} characters; it can have 1 to {LONGEST_KEY} printable "
            "ASCII characters, such as night-run-2026-11-28 or a UUID",
            field="--key",
        )


def _check_wait(*, wait: bool, approval: str) -> None:
    """Refuse to wait where nothing is requested.

    Raises:
        CliError: ``--wait`` stands without ``--request-approval``.
    """
    if wait and not approval:
        raise CliError("--wait needs --request-approval REASON to wait for", field="--wait")


def _request_approval(
    client: "Slipway",
    wanted: ToLaunch,
    options: Mapping[str, Any],
    reason: str,
    *,
    key: str,
) -> "LaunchRequestReply":
    """Request that a person of the team approves a launch."""
    launch = {**wanted.launch, **options}
    if wanted.document is None:
        body = {"launch": launch, "reason": reason}
        return client.request_launch(wanted.plan.id, body, idempotency_key=key or None)
    body = {"document": {**wanted.document, "launch": launch}, "reason": reason}
    return client.request_launch_of_document(body, idempotency_key=key or None)


def _show_request(
    client: "Slipway", made: "LaunchRequestReply", output: str, *, wait: bool, detach: bool
) -> None:
    """Say where a person decides on a request; with ``wait`` follow the job that is approved."""
    if output == "table":
        typer.echo(
            f"The launch of {made.plan_name} ({made.plan}) is {made.state}: "
            f"{client.base_url}{made.url}",
            err=True,
        )
        typer.echo(made.id, err=wait)
    elif not wait:
        write_reply(made, output)
    if not wait:
        return
    decided = decision_of(client, made)
    if output == "table":
        typer.echo(f"Approved by {decided.decided_by or 'somebody'}: {decided.job}", err=True)
    else:
        write_reply(decided, output)
    follow_or_name(client, str(decided.job), output, detach=detach)


def _command(
    plan: str | None,
    file: str | None,
    *,
    on: str,
    settings: Sequence[str],
    texts: Texts,
) -> str:
    """Return the command line that requests the approval of a launch with the same options."""
    words = ["slipway", "launch", *(["-f", file] if file else [str(plan)])]
    words += ["--on", on] if on else []
    words += [word for text in settings for word in ("--set", text)]
    for option in OPTIONS:
        given = texts[option.key] or []
        each_text = given if isinstance(given, list) else [given]
        words += [word for text in each_text for word in (option.names[0], text)]
    return shlex.join([*words, "--request-approval", "REASON"])


def _over_budget(error: "ApiError", command: str) -> CliError:
    """Return a refusal by the token's budget, with the command that requests an approval."""
    needed, rest = (float(error.facts[name]) for name in ("needed_gpu_hours", "rest_gpu_hours"))
    return CliError(
        f"the job may take {needed:.3g} GPU-hours, and {rest:.3g} of the token's budget are left: "
        f"shorten its time limit (--hours), or let a person decide with `{command}`",
        code=error.code,
        exit_code=ExitCode.DENIED,
        problem=error.facts,
    )


def plan_on_server(
    request: dict[str, Any], hardware: Sequence[str], *, unknown: CliError
) -> "PlanAnswer":
    """Return the answer to a request without hardware, for a host or pool of the server.

    The plan is kept on the server, which knows the host's devices and measurements. ``unknown``
    is the error of hardware that the catalog lacks.

    Raises:
        CliError: nobody is logged in, the server has no such host or pool, or it refuses the
            request.
    """
    if not has_server():
        raise CliError(
            f"{unknown.detail}. If it is a host or a pool of a server, {LOGIN}",
            code=unknown.code,
            field=unknown.field,
        )
    name = hardware[0]
    if len(hardware) > 1:
        raise CliError(
            f"{unknown.detail}. A host or a pool of the server stands alone: give one --on",
            code=unknown.code,
            field=unknown.field,
        )
    with server() as client:
        place = _place(client, name)
        if place is None:
            hosts = ", ".join(each.slug for each in client.paginate(client.list_hosts)) or "none"
            raise CliError(
                f"{unknown.detail}. Nor has {client.base_url} a host or pool of this name; its "
                f"hosts: {hosts}",
                code=unknown.code,
                field=unknown.field,
            )
        made = client.create_plan_from_request({"request": request, **place})
        typer.echo(f"On {client.base_url}{made.url}: {made.id}", err=True)
    for note in made.notes:
        typer.echo(f"- {note}", err=True)
    if made.answer is None:
        raise CliError(made.problem or _verdict(made.verdict_words), code="refused")
    return made.answer.model_copy(update={"request": made.answer.request or made.request})


def _place(client: "Slipway", name: str) -> dict[str, str] | None:
    """Return a host, else a pool, by its name or id, as a plan names it; None if there is none.

    Raises:
        CliError: several hosts, or several pools, have the name.
    """
    hosts = list(client.paginate(client.list_hosts))
    found = [each for each in hosts if name in {each.slug, each.id}]
    found = found or [each for each in hosts if name == each.name]
    if found:
        _refuse_several(
            name, "hosts", [f"{each.slug}  {each.state}, {each.contact}" for each in found]
        )
        return {"host": found[0].slug}
    known = list(client.paginate(client.list_pools))
    pools = [each for each in known if name == each.id]
    pools = pools or [each for each in known if name == each.name]
    if not pools:
        return None
    _refuse_several(name, "pools", [f"{each.id}  of {each.team}" for each in pools])
    (pool,) = pools
    # Plans name the only host of a pool itself.
    return {"host": pool.hosts[0]} if len(pool.hosts) == 1 else {"pool": pool.id}


def _refuse_several(name: str, nouns: str, lines: list[str]) -> None:
    """Refuse a name of several hosts or pools, each given as a line that begins with its id.

    Raises:
        CliError: there are several.
    """
    if len(lines) > 1:
        raise CliError(
            "\n  ".join([f"{len(lines)} {nouns} are named {name!r}; name one by its id:", *lines]),
            code="ambiguous",
            field="--on",
        )


def _check(client: "Slipway", plan: "PlanReply", output: str) -> None:
    """Show a plan, with its address if it is kept; raise if nothing fits or it cannot launch."""
    words = plan.verdict_words
    if output == "table":
        address = f"  {plan.id}  {client.base_url}{plan.url}" if plan.id else ""
        typer.echo(f"{plan.name or 'Draft plan'}{address}", err=True)
        typer.echo(_verdict(words), err=True)
        for line in [*words.warnings, *plan.notes]:
            typer.echo(f"- {line}", err=True)
    if plan.answer is not None and not plan.answer.plans:
        from runners.cli.report import nothing_fits

        raise nothing_fits(plan.answer)
    if not plan.launch.can:
        raise CliError(
            f"{plan.launch.title}: {plan.launch.text}",
            code="cannot_launch",
            exit_code=ExitCode.FAILED,
        )


def _verdict(words: "VerdictReply") -> str:
    """Return a verdict and its details as sentences."""
    return f"{words.sentence.rstrip('.')}. {words.detail}".strip()


def verify(
    plan: PlanArgument = None,
    *,
    file: FileOption = None,
    on: OnOption = "",
    yes: YesOption = False,
    output: OutputOption = "table",
) -> None:
    """Run a plan's benchmark or job and print each figure measured beside predicted."""
    with server() as client:
        document = None if file is None else read_document(file)
        wanted = _to_launch(client, plan, document, on=on, settings=())
        _check(client, wanted.plan, output)
        confirm(f"Measure it? {wanted.plan.launch.title}.", yes=yes)
        job = wanted.start(client, {"run": "job"}).job
        typer.echo(f"{job.name}: {job.id}", err=True)
        finished(client, job.id, follow_job(client, job.id, quiet=True))
        if not wrote(client.get_job_figures(job.id), output):
            show_figures(client, job.id)


plans = group("Plans of the server.")


UNNAMED = "Unfinished plan"  # a draft without a name, as the pages call it


@plans.command("list")
def plan_list(
    q: Annotated[str, typer.Argument(metavar="TEXT", help="Part of the name.")] = "",
    output: OutputOption = "table",
) -> None:
    """List the team's plans, the last saved first."""
    from runners.cli.output import table

    with server() as client:
        page = client.list_plans(q=q)
    if wrote(page, output):
        return
    rows = [
        (each.id, each.name or UNNAMED, each.verdict, str(each.version or ""), each.owner)
        for each in page.items
    ]
    show(table(("ID", "NAME", "VERDICT", "VERSION", "OWNER"), rows, fixed=(0,)))


@plans.command("get")
def plan_get(plan_id: ServerPlanArgument, output: OutputOption = "table") -> None:
    """Show a plan of the server: its verdict, and the planner's answer."""
    with server() as client:
        plan = client.get_plan(plan_id)
    if wrote(plan, output):
        return
    typer.echo(f"{plan.name or UNNAMED}  {plan.id}")
    typer.echo(_verdict(plan.verdict_words))
    show(bullets([*plan.verdict_words.warnings, *plan.notes]))
    if plan.answer is not None:
        from runners.cli.report import print_plan

        print_plan(plan.answer.model_copy(update={"id": plan.id}), ())


@plans.command("yaml")
def plan_yaml(plan_id: ServerPlanArgument) -> None:
    """Print a plan of the server as a job.yaml, for `slipway launch -f`."""
    with server() as client:
        document = client.get_plan(plan_id).document
    write_reply(document, "yaml")


@plans.command("schema")
def plan_schema() -> None:
    """Print the JSON schema of job.yaml, for editors."""
    with server() as client:
        write_reply(client.get_plan_schema(), "json")


@plans.command("delete")
def plan_delete(plan_id: ServerPlanArgument, *, yes: YesOption = False) -> None:
    """Delete a plan with all its versions; its jobs stay."""
    with server() as client:
        found = client.get_plan(plan_id)
        what = f"{found.name or 'the draft'} ({found.id})"
        confirm(f"Delete {what} with all its versions?", yes=yes)
        client.delete_plan(found.id, all_versions=True)
    typer.echo(f"Deleted {what}.")
