"""A job's chip with its host's silence beside it."""

from django import template

from webapp.core.templatetags.status import status
from webapp.jobs.models import Job
from webapp.jobs.standing import standing_of

register = template.Library()


@register.inclusion_tag("jobs/_standing.html")
def standing(job: Job) -> dict[str, str]:
    """Draw the chip of a job and, while its host is silent, for how long."""
    found = standing_of(job)
    return {**status(found.state, found.word), "note": found.note}
