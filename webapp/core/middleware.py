"""A refusal that no page expected becomes a message on the page before, never a traceback."""

from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlsplit

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views import defaults

from webapp.core.problems import Problem

GetResponse = Callable[[HttpRequest], HttpResponse]


class ProblemMiddleware:
    """Answers problems that a view lets through; the API has its own answer."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pass the request on."""
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Return what a person sees of a problem; None for anything else."""
        if not isinstance(exception, Problem):
            return None
        if exception.status == HTTPStatus.NOT_FOUND:
            return defaults.page_not_found(request, Http404(exception.detail))
        if exception.status == HTTPStatus.FORBIDDEN:
            return defaults.permission_denied(request, PermissionDenied(exception.detail))
        messages.warning(request, exception.detail)
        return redirect(_page_before(request))


def _page_before(request: HttpRequest) -> str:
    """Return the page that the request came from, if it is ours and another one."""
    before = request.headers.get("Referer", "")
    is_ours = url_has_allowed_host_and_scheme(before, allowed_hosts={request.get_host()})
    is_other = urlsplit(before).path != request.path
    return before if is_ours and is_other else "home"
