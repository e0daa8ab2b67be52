"""Who administers the site, and what nobody does to themselves.

At least one person can always open the administration: the last one is neither deleted nor
closed nor demoted. Nobody raises a role of their own, and only a superuser makes another.
"""

from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db import connection
from django.db.models import QuerySet

from webapp.accounts.models import ROLE_ORDER, Membership, Role, Team
from webapp.core.problems import ConflictProblem

LAST_ADMIN = (
    "This is the last account that can open the administration. Make another superuser first, "
    "then close, demote or delete this one."
)
OWN_ROLE = "Nobody raises a role of their own: ask another admin to do it."
OWN_RIGHTS = "Nobody gives rights to their own account: ask another superuser to do it."


def administrators() -> QuerySet[User]:
    """Return the accounts that can do everything on this site."""
    return User.objects.filter(is_superuser=True, is_staff=True, is_active=True)


def is_administrator(user: User) -> bool:
    """Return whether an account, as it stands in memory, can do everything."""
    return user.is_superuser and user.is_staff and user.is_active


def is_last_administrator(user: User) -> bool:
    """Return whether, without this account, nobody could open the administration.

    Inside a transaction the administrators' rows are locked, so that two who close each other
    at the same moment do not both succeed.
    """
    rows = administrators()
    if connection.in_atomic_block:
        rows = rows.select_for_update()
    keys = set(rows.values_list("pk", flat=True))
    return keys == {user.pk}


def last_administrator_keep(instance: User, raw: bool = False, **_others: Any) -> None:  # noqa: FBT001, FBT002 (Django's signal)
    """Refuse to save an account that closes or demotes the last administrator.

    Raises:
        ConflictProblem: it would; before anything is written.
    """
    if not raw and instance.pk and not is_administrator(instance):
        check_not_last(instance)


def check_not_last(user: User) -> None:
    """Refuse what would leave nobody.

    Raises:
        ConflictProblem: this account is the last administrator.
    """
    if is_last_administrator(user):
        raise ConflictProblem("last_admin", LAST_ADMIN)


def somebody_left(instance: User, **_others: Any) -> None:
    """Undo a deletion, of one account or of many at once, that leaves no administrator.

    Raises:
        ConflictProblem: it did; the deletion's transaction is rolled back.
    """
    if is_administrator(instance) and not administrators().exists():
        raise ConflictProblem("last_admin", LAST_ADMIN)


def may_hold(asker: AbstractBaseUser | AnonymousUser, user: User, team: Team, role: Role) -> bool:
    """Return whether ``asker`` may give ``user`` a role in a team.

    To others any, to oneself none above the one held there; a superuser may join a team.
    """
    if user.pk != asker.pk:
        return True
    held = Membership.objects.filter(user=user, team=team).values_list("role", flat=True).first()
    if held is None:
        return user.is_superuser
    return ROLE_ORDER.index(role) <= ROLE_ORDER.index(Role(held))
