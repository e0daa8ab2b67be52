"""Operations on the caller and the team: tokens, secrets, sessions, limits, audit."""

from typing import Annotated, Any

from django.db.models import QuerySet
from django.http import HttpRequest
from ninja import Query, Router, Status
from pydantic import Field

from runners.client.replies.team import (
    EventPage,
    EventReply,
    MadeToken,
    MemberPage,
    MemberReply,
    MeReply,
    QuotaReply,
    SecretPage,
    SecretReply,
    SessionPage,
    SessionReply,
    TeamReply,
    TokenPage,
    TokenReply,
)
from webapp.accounts.models import AccessToken, Membership, Role, Scope, Secret, memberships_of
from webapp.accounts.secrets import secret_delete, secret_store
from webapp.accounts.services import (
    check_role,
    current_membership,
    current_team,
    signed_in,
    visible_or_404,
)
from webapp.accounts.sign_in import sessions_of
from webapp.accounts.tokens import (
    DEFAULT_DAYS,
    MOST_DAYS,
    acting_token,
    includes,
    token_make,
    token_revoke,
    tokens_of,
    visible_token,
)
from webapp.api.auth import ADMIN, READ
from webapp.api.instants import Day
from webapp.api.requests import Paging, Sent, ShortPaging, page_keys, page_of
from webapp.audit.models import Event
from webapp.audit.reading import EXACT, filter_events, visible_events
from webapp.core import vault
from webapp.core.problems import REFUSALS, ScopeProblem, UnavailableProblem
from webapp.core.queries import in_order
from webapp.jobs.budgets import spent_gpu_hours
from webapp.jobs.quota_form import QuotaForm, quota_store
from webapp.jobs.quotas import limit_sentences, quota_of, quota_usage
from webapp.wizard.documents import form_problem

router = Router(tags=["team"], auth=READ)


def _team(membership: Membership) -> TeamReply:
    team = membership.team
    return TeamReply(id=team.pk, name=team.name, role=Role(membership.role))


@router.get("/me", response={200: MeReply, **REFUSALS}, operation_id="get_me")
def me(request: HttpRequest) -> MeReply:
    """Return who calls: for a token its account, scope, team and what is left of its budget."""
    token = request.auth if isinstance(request.auth, AccessToken) else None  # type: ignore[attr-defined]
    budget = token.budget_gpu_hours if token else None
    return MeReply(
        user=request.user.get_username(),
        scope=_scope(),
        budget_gpu_hours=budget,
        rest_gpu_hours=None
        if budget is None or token is None
        else budget - spent_gpu_hours(token),
        team=_team(current_membership(request)),
        teams=[_team(each) for each in memberships_of(signed_in(request))],
    )


def _scope() -> Scope:
    """Return the scope of the caller; a session has every one."""
    token = acting_token()
    return Scope(token.scope) if token is not None else Scope.ADMIN


@router.get("/team/members", response={200: MemberPage, **REFUSALS}, operation_id="list_members")
def member_list(request: HttpRequest, paging: Query[ShortPaging]) -> MemberPage:
    """Return the members of the current team; an administrator of the site changes them."""
    team = current_membership(request).team
    rows = Membership.objects.filter(team=team).select_related("user").order_by("user__username")
    shown, more = page_of("members", list(rows), lambda row: row.user.get_username(), paging)
    items = [MemberReply(user=row.user.get_username(), role=Role(row.role)) for row in shown]
    return MemberPage(items=items, next_cursor=more)


# Access tokens


class NewToken(Sent):
    """What a new token is for, and how long it is valid."""

    name: Annotated[str, Field(max_length=60, description="What it is for, up to 60 characters")]
    scope: Annotated[Scope, Field(description="What it permits, at most the caller's own scope")]
    days: Annotated[
        float, Field(gt=0, le=MOST_DAYS, description=f"Days until it expires, up to {MOST_DAYS}")
    ] = DEFAULT_DAYS
    is_service: Annotated[
        bool, Field(description="Give it an account of its own, which stays when its maker leaves")
    ] = False
    budget_gpu_hours: Annotated[
        Annotated[float, Field(ge=0, le=1e9)] | None,
        Field(description="GPU-hours that its launches may take, 0 to 1e9; null: no limit"),
    ] = None


def _token(token: AccessToken) -> dict[str, Any]:
    names = ("name", "hint", "is_service", "budget_gpu_hours")
    times = ("created_at", "expires_at", "last_used_at", "revoked_at")
    return {
        "id": token.pk,
        "scope": Scope(token.scope),
        "user": token.user.get_username(),
        **{name: getattr(token, name) for name in (*names, *times)},
    }


@router.get("/tokens", response={200: TokenPage, **REFUSALS}, operation_id="list_tokens")
def token_list(request: HttpRequest, paging: Query[Paging]) -> TokenPage:
    """Return the caller's tokens in the current team, newest first; an admin gets the team's."""
    team = current_membership(request).team
    tokens = tokens_of(signed_in(request), team)
    listed = page_keys(tokens, "created_at", [team.pk], paging)
    items = [TokenReply(**_token(row)) for row in in_order(tokens, listed.keys)]
    return TokenPage(items=items, next_cursor=listed.next_cursor)


@router.post(
    "/tokens", auth=ADMIN, response={201: MadeToken, **REFUSALS}, operation_id="make_token"
)
def token_add(request: HttpRequest, body: NewToken) -> Status[MadeToken]:
    """Make an access token of at most the caller's own scope."""
    if not includes(_scope(), body.scope):
        raise ScopeProblem("scope_too_low", "A token makes no token of a higher scope.")
    token, text = token_make(
        team=current_membership(request).team,
        by=signed_in(request),
        name=body.name,
        scope=body.scope,
        days=body.days,
        is_service=body.is_service,
        budget_gpu_hours=body.budget_gpu_hours,
    )
    return Status(201, MadeToken(**_token(token), token=text))


@router.delete("/tokens/{token_id}", response={204: None, **REFUSALS}, operation_id="revoke_token")
def token_remove(request: HttpRequest, token_id: str) -> Status[None]:
    """Revoke a token: an own one, or another's as an admin of the team.

    With a token of a lower scope than admin it can be that token alone.
    """
    token, acting = visible_token(request, token_id), acting_token()
    is_itself = acting is not None and acting.pk == token.pk
    if not (is_itself or includes(_scope(), Scope.ADMIN)):
        raise ScopeProblem(
            "scope_too_low",
            "Another token is revoked with the scope admin only, and this token's is "
            f"{_scope()}. Revoke it in a browser, under Access tokens.",
        )
    token_revoke(token=token, by=signed_in(request))
    return Status(204, None)


# Secrets of the team


class SecretValue(Sent):
    """The new value of a secret; its lines are kept as they are."""

    value: Annotated[
        str, Field(max_length=20_000, description="The secret text, up to 20,000 characters")
    ]


def _secret(secret: Secret) -> SecretReply:
    return SecretReply(
        id=secret.pk,
        name=secret.name,
        changed_by=secret.changed_by.get_username() if secret.changed_by else "",
        changed_at=secret.changed_at,
        last_given_at=secret.last_given_at,
    )


@router.get("/secrets", response={200: SecretPage, **REFUSALS}, operation_id="list_secrets")
def secret_list(request: HttpRequest, paging: Query[ShortPaging]) -> SecretPage:
    """Return the names of the current team's secrets."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    rows = Secret.objects.filter(team=membership.team).select_related("changed_by")
    shown, more = page_of("secrets", list(rows), lambda row: row.name, paging)
    return SecretPage(items=[_secret(row) for row in shown], next_cursor=more)


@router.put(
    "/secrets/{name}",
    auth=ADMIN,
    response={200: SecretReply, **REFUSALS},
    operation_id="set_secret",
)
def secret_put(request: HttpRequest, name: str, body: SecretValue) -> SecretReply:
    """Store a secret under a name, or replace its value."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.OPERATOR)
    try:
        stored = secret_store(
            team=membership.team, name=name, value=body.value, by=signed_in(request)
        )
    except vault.VaultError as error:
        raise UnavailableProblem("vault", str(error), retry_after_seconds=60) from error
    return _secret(stored)


@router.delete(
    "/secrets/{name}", auth=ADMIN, response={204: None, **REFUSALS}, operation_id="delete_secret"
)
def secret_remove(request: HttpRequest, name: str) -> Status[None]:
    """Delete a secret of the current team; jobs that name it no longer start."""
    membership = current_membership(request)
    secret = visible_or_404(Secret, request.user, team=membership.team, name=name)
    check_role(Role(membership.role), Role.OPERATOR)
    secret_delete(secret=secret, by=signed_in(request))
    return Status(204, None)


# Sessions


@router.get("/sessions", response={200: SessionPage, **REFUSALS}, operation_id="list_sessions")
def session_list(request: HttpRequest, paging: Query[Paging]) -> SessionPage:
    """Return the browsers in which the caller is logged in, the last used first."""
    rows = list(sessions_of(signed_in(request)))
    shown, more = page_of("sessions", rows, lambda row: row.pk, paging)
    items = [
        SessionReply(
            browser=row.words, address=row.address, began_at=row.began_at, seen_at=row.seen_at
        )
        for row in shown
    ]
    return SessionPage(items=items, next_cursor=more)


# Limits of the team


class QuotaChanges(Sent):
    """New limits; what is left out stays, null removes a limit."""

    max_devices: Annotated[
        Annotated[int, Field(ge=0, le=100_000)] | None,
        Field(description="Devices at once over all pools, 0 to 100,000"),
    ] = None
    max_gpu_hours_per_month: Annotated[
        Annotated[float, Field(ge=0, le=1e9)] | None,
        Field(description="Counted while a GPU is held, 0 to 1e9"),
    ] = None
    max_duration_hours: Annotated[
        Annotated[float, Field(ge=0.01, le=8784)] | None,
        Field(description="A job that runs longer is stopped, 0.01 to 8784 hours"),
    ] = None
    max_queued_per_user: Annotated[
        Annotated[int, Field(ge=0, le=10_000)] | None,
        Field(description="Queued jobs of one person, 0 to 10,000"),
    ] = None
    share: Annotated[
        Annotated[float, Field(ge=0.01, le=1000)] | None,
        Field(description="Fair-share weight, 0.01 to 1000: 2 gets two turns for one of 1"),
    ] = None


def _quota(request: HttpRequest) -> QuotaReply:
    team = current_membership(request).team
    quota = quota_of(team)
    seconds = quota.max_duration_seconds
    return QuotaReply(
        max_devices=quota.max_devices,
        max_gpu_hours_per_month=quota.max_gpu_hours_per_month,
        max_duration_hours=seconds / 3600 if seconds else None,
        max_queued_per_user=quota.max_queued_per_user,
        share=quota.share,
        sentences=limit_sentences(team, quota_usage(team, signed_in(request).pk)),
    )


@router.get("/team/limits", response={200: QuotaReply, **REFUSALS}, operation_id="get_limits")
def quota_get(request: HttpRequest) -> QuotaReply:
    """Return the limits of the current team."""
    return _quota(request)


@router.patch(
    "/team/limits",
    auth=ADMIN,
    response={200: QuotaReply, **REFUSALS},
    operation_id="change_limits",
)
def quota_change(request: HttpRequest, body: QuotaChanges) -> QuotaReply:
    """Change the limits of the current team, as an operator."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.OPERATOR)
    before = _quota(request).model_dump(exclude={"sentences"})
    values = before | body.model_dump(exclude_unset=True)
    posted = {name: "" if value is None else value for name, value in values.items()}
    form = QuotaForm(posted, instance=quota_of(membership.team))
    if not form.is_valid():
        raise form_problem(form, "")
    quota_store(form, membership.team, request.user.get_username(), "")
    return _quota(request)


# The history of the team


class EventFilters(Paging):
    """Filters of the history."""

    kind: Annotated[
        str, Query(description="Kind of event, such as job.state or token.created")
    ] = ""
    actor: Annotated[
        str, Query(description="Who did it: a user name, host:SLUG or system:PART")
    ] = ""
    subject: Annotated[str, Query(description="Id of the job, host or other object")] = ""
    since: Annotated[
        Day | None, Query(description="First day, such as 2026-11-01, in the site's time zone")
    ] = None
    until: Annotated[Day | None, Query(description="Last day, included")] = None


@router.get("/audit", response={200: EventPage, **REFUSALS}, operation_id="list_audit")
def audit(request: HttpRequest, filters: Query[EventFilters]) -> EventPage:
    """Return the history of the current team, newest first, for its admins."""
    check_role(Role(current_membership(request).role), Role.ADMIN)
    listed = page_keys(_events(request, filters), "at", [current_team(request).pk], filters)
    fields = EventReply.model_fields
    items = [
        EventReply(**{name: getattr(row, name) for name in fields})
        for row in in_order(Event.objects.all(), listed.keys)
    ]
    return EventPage(items=items, next_cursor=listed.next_cursor)


def _events(request: HttpRequest, filters: EventFilters) -> QuerySet[Event]:
    visible = visible_events(current_team(request).pk, request.user)
    exact = {name: getattr(filters, name) for name in EXACT}
    return filter_events(visible, exact, first=filters.since, last=filters.until)
