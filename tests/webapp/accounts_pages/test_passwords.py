"""Passwords: which are taken, how they are kept, changed by their owner and set by a link."""

import re
import time
from datetime import timedelta

import pytest
import time_machine
from django.conf import settings as product
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core import mail
from django.test import Client

from tests.webapp.conftest import client_of
from webapp.accounts.models import Membership, OpenSession, Team
from webapp.accounts.services import admin_ensure
from webapp.accounts.sign_in import link_path
from webapp.audit.models import Event
from webapp.core.clock import now

pytestmark = pytest.mark.django_db(databases="__all__")
OLD, NEW = "correct horse battery", "a fresh staple of words"
HASHERS = list(product.PASSWORD_HASHERS)


@pytest.fixture
def dora() -> User:
    return User.objects.create_user("dora", email="dora@example.org", password=OLD)


@pytest.fixture
def root() -> User:
    return User.objects.create_superuser("root", password=OLD)


def change(client: Client, old: str = OLD, new: str = NEW, again: str | None = None):
    sent = {"old_password": old, "new_password1": new, "new_password2": again or new}
    return client.post("/settings/password/", sent)


def follow(client: Client, path: str, new: str = NEW):
    return client.post(path, {"new_password1": new, "new_password2": new})


def is_in(client: Client) -> bool:
    return client.get("/settings/sessions/").status_code == 200


def events(kind: str) -> list[tuple[str, dict]]:
    return list(Event.objects.filter(kind=kind).values_list("actor", "detail"))


# How they are kept


def test_a_password_is_kept_by_argon2_and_an_older_hash_replaced_at_log_in(settings, client):
    settings.PASSWORD_HASHERS = HASHERS
    assert make_password(OLD).startswith("argon2$argon2id$v=19$m=19456,t=3,p=1$")
    user = User.objects.create(
        username="dora", password=make_password(OLD, hasher="pbkdf2_sha256")
    )
    answer = client.post("/login/", {"username": "dora", "password": OLD})
    user.refresh_from_db()
    assert answer.status_code == 302
    assert user.password.startswith("argon2$")
    assert user.check_password(OLD)
    assert is_in(client)


# Which are taken


def test_a_weak_password_is_refused_by_what_is_wrong_with_it(client):
    user = User.objects.create_user("basketball1", password=OLD)
    Membership.objects.create(user=user, team=Team.objects.create(name="The Rockets"))
    client.force_login(user)
    for password, words in (
        ("short-one", "at least 12 characters"),
        ("SlipwayAdmin26!", "little more than “slipway”"),
        ("rockets-2026", "little more than “rockets”"),
        ("basketball12", "too similar to the username"),
        ("qwerty123456", "too common"),
    ):
        answer = change(client, new=password)
        assert answer.status_code == 422, password
        assert words in answer.content.decode(), password
        assert User.objects.get().check_password(OLD), password


def test_a_link_and_the_administration_refuse_a_weak_one_too(client, dora, root):
    answer = follow(client, link_path(dora), new="short")
    assert answer.status_code == 422
    assert "at least 12 characters" in answer.content.decode()
    sent = {"username": "eve", "password1": "short", "password2": "short", "usable_password": "on"}
    page = client_of(root).post("/admin/auth/user/add/", sent)
    assert "at least 12 characters" in page.content.decode()
    assert not User.objects.filter(username="eve").exists()


def test_a_password_counts_as_it_was_typed_however_long_and_old_it_is(client, dora):
    for password in (
        "x" * 4 + " and some words " * 8,
        "ALL IN CAPITALS",
        "731846205917",
        "slipway beside a word",
        "пароль из многих слов",
    ):
        change(client_of(dora), old=OLD, new=password)
        dora.refresh_from_db()
        assert dora.check_password(password), password
        for other in (password.strip(), password.swapcase(), password[:64]):
            assert other == password or not dora.check_password(other), (password, other)
        dora.set_password(OLD)
        dora.save()
    with time_machine.travel(now() + timedelta(days=800)):
        sent = {"username": "dora", "password": OLD}
        assert client.post("/login/", sent)["Location"] == "/"


def test_every_field_of_a_password_hides_it_and_lets_a_manager_fill_it(client, dora, root):
    for visitor, path, number in (
        (client, "/login/", 1),
        (client, link_path(dora), 2),
        (client_of(root), "/settings/password/", 3),
    ):
        page = visitor.get(path).content.decode()
        fields = re.findall(r'<input[^>]*name="\w*password[^>]*>', page)
        assert len(fields) == number, path
        for field in fields:
            assert 'type="password"' in field, field
            assert re.search(r'autocomplete="(current|new)-password"', field), field


# Initial ones


def log_in(client: Client, name: str, password: str):
    return client.post("/login/", {"username": name, "password": password})


def test_the_first_admins_password_is_replaced_before_anything_else(client):
    initial = admin_ensure()
    assert log_in(client, "admin", initial)["Location"] == "/"
    assert client.get("/")["Location"] == "/settings/password/"
    assert "an initial password" in client.get("/settings/password/").content.decode()
    answer = change(client, old=initial, new=initial)
    assert answer.status_code == 422
    assert "This is your initial password. Choose another one." in answer.content.decode()
    assert client.get("/jobs/")["Location"] == "/settings/password/"

    assert change(client, old=initial, new=NEW)["Location"] == "/"
    page = client.get("/")
    assert page.status_code == 200
    assert "The initial one is no longer valid." in page.content.decode()
    other = Client()
    assert log_in(other, "admin", initial).status_code == 200
    assert log_in(other, "admin", NEW)["Location"] == "/"
    assert other.get("/jobs/").status_code == 200


def test_an_initial_password_that_nobody_used_expires_and_says_the_ways_out(client):
    initial = admin_ensure()
    given_at = now()
    with time_machine.travel(given_at + timedelta(days=6, hours=23), tick=False):
        assert log_in(Client(), "admin", initial)["Location"] == "/"
    with time_machine.travel(given_at + timedelta(days=7, minutes=1), tick=False):
        page = log_in(client, "admin", initial)
        assert page.status_code == 200
        assert "manage.py changepassword admin" in page.content.decode()
        assert f"expired on {now():%Y-%m-%d}" in page.content.decode()
        assert client.get("/")["Location"].startswith("/login/")
        wrong = log_in(client, "admin", f"{initial}x").content.decode()
        assert "expired" not in wrong  # said to whoever knows it alone
        user = User.objects.get()
        user.set_password(NEW)  # as ``manage.py changepassword`` does
        user.save()
        assert log_in(client, "admin", NEW)["Location"] == "/"
        assert client.get("/").status_code == 200


def test_a_password_that_the_administration_gives_is_initial_and_ones_own_is_not(root, client):
    browser, both = client_of(root), {"password1": OLD, "password2": OLD}
    browser.post("/admin/auth/user/add/", {"username": "eve", **both, "usable_password": "true"})
    eve = User.objects.get(username="eve")
    browser.post(f"/admin/auth/user/{root.pk}/password/", both)
    for _ in range(2):
        log_in(client, "eve", OLD)
        assert client.get("/jobs/")["Location"] == "/settings/password/"
        assert change(client, old=OLD, new=NEW)["Location"] == "/"
        assert client.get("/jobs/").status_code == 200
        browser.post(f"/admin/auth/user/{eve.pk}/password/", both)
        assert client.get("/jobs/")["Location"].startswith("/login/")
    log_in(client, "root", OLD)
    assert client.get("/jobs/").status_code == 200


# One's own


def test_a_change_keeps_this_browser_and_logs_out_every_other(dora):
    here, there = client_of(dora), client_of(dora)
    assert change(here)["Location"] == "/settings/sessions/"
    assert (is_in(here), is_in(there)) == (True, False)
    (row,) = OpenSession.objects.all()
    assert row.session_key == here.session.session_key
    assert Session.objects.count() == 1
    dora.refresh_from_db()
    assert dora.check_password(NEW)


def test_a_change_is_in_the_audit_without_the_password(dora):
    client_of(dora)
    change(client_of(dora))
    detail = {"account": "dora", "way": "own", "num_sessions_ended": 1}
    assert events("account.password") == [("dora", detail)]


def test_a_change_that_is_refused_changes_nothing(dora):
    for fields, words in [
        ({"old": "wrong"}, "old password was entered incorrectly"),
        ({"again": "another one entirely"}, "match"),
    ]:
        client = client_of(dora)
        answer = change(client, **fields)
        assert answer.status_code == 422, fields
        assert words in answer.content.decode(), fields
        assert events("account.password") == [], fields
        assert is_in(client), fields


def test_who_found_a_browser_open_cannot_guess_the_old_password(dora):
    client = client_of(dora)
    statuses = [change(client, old=f"guess {n}").status_code for n in range(12)]
    assert statuses == [422] * 10 + [429] * 2
    assert change(client).status_code == 429


# By a link


def test_a_link_sets_a_password_once_and_logs_every_browser_out(client, dora):
    before = client_of(dora)
    dora.refresh_from_db()
    path = link_path(dora)
    page = client.get(path)
    answer = follow(client, path)
    assert b"dora" in page.content
    assert answer["Location"] == "/login/"
    assert not is_in(before)
    assert not OpenSession.objects.exists()
    assert "password is set" in client.get("/login/").content.decode()
    assert client.post("/login/", {"username": "dora", "password": NEW}).status_code == 302
    assert (client.get(path).status_code, follow(client, path).status_code) == (410, 410)
    detail = {"account": "dora", "way": "link", "num_sessions_ended": 1}
    assert events("account.password") == [("dora", detail)]


def test_a_link_is_over_after_a_day(client, dora):
    path = link_path(dora)
    for hours, status in ((23, 200), (25, 410)):
        with time_machine.travel(now() + timedelta(hours=hours)):
            assert client.get(path).status_code == status


def test_a_link_is_over_once_its_account_has_logged_in_or_was_closed(client, dora):
    path = link_path(dora)
    User.objects.update(is_active=False)
    assert client.get(path).status_code == 410
    User.objects.update(is_active=True)
    assert client.get(path).status_code == 200
    path = link_path(dora)
    client.post("/login/", {"username": "dora", "password": OLD})
    assert client.get(path).status_code == 410


def test_what_is_no_link_is_told_so(client, dora):
    for uid in ["MQ", "MTAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDA", "x", "_-_", "4pm7"]:
        for token in ["x", "a-b", "0" * 300]:
            assert client.get(f"/password/new/{uid}/{token}/").status_code == 410


def test_nothing_of_a_link_is_stored(client, dora):
    path = link_path(dora)
    client.get(path)
    token = path.split("/")[-2]
    kept = [row.get_decoded() for row in Session.objects.all()]
    assert token not in str(kept) + str(Event.objects.values()) + str(User.objects.values())


# Who makes links


def chosen(*users: User) -> dict[str, object]:
    return {"action": "password_link", "_selected_action": [user.pk for user in users]}


def test_an_administrator_makes_a_link_that_is_shown_once(client, root, dora):
    page = client_of(root).post("/admin/auth/user/", chosen(dora))
    found = re.search(r"http://testserver(/password/new/[^<]+)<", page.content.decode())
    assert found is not None
    assert "no-store" in page["Cache-Control"]
    assert follow(client, found[1])["Location"] == "/login/"
    detail = {"account": "dora", "way": "administration"}
    assert events("account.password-link") == [("root", detail)]


def test_an_account_without_a_password_gets_its_first_one_by_a_link(client, root):
    fresh = User.objects.create_user("fresh")
    assert follow(client, link_path(fresh)).status_code == 302
    fresh.refresh_from_db()
    assert fresh.check_password(NEW)


def test_no_link_is_made_by_a_clerk_for_a_superuser_or_for_two_accounts(root, dora):
    page = client_of(root).post("/admin/auth/user/", chosen(root, dora), follow=True)
    assert "Choose exactly one account" in page.content.decode()
    from django.contrib.auth.models import Permission

    dora.is_staff = True
    dora.save()
    dora.user_permissions.set(Permission.objects.filter(content_type__app_label="auth"))
    page = client_of(dora).post("/admin/auth/user/", chosen(root), follow=True)
    assert "No link was created for root" in page.content.decode()
    assert "/password/new/" not in page.content.decode()


def test_a_site_without_e_mail_says_who_makes_a_link(client, settings):
    settings.HAS_EMAIL = False
    for page in (client.get("/password/forgotten/"), client.post("/password/forgotten/")):
        assert "This site sends no e-mail" in page.content.decode()
    assert mail.outbox == []


def mailed(num_least: int) -> list[mail.EmailMessage]:
    """Return what was sent, by threads that nobody waits for."""
    deadline = time.monotonic() + 30
    while len(mail.outbox) < num_least and time.monotonic() < deadline:
        time.sleep(0.01)
    return mail.outbox


def test_a_link_is_sent_to_the_address_of_an_account(client, dora, settings):
    settings.HAS_EMAIL = True
    page = client.post("/password/forgotten/", {"email": "Dora@example.org"})
    (sent,) = mailed(1)
    assert sent.to == ["dora@example.org"]
    assert "If an account has this address" in page.content.decode()
    found = re.search(r"http://testserver(/password/new/\S+)", str(sent.body))
    assert found is not None
    assert follow(client, found[1]).status_code == 302
    detail = {"account": "dora", "way": "e-mail"}
    assert events("account.password-link") == [("system:web", detail)]


def test_an_address_that_no_account_has_is_answered_in_the_same_way(client, dora, settings):
    settings.HAS_EMAIL = True
    pages = [
        client.post("/password/forgotten/", {"email": f"{name}@example.org"}).content
        for name in ("dora", "nobody")
    ]
    assert len({re.sub(rb'nonce="[^"]+"', b"", page) for page in pages}) == 1
    assert len(mailed(1)) == 1


def test_links_are_asked_for_ten_times_and_not_more(client, dora, settings):
    settings.HAS_EMAIL = True
    asked = [client.post("/password/forgotten/", {"email": "dora@example.org"}) for _ in range(11)]
    assert [page.status_code for page in asked] == [200] * 10 + [429]
    assert len(mailed(10)) == 10
