"""What a page with live regions needs: one ticket for its topics, and answers in two sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers

from webapp.live.tickets import ticket_for


def live_context(request: HttpRequest, topics: Sequence[str]) -> dict[str, str]:
    """Return the ticket and the topics of a page's one stream."""
    return {"live_topics": ",".join(topics), "live_ticket": ticket_for(request.user, topics)}


def page_or_regions(
    request: HttpRequest, page: str, regions: str, context: Mapping[str, Any]
) -> HttpResponse:
    """Return the page, or for htmx and live.js only the regions of it that change."""
    is_partial = request.headers.get("HX-Request") == "true"
    response = render(request, regions if is_partial else page, dict(context))
    patch_vary_headers(response, ["HX-Request"])
    response["Cache-Control"] = "no-store"
    return response
