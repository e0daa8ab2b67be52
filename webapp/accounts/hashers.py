"""Password hashing: Argon2id with parameters for the memory of a small server."""

from django.contrib.auth.hashers import (
    Argon2PasswordHasher,
    PBKDF2PasswordHasher,
    make_password,
)
from django.contrib.auth.models import User

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
