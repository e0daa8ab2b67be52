"""A host's name, linked to its page if the user may open it."""

from typing import Any

from django import template
from django.urls import reverse
from django.utils.html import format_html

from webapp.hosts.models import Host
from webapp.hosts.pools import is_own

register = template.Library()


@register.simple_tag(takes_context=True)
def host_name(context: dict[str, Any], host: Host) -> str:
    """Return a host's name: a link for its own team, plain text for other teams."""
    if not is_own(context["request"].user, host):
        return format_html("{} <span>of {}</span>", host.name, host.team.name)
    return format_html('<a href="{}">{}</a>', reverse("host-detail", args=[host.slug]), host.name)
