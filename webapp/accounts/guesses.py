"""How often a password may be tried: per account and address, and on the whole site.

A try counts before the password is looked at, so that a hundred at once get no more than one
after the other. A name that no account has counts like any other: the answer tells nothing.
An account is never locked for other addresses: nobody can lock somebody else out from afar,
short of the limit of the whole site.
"""

import hashlib
from datetime import timedelta

from django.db import transaction

from webapp.accounts.models import LoginTry
from webapp.core.clock import now
from webapp.core.problems import BusyProblem

WINDOW = timedelta(minutes=15)
PER_ACCOUNT_AND_ADDRESS, PER_ADDRESS, PER_SITE = 10, 100, 1000


def try_begin(*, name: str, address: str) -> LoginTry:
    """Count a try and return it.

    Raises:
        BusyProblem: too many were wrong; ``retry_after_seconds`` says when the next may come.
    """
    account = hashlib.sha256(name.strip().casefold().encode()).hexdigest()
    with transaction.atomic():
        mine = LoginTry.objects.create(account=account, address=address, at=now())
        wait = max(
            _wait_seconds(PER_ACCOUNT_AND_ADDRESS, account=account, address=address),
            _wait_seconds(PER_ADDRESS, address=address),
            _wait_seconds(PER_SITE),
        )
        if wait:
            mine.delete()
    if wait:
        raise BusyProblem("too_many_tries", wait_sentence(wait), retry_after_seconds=wait)
    return mine


def _wait_seconds(most: int, **which: str) -> int:
    """Return after how many seconds one more try fits, counting the one that was just made."""
    instant = now()
    recent = LoginTry.objects.filter(at__gt=instant - WINDOW, **which).order_by("-at", "-pk")
    too_old = recent.values_list("at", flat=True)[most : most + 1]
    return max((1 + int((at + WINDOW - instant).total_seconds()) for at in too_old), default=0)


def wait_sentence(seconds: int) -> str:
    """Return what whoever has to wait is told."""
    minutes = -(-seconds // 60)
    return (
        f"Too many wrong passwords. Try again in {minutes} minute{'s' if minutes > 1 else ''}; "
        "until then no password is looked at."
    )


def tries_forgive(tried: LoginTry) -> None:
    """Forget the tries of an account from an address: the right password came from there."""
    LoginTry.objects.filter(account=tried.account, address=tried.address).delete()


def tries_forget_old() -> int:
    """Forget what no limit counts any more; return how many."""
    return LoginTry.objects.filter(at__lte=now() - WINDOW).delete()[0]
