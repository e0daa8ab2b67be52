"""Helpers for pages with live regions: the stream's attributes, and partial responses."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.utils.html import format_html

from webapp.live.tickets import ticket_for

RENDERING_SECONDS = 15.0  # maximum time from rendering a page to opening its stream


def live_context(request: HttpRequest, topics: Sequence[str]) -> dict[str, str]:
    """Return the attributes of the element that opens the page's live stream.

    ``since`` is the event id to resume after, so that changes during the rendering, transfer and
    script start of the page are replayed to it.
    """
    since = f"{int((time.time() - RENDERING_SECONDS) * 1000)}-0"
    attributes = format_html(
        'data-live-topics="{}" data-live-ticket="{}" data-live-since="{}"',
        ",".join(topics), ticket_for(request.user, topics), since,
    )  # fmt: skip
    return {"live_attributes": attributes}


def page_or_regions(
    request: HttpRequest, page: str, regions: str, context: Mapping[str, Any]
) -> HttpResponse:
    """Return the page, or only its live regions for htmx and live.js."""
    is_partial = request.headers.get("HX-Request") == "true"
    response = render(request, regions if is_partial else page, dict(context))
    patch_vary_headers(response, ["HX-Request"])
    response["Cache-Control"] = "no-store"
    return response
