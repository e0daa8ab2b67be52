"""Detect a restored database: its hosts have seen a higher epoch than it contains.

The epoch is a counter that rises with every revoked or replaced credential and with
``manage.py epoch raise``. Every heartbeat reply carries it to the host with an HMAC that only
this site can make; every heartbeat returns the highest epoch that the host has seen. A higher
epoch with a valid HMAC means that the database is older than that reply: no job is started until
an operator raises the epoch. Hosts that never saw the highest epoch may have been revoked since
the backup, so their credentials are ended.
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
    "This site was restored from a backup: its hosts have seen newer data. Nothing is "
    "started until an operator of the server runs `python3 manage.py epoch raise`."
)


def epoch() -> Epoch:
    """Return the site's epoch, created on first use."""
    return Epoch.objects.get_or_create(pk=1)[0]


def shown(number: int) -> EpochShown:
    """Return an epoch number with this site's HMAC as proof."""
    text = f"epoch:{number}".encode()
    proof = hmac.new(settings.SECRET_KEY.encode(), text, hashlib.sha256).hexdigest()
    return EpochShown(number=number, proof=proof)


def is_authentic(said: EpochShown) -> bool:
    """Return whether the proof of an epoch is this site's HMAC."""
    return hmac.compare_digest(shown(said.number).proof, said.proof)


def is_restored() -> bool:
    """Return whether the database is older than an epoch that the site sent."""
    return Epoch.objects.filter(highest_seen__gt=F("number")).exists()


def epoch_advance() -> None:
    """Increment the epoch after a credential was revoked or replaced."""
    epoch()
    Epoch.objects.filter(pk=1).update(number=F("number") + 1)


def epochs_record(said: Iterable[EpochShown]) -> None:
    """Store the highest epoch that hosts have seen; log once when it exceeds the site's."""
    highest = max((each.number for each in said if is_authentic(each)), default=0)
    if highest <= epoch().number:
        return
    rows = Epoch.objects.filter(pk=1, highest_seen__lt=highest, number__lt=highest)
    if rows.update(highest_seen=highest):
        log.error("hosts have seen a higher epoch: this database is a backup", seen=highest)
        _record("site.restored", "system:beats", {"seen": highest})


def epoch_raise(*, by: str) -> list[Host]:
    """Raise the epoch after a restoration; return the hosts whose credentials were ended.

    Hosts that have not shown the highest epoch may have been revoked after the backup was made:
    they must enrol again. All sessions end, and unused enrolment tokens are revoked.
    """
    with transaction.atomic():
        site = Epoch.objects.select_for_update().get(pk=epoch().pk)
        is_backup = site.highest_seen > site.number
        ended = _end_credentials(site.highest_seen) if is_backup else []
        site.number = max(site.number, site.highest_seen) + 1
        site.highest_seen = 0
        site.save()
        detail = {"number": site.number, "hosts": [host.slug for host in ended][:100]}
        _record("site.epoch_raised", by, detail)
    for host in ended:
        redis_users.withdraw(host)
    return ended


def _end_credentials(highest: int) -> list[Host]:
    outdated = list(Host.objects.exclude(credential_hash="").filter(epoch_seen__lt=highest))
    rows = Host.objects.filter(pk__in=[host.pk for host in outdated])
    rows.update(credential_hash="", command_salt="", redis_secret_hash="", rotation_asked_at=None)
    EnrolmentToken.objects.filter(used_at=None, revoked_at=None).update(revoked_at=now())
    Session.objects.all().delete()
    return outdated


def _record(kind: str, actor: str, detail: dict[str, object]) -> None:
    Event.objects.create(at=now(), team_id="", kind=kind, actor=actor[:80], detail=detail)
