"""Access to plans: members of the plan's team can change it, from practitioner on."""

from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from webapp.accounts.models import Role
from webapp.accounts.roles import check_role, membership_of, visible_or_404
from webapp.plans.models import Plan


def changeable_plan(request: HttpRequest, plan_id: str) -> Plan:
    """Return a plan that the user may change.

    Raises:
        Http404: it belongs to a team that the user is not in.
        PermissionDenied: the user's role in that team is read-only.
    """
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    membership = membership_of(request.user, plan.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.PRACTITIONER)
    return plan


def signed_in(request: HttpRequest) -> User:
    """Return the user of a request.

    Raises:
        PermissionDenied: nobody is logged in.
    """
    if not isinstance(request.user, User):
        raise PermissionDenied("Log in first.")
    return request.user
