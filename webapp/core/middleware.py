"""Middleware: problems become messages, unreadable text is rejected, pages are compressed."""

import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlsplit

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.request import UnreadablePostError
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views import defaults
from servestatic.utils import parse_accept_encoding

from webapp.core.problems import Problem

# Safe redirects to URLs from requests: only to pages of this site.


def is_own(request: HttpRequest, address: str) -> bool:
    """Return whether an address is a path or an absolute URL of this site."""
    if not url_has_allowed_host_and_scheme(address, allowed_hosts={request.get_host()}):
        return False
    return urlsplit(address).path.startswith("/")


def redirect_to_own(request: HttpRequest, address: str, otherwise: str) -> HttpResponseRedirect:
    """Return a redirect to an address of this site, or to ``otherwise`` for any other.

    ``django.shortcuts.redirect`` is not used: it takes text such as ``0`` for a view name.
    """
    return HttpResponseRedirect(address if is_own(request, address) else otherwise)


# Compression of pages and JSON with mitigations against BREACH.
#
# BREACH derives a secret from the length of a compressed page: the attacker makes the victim's
# browser open the page with guesses in the URL and observes the size of the responses.
# Mitigations:
#
# - Django masks the CSRF token in every response, and pads the response by up to 100 random bytes.
# - Cross-site requests get uncompressed responses.
# - A page that shows a secret is marked (``uncompressed``) and never compressed.
# - Streamed responses are not compressed: server-sent events must not be buffered, and artefacts
#   are compressed where it is worth it.
#
# Static files bypass this: they contain no secrets and are compressed at collection.


OTHER_SITES = ("cross-site", "same-site")  # another host of the same domain is not trusted
MARK = "_shows_a_secret"
Response = TypeVar("Response", bound=HttpResponseBase)


def uncompressed(response: Response) -> Response:
    """Mark a response that shows a secret, so that it is never compressed."""
    setattr(response, MARK, True)
    return response


class CompressionMiddleware(GZipMiddleware):
    """Django's gzip middleware with random padding, for responses that may be compressed."""

    def process_response(
        self, request: HttpRequest, response: HttpResponseBase
    ) -> HttpResponseBase:
        """Return the response, compressed if the client accepts it and it may be compressed."""
        if response.streaming or hasattr(response, MARK) or not _may_compress(request):
            return response
        return super().process_response(request, response)


def _may_compress(request: HttpRequest) -> bool:
    accepted = parse_accept_encoding(request.headers.get("Accept-Encoding", ""))
    return "gzip" in accepted and request.headers.get("Sec-Fetch-Site") not in OTHER_SITES


# Middleware that rejects text that databases cannot store.
#
# PostgreSQL cannot store NUL in text, and no database can store a lone surrogate. This middleware
# checks URLs, queries and forms; ``webapp.api.problems`` checks JSON bodies.


UNKEPT = re.compile("[\x00\ud800-\udfff]")
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
LONGEST_NAME = 40
API = "/api/"  # parses its bodies itself and has no forms
GetResponse = Callable[[HttpRequest], HttpResponse]


class ReadableTextMiddleware:
    """Answers 400 with the name of the field; ignores cookies with such text."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Delete unreadable cookies, and call the next handler."""
        for name in [name for name, value in request.COOKIES.items() if UNKEPT.search(value)]:
            del request.COOKIES[name]
        return self.get_response(request)

    def process_view(
        self, request: HttpRequest, _view: object, _args: object, _kwargs: object
    ) -> HttpResponse | None:
        """Return the 400 response, or None for a readable request."""
        try:
            where = next((where for where, text in _texts(request) if UNKEPT.search(text)), None)
        except UnreadablePostError:
            return None  # the client disconnected
        return None if where is None else _refused(request, where)


def _texts(request: HttpRequest) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of every text in a request."""
    yield "The address", request.path_info
    fields = [("The query", request.GET)]
    is_api = request.path_info.startswith(API)
    if request.method == "POST" and request.content_type in FORMS and not is_api:
        fields.append(("The form", request.POST))
    for place, values in fields:
        for name, texts in values.lists():
            yield f"The name of a field of {place.lower()}", name
            for text in texts:
                yield f"Field “{name[:LONGEST_NAME]}” of {place.lower()}", str(text)
    if len(fields) > 1:
        for name, files in request.FILES.lists():
            for file in files:
                yield f"The name of the file in the field “{name[:LONGEST_NAME]}”", file.name or ""


def _refused(request: HttpRequest, where: str) -> HttpResponse:
    from webapp.api.problems import problem_response  # here: webapp.api imports webapp.core

    detail = (
        f"{where} holds a NUL character or half of a surrogate pair, which no database keeps. "
        "Take it out and send the rest again."
    )
    problem = Problem("unreadable_text", detail)
    if request.path_info.startswith(API):
        return problem_response(problem)
    return render(request, "400.html", {"detail": detail}, status=problem.status)


# Request attributes of other middlewares that reference the request.
REFERRING = ("user", "auser", "_messages", "htmx", "csp_nonce")


class ReleaseMiddleware:
    """Frees a request after its response.

    Several middlewares set request attributes that reference the request. Such a cycle, with the
    body and all loaded rows, lives until a collection of the oldest generation: after a burst of
    requests this uses much memory and fragments the heap.
    """

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Call the next handler, and break the request's cycles unless the response streams."""
        response = self.get_response(request)
        if not response.streaming:
            for name in REFERRING:
                vars(request).pop(name, None)
        return response


class ProblemMiddleware:
    """Turns a ``Problem`` of a view into a page or a message; the API has its own handler."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Call the next handler."""
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Return the response to a problem; None for other exceptions."""
        if not isinstance(exception, Problem):
            return None
        if exception.status == HTTPStatus.NOT_FOUND:
            return defaults.page_not_found(request, Http404(exception.detail))
        if exception.status == HTTPStatus.FORBIDDEN:
            return defaults.permission_denied(request, PermissionDenied(exception.detail))
        messages.warning(request, exception.detail)
        before = request.headers.get("Referer", "")
        is_other = urlsplit(before).path != request.path
        return redirect_to_own(request, before if is_other else "", reverse("home"))
