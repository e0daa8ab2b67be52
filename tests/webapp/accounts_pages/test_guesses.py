"""How often a password may be tried, and what whoever tried too often is told."""

from datetime import timedelta

import pytest
import time_machine
from django.contrib.auth.models import User
from django.test import Client

from webapp.accounts import login
from webapp.accounts.models import LoginTry
from webapp.core.clock import now
from webapp.core.problems import BusyProblem

pytestmark = pytest.mark.django_db(databases="__all__")
PASSWORD, WRONG = "correct horse battery", "wrong"


@pytest.fixture(autouse=True)
def dora(db) -> User:
    return User.objects.create_user("dora", password=PASSWORD, is_staff=True)


def guess(name: str = "dora", password: str = WRONG, page: str = "/login/", **extra):
    return Client().post(page, {"username": name, "password": password}, **extra)


def guess_all(count: int, **how) -> list[int]:
    return [guess(**how).status_code for _ in range(count)]


def test_of_twenty_tries_the_later_ten_are_refused_with_the_wait_named():
    assert guess_all(20) == [200] * 10 + [429] * 10
    answer = guess()
    assert "Try again in 15 minutes" in answer.content.decode()
    assert 800 < int(answer.headers["Retry-After"]) <= 901


def test_the_right_password_does_not_open_before_the_wait_is_over():
    guess_all(10)

    assert guess(password=PASSWORD).status_code == 429
    with time_machine.travel(now() + login.WINDOW + timedelta(seconds=2)):
        assert guess(password=PASSWORD).status_code == 302


def test_the_right_password_forgives_the_wrong_ones_before_it():
    guess_all(9)
    guess(password=PASSWORD)

    assert guess_all(10) == [200] * 10


def test_a_name_that_no_account_has_is_answered_in_the_same_way():
    known, unknown = guess_all(12), guess_all(12, name="nobody")

    assert known == unknown
    assert guess().content.count(b"Try again") == guess(name="nobody").content.count(b"Try again")


def test_case_and_spaces_make_no_other_account():
    guess_all(10)

    assert guess(name=" DORA ").status_code == 429


def test_nobody_locks_somebody_else_out_from_another_address():
    guess_all(10)

    answer = guess(password=PASSWORD, REMOTE_ADDR="192.0.2.7")
    assert answer.status_code == 302


def test_one_address_that_tries_many_accounts_is_refused(monkeypatch):
    monkeypatch.setattr(login, "PER_ADDRESS", 5)
    tried = [guess(name=f"person-{number}").status_code for number in range(6)]

    assert tried == [200] * 5 + [429]


def test_the_whole_site_has_a_limit(monkeypatch):
    monkeypatch.setattr(login, "PER_SITE", 3)
    tried = [guess(name=f"p{n}", REMOTE_ADDR=f"192.0.2.{n}").status_code for n in range(4)]

    assert tried == [200] * 3 + [429]


def test_the_door_of_the_administration_counts_too():
    assert guess_all(12, page="/admin/login/?next=/admin/")[-2:] == [429, 429]


def test_a_try_counts_before_its_password_is_looked_at():
    for _ in range(10):
        login.try_begin(name="dora", address="127.0.0.1")

    with pytest.raises(BusyProblem, match="no password is looked at"):
        login.try_begin(name="dora", address="127.0.0.1")


def test_what_no_limit_counts_any_more_is_forgotten():
    guess()
    with time_machine.travel(now() + login.WINDOW + timedelta(seconds=2)):
        assert login.tries_forget_old() == 1
    assert not LoginTry.objects.exists()


def test_the_name_that_was_tried_is_not_stored():
    guess(name="my-password-by-mistake")

    assert "mistake" not in repr(LoginTry.objects.values())
