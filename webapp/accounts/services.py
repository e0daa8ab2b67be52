"""How people and teams come to be."""

import secrets

from django.contrib.auth.models import User
from django.db import transaction

from webapp.accounts.models import Membership, Role, Team

HOME_TEAM = "Home team"
ADMIN_NAME = "admin"


def team_create(*, name: str) -> Team:
    """Return the team of that name, made if there is none."""
    return Team.objects.get_or_create(name=name)[0]


def member_add(*, team: Team, user: User, role: Role) -> Membership:
    """Return the user's membership of the team, with ``role`` from now on."""
    return Membership.objects.update_or_create(team=team, user=user, defaults={"role": role})[0]


def admin_ensure() -> str | None:
    """Make the first admin with a home team; return the password, or None if there was one."""
    with transaction.atomic():
        if User.objects.filter(is_superuser=True).exists():
            return None
        password = secrets.token_urlsafe(12)
        user = User.objects.create_superuser(ADMIN_NAME, password=password)
        member_add(team=team_create(name=HOME_TEAM), user=user, role=Role.ADMIN)
    return password
