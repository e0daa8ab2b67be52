"""Teams, members and their roles."""

import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.db import connection, transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404

from webapp.accounts.initial_passwords import initial_password_mark
from webapp.accounts.models import (
    ROLE_ORDER,
    Membership,
    Role,
    Team,
    TeamOwned,
    TeamQuerySet,
    memberships_of,
)
from webapp.core.problems import ConflictProblem

# ---------------------------------------------------------------------------
# Creation of teams and the first admin, and rules for administrators.
# ---------------------------------------------------------------------------


# Rules for administrators and for changes to one's own account.
#
# At least one account can always open the administration: the last one cannot be deleted, closed
# or demoted. Nobody can raise their own role, and only a superuser can create another.


LAST_ADMIN = (
    "This is the last account that can open the administration. Create another superuser first, "
    "then close, demote or delete this account."
)
OWN_ROLE = "You cannot raise your own role: ask another admin."
OWN_RIGHTS = "You cannot add rights to your own account: ask another superuser."


def administrators() -> QuerySet[User]:
    """Return the active superuser accounts with access to the administration."""
    return User.objects.filter(is_superuser=True, is_staff=True, is_active=True)


def is_administrator(user: User) -> bool:
    """Return whether an account, with its unsaved changes, is an administrator."""
    return user.is_superuser and user.is_staff and user.is_active


def is_last_administrator(user: User) -> bool:
    """Return whether this account is the only administrator.

    Inside a transaction the administrators' rows are locked, so that two administrators cannot
    close each other at the same time.
    """
    rows = administrators()
    if connection.in_atomic_block:
        rows = rows.select_for_update()
    keys = set(rows.values_list("pk", flat=True))
    return keys == {user.pk}


def last_administrator_keep(instance: User, raw: bool = False, **_others: Any) -> None:  # noqa: FBT001, FBT002 (Django's signal)
    """Reject a save that closes or demotes the last administrator.

    Raises:
        ConflictProblem: the save would leave no administrator; nothing is written.
    """
    is_closed = not raw and instance.pk and not is_administrator(instance)
    if is_closed and is_last_administrator(instance):
        raise ConflictProblem("last_admin", LAST_ADMIN)


def somebody_left(instance: User, **_others: Any) -> None:
    """Reject a deletion of one or more accounts that leaves no administrator.

    Raises:
        ConflictProblem: no administrator is left; the deletion's transaction is rolled back.
    """
    if is_administrator(instance) and not administrators().exists():
        raise ConflictProblem("last_admin", LAST_ADMIN)


def may_hold(asker: AbstractBaseUser | AnonymousUser, user: User, team: Team, role: Role) -> bool:
    """Return whether ``asker`` may give ``user`` a role in a team.

    Any role to others; to oneself none above the current one, but a superuser may join a team.
    """
    if user.pk != asker.pk:
        return True
    held = Membership.objects.filter(user=user, team=team).values_list("role", flat=True).first()
    if held is None:
        return user.is_superuser
    return ROLE_ORDER.index(role) <= ROLE_ORDER.index(Role(held))


HOME_TEAM = "Home team"
ADMIN_NAME = "admin"


def team_create(*, name: str) -> Team:
    """Return the team of that name, created if missing."""
    return Team.objects.get_or_create(name=name)[0]


def member_add(*, team: Team, user: User, role: Role) -> Membership:
    """Set the user's role in the team and return the membership."""
    return Membership.objects.update_or_create(team=team, user=user, defaults={"role": role})[0]


def admin_ensure() -> str | None:
    """Create the first admin with a home team; return its password, or None if one exists.

    The password is an initial one (``webapp.accounts.initial_passwords``).
    """
    with transaction.atomic():
        if User.objects.filter(is_superuser=True).exists():
            return None
        password = secrets.token_urlsafe(16)  # 128 bits
        user = User.objects.create_superuser(ADMIN_NAME, password=password)
        initial_password_mark(user)
        member_add(team=team_create(name=HOME_TEAM), user=user, role=Role.ADMIN)
    return password


# ---------------------------------------------------------------------------
# Authorisation: the current team, roles, and the two error responses.
#
# An object of another team yields 404. A role that is too low yields 403.
# ---------------------------------------------------------------------------


SESSION_KEY = "team"
Owned = TypeVar("Owned", bound=TeamOwned)
View = Callable[..., HttpResponseBase]


def membership_of(user: User | AnonymousUser, team: Team) -> Membership | None:
    """Return the user's membership of a team, or None."""
    return next((each for each in memberships_of(user) if each.team_id == team.pk), None)


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


def check_role(role: Role, required_role: Role) -> None:
    """Check that a role includes ``required_role``.

    Raises:
        PermissionDenied: ``role`` does not include it; the message names both roles.
    """
    if not is_at_least(role, required_role):
        raise PermissionDenied(
            f"This needs the role {required_role.label}; yours is {role.label}. An admin of your "
            "team can change your role."
        )


def visible_or_404(model: type[Owned], user: User | AnonymousUser, **lookup: object) -> Owned:
    """Return the object if it belongs to one of the user's teams, else raise Http404."""
    rows = cast("TeamQuerySet[Owned]", model.objects)
    return get_object_or_404(rows.visible_to(user).select_related("team"), **lookup)


def visible_with_role_or_404(
    model: type[Owned], request: HttpRequest, **lookup: object
) -> tuple[Owned, Role]:
    """Return an object of a team of the user, with the user's role there, else raise Http404."""
    roles = {each.team_id: Role(each.role) for each in memberships_of(request.user)}
    rows = cast("TeamQuerySet[Owned]", model.objects).filter(team__in=list(roles))
    row = get_object_or_404(rows.select_related("team"), **lookup)
    return row, roles[row.team_id]


def may_change(membership: Membership | None, row: TeamOwned) -> bool:
    """Return whether a member may change a row that has an owner: its own, an operator every."""
    if membership is None:
        return False
    role = Role(membership.role)
    owner_id: int | None = row.owner_id  # type: ignore[attr-defined]  # of a row with an owner
    is_own = owner_id == membership.user_id
    return is_at_least(role, Role.OPERATOR) or (is_own and is_at_least(role, Role.PRACTITIONER))


def owned_for(
    request: HttpRequest, model: type[Owned], *, action: str = "change", **lookup: object
) -> Owned:
    """Return an object that the person may change, or take another ``action`` on.

    Raises:
        Http404: it is of no team of the person's.
        PermissionDenied: the role is too low, or the object is someone else's.
    """
    row = visible_or_404(model, request.user, **lookup)
    if not may_change(membership_of(request.user, row.team), row):
        name = model._meta.verbose_name
        raise PermissionDenied(f"Only its owner or an operator can {action} this {name}.")
    return row


def signed_in(request: HttpRequest) -> User:
    """Return the user of a request.

    Raises:
        PermissionDenied: nobody is logged in.
    """
    if not isinstance(request.user, User):
        raise PermissionDenied("Log in first.")
    return request.user
