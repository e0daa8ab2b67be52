"""Notices that this database is a backup: hosts have seen a higher epoch than it knows.

The epoch is a number that rises with every credential that is revoked or replaced, and by
``manage.py epoch raise``. Every beat takes it to the hosts with a proof that only this site can
make, and brings back what they have seen. A higher one with its proof means that the database is
older than what the site once said: nothing is started until somebody raises the epoch, and
credentials that had been revoked by then do not come back, for their hosts never saw it.
"""

import hashlib
import hmac
from collections.abc import Iterable

import structlog
from django.conf import settings
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import F

from runners.messages import EpochShown
from webapp.core.clock import now
from webapp.hosts import redis_users
from webapp.hosts.models import EnrolmentToken, Epoch, Host
from webapp.jobs.models import Event

log = structlog.get_logger(__name__)
RESTORED = (
    "This site was restored from a backup: its hosts have seen what it does not know. Nothing is "
    "started until an operator of the server runs `python3 manage.py epoch raise`."
)


def epoch() -> Epoch:
    """Return the site's epoch, made on first use."""
    return Epoch.objects.get_or_create(pk=1)[0]


def shown(number: int) -> EpochShown:
    """Return an epoch with the proof that this site said it."""
    text = f"epoch:{number}".encode()
    proof = hmac.new(settings.SECRET_KEY.encode(), text, hashlib.sha256).hexdigest()
    return EpochShown(number=number, proof=proof)


def is_authentic(said: EpochShown) -> bool:
    """Return whether this site once said that epoch."""
    return hmac.compare_digest(shown(said.number).proof, said.proof)


def is_restored() -> bool:
    """Return whether the database is older than what the site once said."""
    return Epoch.objects.filter(highest_seen__gt=F("number")).exists()


def epoch_advance() -> None:
    """Raise the epoch, because a credential that was good is no longer."""
    epoch()
    Epoch.objects.filter(pk=1).update(number=F("number") + 1)


def epochs_hear(said: Iterable[EpochShown]) -> None:
    """Note the highest epoch that hosts have seen; told once when it is above ours."""
    highest = max((each.number for each in said if is_authentic(each)), default=0)
    if highest <= epoch().number:
        return
    rows = Epoch.objects.filter(pk=1, highest_seen__lt=highest, number__lt=highest)
    if rows.update(highest_seen=highest):
        log.error("hosts have seen a higher epoch: this database is a backup", seen=highest)
        _record("site.restored", "system:beats", {"seen": highest})


def epoch_raise(*, by: str) -> list[Host]:
    """Go on after a restoration; return the hosts whose credentials ended with it.

    Hosts that have not shown the highest epoch may have been revoked after the backup was made:
    they enrol again. So does everybody else who comes back with a backup: sessions end, and
    tokens that were not used are good for nothing.
    """
    with transaction.atomic():
        known = Epoch.objects.select_for_update().get(pk=epoch().pk)
        is_backup = known.highest_seen > known.number
        ended = _end_credentials(known.highest_seen) if is_backup else []
        known.number = max(known.number, known.highest_seen) + 1
        known.highest_seen = 0
        known.save()
        detail = {"number": known.number, "hosts": [host.slug for host in ended][:100]}
        _record("site.epoch_raised", by, detail)
    for host in ended:
        redis_users.withdraw(host)
    return ended


def _end_credentials(highest: int) -> list[Host]:
    late = list(Host.objects.exclude(credential_hash="").filter(epoch_seen__lt=highest))
    rows = Host.objects.filter(pk__in=[host.pk for host in late])
    rows.update(credential_hash="", command_salt="", redis_secret_hash="", rotation_asked_at=None)
    EnrolmentToken.objects.filter(used_at=None, revoked_at=None).update(revoked_at=now())
    Session.objects.all().delete()
    return late


def _record(kind: str, actor: str, detail: dict[str, object]) -> None:
    Event.objects.create(at=now(), team_id="", kind=kind, actor=actor[:80], detail=detail)
