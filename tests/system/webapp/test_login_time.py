"""How long a refusal takes tells nobody whether a name has an account."""

import statistics
import time

import pytest
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import User
from django.test import Client

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
ROUNDS = 7
LEAST_SECONDS = 0.02  # a hash that is worth its name takes longer; a missing one would not
# Of the medians: what a request's own noise on a busy machine may be, and a left-out hash is not.
MOST_APART = 1.5
KINDS = ("known", "unknown", "closed", "without-a-password")
HASHERS = [
    "webapp.accounts.sign_in.SmallArgon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]


@pytest.fixture(autouse=True)
def _real_hasher(settings) -> None:
    settings.PASSWORD_HASHERS = HASHERS


@pytest.fixture
def people(db, _real_hasher) -> None:
    User.objects.create_user("known", password="a-right-password")
    User.objects.create_user("closed", password="a-right-password", is_active=False)
    User.objects.create_user("without-a-password")


def seconds_of(name: str, number: int) -> float:
    """Return how long the refusal of a wrong password takes, by the processor's own clock."""
    client = Client(REMOTE_ADDR=f"192.0.2.{number}")
    client.get("/login/")
    began = time.thread_time()
    answer = client.post("/login/", {"username": name, "password": "a-wrong-password"})
    assert answer.status_code == 200
    return time.thread_time() - began


def test_a_refusal_takes_as_long_for_every_kind_of_name(people):
    assert_even(KINDS)


def test_it_does_while_an_account_has_the_hash_of_an_older_version(people):
    old = make_password("a-right-password", hasher="pbkdf2_sha256")
    User.objects.create(username="old", password=old)

    assert_even((*KINDS, "old"))


def assert_even(kinds: tuple[str, ...]) -> None:
    """The refusals of these names take as long as each other."""
    seconds_of("known", 200)  # what is loaded on first use
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS):
        for kind in kinds:
            taken[kind].append(seconds_of(kind, number))
    medians = {kind: statistics.median(times) for kind, times in taken.items()}
    assert min(medians.values()) > LEAST_SECONDS, medians
    assert max(medians.values()) / min(medians.values()) < MOST_APART, medians
