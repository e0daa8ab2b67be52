"""Operations on deployments, on the keys of their clients, and on usage."""

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any

from django.db import transaction
from django.http import HttpRequest
from django.urls import reverse
from ninja import Query, Router, Status
from pydantic import Field, model_validator

from runners.client.replies.deployments import (
    DeploymentDraftReply,
    DeploymentPage,
    DeploymentReply,
    DifferenceReply,
    KeyAlarmReply,
    KeyPage,
    KeyReply,
    MadeKey,
    ReplicaReply,
    UsagePage,
    UsageReply,
)
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import check_role, current_membership, signed_in
from webapp.api.auth import LAUNCH, READ
from webapp.api.instants import Instant
from webapp.api.plans import plan_of_document, plan_to_change
from webapp.api.requests import (
    Paging,
    Sent,
    ShortPaging,
    cursor_of,
    cursor_text,
    foreign_cursor,
    job_key,
    list_mark,
    page_keys,
)
from webapp.core.clock import now
from webapp.core.problems import REFUSALS, ConflictProblem, InvalidProblem
from webapp.core.queries import in_order
from webapp.deployments.addresses import gateway_url
from webapp.deployments.alarms import current_alarms
from webapp.deployments.drafts import (
    differences,
    draft_discard,
    draft_keep,
    draft_of,
    draft_roll_out,
)
from webapp.deployments.keys import KeyOptions, Rotation, key_make, key_revoke, key_rotate
from webapp.deployments.models import (
    MODEL_NAME_LENGTH,
    Deployment,
    KeyAlarm,
    ServingKey,
    Usage,
)
from webapp.deployments.permissions import (
    deployment_for,
    key_for,
    keys_of,
    own_key_for,
    usable_deployment,
    visible_deployment,
)
from webapp.deployments.replica_costs import Rates, rates_of_rows, usd_of
from webapp.deployments.services import (
    DEFAULT_IDLE_SECONDS,
    LEAST_IDLE_SECONDS,
    MOST_ALIASES,
    MOST_FALLBACKS,
    MOST_IDLE_SECONDS,
    MOST_REPLICAS,
    deployment_change,
    deployment_create,
    deployment_delete,
    deployment_sleep,
    deployment_wake,
)
from webapp.deployments.states import DeploymentView, view_of, views_of
from webapp.deployments.usage import (
    DAYS,
    MONTH,
    MOST_DAYS,
    Span,
    last_days,
    month_span,
    tokens_of,
    usage_after,
    usage_of,
)
from webapp.deployments.warm_hours import EXAMPLE
from webapp.plans.models import Plan
from webapp.plans.planning import plan_answer
from webapp.wizard.documents import SentLaunch, SentPlan, check_launch

router = Router(tags=["deployments"], auth=READ)
Idle = Annotated[
    float | None,
    Field(
        ge=LEAST_IDLE_SECONDS,
        le=MOST_IDLE_SECONDS,
        description="Without a request, until it sleeps; null: never",
    ),
]
Aliases = Annotated[
    list[Annotated[str, Field(max_length=MODEL_NAME_LENGTH)]],
    Field(max_length=MOST_ALIASES, description="Further names that it answers to, such as gpt-4o"),
]
Fallbacks = Annotated[
    list[Annotated[str, Field(max_length=MODEL_NAME_LENGTH)]],
    Field(
        max_length=MOST_FALLBACKS,
        description="Names of deployments that answer when it fails, is full or cannot load",
    ),
]
WarmHours = Annotated[
    str,
    Field(max_length=400, description=f"Hours in which it is kept awake, such as {EXAMPLE}"),
]
Replicas = Annotated[
    int, Field(ge=1, le=MOST_REPLICAS, description="Jobs that serve it at once, while it is awake")
]
MOST_DIGITS = 18  # of a row's number


class NewDeployment(Sent):
    """A name, and what it is to run: a plan, or a document that is planned now."""

    name: Annotated[
        str, Field(max_length=MODEL_NAME_LENGTH, description="That clients give as their model")
    ]
    plan: Annotated[str | None, Field(description="Id of a plan to serve")] = None
    document: Annotated[
        SentPlan | None, Field(description="A plan's document, instead of a plan")
    ] = None
    launch: Annotated[
        SentLaunch | None, Field(description="Options of its jobs; of a document its own")
    ] = None
    idle_seconds: Idle = DEFAULT_IDLE_SECONDS
    is_kept_awake: Annotated[
        bool, Field(description="Start it now, and again whenever it ends")
    ] = False
    aliases: Aliases = []
    fallbacks: Fallbacks = []
    warm_hours: WarmHours = ""
    min_replicas: Replicas = 1
    max_replicas: Replicas = 1

    @model_validator(mode="after")
    def _one_source(self) -> "NewDeployment":
        if (self.plan is None) == (self.document is None):
            raise ValueError("give either plan, the id of one, or document")
        if self.document is not None and self.launch is not None:
            raise ValueError("launch is given beside document: write it into the document")
        return self


class ChangedDeployment(Sent):
    """What is to change; a field that is left out stays."""

    plan: Annotated[str | None, Field(description="Id of a plan to serve")] = None
    launch: Annotated[SentLaunch | None, Field(description="Options of its jobs")] = None
    idle_seconds: Idle = None
    is_kept_awake: Annotated[bool | None, Field(description="Start it again whenever it ends")] = (
        None
    )
    is_paused: Annotated[bool | None, Field(description="Stop what runs; no request wakes it")] = (
        None
    )
    aliases: Annotated[
        Aliases | None, Field(description="All further names that it answers to, such as gpt-4o")
    ] = None
    fallbacks: Annotated[
        Fallbacks | None,
        Field(description="All deployments that answer when it cannot, in their order"),
    ] = None
    warm_hours: Annotated[
        WarmHours | None, Field(description=f"Hours in which it is kept awake, such as {EXAMPLE}")
    ] = None
    min_replicas: Annotated[
        Replicas | None, Field(description="Jobs that serve it at once, while it is awake")
    ] = None
    max_replicas: Annotated[
        Replicas | None, Field(description="Jobs that serve it at once, with many requests")
    ] = None


class RollOut(Sent):
    """Which draft is rolled out."""

    saved_at: Annotated[
        Instant | None, Field(description="Of the draft that was seen; null: the present one")
    ] = None


def _replica_replies(view: DeploymentView) -> list[ReplicaReply]:
    return [
        ReplicaReply(
            job=each.job_id,
            job_state=each.job.state,
            host=each.job.host.slug if each.job.host else "",
            plan=each.plan_id,
            is_leaving=each.is_leaving,
            created_at=each.created_at,
            ready_at=each.ready_at,
            silent_since=each.not_answering_since,
        )
        for each in view.replicas
    ]


def _reply(request: HttpRequest, view: DeploymentView) -> DeploymentReply:
    row = view.deployment
    return DeploymentReply(
        id=row.pk,
        name=row.name,
        aliases=row.aliases,
        fallbacks=row.fallbacks,
        state=view.state,
        problem=row.problem,
        seconds_to_go=view.seconds_to_go,
        load_seconds=view.load_seconds,
        team=row.team_id,
        owner=row.owner.get_username() if row.owner else "",
        plan=row.plan_id,
        plan_name=row.plan.name,
        launch=row.launch_options,
        idle_seconds=row.idle_seconds,
        is_kept_awake=row.is_kept_awake,
        is_paused=row.is_paused,
        warm_hours=row.warm_hours,
        min_replicas=row.min_replicas,
        max_replicas=row.max_replicas,
        replicas=_replica_replies(view),
        base_url=gateway_url(request),
        created_at=row.created_at,
        url=reverse("deployment-detail", args=[row.pk]),
    )


@router.get(
    "/deployments", response={200: DeploymentPage, **REFUSALS}, operation_id="list_deployments"
)
def deployment_list(request: HttpRequest, paging: Query[Paging]) -> DeploymentPage:
    """Return the teams' deployments, the newest first."""
    teams = team_ids_of(request.user)
    rows = Deployment.objects.filter(team__in=teams, deleted_at=None)
    listed = page_keys(rows, "created_at", teams, paging)
    found = in_order(Deployment.objects.select_related("owner", "plan"), listed.keys)
    items = [_reply(request, view) for view in views_of(list(found))]
    return DeploymentPage(items=items, next_cursor=listed.next_cursor)


@router.post(
    "/deployments",
    auth=LAUNCH,
    response={201: DeploymentReply, **REFUSALS},
    operation_id="create_deployment",
)
def deployment_add(request: HttpRequest, body: NewDeployment) -> Status[DeploymentReply]:
    """Make a deployment: it sleeps until the first request, unless it is kept awake."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    plan, launch = _planned(request, body)
    with transaction.atomic():
        if plan._state.adding:  # noqa: SLF001 -- Django documents it
            plan.save(force_insert=True)
        try:
            made = deployment_create(
                team=plan.team,
                by=signed_in(request),
                name=body.name,
                plan=plan,
                launch=launch,
                idle_seconds=body.idle_seconds,
                is_kept_awake=body.is_kept_awake,
                aliases=body.aliases,
                fallbacks=body.fallbacks,
                warm_hours=body.warm_hours,
                min_replicas=body.min_replicas,
                max_replicas=max(body.min_replicas, body.max_replicas),
                idempotency_key=job_key(request),
            )
        except DraftProblem as problem:
            raise ConflictProblem("cannot_launch", problem.sentence) from problem
    if made.is_warm(now()):
        deployment_wake(made)
    return Status(201, _reply(request, view_of(made)))


def _planned(request: HttpRequest, body: NewDeployment) -> tuple[Plan, Launch]:
    if body.document is None:
        plan, launch = plan_to_change(request, body.plan or ""), body.launch or Launch()
    else:
        plan, _ = plan_of_document(request, body.document)
        launch = body.document.launch
        try:
            plan_answer(plan)
        except DraftProblem as problem:
            raise InvalidProblem("draft", problem.sentence) from problem
    launch = launch.model_copy(update={"run": "endpoint"})
    if plan.document.goal == "serve":
        check_launch(plan, launch)
    return plan, launch


@router.get(
    "/deployments/{deployment_id}",
    response={200: DeploymentReply, **REFUSALS},
    operation_id="get_deployment",
)
def deployment_get(request: HttpRequest, deployment_id: str) -> DeploymentReply:
    """Return a deployment with the jobs that serve it."""
    return _reply(request, view_of(visible_deployment(request, deployment_id)))


@router.patch(
    "/deployments/{deployment_id}",
    auth=LAUNCH,
    response={200: DeploymentReply, **REFUSALS},
    operation_id="change_deployment",
)
def deployment_edit(
    request: HttpRequest, deployment_id: str, body: ChangedDeployment
) -> DeploymentReply:
    """Change a deployment; another plan is rolled out without a failed request."""
    row = deployment_for(request, deployment_id)
    fields = _fields_of(request, body)
    try:
        changed = deployment_change(deployment=row, by=signed_in(request), **fields)
    except DraftProblem as problem:
        raise ConflictProblem("cannot_launch", problem.sentence) from problem
    return _reply(request, view_of(changed))


def _fields_of(request: HttpRequest, body: ChangedDeployment) -> dict[str, Any]:
    """Return the arguments of a change."""
    sent: dict[str, Any] = body.model_dump(exclude_unset=True, exclude={"plan", "launch"})
    fields = {
        name: value for name, value in sent.items() if value is not None or name == "idle_seconds"
    }
    plan = plan_to_change(request, body.plan) if body.plan else None
    return {**fields, "plan": plan, "launch": body.launch}


# Drafts of changes


def _draft_reply(deployment: Deployment) -> DeploymentDraftReply:
    draft = draft_of(deployment)
    return DeploymentDraftReply(
        deployment=deployment.pk,
        plan=draft.plan_id,
        fields=draft.fields,
        by=draft.by.get_username() if draft.by else "",
        saved_at=draft.saved_at,
        differences=[DifferenceReply(**each._asdict()) for each in differences(deployment)],
    )


@router.get(
    "/deployments/{deployment_id}/draft",
    response={200: DeploymentDraftReply, **REFUSALS},
    operation_id="get_deployment_draft",
)
def deployment_draft_get(request: HttpRequest, deployment_id: str) -> DeploymentDraftReply:
    """Return the draft of a deployment's change, against what counts now; 404: there is none."""
    return _draft_reply(visible_deployment(request, deployment_id))


@router.put(
    "/deployments/{deployment_id}/draft",
    auth=LAUNCH,
    response={200: DeploymentDraftReply, **REFUSALS},
    operation_id="keep_deployment_draft",
)
def deployment_draft_put(
    request: HttpRequest, deployment_id: str, body: ChangedDeployment
) -> DeploymentDraftReply:
    """Keep a change as the deployment's draft, in place of the one before; nothing runs of it."""
    row = deployment_for(request, deployment_id)
    try:
        draft_keep(deployment=row, by=signed_in(request), **_fields_of(request, body))
    except DraftProblem as problem:
        raise ConflictProblem("cannot_launch", problem.sentence) from problem
    return _draft_reply(row)


@router.post(
    "/deployments/{deployment_id}/draft/roll-out",
    auth=LAUNCH,
    response={200: DeploymentReply, **REFUSALS},
    operation_id="roll_out_deployment_draft",
)
def deployment_draft_start(
    request: HttpRequest, deployment_id: str, body: RollOut
) -> DeploymentReply:
    """Change the deployment as its draft says; what runs is replaced without a failed request."""
    row = deployment_for(request, deployment_id)
    try:
        changed = draft_roll_out(deployment=row, by=signed_in(request), seen_at=body.saved_at)
    except DraftProblem as problem:
        raise ConflictProblem("cannot_launch", problem.sentence) from problem
    return _reply(request, view_of(changed))


@router.delete(
    "/deployments/{deployment_id}/draft",
    auth=LAUNCH,
    response={204: None, **REFUSALS},
    operation_id="discard_deployment_draft",
)
def deployment_draft_remove(request: HttpRequest, deployment_id: str) -> Status[None]:
    """Discard the draft of a deployment's change."""
    draft_discard(deployment=deployment_for(request, deployment_id), by=signed_in(request))
    return Status(204, None)


@router.post(
    "/deployments/{deployment_id}/wake",
    auth=LAUNCH,
    response={200: DeploymentReply, **REFUSALS},
    operation_id="wake_deployment",
)
def deployment_start(request: HttpRequest, deployment_id: str) -> DeploymentReply:
    """Load a deployment's model now; a paused one is resumed."""
    row = usable_deployment(request, deployment_id)
    try:
        deployment_wake(row, by=signed_in(request))
    except DraftProblem as problem:
        raise ConflictProblem("cannot_launch", problem.sentence) from problem
    row.refresh_from_db()
    return _reply(request, view_of(row))


@router.post(
    "/deployments/{deployment_id}/sleep",
    auth=LAUNCH,
    response={200: DeploymentReply, **REFUSALS},
    operation_id="sleep_deployment",
)
def deployment_end(request: HttpRequest, deployment_id: str) -> DeploymentReply:
    """Stop the jobs of a deployment; the next request wakes it."""
    row = deployment_for(request, deployment_id)
    deployment_sleep(deployment=row, by=signed_in(request))
    row.refresh_from_db()
    return _reply(request, view_of(row))


@router.delete(
    "/deployments/{deployment_id}",
    auth=LAUNCH,
    response={204: None, **REFUSALS},
    operation_id="delete_deployment",
)
def deployment_remove(request: HttpRequest, deployment_id: str) -> Status[None]:
    """Delete a deployment: its jobs stop, its name is free again, its usage stays."""
    deployment_delete(deployment=deployment_for(request, deployment_id), by=signed_in(request))
    return Status(204, None)


# Keys


def _key(key: ServingKey) -> dict[str, Any]:
    """Return the fields of a key's reply."""
    return _key_rows([key])[0]


def _key_rows(keys: Sequence[ServingKey]) -> list[dict[str, Any]]:
    used, alarms = tokens_of(keys), current_alarms(keys)
    return [
        {
            **_key_fields(key),
            "tokens_today": used.get(key.pk, (0, 0))[0],
            "tokens_this_month": used.get(key.pk, (0, 0))[1],
            "alarms": [_alarm(each) for each in alarms.get(key.pk, ())],
        }
        for key in keys
    ]


def _alarm(alarm: KeyAlarm) -> KeyAlarmReply:
    return KeyAlarmReply(
        period=alarm.period,
        percent=alarm.percent,
        used_tokens=alarm.used_tokens,
        limit_tokens=alarm.limit_tokens,
        at=alarm.at,
    )


def _key_fields(key: ServingKey) -> dict[str, Any]:
    names = ("name", "hint", "is_service")
    limits = ("requests_per_minute", "max_concurrency", "tokens_per_day", "tokens_per_month")
    times = ("created_at", "expires_at", "revoked_at", "last_used_at")
    more = ("rotated_at", "earlier_until")
    return {
        "id": key.pk,
        "owner": key.owner.get_username() if key.owner else "",
        "models": key.model_names,
        "hold_seconds": key.hold_seconds,
        **{name: getattr(key, name) for name in (*names, *limits, *times, *more)},
    }


@router.get("/serving-keys", response={200: KeyPage, **REFUSALS}, operation_id="list_serving_keys")
def key_list(request: HttpRequest, paging: Query[Paging]) -> KeyPage:
    """Return the caller's keys, the newest first; an operator gets the team's."""
    membership = current_membership(request)
    rows = keys_of(membership)
    listed = page_keys(rows, "created_at", [membership.team_id], paging)
    items = [KeyReply(**row) for row in _key_rows(in_order(rows, listed.keys))]
    return KeyPage(items=items, next_cursor=listed.next_cursor)


@router.post(
    "/serving-keys",
    auth=LAUNCH,
    response={201: MadeKey, **REFUSALS},
    operation_id="make_serving_key",
)
def key_add(request: HttpRequest, body: KeyOptions) -> Status[MadeKey]:
    """Make a key with which clients use the team's deployments."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    key, text = key_make(team=membership.team, by=signed_in(request), options=body)
    return Status(201, MadeKey(**_key(key), key=text))


@router.post(
    "/serving-keys/{key_id}/rotate",
    auth=LAUNCH,
    response={200: MadeKey, **REFUSALS},
    operation_id="rotate_serving_key",
)
def key_renew(request: HttpRequest, key_id: str, body: Rotation) -> MadeKey:
    """Give a key a new secret; the present one still opens for the hours of the overlap."""
    key, text = key_rotate(key=own_key_for(request, key_id), by=signed_in(request), rotation=body)
    return MadeKey(**_key(key), key=text)


@router.delete(
    "/serving-keys/{key_id}",
    auth=LAUNCH,
    response={204: None, **REFUSALS},
    operation_id="revoke_serving_key",
)
def key_remove(request: HttpRequest, key_id: str) -> Status[None]:
    """Revoke a key; gateways end its streams within a second."""
    key_revoke(key=key_for(request, key_id), by=signed_in(request))
    return Status(204, None)


# Usage


class UsageQuery(ShortPaging):
    """The days to list."""

    days: Annotated[
        int, Field(ge=1, le=MOST_DAYS, description="Up to today (UTC), newest first")
    ] = DAYS
    month: Annotated[
        str | None,
        Field(pattern=f"^{MONTH}$", description="Such as 2026-11 (UTC), instead of days"),
    ] = None

    @property
    def span(self) -> Span:
        """Return the days that are asked for."""
        return month_span(self.month) if self.month else last_days(self.days)


@router.get("/usage", response={200: UsagePage, **REFUSALS}, operation_id="list_usage")
def usage_list(request: HttpRequest, query: Query[UsageQuery]) -> UsagePage:
    """Return what the caller's keys used, by day, key and deployment; an operator gets all."""
    membership = current_membership(request)
    rows, mark = usage_of(membership, query.span), list_mark("usage", query)
    if query.cursor:
        day, key = cursor_of(query.cursor, mark, date.fromisoformat)
        if not (key.isascii() and key.isdigit() and len(key) <= MOST_DIGITS):
            raise foreign_cursor(query.cursor)
        rows = usage_after(rows, day, int(key))
    found = list(rows[: query.limit + 1])
    shown, more = found[: query.limit], None
    if len(found) > query.limit:
        more = cursor_text(shown[-1].day.isoformat(), str(shown[-1].pk), mark)
    rates = rates_of_rows(shown)
    return UsagePage(items=[_usage(row, rates) for row in shown], next_cursor=more)


def _usage(row: Usage, rates: Rates) -> UsageReply:
    names = ("requests", "failed", "cut", "prompt_tokens", "cached_tokens", "completion_tokens")
    return UsageReply(
        day=row.day.isoformat(),
        key=row.key_id,
        key_name=row.key.name,
        owner=row.key.owner.get_username() if row.key.owner else "",
        team=row.key.team_id,
        usd=usd_of(row, rates),
        deployment=row.deployment_id,
        deployment_name=row.deployment.name,
        **{name: getattr(row, name) for name in names},
    )
