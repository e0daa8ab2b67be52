"""Access tokens for the API: make, find and revoke them, and their page."""

import hashlib
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from django.contrib import messages
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q, QuerySet
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.text import slugify
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import SCOPE_ORDER, AccessToken, Role, Scope, Team
from webapp.accounts.services import (
    check_role,
    current_role,
    current_team,
    is_at_least,
    member_add,
    membership_of,
    signed_in,
    visible_or_404,
)
from webapp.accounts.sign_in import session_secret_keep, session_secret_of
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.middleware import uncompressed
from webapp.core.names import checked_name
from webapp.core.numbers import PLAIN, number_of
from webapp.core.outages import UseNotes
from webapp.core.parameters import reads_query
from webapp.core.problems import ConflictProblem, ForbiddenProblem, InvalidProblem, Problem

PREFIX = "slp_"  # a known prefix, so that scanners for leaked secrets find a token in a repository
HINT_LENGTH = 9
DEFAULT_DAYS, MOST_DAYS = 90, 366
MOST_HOURS = 1e9  # of GPUs, in a budget
MOST_TOKENS = 50  # of one account in one team, valid at the same time
NAME = re.compile(r"[\w .@+-]{1,60}")
USED_EVERY = timedelta(minutes=1)  # writes of the last use
SHOWN_ENDED = timedelta(days=30)  # ended tokens stay on the page for so long
uses = UseNotes()
SESSION_TOKENS = "access-tokens"  # session key: id -> text, encrypted, until it is shown
token_revoked = Signal()  # received in webapp.hosts.epoch
# The least role that a scope is of use to.
ROLE_OF_SCOPE = {
    Scope.READ: Role.VIEWER,
    Scope.PLAN: Role.PRACTITIONER,
    Scope.LAUNCH: Role.PRACTITIONER,
    Scope.ADMIN: Role.OPERATOR,
}


# The token of the request that is served
#
# A service that limits what a token may do (``webapp.jobs.budgets``) reads it here instead of
# getting it from each caller: an operation that forgot to pass it on would be without the limit.

_acting: ContextVar[AccessToken | None] = ContextVar("acting_token", default=None)


def acting_token() -> AccessToken | None:
    """Return the token with which the current request is made; None for people and programs."""
    return _acting.get()


@contextmanager
def acting_as(token: AccessToken | None) -> Iterator[None]:
    """Let the block be a request with ``token``, or at first with none (``token_act``)."""
    before = _acting.set(token)
    try:
        yield
    finally:
        _acting.reset(before)


def token_act(token: AccessToken) -> None:
    """Make a token the one of the current request, until its ``acting_as`` ends."""
    _acting.set(token)


def digest_of(text: str) -> str:
    """Return the SHA-256 of a token in hexadecimal; only this is stored."""
    return hashlib.sha256(text.encode()).hexdigest()


def includes(held: Scope, needed: Scope) -> bool:
    """Return whether scope ``held`` includes ``needed``."""
    return SCOPE_ORDER.index(held) >= SCOPE_ORDER.index(needed)


def valid_tokens() -> QuerySet[AccessToken]:
    """Return the tokens that are neither revoked nor expired, of open accounts."""
    return AccessToken.objects.filter(
        revoked_at=None, expires_at__gt=now(), user__is_active=True
    ).select_related("user", "team")


@sensitive_variables("text")
def token_make(
    *,
    team: Team,
    by: User,
    name: str,
    scope: str,
    days: float = DEFAULT_DAYS,
    is_service: bool = False,
    budget_gpu_hours: float | None = None,
) -> tuple[AccessToken, str]:
    """Return a new token and its text, which is not shown again.

    A token permits no more than its maker may do; with a budget its launches take no more than
    that altogether, which is what an agent's token should have. For a service, an account without
    a password is made as a member of the team with the least role that the scope needs; an admin
    makes those.

    Raises:
        InvalidProblem: the name, the scope or the number of days is invalid.
        ForbiddenProblem: the maker's role is too low for the scope, or for a service, or it acts
            by a token with a budget, which another token would not have.
        ConflictProblem: the account has ``MOST_TOKENS`` valid tokens already.
    """
    held = membership_of(by, team)
    role = Role(held.role) if held else Role.VIEWER
    chosen = _checked(name.strip(), scope, days, budget_gpu_hours)
    needed = Role.ADMIN if is_service else ROLE_OF_SCOPE[chosen]
    if not is_at_least(role, needed):
        what = "A token for a service" if is_service else f"The scope {chosen}"
        raise ForbiddenProblem(
            "role_too_low",
            f"{what} needs the role {needed.label}, and yours is {role.label}. Choose a lower "
            "scope, or ask an admin of your team.",
        )
    acting = acting_token()
    if acting is not None and acting.budget_gpu_hours is not None:
        raise ForbiddenProblem(
            "has_budget",
            f"The token “{acting.name}” has a budget, so it makes no tokens. Make one in a "
            "browser, under Access tokens.",
        )
    text = PREFIX + secrets.token_urlsafe(32)
    with transaction.atomic():
        user = _service_account(team, name.strip(), ROLE_OF_SCOPE[chosen]) if is_service else by
        if valid_tokens().filter(user=user, team=team).count() >= MOST_TOKENS:
            raise ConflictProblem(
                "too_many_tokens",
                f"{user.get_username()} has {MOST_TOKENS} valid tokens in {team.name}, the most. "
                "Revoke one that is not used.",
            )
        token = AccessToken.objects.create(
            team=team,
            user=user,
            created_by=by,
            name=name.strip(),
            scope=chosen,
            is_service=is_service,
            budget_gpu_hours=budget_gpu_hours,
            digest=digest_of(text),
            hint=text[:HINT_LENGTH],
            created_at=now(),
            expires_at=now() + timedelta(days=days),
        )
        event_record(
            token,
            "token.created",
            by.get_username(),
            detail={
                "name": token.name,
                "scope": chosen,
                "user": user.get_username(),
                "budget_gpu_hours": budget_gpu_hours,
            },
        )
    return token, text


def _checked(name: str, scope: str, days: float, budget: float | None) -> Scope:
    if not NAME.fullmatch(checked_name(name, "name")):
        raise InvalidProblem(
            "name",
            f"The name {name[:60]!r} is not valid. Use 1 to 60 letters, digits, blanks and "
            "any of . _ @ + -, such as “laptop”.",
        )
    if scope not in Scope.values:
        raise InvalidProblem(
            "scope", f"The scope is {scope[:20]!r}; it can be {', '.join(Scope.values)}."
        )
    if not 0 < days <= MOST_DAYS:
        raise InvalidProblem(
            "days", f"The token is to last {days:g} days; it can last up to {MOST_DAYS} days."
        )
    if budget is not None and not (
        scope in {Scope.LAUNCH, Scope.ADMIN} and 0 <= budget <= MOST_HOURS
    ):
        raise InvalidProblem(
            "budget_gpu_hours",
            f"The budget is {budget:g} GPU-hours; it can be 0 to a billion, for the scopes launch "
            "and admin.",
        )
    return Scope(scope)


def _service_account(team: Team, name: str, role: Role) -> User:
    """Return a new account for a service; nobody can log in with it."""
    stem = f"service-{slugify(name)[:40] or 'token'}"
    numbered = (f"{stem}-{number}" if number > 1 else stem for number in count(1))
    taken = set(User.objects.filter(username__startswith=stem).values_list("username", flat=True))
    user = User(username=next(name for name in numbered if name not in taken))
    user.set_unusable_password()
    user.save()
    member_add(team=team, user=user, role=role)
    return user


@sensitive_variables("text")
def token_find(text: str) -> AccessToken | None:
    """Return the valid token with this text, and note its use at most once a minute.

    Reading does not depend on the note: it is left out while the database cannot be written.
    """
    token = valid_tokens().filter(digest=digest_of(text)).first()
    if token is None:
        return None
    instant = now()
    is_due = Q(last_used_at=None) | Q(last_used_at__lt=instant - USED_EVERY)
    if token.last_used_at is None or token.last_used_at < instant - USED_EVERY:
        due = AccessToken.objects.filter(is_due, pk=token.pk)
        uses.store(lambda: due.update(last_used_at=instant), "a token's use")
    return token


@sensitive_variables("text")
def expired_token(text: str) -> AccessToken | None:
    """Return the token with this text if its time is over and nothing else ended it."""
    rows = AccessToken.objects.filter(digest=digest_of(text), revoked_at=None)
    return rows.filter(expires_at__lte=now(), user__is_active=True).first()


def token_revoke(*, token: AccessToken, by: User) -> bool:
    """Revoke a token at once; return whether it was still valid.

    The account of a service without another valid token is closed.
    """
    with transaction.atomic():
        rows = AccessToken.objects.filter(pk=token.pk, revoked_at=None)
        is_revoked = bool(rows.update(revoked_at=now()))
        if is_revoked:
            token_revoked.send(sender=AccessToken)
            event_record(token, "token.revoked", by.get_username(), detail={"name": token.name})
        if token.is_service and not valid_tokens().filter(user=token.user_id).exists():
            User.objects.filter(pk=token.user_id).update(is_active=False)
    return is_revoked


def tokens_of(user: User, team: Team) -> QuerySet[AccessToken]:
    """Return the tokens in a team that a user may see: the own ones, and an admin every one."""
    held = membership_of(user, team)
    rows = AccessToken.objects.filter(team=team).select_related("user", "created_by")
    ended = Q(revoked_at__lt=now() - SHOWN_ENDED) | Q(expires_at__lt=now() - SHOWN_ENDED)
    rows = rows.exclude(ended)
    is_admin = held is not None and is_at_least(Role(held.role), Role.ADMIN)
    return rows if is_admin else rows.filter(user=user)


def visible_token(request: HttpRequest, token_id: str) -> AccessToken:
    """Return a token that the caller may revoke: an own one, or as an admin the team's.

    Raises:
        Http404: it belongs to a team that the caller is not in.
        PermissionDenied: it is another person's, and the caller is no admin.
    """
    token = visible_or_404(AccessToken, request.user, pk=token_id)
    if token.user_id != request.user.pk:
        held = membership_of(request.user, token.team)
        check_role(Role(held.role) if held else Role.VIEWER, Role.ADMIN)
    return token


# The page


@require_GET
@reads_query("new")
def token_list(request: HttpRequest) -> HttpResponse:
    """List the user's tokens in the current team; a new one is shown once."""
    user, team = signed_in(request), current_team(request)
    instant: datetime = now()
    rows = list(tokens_of(user, team))
    new_id = request.GET.get("new", "")
    context: dict[str, Any] = {
        "team": team,
        "rows": [(token, _state(token, instant)) for token in rows],
        "new_token": session_secret_of(request, SESSION_TOKENS, new_id) if new_id else "",
        "scopes": _scopes(current_role(request)),
        "days": DEFAULT_DAYS,
        "most_days": MOST_DAYS,
        "may_make_services": is_at_least(current_role(request), Role.ADMIN),
    }
    if context["new_token"]:
        del request.session[SESSION_TOKENS]
    response = uncompressed(render(request, "accounts/tokens.html", context))
    response["Cache-Control"] = "no-store"
    return response


SCOPE_WORDS = {
    Scope.READ: "Read plans, jobs, logs and hosts",
    Scope.PLAN: "Read, and make and change plans",
    Scope.LAUNCH: "Plan, and launch and stop jobs",
    Scope.ADMIN: "Everything that your role permits",
}


def _scopes(role: Role) -> list[tuple[str, str]]:
    return [
        (scope.value, words)
        for scope, words in SCOPE_WORDS.items()
        if is_at_least(role, ROLE_OF_SCOPE[scope])
    ]


def _state(token: AccessToken, instant: datetime) -> str:
    if token.revoked_at:
        return "revoked"
    return "expired" if token.expires_at <= instant else "valid"


@require_POST
def token_save(request: HttpRequest) -> HttpResponse:
    """Make a token; its text is shown once, on the page that follows."""
    posted = request.POST
    try:
        token, text = token_make(
            team=current_team(request),
            by=signed_in(request),
            name=posted.get("name", ""),
            scope=posted.get("scope", ""),
            days=_days(posted.get("days", "")),
            is_service=posted.get("service") == "yes",
            budget_gpu_hours=_budget(posted.get("budget", "")),
        )
    except Problem as problem:
        messages.error(request, problem.detail)
        return redirect("tokens")
    session_secret_keep(request, SESSION_TOKENS, token.pk, text)
    response = redirect("tokens")
    response["Location"] += f"?new={token.pk}"
    return response


def _budget(text: str) -> float | None:
    try:
        return number_of(text, PLAIN) if text.strip() else None
    except ValueError as fault:
        raise InvalidProblem(
            "budget_gpu_hours", f"“Budget” is {text[:20]}, {fault}; it can be a number, or empty."
        ) from None


def _days(text: str) -> float:
    try:
        return number_of(text.strip() or f"{DEFAULT_DAYS}", PLAIN)
    except ValueError as fault:
        raise InvalidProblem(
            "days", f"“Valid for” is {text[:20]}, {fault}; it can be 1 to {MOST_DAYS} days."
        ) from None


@require_POST
def token_remove(request: HttpRequest, access_id: str) -> HttpResponse:
    """Revoke a token."""
    token = visible_token(request, access_id)
    if token_revoke(token=token, by=signed_in(request)):
        messages.success(request, f"{token.name} is revoked: it opens nothing any more.")
    return redirect("tokens")
