"""Safe redirects to URLs from requests: only to pages of this site."""

from urllib.parse import urlsplit

from django.http import HttpRequest, HttpResponseRedirect
from django.utils.http import url_has_allowed_host_and_scheme


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
