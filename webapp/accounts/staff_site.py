"""Django's admin behind a password shown lately, with a row in the history for every write."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import structlog
from django.conf import settings
from django.contrib.admin import AdminSite
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.decorators import method_decorator
from django.utils.http import url_has_allowed_host_and_scheme

from webapp.accounts.login import GuardedLogin
from webapp.accounts.networks import lies_in
from webapp.accounts.session_signals import AUTHENTICATED_AT, address_of
from webapp.core.clock import now
from webapp.jobs.models import Event

log = structlog.get_logger(__name__)
RECENT_SECONDS = 15 * 60
LONGEST_PATH = 200


class StaffSite(AdminSite):
    """The administration: staff alone, and not with a session that was found open."""

    def has_permission(self, request: HttpRequest) -> bool:
        """Let staff in whose password was shown within the last 15 minutes."""
        is_near = lies_in(address_of(request), settings.ADMIN_NETWORKS)
        return is_near and super().has_permission(request) and was_confirmed(request)

    @method_decorator(login_not_required)
    def login(
        self,
        request: HttpRequest,
        extra_context: dict[str, Any] | None = None,  # noqa: ARG002 (Django's signature)
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Ask for the password with the product's own page, which limits guesses."""
        check_network(request)
        if self.has_permission(request):
            return redirect(_wanted(request))
        if request.user.is_authenticated and not super().has_permission(request):
            raise PermissionDenied("The administration is for staff alone.")
        context = {"again": request.user.is_authenticated}
        known = {"username": request.user.get_username()}
        return GuardedLogin.as_view(extra_context=context, initial=known)(request)

    def admin_view(self, view: Callable[..., Any], cacheable: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 (Django's signature)
        """Guard a view, and record what it writes in the transaction that writes it."""
        guarded = super().admin_view(view, cacheable)

        def recorded(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (the view's)
            check_network(request)
            if request.method in {"GET", "HEAD", "OPTIONS"} or not self.has_permission(request):
                return guarded(request, *args, **kwargs)
            with transaction.atomic():
                response = guarded(request, *args, **kwargs)
                if response.status_code == HttpResponse(status=302).status_code:
                    admin_write_record(request)
            return response

        return update_wrapper(recorded, guarded)


def check_network(request: HttpRequest) -> None:
    """Let nobody see the administration from a network that the site does not name.

    Raises:
        Http404: the request came from elsewhere; the log says from where.
    """
    address = address_of(request)
    if not lies_in(address, settings.ADMIN_NETWORKS):
        log.warning("administration asked for from another network", address=address)
        raise Http404("Nothing is here.")


def was_confirmed(request: HttpRequest) -> bool:
    """Return whether this session showed the password within the last 15 minutes."""
    at = request.session.get(AUTHENTICATED_AT, 0)
    return bool(now().timestamp() - at < RECENT_SECONDS)


def _wanted(request: HttpRequest) -> str:
    """Return the page that was asked for, if it is ours."""
    after = request.GET.get("next", "")
    is_ours = url_has_allowed_host_and_scheme(after, allowed_hosts={request.get_host()})
    return after if is_ours else "admin:index"


def admin_write_record(request: HttpRequest) -> None:
    """Write who changed what in the administration; values are not written, they may be secret."""
    fields = sorted(set(request.POST) - {"csrfmiddlewaretoken"})
    Event.objects.create(
        at=now(),
        team_id="",
        kind="admin.write",
        subject="",
        actor=request.user.get_username()[:80],
        detail={"path": request.path[:LONGEST_PATH], "fields": fields[:100]},
    )
