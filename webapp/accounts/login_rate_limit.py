"""Rate limits of password attempts: per account and address, per address, and per site.

An attempt is counted before the password is checked, so that parallel attempts gain nothing.
Unknown names are counted like others, so that the response reveals nothing. An account is never
locked for other addresses, so nobody can lock out somebody else, except through the limit of the
whole site.
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
    """Count an attempt and return it.

    Raises:
        BusyProblem: too many attempts; ``retry_after_seconds`` says when the next is allowed.
    """
    account = hashlib.sha256(name.strip().casefold().encode()).hexdigest()
    with transaction.atomic():
        attempt = LoginTry.objects.create(account=account, address=address, at=now())
        wait = max(
            _wait_seconds(PER_ACCOUNT_AND_ADDRESS, account=account, address=address),
            _wait_seconds(PER_ADDRESS, address=address),
            _wait_seconds(PER_SITE),
        )
        if wait:
            attempt.delete()
    if wait:
        raise BusyProblem("too_many_tries", wait_sentence(wait), retry_after_seconds=wait)
    return attempt


def _wait_seconds(most: int, **which: str) -> int:
    """Return the seconds until another attempt is allowed, including the one just counted."""
    instant = now()
    recent = LoginTry.objects.filter(at__gt=instant - WINDOW, **which).order_by("-at", "-pk")
    too_old = recent.values_list("at", flat=True)[most : most + 1]
    return max((1 + int((at + WINDOW - instant).total_seconds()) for at in too_old), default=0)


def wait_sentence(seconds: int) -> str:
    """Return the message for a user who has to wait."""
    minutes = -(-seconds // 60)
    return (
        f"Too many wrong passwords. Try again in {minutes} minute{'s' if minutes > 1 else ''}; "
        "until then no password is looked at."
    )


def tries_forgive(tried: LoginTry) -> None:
    """Delete the attempts of an account from an address, after a correct password."""
    LoginTry.objects.filter(account=tried.account, address=tried.address).delete()


def tries_forget_old() -> int:
    """Delete attempts outside the window; return their number."""
    return LoginTry.objects.filter(at__lte=now() - WINDOW).delete()[0]
