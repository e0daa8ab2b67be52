"""Models under lasting names, clients' keys, and usage: ``slipway deployments``, ``keys``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.specs.units import MINUTE
from runners.cli.errors import CliError
from runners.cli.groups import group
from runners.cli.output import OutputOption, seconds, show, table
from runners.cli.plans import read_document
from runners.cli.server import YesOption, confirm, row_named, server, wrote

if TYPE_CHECKING:
    from runners.client.generated import DeploymentReply, ReplicaReply, Slipway, UsageReply

DeploymentArgument = Annotated[
    str, typer.Argument(metavar="DEPLOYMENT", help="Name or id of a deployment.")
]
IdleOption = Annotated[
    float | None,
    typer.Option("--idle", metavar="MINUTES", help="Sleep after so long without a request."),
]
AwakeOption = Annotated[
    bool | None,
    typer.Option("--awake/--may-sleep", help="Keep it awake, or let it sleep when idle."),
]

AliasOption = Annotated[
    list[str] | None,
    typer.Option("--alias", metavar="NAME", help="It also answers to this name; again for more."),
]
FallbackOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fallback",
        metavar="DEPLOYMENT",
        help="This one answers when it cannot; again for more; '' for none.",
    ),
]

WarmOption = Annotated[
    str | None,
    typer.Option(
        "--warm",
        metavar="HOURS",
        help="Keep it awake in these hours, such as 'mon-fri 08:00-18:00 Europe/Berlin'.",
    ),
]
ReplicasOption = Annotated[
    str | None,
    typer.Option("--replicas", metavar="N-M", help="Run so many jobs at once, such as 2 or 1-3."),
]

SUMMED_BY = {
    "deployment": "deployment_name",
    "key": "key_name",
    "person": "owner",
    "day": "day",
}
deployments = group("Models under lasting names, awake when asked.")


def _of(client: "Slipway", name: str) -> "DeploymentReply":
    """Return the deployment with a name or an id.

    Raises:
        CliError: there is none.
    """
    rows = client.paginate(client.list_deployments)
    return row_named(rows, name, ("name", "id"), "deployment")


def _words(row: "DeploymentReply") -> str:
    if row.state == "loading" and row.seconds_to_go is not None:
        return f"loading, about {seconds(row.seconds_to_go)} to go"
    return "not answering" if row.state == "silent" else row.state


def _model_words(replica: "ReplicaReply") -> str:
    if replica.silent_since is not None:
        return f"not answering since {replica.silent_since.astimezone():%H:%M:%S}"
    return "ready" if replica.ready_at else "loading"


@deployments.command("list")
def deployment_list(output: OutputOption = "table") -> None:
    """List the teams' deployments, the newest first."""
    with server() as client:
        rows = list(client.paginate(client.list_deployments))
    if wrote(rows, output):
        return
    shown = [
        (each.id, each.name, _words(each), each.replicas[0].host if each.replicas else "")
        for each in rows
    ]
    show(table(("ID", "NAME", "STATE", "HOST"), shown, fixed=(0,)))
    if rows:
        typer.echo(f"Their address for clients: {rows[0].base_url}")


@deployments.command("get")
def deployment_get(deployment: DeploymentArgument, output: OutputOption = "table") -> None:
    """Show a deployment: its state, its plan, its jobs, the address for clients."""
    with server() as client:
        found = client.get_deployment(_of(client, deployment).id)
    if wrote(found, output):
        return
    _show(found)


def _show(row: "DeploymentReply") -> None:
    typer.echo(f"{row.name}  {row.id}  {_words(row)}")
    if row.problem:
        typer.echo(row.problem)
    if row.is_kept_awake:
        idle = "kept awake"
    elif row.warm_hours:
        idle = f"kept awake {row.warm_hours}"
    elif row.idle_seconds is None:
        idle = "stays awake until somebody puts it to sleep"
    else:
        idle = f"sleeps after {seconds(row.idle_seconds)} without a request"
    typer.echo(f"{idle}; plan {row.plan_name} ({row.plan})")
    names = " or ".join([row.name, *row.aliases])
    typer.echo(f"clients: {row.base_url}, model {names}")
    if row.fallbacks:
        typer.echo(f"falls back to {', '.join(row.fallbacks)}")
    shown = [(each.job, each.job_state, each.host, _model_words(each)) for each in row.replicas]
    if shown:
        show(table(("JOB", "STATE", "HOST", "MODEL"), shown, fixed=(0,)))


@deployments.command("add")
def deployment_add(  # noqa: PLR0913, PLR0917 (the options of the command)
    name: Annotated[str, typer.Argument(help="That clients give as their model.")],
    plan: Annotated[
        str, typer.Option("--plan", metavar="PLAN", help="Id of a plan to serve.")
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="A plan's document, as for launch."),
    ] = None,
    idle: IdleOption = None,
    awake: AwakeOption = None,
    alias: AliasOption = None,
    fallback: FallbackOption = None,
    warm: WarmOption = None,
    replicas: ReplicasOption = None,
    output: OutputOption = "table",
) -> None:
    """Keep a plan to serve under a name; the first request wakes it."""
    if bool(plan) == (file is not None):
        raise CliError("give either --plan or --file", field="--plan")
    sent: dict[str, Any] = {"name": name, **_options(idle, awake, alias, fallback, warm, replicas)}
    if file is not None:
        sent["document"] = read_document(str(file))
    else:
        sent["plan"] = plan
    with server() as client:
        made = client.create_deployment(sent)
    if not wrote(made, output):
        _show(made)


def _options(
    idle: float | None,
    awake: bool | None,  # noqa: FBT001
    alias: list[str] | None,
    fallback: list[str] | None,
    warm: str | None,
    replicas: str | None,
) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if idle is not None:
        found["idle_seconds"] = idle * MINUTE
    if awake is not None:
        found["is_kept_awake"] = awake
    if alias is not None:
        found["aliases"] = alias
    if fallback is not None:
        found["fallbacks"] = [each for each in fallback if each]
    if warm is not None:
        found["warm_hours"] = warm
    if replicas is not None:
        least, _, most = replicas.partition("-")
        if not (least.isdecimal() and (most or least).isdecimal()):
            raise CliError(
                f"{replicas!r} is no number such as 2 or range such as 1-3", field="--replicas"
            )
        found |= {"min_replicas": int(least), "max_replicas": int(most or least)}
    return found


@deployments.command("change")
def deployment_change(  # noqa: PLR0913, PLR0917 (the options of the command)
    deployment: DeploymentArgument,
    plan: Annotated[
        str, typer.Option("--plan", metavar="PLAN", help="Roll out this plan or version.")
    ] = "",
    idle: IdleOption = None,
    awake: AwakeOption = None,
    alias: AliasOption = None,
    fallback: FallbackOption = None,
    warm: WarmOption = None,
    replicas: ReplicasOption = None,
    paused: Annotated[
        bool | None,
        typer.Option("--pause/--unpause", help="Stop it, and let no request wake it."),
    ] = None,
    output: OutputOption = "table",
) -> None:
    """Change a deployment; another plan is rolled out without a failed request."""
    sent = {
        **_options(idle, awake, alias, fallback, warm, replicas),
        **({"plan": plan} if plan else {}),
    }
    if paused is not None:
        sent["is_paused"] = paused
    if not sent:
        raise CliError("nothing is to change: see --help for what may change")
    with server() as client:
        changed = client.change_deployment(_of(client, deployment).id, sent)
    if not wrote(changed, output):
        _show(changed)


@deployments.command("draft")
def deployment_draft(  # noqa: PLR0913, PLR0917 (the options of the command)
    deployment: DeploymentArgument,
    plan: Annotated[
        str, typer.Option("--plan", metavar="PLAN", help="Run this plan or version.")
    ] = "",
    idle: IdleOption = None,
    awake: AwakeOption = None,
    alias: AliasOption = None,
    fallback: FallbackOption = None,
    warm: WarmOption = None,
    replicas: ReplicasOption = None,
    discard: Annotated[bool, typer.Option("--discard", help="Discard it.")] = False,  # noqa: FBT002
    output: OutputOption = "table",
) -> None:
    """Keep a change as a draft, shown against what runs; without options show the draft."""
    sent = {
        **_options(idle, awake, alias, fallback, warm, replicas),
        **({"plan": plan} if plan else {}),
    }
    if discard and sent:
        raise CliError("a draft is either kept or discarded", field="--discard")
    with server() as client:
        row = _of(client, deployment)
        if discard:
            client.discard_deployment_draft(row.id)
            typer.echo(f"The draft of {row.name} is discarded.")
            return
        kept = client.keep_deployment_draft(row.id, sent) if sent else None
        draft = kept or client.get_deployment_draft(row.id)
    if wrote(draft, output):
        return
    shown = [(each.label, each.running, each.drafted) for each in draft.differences]
    show(table(("CHANGES", "NOW", "WITH THE DRAFT"), shown))
    typer.echo(f"Roll it out: slipway deployments rollout {row.name}")


@deployments.command("rollout")
def deployment_rollout(deployment: DeploymentArgument, output: OutputOption = "table") -> None:
    """Change a deployment as its draft says, without a failed request."""
    with server() as client:
        row = _of(client, deployment)
        changed = client.roll_out_deployment_draft(row.id, {})
    if not wrote(changed, output):
        _show(changed)


@deployments.command("wake")
def deployment_wake(deployment: DeploymentArgument, output: OutputOption = "table") -> None:
    """Load a deployment's model now."""
    with server() as client:
        found = client.wake_deployment(_of(client, deployment).id)
    if not wrote(found, output):
        _show(found)


@deployments.command("sleep")
def deployment_sleep(deployment: DeploymentArgument, *, yes: YesOption = False) -> None:
    """Stop what runs of a deployment; the next request wakes it."""
    with server() as client:
        found = _of(client, deployment)
        confirm(f"Put {found.name} to sleep?", yes=yes)
        client.sleep_deployment(found.id)
    typer.echo(f"{found.name} goes to sleep.")


@deployments.command("delete")
def deployment_delete(deployment: DeploymentArgument, *, yes: YesOption = False) -> None:
    """Delete a deployment: clients get 404, what runs of it stops, its usage stays."""
    with server() as client:
        found = _of(client, deployment)
        confirm(f"Delete the deployment {found.name}, {found.state}?", yes=yes)
        client.delete_deployment(found.id)
    typer.echo(f"Deleted {found.name}.")


@deployments.command("usage")
def usage_list(
    days: Annotated[int, typer.Option("--days", help="Up to today, UTC.")] = 30,
    month: Annotated[
        str, typer.Option("--month", metavar="YYYY-MM", help="Instead of days, such as 2026-11.")
    ] = "",
    by: Annotated[str, typer.Option("--by", help="Sum by deployment, key, person or day.")] = "",
    output: OutputOption = "table",
) -> None:
    """List what clients used and what it cost, by day, key and deployment, or sums of it."""
    if by not in {"", *SUMMED_BY}:
        raise CliError(f"{by!r} is none of {', '.join(SUMMED_BY)}", field="--by")
    asked: dict[str, Any] = {"month": month} if month else {"days": days}
    with server() as client:
        rows = list(client.paginate(client.list_usage, **asked))
    if wrote(rows, output):
        return
    if by:
        show(table((by.upper(), "ANSWERS", "PROMPT", "GENERATED", "USD"), _summed(rows, by)))
        return
    shown = [
        (
            each.day,
            each.key_name,
            each.deployment_name,
            f"{each.requests:,}",
            f"{each.prompt_tokens:,}",
            f"{each.completion_tokens:,}",
            _dollars([each.usd]),
        )
        for each in rows
    ]
    show(table(("DAY", "KEY", "DEPLOYMENT", "ANSWERS", "PROMPT", "GENERATED", "USD"), shown))


def _summed(rows: Sequence["UsageReply"], by: str) -> list[tuple[str, ...]]:
    """Return the sums of usage by a column, those with the most tokens first."""
    groups: dict[str, list[UsageReply]] = {}
    for each in rows:
        groups.setdefault(getattr(each, SUMMED_BY[by]) or "(no person)", []).append(each)
    sums = [
        (
            name,
            sum(each.requests for each in group),
            sum(each.prompt_tokens for each in group),
            sum(each.completion_tokens for each in group),
            _dollars([each.usd for each in group]),
        )
        for name, group in groups.items()
    ]
    sums.sort(key=lambda row: -row[2] - row[3])
    return [(name, *(f"{each:,}" for each in counts), usd) for name, *counts, usd in sums]


def _dollars(costs: Sequence[float | None]) -> str:
    """Return a sum of costs; "" where none is known, with ≥ where one is not."""
    known = [each for each in costs if each is not None]
    if not known:
        return ""
    return f"{'' if len(known) == len(costs) else '≥ '}{sum(known):.4g}"


keys = group("Clients' keys for the team's deployments.")


@keys.command("list")
def key_list(output: OutputOption = "table") -> None:
    """List your keys in the team; an operator sees the team's."""
    with server() as client:
        rows = list(client.paginate(client.list_serving_keys))
    if wrote(rows, output):
        return
    shown = [
        (
            each.id,
            each.name,
            "a service" if each.is_service else each.owner,
            f"{each.hint}…",
            ", ".join(each.models) or "all",
            _used(each.tokens_today, each.tokens_per_day),
            _used(each.tokens_this_month, each.tokens_per_month),
            f"{each.last_used_at:%Y-%m-%d %H:%M}" if each.last_used_at else "never",
            "revoked"
            if each.revoked_at
            else (f"{each.expires_at:%Y-%m-%d}" if each.expires_at else "never"),
        )
        for each in rows
    ]
    show(
        table(
            ("ID", "NAME", "OF", "KEY", "FOR", "TODAY", "MONTH", "LAST USED", "EXPIRES"),
            shown,
            fixed=(0,),
        )
    )


def _used(tokens: int, limit: int | None) -> str:
    if limit is None:
        return f"{tokens:,}"
    return f"{tokens:,} of {limit:,}"


@keys.command("add")
def key_add(  # noqa: PLR0913 (the options of the command)
    name: Annotated[str, typer.Argument(help="Where it will be used.")],
    *,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="DEPLOYMENT", help="For this one; again for more."),
    ] = None,
    service: Annotated[
        bool, typer.Option("--service", help="The team's, no person's; operators make it.")
    ] = False,
    per_minute: Annotated[
        int | None, typer.Option("--per-minute", help="Requests a minute.")
    ] = None,
    at_once: Annotated[int | None, typer.Option("--at-once", help="Requests at once.")] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option("--tokens-per-day", help="Prompts and answers, UTC.")
    ] = None,
    tokens_per_month: Annotated[
        int | None, typer.Option("--tokens-per-month", help="From the first of the month, UTC.")
    ] = None,
    days: Annotated[float | None, typer.Option("--days", help="How long it is valid.")] = None,
    output: OutputOption = "table",
) -> None:
    """Make a key and print it; it is not shown again."""
    sent = {
        "name": name,
        "models": models or [],
        "is_service": service,
        "requests_per_minute": per_minute,
        "max_concurrency": at_once,
        "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month,
        "days": days,
    }
    with server() as client:
        made = client.make_serving_key(sent)
    if not wrote(made, output):
        typer.echo(made.key)


@keys.command("rotate")
def key_rotate(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="From `slipway keys list`.")],
    overlap: Annotated[
        float,
        typer.Option("--overlap", metavar="HOURS", help="The present secret opens so long."),
    ] = 24.0,
    output: OutputOption = "table",
) -> None:
    """Give a key a new secret and print it; the present one opens for some hours more."""
    with server() as client:
        made = client.rotate_serving_key(key_id, {"overlap_hours": overlap})
    if not wrote(made, output):
        typer.echo(made.key)


@keys.command("revoke")
def key_revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="From `slipway keys list`.")],
    *,
    yes: YesOption = False,
) -> None:
    """Revoke a key; its streams end within a second."""
    confirm(f"Revoke the key {key_id}?", yes=yes)
    with server() as client:
        client.revoke_serving_key(key_id)
    typer.echo(f"Revoked {key_id}.")
