"""Which team a page works for, and for which others it could."""

from typing import Any, NamedTuple

from django import template
from django.http import HttpRequest

from webapp.accounts.models import Membership
from webapp.accounts.roles import chosen_of, memberships_of

register = template.Library()


class TeamChoices(NamedTuple):
    """The membership that is in force, and the user's others."""

    current: Membership | None
    others: list[Membership]


@register.simple_tag(takes_context=True)
def team_choices(context: dict[str, Any]) -> TeamChoices:
    """Return the teams of whoever looks at a page."""
    request: HttpRequest | None = context.get("request")
    if request is None:
        return TeamChoices(None, [])
    found = memberships_of(request.user)
    current = chosen_of(request, found)
    return TeamChoices(current, [one for one in found if one != current])
