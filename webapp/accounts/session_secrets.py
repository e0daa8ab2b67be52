"""Secrets to be shown to one browser on a later page, encrypted in its session.

Sessions are in the database and its backups; the encryption keys are not.
"""

from django.http import HttpRequest

from webapp.core import vault


def session_secret_keep(request: HttpRequest, kind: str, owner_id: str, text: str) -> None:
    """Store an object's secret in the session, replacing the last one of its kind."""
    request.session[kind] = {owner_id: vault.seal(text)}


def session_secret_of(request: HttpRequest, kind: str, owner_id: str) -> str:
    """Return an object's secret from the session, or "" if there is none.

    The result is also "" if the encryption key is gone; the user can create a new secret.
    """
    sealed = (request.session.get(kind) or {}).get(owner_id, "")
    try:
        return vault.unseal(sealed) if sealed else ""
    except vault.VaultError:
        return ""
