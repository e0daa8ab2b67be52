"""Middleware: problems become messages, and finished requests are freed."""

from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlsplit

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.views import defaults

from webapp.core.own_pages import redirect_to_own
from webapp.core.problems import Problem

GetResponse = Callable[[HttpRequest], HttpResponse]

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
