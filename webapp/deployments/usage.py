"""What clients' keys used, by day, key and deployment."""

from datetime import timedelta

from django.db.models import QuerySet

from webapp.accounts.models import Membership, Role
from webapp.accounts.services import is_at_least
from webapp.core.clock import now
from webapp.deployments.models import Usage

DAYS, MOST_DAYS = 30, 400


def usage_of(membership: Membership, days: int) -> QuerySet[Usage]:
    """Return the usage of the last days, newest first: of a member's keys, an operator's team."""
    first = now().date() - timedelta(days=days - 1)
    rows = Usage.objects.filter(key__team=membership.team_id, day__gte=first)
    if not is_at_least(Role(membership.role), Role.OPERATOR):
        rows = rows.filter(key__owner=membership.user_id)
    rows = rows.select_related("key__owner", "deployment")
    return rows.order_by("-day", "key_id", "deployment_id")
