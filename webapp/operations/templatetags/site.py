"""Template tags: the current team, hosts, states and priorities of jobs."""

import re
from typing import Any, NamedTuple

from django import template
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from runners.plans.pins import FIELD_TITLES
from runners.shared.schedulers import SCHEDULER_TERMS, SchedulerTerms
from webapp.accounts.models import Membership, Role, memberships_of
from webapp.accounts.services import chosen_of, is_at_least
from webapp.core.display import fragment
from webapp.core.templatetags.components import status
from webapp.hosts.models import Host
from webapp.hosts.pools import is_team_host
from webapp.jobs.models import Job, Priority
from webapp.jobs.progress import state_label_of

# ---------------------------------------------------------------------------
# Template tag for the current team and the user's other teams.
# ---------------------------------------------------------------------------


register = template.Library()
KEPT = "_team_choices"  # request attribute that caches the result


class TeamChoices(NamedTuple):
    """The user's current membership and the others."""

    current: Membership | None
    others: list[Membership]

    @property
    def can_plan(self) -> bool:
        """Return whether the user may make plans and launch jobs in the current team."""
        return self.current is not None and is_at_least(Role(self.current.role), Role.PRACTITIONER)

    @property
    def planned_for(self) -> set[str]:
        """Return the ids of the teams whose plans the user may change."""
        memberships = [*([self.current] if self.current else []), *self.others]
        return {
            each.team_id for each in memberships if is_at_least(Role(each.role), Role.PRACTITIONER)
        }

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


# ---------------------------------------------------------------------------
# A host's name, linked to its page if the user may open it.
# ---------------------------------------------------------------------------


@register.simple_tag(takes_context=True)
def host_name(context: dict[str, Any], host: Host) -> str:
    """Return a host's name: a link for its own team, plain text for other teams."""
    if not is_team_host(context["request"].user, host):
        return format_html("{} <span>of {}</span>", host.name, host.team.name)
    return format_html('<a href="{}">{}</a>', reverse("host-detail", args=[host.slug]), host.name)


# ---------------------------------------------------------------------------
# Template tag for the priorities of a queued job.
# ---------------------------------------------------------------------------


@register.simple_tag
def priority_options(chosen: int) -> SafeString:
    """Render the options of a ``select``, with the current priority selected."""
    choices = tuple(Priority.choices)
    return fragment("queue/_priority_options.html", chosen=chosen, choices=choices)


# ---------------------------------------------------------------------------
# Template tag for a job's status chip, with its host's silence.
# ---------------------------------------------------------------------------


@register.simple_tag
def state_label(job: Job) -> SafeString:
    """Render a job's status chip and, while its host sends no heartbeat, for how long."""
    label = state_label_of(job)
    chip = status(label.state, label.word)
    return fragment("jobs/_standing.html", chip=chip, note=label.note) if label.note else chip


_FIELD = re.compile(r"\b(?:workload|pins|hardware|constraints|launch)\.(\w+)")


@register.filter
def field_words(text: str) -> str:
    """Return a text of the planner with fields of a document by their titles in the wizard."""

    def title(found: re.Match[str]) -> str:
        known = FIELD_TITLES.get(found[1])
        return f"“{known}”" if known else found[0]

    return _FIELD.sub(title, text)


@register.filter
def scheduler_terms(kind: str) -> SchedulerTerms:
    """Return a scheduler's words for its parts; facts of an older agent name none but Slurm."""
    rows = {str(name): terms for name, terms in SCHEDULER_TERMS.items()}
    return rows.get(kind, SCHEDULER_TERMS["slurm"])
