"""Template tag for the current team and the user's other teams."""

from typing import Any, NamedTuple

from django import template
from django.http import HttpRequest

from webapp.accounts.models import Membership, Role
from webapp.accounts.roles import chosen_of, is_at_least, memberships_of

register = template.Library()
KEPT = "_team_choices"  # request attribute that caches the result


class TeamChoices(NamedTuple):
    """The user's current membership and the others."""

    current: Membership | None
    others: list[Membership]

    @property
    def can_add_hosts(self) -> bool:
        """Return whether the user may add hosts in any of their teams."""
        memberships = [*([self.current] if self.current else []), *self.others]
        return any(is_at_least(Role(each.role), Role.OPERATOR) for each in memberships)


@register.simple_tag(takes_context=True)
def team_choices(context: dict[str, Any]) -> TeamChoices:
    """Return the user's teams; queried once per request."""
    request: HttpRequest | None = context.get("request")
    if request is None:
        return TeamChoices(None, [])
    choices: TeamChoices | None = getattr(request, KEPT, None)
    if choices is None:
        memberships = memberships_of(request.user)
        current = chosen_of(request, memberships)
        choices = TeamChoices(current, [each for each in memberships if each != current])
        setattr(request, KEPT, choices)
    return choices
