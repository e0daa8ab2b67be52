"""Who may change a deployment or a key: its owner, and operators of the team."""

from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest

from webapp.accounts.models import Membership, Role
from webapp.accounts.services import (
    is_at_least,
    may_change,
    membership_of,
    owned_for,
    visible_or_404,
)
from webapp.deployments.models import Deployment, ServingKey


def visible_deployment(request: HttpRequest, deployment_id: str) -> Deployment:
    """Return a deployment of the person's teams that is not deleted, else raise Http404."""
    return visible_or_404(Deployment, request.user, pk=deployment_id, deleted_at=None)


def deployment_for(request: HttpRequest, deployment_id: str) -> Deployment:
    """Return a deployment that the person may change.

    Raises:
        PermissionDenied: the role is too low, or the deployment is someone else's.
    """
    return owned_for(request, Deployment, pk=deployment_id, deleted_at=None)


def usable_deployment(request: HttpRequest, deployment_id: str) -> Deployment:
    """Return a deployment that the person may wake, as a request of theirs would.

    Raises:
        PermissionDenied: the role is too low, or it is paused by who may change it.
    """
    row = visible_deployment(request, deployment_id)
    held = membership_of(request.user, row.team)
    if held is None or not is_at_least(Role(held.role), Role.PRACTITIONER):
        raise PermissionDenied("To wake a deployment you need the role Practitioner or higher.")
    if row.is_paused and not may_change(held, row):
        raise PermissionDenied("It is paused; only its owner or an operator can wake it.")
    return row


def keys_of(membership: Membership) -> QuerySet[ServingKey]:
    """Return the keys that a member may see: the own ones, and an operator the team's."""
    rows = ServingKey.objects.filter(team=membership.team_id).select_related("owner")
    if is_at_least(Role(membership.role), Role.OPERATOR):
        return rows
    return rows.filter(owner=membership.user_id)


def key_for(request: HttpRequest, key_id: str) -> ServingKey:
    """Return a key that the person may revoke.

    Raises:
        PermissionDenied: the role is too low, or the key is someone else's.
    """
    return owned_for(request, ServingKey, action="revoke", pk=key_id)


def own_key_for(request: HttpRequest, key_id: str) -> ServingKey:
    """Return a key that the person may rotate: what it then uses counts as its owner's.

    An operator rotates those of services.

    Raises:
        PermissionDenied: the role is too low, or the key is someone else's.
    """
    key = owned_for(request, ServingKey, action="rotate", pk=key_id)
    if not key.is_service and key.owner_id != request.user.pk:
        raise PermissionDenied("Only its owner can rotate this key; you can revoke it.")
    return key
