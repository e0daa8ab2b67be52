"""Who may change hosts: the operators of their team."""

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from webapp.accounts.models import Role
from webapp.accounts.services import has_role, visible_or_404
from webapp.hosts.models import Host


def any_operator(request: HttpRequest) -> bool:
    """Return whether the user may add hosts in any of their teams."""
    if not request.user.is_authenticated:
        return False
    roles = request.user.memberships.values_list("role", flat=True)
    return bool({Role.OPERATOR, Role.ADMIN} & {Role(role) for role in roles})


def host_for_operator(request: HttpRequest, slug: str) -> Host:
    """Return a host for one of its team's operators.

    Raises:
        PermissionDenied: the user is not an operator.
    """
    host = visible_or_404(Host, request.user, slug=slug)
    if not has_role(request.user, host.team, Role.OPERATOR):
        raise PermissionDenied(
            "Only operators change hosts. An admin of your team can give you the role."
        )
    return host
