"""The key of an observed server: write-only, of this server alone, bound to its address."""

from django.db import transaction
from django.views.decorators.debug import sensitive_variables

from webapp.core import vault
from webapp.core.problems import InvalidProblem
from webapp.servers.models import ObservedServer

LONGEST_KEY = 4096  # characters


def _owner(team_id: str, url: str) -> str:
    """Return what an encrypted key is bound to: at another address it does not decrypt."""
    return f"observed server {team_id} {url}"


@sensitive_variables("key")
def sealed_key(team_id: str, url: str, key: str) -> str:
    """Return a key as it is stored; "" without one.

    Raises:
        InvalidProblem: it cannot stand in a header.
        VaultError: there is no key to encrypt it with.
    """
    if not key:
        return ""
    message = ""
    if len(key) > LONGEST_KEY:
        message = f"The key has {len(key):,} characters; it may have {LONGEST_KEY:,}."
    elif not (key.isascii() and key.isprintable() and " " not in key):
        message = (
            "The key cannot be sent: it holds blanks, line ends or letters beyond ASCII. Give the "
            "key alone."
        )
    if message:
        raise InvalidProblem("key", message, errors=[{"field": "key", "message": message}])
    return vault.seal(key, owner=_owner(team_id, url))


@sensitive_variables()
def key_of(row: ObservedServer) -> str:
    """Return a server's key, "" without one.

    Raises:
        VaultError: it cannot be decrypted, or was given for another address.
    """
    if not row.sealed_key:
        return ""
    return vault.unseal(row.sealed_key, owner=_owner(row.team_id, row.url))


def keys_reseal() -> int:
    """Encrypt every server's key again with the newest key of the site; return their number.

    Raises:
        VaultError: no key decrypts one of them.
    """
    with transaction.atomic():
        rows = list(ObservedServer.objects.select_for_update(of=("self",)).exclude(sealed_key=""))
        for row in rows:
            row.sealed_key = vault.reseal(row.sealed_key, owner=_owner(row.team_id, row.url))
        ObservedServer.objects.bulk_update(rows, ["sealed_key"])
    return len(rows)
