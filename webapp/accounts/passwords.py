"""Password hashing, and changes by the owner or through a one-time link."""

from django.contrib.auth.hashers import (
    Argon2PasswordHasher,
    PBKDF2PasswordHasher,
    make_password,
)
from django.contrib.auth.models import User
from django.contrib.auth.tokens import default_token_generator
from django.db import transaction
from django.urls import reverse
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode

from webapp.accounts.models import OpenSession
from webapp.accounts.sessions import sessions_end
from webapp.core.clock import now
from webapp.jobs.models import Event

# Password hashing: Argon2id with parameters for the memory of a small server.


OLD = f"{PBKDF2PasswordHasher.algorithm}$"


class SmallArgon2PasswordHasher(Argon2PasswordHasher):
    """Argon2id with 19 MiB, three passes and one lane.

    Above OWASP's minimum (19 MiB, two passes; Password Storage Cheat Sheet). With Django's
    100 MiB, a hundred simultaneous logins would take 10 GB.
    """

    memory_cost = 19_456  # KiB
    time_cost = 3
    parallelism = 1


def refusal_even_out(name: str, password: str) -> None:
    """Equalise the time of a rejected password, so that it does not reveal the kind of account.

    While accounts with PBKDF2 hashes of an older version exist (replaced at their next login),
    every rejection computes both hashes.
    """
    old = User.objects.filter(password__startswith=OLD)
    if not old.exists():
        return
    if old.filter(username=name).exists():
        make_password(password)
    else:
        hasher = PBKDF2PasswordHasher()
        hasher.encode(password, hasher.salt())


SYSTEM = "system:web"


def password_set(
    *, user: User, password: str, way: str, actor: str, session_key: str = ""
) -> None:
    """Set an account's password, and log out every browser but that of ``session_key``.

    ``way`` is "own" or "link"; it and the actor are recorded in the audit.
    """
    with transaction.atomic():
        user.set_password(password)
        user.save(update_fields=["password"])
        others = OpenSession.objects.filter(user=user).exclude(session_key=session_key)
        num_ended = sessions_end(others)
        event_write(
            kind="account.password", user=user, actor=actor, way=way, num_sessions_ended=num_ended
        )


def event_write(*, kind: str, user: User, actor: str, **detail: object) -> None:
    """Record an event of an account in the audit, which superusers can read."""
    Event.objects.create(
        at=now(),
        team_id="",
        kind=kind,
        subject=str(user.pk),
        actor=actor[:80],
        detail={"account": user.get_username()[:80], **detail},
    )


def session_renamed(before: str, after: str) -> None:
    """Update the row of a browser whose session key changed."""
    OpenSession.objects.filter(session_key=before).update(session_key=after)


def link_path(user: User) -> str:
    """Return the path of an account's password reset link."""
    uid = urlsafe_base64_encode(force_bytes(user.pk))
    token = default_token_generator.make_token(user)
    return reverse("password-new", kwargs={"uid": uid, "token": token})


def user_of_link(uid: str, token: str) -> User | None:
    """Return the user of a reset link; None if it is used, expired or invalid."""
    try:
        number = int(urlsafe_base64_decode(uid).decode())
        user = User.objects.get(pk=number, is_active=True)
    except (ValueError, OverflowError, User.DoesNotExist):
        return None
    return user if default_token_generator.check_token(user, token) else None
