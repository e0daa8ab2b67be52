"""API authentication: hosts by bearer credential, people by session."""

from typing import Any

from django.http import HttpRequest
from ninja.security import HttpBearer, SessionAuth

from webapp.accounts.sessions import address_of
from webapp.core.pace import HOST, PERSON, STRANGER, calls
from webapp.core.problems import UnauthorizedProblem
from webapp.hosts.models import Host
from webapp.hosts.services import UNKNOWN_CREDENTIAL, host_by_credential


class HostAuth(HttpBearer):
    """A host's credential as bearer token; the host becomes ``request.auth``."""

    openapi_name = "HostCredential"

    def authenticate(self, request: HttpRequest, token: str) -> Host:
        """Return the host.

        Raises:
            UnauthorizedProblem: no host has this credential.
            BusyProblem: the caller exceeds its rate limit.
        """
        host = host_by_credential(token)
        if host is None:
            calls.keep(STRANGER, address_of(request))
            raise UnauthorizedProblem(*UNKNOWN_CREDENTIAL)
        calls.keep(HOST, host.pk)
        return host


class PersonAuth(SessionAuth):
    """A logged-in person, with a rate limit for people and their scripts."""

    def authenticate(self, request: HttpRequest, key: str | None) -> Any:  # noqa: ANN401 (ninja's)
        """Return the user, or None.

        Raises:
            BusyProblem: the user exceeds the rate limit.
        """
        person = super().authenticate(request, key)
        if person is not None:
            calls.keep(PERSON, str(person.pk))
        return person


def calling_host(request: HttpRequest) -> Host:
    """Return the host that ``HostAuth`` authenticated."""
    host: Host = request.auth  # type: ignore[attr-defined]  # ninja sets it
    return host
