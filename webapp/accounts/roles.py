"""Authorisation: the current team, roles, and the two error responses.

An object of another team yields 404. A role that is too low yields 403.
"""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404

from webapp.accounts.models import ROLE_ORDER, Membership, Role, Team, TeamOwned, TeamQuerySet

SESSION_KEY = "team"
Owned = TypeVar("Owned", bound=TeamOwned)
View = Callable[..., HttpResponseBase]


def membership_of(user: User | AnonymousUser, team: Team) -> Membership | None:
    """Return the user's membership of a team, or None."""
    if not user.is_authenticated:
        return None
    return Membership.objects.filter(user=user, team=team).first()


def has_role(user: User | AnonymousUser, team: Team, role: Role) -> bool:
    """Return whether the user holds ``role`` or a higher one in ``team``."""
    membership = membership_of(user, team)
    return membership is not None and is_at_least(Role(membership.role), role)


def is_at_least(held: Role, wanted: Role) -> bool:
    """Return whether ``held`` includes what ``wanted`` may do."""
    return ROLE_ORDER.index(held) >= ROLE_ORDER.index(wanted)


def current_membership(request: HttpRequest) -> Membership:
    """Return the membership chosen in the session, else the user's first.

    Raises:
        PermissionDenied: the user is anonymous or belongs to no team.
    """
    if not request.user.is_authenticated:
        raise PermissionDenied("Log in first.")
    membership = chosen_of(request, memberships_of(request.user))
    if membership is None:
        raise PermissionDenied("You belong to no team yet. Ask an admin to add you to one.")
    return membership


def memberships_of(user: User | AnonymousUser) -> list[Membership]:
    """Return a user's memberships, oldest first."""
    if not user.is_authenticated:
        return []
    return list(Membership.objects.filter(user=user).select_related("team").order_by("pk"))


def chosen_of(request: HttpRequest, memberships: list[Membership]) -> Membership | None:
    """Return the membership chosen in the session, else the first, or None."""
    chosen = request.session.get(SESSION_KEY)
    first = next(iter(memberships), None)
    return next((each for each in memberships if each.team_id == chosen), first)


def choose_team(request: HttpRequest, team_id: str) -> Team:
    """Switch this session to another of the user's teams.

    Raises:
        Http404: the user is not a member of that team.
    """
    for membership in memberships_of(request.user):
        if membership.team_id == team_id:
            request.session[SESSION_KEY] = team_id
            return membership.team
    raise Http404(team_id)


def current_team(request: HttpRequest) -> Team:
    """Return the current team of the request."""
    return current_membership(request).team


def current_role(request: HttpRequest) -> Role:
    """Return the user's role in the current team of the request."""
    return Role(current_membership(request).role)


def require_role(role: Role) -> Callable[[View], View]:
    """Return a decorator that makes a view answer 403 to users below ``role``."""

    def decorate(view: View) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponseBase:
            check_role(current_role(request), role)
            return view(request, *args, **kwargs)

        guarded.required_role = role  # type: ignore[attr-defined]  # read by the matrix test
        return guarded

    return decorate


def check_role(held: Role, wanted: Role) -> None:
    """Check that a role includes ``wanted``.

    Raises:
        PermissionDenied: it does not; the message names both roles.
    """
    if not is_at_least(held, wanted):
        raise PermissionDenied(
            f"This needs the role {wanted.label}; yours is {held.label}. "
            "An admin of your team can change it."
        )


def visible_or_404(model: type[Owned], user: User | AnonymousUser, **lookup: object) -> Owned:
    """Return the object if it belongs to one of the user's teams, else raise Http404."""
    rows = cast("TeamQuerySet[Owned]", model.objects)
    return get_object_or_404(rows.visible_to(user).select_related("team"), **lookup)
