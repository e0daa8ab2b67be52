"""Operations of people on hosts, their devices and environments, pools and queues."""

from typing import Annotated, Any, Literal, cast

from django.db.models import Q
from django.http import HttpRequest
from django.shortcuts import get_object_or_404
from ninja import Query, Router, Status
from pydantic import Field

from planner.specs.units import GIB
from runners.client.replies.hosts import (
    CheckReply,
    CheckStatus,
    DeviceOfHost,
    DeviceReply,
    EnrolmentReply,
    EnrolmentState,
    EnvironmentReply,
    HostDetail,
    HostPage,
    HostReply,
    PoolPage,
    PoolReply,
    QueuedJob,
    QueueReply,
)
from runners.client.replies.jobs import JobDetail, PriorityWord
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import (
    check_role,
    current_membership,
    current_team,
    has_role,
    signed_in,
    visible_or_404,
)
from webapp.agents.environments import environment_order, environments_of
from webapp.api.auth import ADMIN, READ
from webapp.api.jobs import PRIORITY_WORDS, job_detail
from webapp.api.requests import Sent, ShortPaging, page_of
from webapp.core.problems import REFUSALS, ForbiddenProblem, InvalidProblem, NotFoundProblem
from webapp.hosts.adding import AddHostForm, VirtualHostForm
from webapp.hosts.addresses import address_choose
from webapp.hosts.health import checklist, is_ready
from webapp.hosts.install_commands import install_commands, server_for_hosts
from webapp.hosts.labels import LabelsForm, labels_set, labels_text
from webapp.hosts.machines import hosts_mark_distinct, hosts_on_same_machine, virtual_host_create
from webapp.hosts.models import Device, EnrolmentToken, Host, HostState, Pool
from webapp.hosts.permissions import host_for_operator
from webapp.hosts.pools import facts_for, visible_pools
from webapp.hosts.services import (
    contact_of,
    credential_revoke,
    device_cordon,
    device_uncordon,
    host_set_state,
    host_take_out,
    recheck_request,
    rotation_request,
    silent_seconds,
    token_create,
    token_revoke,
)
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.lookup import devices_of, load_job
from webapp.jobs.models import Job
from webapp.jobs.proofs import prove_host
from webapp.jobs.queue_order import job_move, job_prioritise, order_digest
from webapp.jobs.waiting import lines_of
from webapp.wizard.documents import form_problem

router = Router(tags=["hosts"], auth=READ)


def _fields(host: Host) -> dict[str, Any]:
    return {
        "id": host.pk,
        "slug": host.slug,
        "name": host.name,
        "kind": host.kind,
        "state": host.state,
        "contact": contact_of(host),
        "silent_seconds": silent_seconds(host),
        "pool": host.pool.name,
        "labels": {key: str(value) for key, value in host.labels.items()},
        "agent_version": host.agent_version,
        "enrolled_at": host.enrolled_at,
        "last_seen_at": host.last_seen_at,
    }


def host_detail(host: Host, request: HttpRequest) -> HostDetail:
    """Return a host as its page shows it."""
    token = EnrolmentToken.objects.filter(host=host).order_by("-used_at").first()
    return HostDetail(
        **_fields(host),
        address=host.address,
        facts=facts_for(request.user, host, host.facts),
        planned=host.planned,
        keep_models_bytes=host.keep_models_bytes,
        microbench=host.microbench,
        calibration=host.calibration,
        devices=[
            DeviceReply(
                id=row.device.pk,
                index=row.device.index,
                kind=cast("DeviceOfHost", row.device.kind),
                name=row.device.name,
                memory_bytes=row.device.memory_bytes,
                is_present=row.device.is_present,
                is_held=row.is_held,
                job=row.jobs[0].pk if row.jobs else None,
                jobs=[each.pk for each in row.jobs],
                cordoned_by=row.device.cordoned_by,
                cordon_reason=row.device.cordon_reason,
            )
            for row in devices_of(host, request.user)
        ],
        environments=[
            EnvironmentReply(
                name=row.state.name,
                stage=row.state.stage,
                purpose=row.state.purpose,
                size_bytes=row.state.size_bytes,
                num_packages=row.state.num_packages,
                words=row.state.words,
                pending_action=cast("Any", row.pending_action),
            )
            for row in environments_of(host)
        ],
        is_ready=is_ready(host),
        checks=_checks(token, host) if token else [],
    )


def _checks(token: EnrolmentToken, host: Host | None) -> list[CheckReply]:
    return [
        CheckReply(
            name=each.name,
            status=cast("CheckStatus", each.status),
            sentence=each.words,
            remedy=each.fix,
            command=each.command,
        )
        for each in checklist(token, host)
    ]


class HostFilters(ShortPaging):
    """Filters of the list of hosts."""

    q: Annotated[str, Query(description="Part of the name")] = ""


@router.get("", response={200: HostPage, **REFUSALS}, operation_id="list_hosts")
def host_list(request: HttpRequest, filters: Query[HostFilters]) -> HostPage:
    """Return the teams' hosts by name."""
    hosts = Host.objects.visible_to(request.user).select_related("pool").order_by("name", "pk")
    if part := filters.q.strip():
        hosts = hosts.filter(name__folded_contains=part)
    shown, more = page_of("hosts", list(hosts), lambda host: host.pk, filters)
    return HostPage(items=[HostReply(**_fields(host)) for host in shown], next_cursor=more)


class NewHost(Sent):
    """The host that is to be enrolled; labels are names with values, such as gpu: 4090."""

    name: Annotated[
        str, Field(max_length=80, description="Name shown on pages, up to 80 characters")
    ]
    pool: Annotated[
        str, Field(max_length=40, description="Name of its pool, made if there is none")
    ] = "default"
    labels: Annotated[dict[str, str], Field(description="Values by name, such as gpu: 4090")] = {}


def _operator(request: HttpRequest) -> None:
    check_role(Role(current_membership(request).role), Role.OPERATOR)


@router.post(
    "/enrolments",
    auth=ADMIN,
    response={201: EnrolmentReply, **REFUSALS},
    operation_id="add_host",
)
def enrolment_create(request: HttpRequest, body: NewHost) -> Status[EnrolmentReply]:
    """Make a one-time token, valid for an hour, with which a machine enrols itself."""
    _operator(request)
    posted = {"name": body.name, "pool": body.pool, "labels": labels_text(body.labels)}
    form = AddHostForm(posted)
    if not form.is_valid():
        raise form_problem(form, "")
    values = form.cleaned_data
    token, text = token_create(
        team=current_team(request),
        by=signed_in(request),
        name=values["name"],
        pool=values["pool"],
        labels=values["labels"],
    )
    server, _ = server_for_hosts(request)
    commands = {each.key: each.command for each in install_commands(server, text)}
    reply = EnrolmentReply(
        id=token.pk, name=token.name, token=text, expires_at=token.expires_at, commands=commands
    )
    return Status(201, reply)


def _enrolment(request: HttpRequest, token_id: str) -> EnrolmentToken:
    _operator(request)
    tokens = EnrolmentToken.objects.select_related("host")
    return get_object_or_404(tokens, pk=token_id, team=current_team(request))


@router.get(
    "/enrolments/{token_id}",
    response={200: EnrolmentState, **REFUSALS},
    operation_id="get_enrolment",
)
def enrolment_get(request: HttpRequest, token_id: str) -> EnrolmentState:
    """Return what is known of a host that is being enrolled, check by check."""
    token = _enrolment(request, token_id)
    return EnrolmentState(
        id=token.pk,
        name=token.name,
        expires_at=token.expires_at,
        used_at=token.used_at,
        revoked_at=token.revoked_at,
        host=token.host.slug if token.host else None,
        is_ready=is_ready(token.host),
        checks=_checks(token, token.host),
    )


@router.delete(
    "/enrolments/{token_id}",
    auth=ADMIN,
    response={204: None, **REFUSALS},
    operation_id="revoke_enrolment",
)
def enrolment_revoke(request: HttpRequest, token_id: str) -> Status[None]:
    """Revoke an unused enrolment token; a used or revoked one stays as it is."""
    token_revoke(token=_enrolment(request, token_id))
    return Status(204, None)


class NewVirtualHost(Sent):
    """A machine that the team considers buying or renting."""

    name: Annotated[
        str, Field(max_length=80, description="Name shown on pages, up to 80 characters")
    ]
    device: Annotated[str, Field(max_length=80, description="Id of a device of the catalog")]
    num_devices: Annotated[
        int, Field(ge=1, le=1024, description="Devices in the machine, 1 to 1024")
    ] = 8
    memory_gib: Annotated[
        Annotated[float, Field(ge=1, le=1_000_000)] | None,
        Field(description="Memory of the machine in GiB, 1 to 1,000,000; null: not known"),
    ] = None


@router.post(
    "/virtual",
    auth=ADMIN,
    response={201: HostDetail, **REFUSALS},
    operation_id="add_virtual_host",
)
def host_virtual(request: HttpRequest, body: NewVirtualHost) -> Status[HostDetail]:
    """Make a planning-only host, on which no job runs."""
    _operator(request)
    form = VirtualHostForm(body.model_dump())
    if not form.is_valid():
        raise form_problem(form, "")
    values = form.cleaned_data
    host = virtual_host_create(
        team=current_team(request),
        name=values["name"],
        device=values["device"],
        num_devices=values["num_devices"],
        memory_bytes=int(values["memory_gib"] * GIB) if values["memory_gib"] else None,
        by=request.user.get_username(),
    )
    return Status(201, host_detail(host, request))


@router.get("/{slug}", response={200: HostDetail, **REFUSALS}, operation_id="get_host")
def host_get(request: HttpRequest, slug: str) -> HostDetail:
    """Return a host with its devices, facts and measurements."""
    return host_detail(visible_or_404(Host, request.user, slug=slug), request)


Action = Literal["drain", "undrain", "recheck", "rotate", "revoke", "maintenance", "retire"]


@router.post(
    "/{slug}/actions/{action}",
    auth=ADMIN,
    response={200: HostDetail, **REFUSALS},
    operation_id="act_on_host",
)
def host_act(request: HttpRequest, slug: str, action: Action) -> HostDetail:
    """Change a host, as an operator.

    ``drain``: it finishes its jobs and takes no new ones; ``undrain``: it takes jobs again;
    ``recheck``: it reports new facts; ``rotate``: it replaces its secrets; ``revoke``: its
    credential ends until it is enrolled again; ``maintenance`` and ``retire``: it is taken out.
    """
    host, by = host_for_operator(request, slug), request.user.get_username()
    if action == "drain":
        host_set_state(host=host, to=HostState.DRAINING, by=by)
    elif action == "undrain":
        host_set_state(host=host, to=HostState.READY, by=by)
    elif action == "recheck":
        recheck_request(host=host, by=by)
    elif action == "rotate":
        rotation_request(host=host, by=by)
    elif action == "revoke":
        credential_revoke(host=host, by=by)
    else:
        to = HostState.MAINTENANCE if action == "maintenance" else HostState.RETIRED
        host_take_out(host=host, to=to, by=by)
    return host_get(request, slug)


class HostChanges(Sent):
    """New labels or another address; what is left out stays."""

    labels: Annotated[
        dict[str, str] | None, Field(description="All labels, values by name; null: as they are")
    ] = None
    address: Annotated[
        Annotated[str, Field(max_length=45)] | None,
        Field(description="One of the host's IP addresses; empty: the first; null: as it is"),
    ] = None


@router.patch(
    "/{slug}", auth=ADMIN, response={200: HostDetail, **REFUSALS}, operation_id="change_host"
)
def host_change(request: HttpRequest, slug: str, body: HostChanges) -> HostDetail:
    """Change a host's labels, and the address at which a job's other hosts reach it."""
    host, by = host_for_operator(request, slug), request.user.get_username()
    if body.labels is not None:
        form = LabelsForm({"labels": labels_text(body.labels)})
        if not form.is_valid():
            raise form_problem(form, "")
        labels_set(host=host, labels=form.cleaned_data["labels"], by=by)
    if body.address is not None:
        address_choose(host=host, address=body.address.strip(), by=by)
    return host_get(request, slug)


class Alike(Sent):
    """Another host that looks like the same machine, and whether it is another one."""

    other: Annotated[str, Field(max_length=80, description="Slug of the other host")]
    is_apart: Annotated[
        bool, Field(description="true: another machine; false: the same one again")
    ] = True


@router.post(
    "/{slug}/apart",
    auth=ADMIN,
    response={200: HostDetail, **REFUSALS},
    operation_id="mark_host_apart",
)
def host_apart(request: HttpRequest, slug: str, body: Alike) -> HostDetail:
    """Say that a host that looks like the same machine is another one, or undo it."""
    host = host_for_operator(request, slug)
    alike = {each.host_id for each in hosts_on_same_machine(host, request.user)}
    named = Host.objects.select_related("pool").filter(pk__in=alike, slug=body.other)
    if (other := named.first()) is None:
        raise NotFoundProblem(
            "not_alike", f"No host of that slug looks like the machine of {host.name} now."
        )
    by = request.user.get_username()
    hosts_mark_distinct(host=host, other=other, by=by, is_apart=body.is_apart)
    for pool in Pool.objects.filter(pk__in={host.pool_id, other.pool_id}):
        allocate_pool(pool)
    return host_get(request, slug)


@router.post(
    "/{slug}/validate",
    auth=ADMIN,
    response={201: JobDetail, **REFUSALS},
    operation_id="validate_host",
)
def host_validate(request: HttpRequest, slug: str) -> Status[JobDetail]:
    """Queue a validation of every device of a host; the reply is its job."""
    job = prove_host(host=host_for_operator(request, slug), owner=signed_in(request))
    return Status(201, job_detail(load_job(request, job.pk), request))


class Cordon(Sent):
    """Why a device takes no new jobs."""

    reason: Annotated[
        str, Field(max_length=200, description="Shown on the host's page, up to 200 characters")
    ]


def _device(request: HttpRequest, slug: str, device_id: str) -> Device:
    host = host_for_operator(request, slug)
    return get_object_or_404(Device.objects.select_related("host__pool"), host=host, pk=device_id)


@router.put(
    "/{slug}/devices/{device_id}/cordon",
    auth=ADMIN,
    response={200: HostDetail, **REFUSALS},
    operation_id="cordon_device",
)
def cordon(request: HttpRequest, slug: str, device_id: str, body: Cordon) -> HostDetail:
    """Cordon a device: it takes no new jobs."""
    device = _device(request, slug, device_id)
    device_cordon(device=device, by=request.user.get_username(), reason=body.reason)
    return host_get(request, slug)


@router.delete(
    "/{slug}/devices/{device_id}/cordon",
    auth=ADMIN,
    response={200: HostDetail, **REFUSALS},
    operation_id="uncordon_device",
)
def uncordon(request: HttpRequest, slug: str, device_id: str) -> HostDetail:
    """Uncordon a device: it takes jobs again."""
    device = _device(request, slug, device_id)
    device_uncordon(device=device, by=request.user.get_username())
    allocate_pool(device.host.pool)
    return host_get(request, slug)


@router.put(
    "/{slug}/environments/{name}",
    auth=ADMIN,
    response={200: HostDetail, **REFUSALS},
    operation_id="build_environment",
)
def environment_build(request: HttpRequest, slug: str, name: str) -> HostDetail:
    """Let a host build an environment, such as vllm, before a job needs it."""
    host = host_for_operator(request, slug)
    environment_order(host=host, name=name, action="build", by=request.user.get_username())
    return host_get(request, slug)


@router.delete(
    "/{slug}/environments/{name}",
    auth=ADMIN,
    response={200: HostDetail, **REFUSALS},
    operation_id="remove_environment",
)
def environment_remove(request: HttpRequest, slug: str, name: str) -> HostDetail:
    """Let a host delete an environment that no job runs in."""
    host = host_for_operator(request, slug)
    environment_order(host=host, name=name, action="remove", by=request.user.get_username())
    return host_get(request, slug)


# Pools and their queues

queue_router = Router(tags=["queue"], auth=READ)


def _pool_fields(pool: Pool, request: HttpRequest) -> dict[str, Any]:
    hosts = Host.objects.visible_to(request.user).filter(pool=pool)
    slugs = hosts.exclude(state=HostState.RETIRED).order_by("slug").values_list("slug", flat=True)
    return {"id": pool.pk, "name": pool.name, "team": pool.team.name, "hosts": list(slugs)}


@queue_router.get("", response={200: PoolPage, **REFUSALS}, operation_id="list_pools")
def pool_list(request: HttpRequest, paging: Query[ShortPaging]) -> PoolPage:
    """Return the pools in which the caller's teams may launch."""
    shown, more = page_of("pools", list(visible_pools(request.user)), lambda pool: pool.pk, paging)
    items = [PoolReply(**_pool_fields(pool, request)) for pool in shown]
    return PoolPage(items=items, next_cursor=more)


@queue_router.get("/{pool_id}", response={200: QueueReply, **REFUSALS}, operation_id="get_queue")
def queue_get(request: HttpRequest, pool_id: str) -> QueueReply:
    """Return a pool's queue in order, with the reason and forecast of each wait."""
    pool = _pool(request, pool_id)
    teams, lines = set(team_ids_of(request.user)), lines_of(pool)
    own = [line.job.team_id in teams for line in lines]
    return QueueReply(
        **_pool_fields(pool, request),
        queue=[
            QueuedJob(
                position=line.position,
                job=line.job.pk if is_own else None,
                name=line.job.name if is_own else "another team's job",
                owner=line.job.owner.get_username() if is_own and line.job.owner else "",
                priority=PRIORITY_WORDS[line.job.priority],
                sentence=line.sentence,
                start_at=line.start_at,
            )
            for line, is_own in zip(lines, own, strict=True)
        ],
        seen=order_digest([line.job.pk for line in lines]),
    )


def _pool(request: HttpRequest, pool_id: str) -> Pool:
    by_key = Q(pk=pool_id) | Q(slug=pool_id)
    pool = visible_pools(request.user).filter(by_key).order_by("pk").first()
    if pool is None:
        raise NotFoundProblem("not_found", "No pool of your teams has this id or name.")
    return pool


class QueueMove(Sent):
    """A new place or priority of a queued job."""

    move: Annotated[
        Literal["up", "down"] | None, Field(description="By one turn; without priority")
    ] = None
    seen: Annotated[str, Field(max_length=40, description="Of the queue; needed to move")] = ""
    priority: Annotated[
        PriorityWord | None, Field(description="Of the job in its pool; without move")
    ] = None


PRIORITIES = {word: str(value) for value, word in PRIORITY_WORDS.items()}


@queue_router.patch(
    "/{pool_id}/jobs/{job_id}",
    auth=ADMIN,
    response={200: QueueReply, **REFUSALS},
    operation_id="reorder_queue",
)
def queue_change(request: HttpRequest, pool_id: str, job_id: str, body: QueueMove) -> QueueReply:
    """Move a queued job by one turn, or change its priority, as an operator of the pool's team."""
    pool, by = _pool(request, pool_id), request.user.get_username()
    if not has_role(request.user, pool.team, Role.OPERATOR):
        raise ForbiddenProblem(
            "role_too_low",
            f"Only operators of {pool.team.name} change this queue. An admin of that team can "
            "give you the role.",
        )
    if (body.move is None) == (body.priority is None):
        raise InvalidProblem("move", "Give one of the fields move and priority.")
    if not Job.objects.filter(pk=job_id, pool=pool).exists():
        raise NotFoundProblem("not_found", "No job of this queue has this id.")
    if body.move is not None:
        job_move(pool=pool, job_id=job_id, is_up=body.move == "up", seen=body.seen, by=by)
    else:
        priority = PRIORITIES[body.priority or "normal"]
        job_prioritise(pool=pool, job_id=job_id, priority=priority, by=by)
    allocate_pool(pool)
    return queue_get(request, pool_id)
