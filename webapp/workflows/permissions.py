"""Who may stop, resume or delete a workflow: its owner, and operators of the team."""

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from webapp.accounts.models import Membership, Role
from webapp.accounts.services import is_at_least, membership_of, visible_or_404
from webapp.workflows.models import Workflow


def may_change(membership: Membership | None, workflow: Workflow) -> bool:
    """Return whether a member may stop, resume and delete a workflow."""
    if membership is None:
        return False
    if is_at_least(Role(membership.role), Role.OPERATOR):
        return True
    is_practitioner = is_at_least(Role(membership.role), Role.PRACTITIONER)
    return is_practitioner and workflow.owner_id == membership.user_id


def workflow_for(request: HttpRequest, workflow_id: str) -> Workflow:
    """Return a workflow that the person may stop, resume and delete.

    Raises:
        PermissionDenied: the role is too low, or the workflow is someone else's.
    """
    workflow = visible_or_404(Workflow, request.user, pk=workflow_id)
    if not may_change(membership_of(request.user, workflow.team), workflow):
        raise PermissionDenied("Only its owner or an operator can change this workflow.")
    return workflow
