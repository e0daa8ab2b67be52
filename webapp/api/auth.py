"""Who calls the API: a host by its credential, a person by the session."""

from django.http import HttpRequest
from ninja.security import HttpBearer

from webapp.core.problems import UnauthorizedProblem
from webapp.hosts.models import Host
from webapp.hosts.services import UNKNOWN_CREDENTIAL, host_by_credential


class HostAuth(HttpBearer):
    """A host's credential as bearer token; the host becomes ``request.auth``."""

    openapi_name = "HostCredential"

    def authenticate(self, _request: HttpRequest, token: str) -> Host:
        """Return the host.

        Raises:
            UnauthorizedProblem: no host has this credential.
        """
        host = host_by_credential(token)
        if host is None:
            raise UnauthorizedProblem(*UNKNOWN_CREDENTIAL)
        return host


def calling_host(request: HttpRequest) -> Host:
    """Return the host that ``HostAuth`` let in."""
    host: Host = request.auth  # type: ignore[attr-defined]  # ninja sets it
    return host
