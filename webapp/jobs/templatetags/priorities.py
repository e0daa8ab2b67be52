"""Template tag for the priorities of a queued job."""

from django import template
from django.utils.safestring import SafeString

from webapp.core.display import fragment
from webapp.jobs.models import Priority

register = template.Library()


@register.simple_tag
def priority_options(chosen: int) -> SafeString:
    """Render the options of a ``select``, with the current priority selected."""
    choices = tuple(Priority.choices)
    return fragment("queue/_priority_options.html", chosen=chosen, choices=choices)
