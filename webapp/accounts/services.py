"""Creation of teams, memberships and the first admin."""

import secrets

from django.contrib.auth.models import User
from django.db import transaction

from webapp.accounts.models import Membership, Role, Team

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
