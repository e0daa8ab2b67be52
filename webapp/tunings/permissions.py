"""Who may stop or delete a tuning: its owner, and operators of the team."""

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from webapp.accounts.models import Membership, Role
from webapp.accounts.services import is_at_least, membership_of, visible_or_404
from webapp.tunings.models import Tuning


def may_change(membership: Membership | None, tuning: Tuning) -> bool:
    """Return whether a member may stop and delete a tuning."""
    if membership is None:
        return False
    if is_at_least(Role(membership.role), Role.OPERATOR):
        return True
    is_practitioner = is_at_least(Role(membership.role), Role.PRACTITIONER)
    return is_practitioner and tuning.owner_id == membership.user_id


def tuning_for(request: HttpRequest, tuning_id: str) -> Tuning:
    """Return a tuning that the person may stop and delete.

    Raises:
        PermissionDenied: the role is too low, or the tuning is someone else's.
    """
    tuning = visible_or_404(Tuning, request.user, pk=tuning_id)
    if not may_change(membership_of(request.user, tuning.team), tuning):
        raise PermissionDenied("Only its owner or an operator can change this tuning.")
    return tuning
