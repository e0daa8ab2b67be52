"""Creation of teams and the first admin, and rules for administrators."""

import secrets
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db import connection, transaction
from django.db.models import QuerySet

from webapp.accounts.models import ROLE_ORDER, Membership, Role, Team
from webapp.core.problems import ConflictProblem

# Rules for administrators and for changes to one's own account.
#
# At least one account can always open the administration: the last one cannot be deleted, closed
# or demoted. Nobody can raise their own role, and only a superuser can create another.


LAST_ADMIN = (
    "This is the last account that can open the administration. Make another superuser first, "
    "then close, demote or delete this one."
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
        ConflictProblem: it would; nothing is written.
    """
    if not raw and instance.pk and not is_administrator(instance):
        check_not_last(instance)


def check_not_last(user: User) -> None:
    """Reject a change that would leave no administrator.

    Raises:
        ConflictProblem: this account is the last administrator.
    """
    if is_last_administrator(user):
        raise ConflictProblem("last_admin", LAST_ADMIN)


def somebody_left(instance: User, **_others: Any) -> None:
    """Reject a deletion of one or more accounts that leaves no administrator.

    Raises:
        ConflictProblem: none is left; the deletion's transaction is rolled back.
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
    """Create the first admin with a home team; return its password, or None if one exists."""
    with transaction.atomic():
        if User.objects.filter(is_superuser=True).exists():
            return None
        password = secrets.token_urlsafe(12)
        user = User.objects.create_superuser(ADMIN_NAME, password=password)
        member_add(team=team_create(name=HOME_TEAM), user=user, role=Role.ADMIN)
    return password
