"""Hosts and queues of the server: ``slipway hosts``, ``queue``."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from runners.cli.errors import CliError, ExitCode
from runners.cli.groups import group
from runners.cli.output import OutputOption, binary_size, seconds, show, table
from runners.cli.server import (
    JobArgument,
    YesOption,
    complete_host,
    confirm,
    job_id_of,
    server,
    write_reply,
    wrote,
)

if TYPE_CHECKING:
    from runners.client.generated import DeviceReply, HostDetail
    from runners.client.replies.cached_models import CachedModelReply

HostArgument = Annotated[
    str,
    typer.Argument(metavar="HOST", help="Slug of a host.", autocompletion=complete_host),
]
DevicesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="DEVICE...", help="Such as 0 or gpu0; every device without one."),
]
hosts = group("GPU hosts of the server.")
CHECK_SECONDS = 2.0
MAX_KEEP_GIB = 2**30


@hosts.command("list")
def host_list(
    q: Annotated[str, typer.Argument(metavar="TEXT", help="Part of the name.")] = "",
    output: OutputOption = "table",
) -> None:
    """List the team's hosts with their contact."""
    with server() as client:
        rows = list(client.paginate(client.list_hosts, q=q))
    if wrote(rows, output):
        return
    shown = [
        (
            each.slug,
            each.state,
            each.contact
            if each.silent_seconds is None
            else f"{each.contact}, {seconds(each.silent_seconds)} ago",
            each.pool,
            " ".join(f"{key}={value}" for key, value in each.labels.items()),
        )
        for each in rows
    ]
    show(table(("HOST", "STATE", "CONTACT", "POOL", "LABELS"), shown, fixed=(0,)))


@hosts.command("get")
def host_get(host: HostArgument, output: OutputOption = "table") -> None:
    """Show a host: its devices, who holds them, and its checks."""
    with server() as client:
        found = client.get_host(host)
    if wrote(found, output):
        return
    typer.echo(f"{found.name}: {found.state}, {found.contact}, pool {found.pool}")
    details = [found.address] if found.address else []
    details += [f"{key}={value}" for key, value in sorted(found.labels.items())]
    if details:
        typer.echo(", ".join(details))
    rows = [
        (
            f"{each.kind} {each.index}",
            each.name,
            binary_size(each.memory_bytes),
            each.job or ("held" if each.is_held else "free"),
            f"cordoned by {each.cordoned_by}: {each.cordon_reason}" if each.cordoned_by else "",
        )
        for each in found.devices
    ]
    show(table(("DEVICE", "NAME", "MEMORY", "JOB", ""), rows, right=(2,)))


@hosts.command("add")
def host_add(
    name: Annotated[str, typer.Argument(help="As pages show it.")],
    pool: Annotated[str, typer.Option("--pool", help="Hosts of one pool take the same jobs.")] = (
        "default"
    ),
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Repeatable.")
    ] = None,
    way: Annotated[
        str, typer.Option("--with", help="pip, pipx, systemd, slurm, kubernetes or ray.")
    ] = "pip",
    *,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until the host is ready, check by check.")
    ] = False,
    output: OutputOption = "table",
) -> None:
    """Print the command with which a machine becomes a host; it is valid for an hour."""
    labels = dict(_label(text) for text in label or ())
    with server() as client:
        made = client.add_host({"name": name, "pool": pool, "labels": labels})
        if output != "table":
            write_reply(made, output)
        elif way not in made.commands:
            raise CliError(
                f"--with is {way!r}: it can be {', '.join(made.commands)}", field="--with"
            )
        else:
            typer.echo(made.commands[way])
        seen: dict[str, str] = {}
        while wait:
            state = client.get_enrolment(made.id)
            for each in state.checks:
                if seen.get(each.name) != each.status:
                    seen[each.name] = each.status
                    typer.echo(f"[{each.status}] {each.name}: {each.sentence}", err=True)
            if state.is_ready:
                return
            time.sleep(CHECK_SECONDS)


def _label(text: str, option: str = "--label") -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise CliError(f"{option} is {text!r}: write it as KEY=VALUE", field=option)
    return key, value


@hosts.command("check")
def host_check(host: HostArgument, output: OutputOption = "table") -> None:
    """Ask a host for new facts, and show its check-list."""
    with server() as client:
        found = client.act_on_host(host, "recheck")
    if wrote(found, output):
        return
    rows = [(each.status, each.name, each.sentence, each.remedy) for each in found.checks]
    show(table(("STATUS", "CHECK", "FINDING", "REMEDY"), rows))
    if any(each.status == "failed" for each in found.checks):
        raise typer.Exit(int(ExitCode.FAILED))


def _act(host: str, action: str, question: str, *, yes: bool) -> None:
    if question:
        confirm(question, yes=yes)
    with server() as client:
        found = client.act_on_host(host, action)  # type: ignore[arg-type]  # one of the API's
    typer.echo(f"{found.name} is {found.state}.")


@hosts.command("drain")
def host_drain(host: HostArgument) -> None:
    """Let a host finish its jobs and take no new ones."""
    _act(host, "drain", "", yes=True)


@hosts.command("undrain")
def host_undrain(host: HostArgument) -> None:
    """Let a host take jobs again."""
    _act(host, "undrain", "", yes=True)


@hosts.command("cordon")
def host_cordon(
    host: HostArgument,
    devices: DevicesArgument = None,
    *,
    reason: Annotated[
        str, typer.Option("--reason", help="Shown to everybody who waits for the device.")
    ],
) -> None:
    """Let devices of a host take no new jobs; what runs on them goes on."""
    with server() as client:
        for device in _devices(client.get_host(host), devices, is_cordoned=False):
            client.cordon_device(host, device.id, {"reason": reason})
            typer.echo(f"{device.kind} {device.index} {device.name} is cordoned.")


@hosts.command("uncordon")
def host_uncordon(host: HostArgument, devices: DevicesArgument = None) -> None:
    """Let cordoned devices of a host take jobs again."""
    with server() as client:
        for device in _devices(client.get_host(host), devices, is_cordoned=True):
            client.uncordon_device(host, device.id)
            typer.echo(f"{device.kind} {device.index} {device.name} takes jobs again.")


def _devices(
    host: "HostDetail", names: list[str] | None, *, is_cordoned: bool
) -> "list[DeviceReply]":
    """Return the devices of a host that are named; without names those of the given state.

    Raises:
        CliError: a name is that of no device, or of several.
    """
    if not names:
        found = [each for each in host.devices if bool(each.cordoned_by) is is_cordoned]
        if not found:
            state = "cordoned" if is_cordoned else "left to cordon"
            typer.echo(f"No device of {host.name} is {state}.", err=True)
        return found
    known = [
        (each, (each.id, str(each.index), f"{each.kind}{each.index}")) for each in host.devices
    ]
    found = []
    for name in names:
        matching = [each for each, own in known if name.replace(" ", "").lower() in own]
        if len(matching) != 1:
            listed = ", ".join(f"{each.kind}{each.index}" for each in host.devices) or "none"
            raise CliError(
                f"DEVICE is {name!r}, which names {len(matching) or 'no'} device"
                f"{'s' if matching else ''} of {host.name}: it has {listed}",
                field="DEVICE",
            )
        found += matching
    return found


@hosts.command("label")
def host_label(
    host: HostArgument,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE...", help="A label to set; KEY- removes one. Without it: the list."
        ),
    ] = None,
) -> None:
    """Set and remove labels of a host; others stay as they are."""
    with server() as client:
        found = client.get_host(host)
        labels = dict(found.labels)
        for change in changes or ():
            if "=" not in change and change.endswith("-"):
                if labels.pop(change[:-1], None) is None:
                    listed = ", ".join(found.labels) or "none"
                    raise CliError(
                        f"{found.name} has no label {change[:-1]!r}: it has {listed}",
                        field="KEY",
                    )
            else:
                labels |= [_label(change, "LABEL")]
        if labels != found.labels:
            found = client.change_host(host, {"labels": labels})
    for key, value in sorted(found.labels.items()):
        typer.echo(f"{key}={value}")


@hosts.command("address")
def host_address(
    host: HostArgument,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="One that it reported. Without it: the list.")
    ] = "",
) -> None:
    """Choose the address at which a job's other hosts reach a host."""
    with server() as client:
        found = client.get_host(host)
        if address and address != found.address:
            found = client.change_host(host, {"address": address})
    known = [str(each) for each in found.facts.get("addresses") or ()]
    for each in known if found.address in known else [found.address, *known]:
        if each:
            typer.echo(f"{each} (chosen)" if each == found.address else each)


@hosts.command("files")
def host_files(host: HostArgument, output: OutputOption = "table") -> None:
    """List what ended jobs keep on a host's disk, the largest first."""
    from runners.cli.jobs import write_files

    with server() as client:
        found = list(client.paginate(client.list_host_files, host))
    write_files(found, output)


@hosts.command("models")
def host_models(
    host: HostArgument,
    delete: Annotated[
        str, typer.Option("--delete", metavar="NAME", help="Delete it from the host's disk.")
    ] = "",
    pin: Annotated[
        str, typer.Option("--pin", metavar="NAME", help="Keep it, whatever the rule says.")
    ] = "",
    unpin: Annotated[str, typer.Option("--unpin", metavar="NAME", help="Undo a pin.")] = "",
    keep: Annotated[
        str, typer.Option("--keep", metavar="GIB|all", help="What the cache keeps at most.")
    ] = "",
    *,
    yes: YesOption = False,
    output: OutputOption = "table",
) -> None:
    """List the models in the Hub's cache of a host; NAME is org/name or org/name@commit."""
    keep_gib = _keep_gib(keep)
    if delete:
        confirm(f"Delete {delete} from the disk of {host}?", yes=yes)
    with server() as client:
        if unpin:
            client.pin_host_model(host, {"model": unpin, "is_pinned": False})
        if pin:
            client.pin_host_model(host, {"model": pin})
        if delete:
            client.delete_host_model(host, model=delete)
        if keep:
            client.set_models_rule(host, {"keep_gib": keep_gib})
        found = list(client.paginate(client.list_host_models, host))
    if wrote(found, output):
        return
    rows = [
        (
            each.repository,
            each.commit[:12] if each.is_complete else f"{each.commit[:12]} incomplete".strip(),
            binary_size(each.size_bytes),
            f"{each.used_at:%Y-%m-%d %H:%M}" if each.used_at else "",
            str(each.num_jobs or ""),
            _model_state(each),
        )
        for each in found
    ]
    heads = ("MODEL", "COMMIT", "SIZE", "LAST USE", "JOBS", "")
    show(table(heads, rows, right=(2, 4), fixed=(0,)))


def _keep_gib(text: str) -> float | None:
    try:
        gib = None if text in {"", "all"} else float(text)
    except ValueError:
        gib = -1.0
    if gib is not None and not 0 <= gib <= MAX_KEEP_GIB:
        raise CliError(
            f"--keep is {text!r}; it can be 0 to {MAX_KEEP_GIB:,} GiB, or all to keep everything",
            field="--keep",
        )
    return gib


def _model_state(model: "CachedModelReply") -> str:
    words = [
        f"pinned by {model.pinned_by}" if model.pinned_by else "",
        "a job needs it" if model.is_needed else "",
        "is being deleted" if model.is_deleting else "",
    ]
    return ", ".join(filter(None, words))


environments = group("Named environments of a host, such as vllm.")
hosts.add_typer(environments, name="environments")
EnvironmentArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Such as vllm: see `environments list`.")
]


@environments.command("list")
def environment_list(host: HostArgument, output: OutputOption = "table") -> None:
    """List a host's environments: what each is for, and whether it is built."""
    with server() as client:
        found = client.get_host(host).environments
    if wrote(found, output):
        return
    rows = [
        (
            each.name,
            f"{each.stage}, to {each.pending_action}" if each.pending_action else each.stage,
            binary_size(each.size_bytes),
            each.words or each.purpose,
        )
        for each in found
    ]
    show(table(("NAME", "STAGE", "SIZE", ""), rows, right=(2,)))


@environments.command("build")
def environment_build(host: HostArgument, name: EnvironmentArgument) -> None:
    """Let a host build an environment before a job needs it, or build it anew."""
    with server() as client:
        found = client.build_environment(host, name)
    typer.echo(f"{found.name} builds {name} at its next heartbeat.")


@environments.command("remove")
def environment_remove(
    host: HostArgument, name: EnvironmentArgument, *, yes: YesOption = False
) -> None:
    """Let a host delete an environment that no job runs in."""
    confirm(f"Delete the environment {name} of {host}?", yes=yes)
    with server() as client:
        found = client.remove_environment(host, name)
    typer.echo(f"{found.name} deletes {name} at its next heartbeat.")


@hosts.command("maintenance")
def host_maintenance(host: HostArgument) -> None:
    """Put a host into maintenance."""
    _act(host, "maintenance", "", yes=True)


@hosts.command("rotate")
def host_rotate(host: HostArgument) -> None:
    """Let a host replace its secrets at its next heartbeat."""
    _act(host, "rotate", "", yes=True)


@hosts.command("revoke")
def host_revoke(host: HostArgument, *, yes: YesOption = False) -> None:
    """End a host's access until it is enrolled again."""
    _act(host, "revoke", f"End the access of {host}?", yes=yes)


@hosts.command("retire")
def host_retire(host: HostArgument, *, yes: YesOption = False) -> None:
    """Retire a host for good."""
    _act(host, "retire", f"Retire {host} for good?", yes=yes)


@hosts.command("validate")
def host_validate(
    host: HostArgument,
    *,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not follow it.")] = False,
) -> None:
    """Validate every device of a host, and follow the job."""
    from runners.cli.jobs import finished, follow_job

    with server() as client:
        job = client.validate_host(host)
        typer.echo(job.id, err=not detach)
        if not detach:
            finished(client, job.id, follow_job(client, job.id))


queue = group("Queues of the pools.")


@queue.command("list")
def queue_list(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="Id or slug; all without it.")] = "",
    output: OutputOption = "table",
) -> None:
    """List waiting jobs in their order, and why each waits."""
    with server() as client:
        pools = [pool] if pool else [each.id for each in client.paginate(client.list_pools)]
        found = [client.get_queue(each) for each in pools]
    if wrote(found, output):
        return
    for each in found:
        typer.echo(f"{each.name} ({each.team}): {', '.join(each.hosts) or 'no host'}")
        rows = [
            (str(one.position or ""), one.job or "", one.name, one.priority, one.sentence)
            for one in each.queue
        ]
        if rows:
            show(table(("", "JOB", "NAME", "PRIORITY", "WHY IT WAITS"), rows, right=(0,)))
        else:
            typer.echo("Nothing waits.")


@queue.command("move")
def queue_move(
    pool: Annotated[str, typer.Argument(metavar="POOL")],
    job: JobArgument,
    direction: Annotated[str, typer.Argument(metavar="up|down")],
) -> None:
    """Move a waiting job by one turn, as an operator."""
    with server() as client:
        seen = client.get_queue(pool).seen
        job_id = job_id_of(client, job)
        client.reorder_queue(pool, job_id, {"move": direction, "seen": seen})
    typer.echo(f"Moved {job_id} {direction}.")


@queue.command("priority")
def queue_priority(
    pool: Annotated[str, typer.Argument(metavar="POOL")],
    job: JobArgument,
    priority: Annotated[str, typer.Argument(metavar="low|normal|high")],
) -> None:
    """Change the priority of a waiting job, as an operator."""
    with server() as client:
        job_id = job_id_of(client, job)
        client.reorder_queue(pool, job_id, {"priority": priority})
    typer.echo(f"The priority of {job_id} is {priority}.")
