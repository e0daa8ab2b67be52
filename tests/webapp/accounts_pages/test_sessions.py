"""Sessions: how they end, how browsers are named, guessed passwords, and the pages around."""

from datetime import timedelta

import pytest
import time_machine
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.middleware.csrf import CSRF_SESSION_KEY
from django.template.loader import render_to_string
from django.test import Client

from tests.webapp.conftest import client_of
from webapp.accounts import sign_in
from webapp.accounts.models import LoginTry, Membership, OpenSession, Role, browser_words
from webapp.accounts.sign_in import sessions_forget_ended
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.pace import Pace
from webapp.core.problems import BusyProblem
from webapp.plans.models import Plan

# Where a person is logged in: seen, ended, and over after half a day.


pytestmark = pytest.mark.django_db(databases="__all__")
PASSWORD, WRONG = "correct horse battery", "wrong"


def is_in(client: Client) -> bool:
    return client.get("/settings/sessions/").status_code == 200


def end(client: Client, which: str, password: str = PASSWORD) -> None:
    client.post("/settings/sessions/end/", {"session": which, "password": password})


@pytest.fixture
def dora(team) -> User:
    """A person of alice's team who has a password."""
    user = User.objects.create_user("dora", password=PASSWORD)
    Membership.objects.create(user=user, team=team, role=Role.PRACTITIONER)
    return user


def test_the_page_lists_every_browser_of_the_person_and_nobody_elses(alice, bob):
    here, _ = client_of(alice), client_of(alice)
    client_of(bob)
    listed = here.get("/settings/sessions/").context["open_sessions"]
    assert [row.user for row in listed] == [alice, alice]


def test_a_session_or_every_other_one_is_out_at_its_next_request(dora):
    here, there = client_of(dora), client_of(dora)
    row = OpenSession.objects.get(session_key=there.session.session_key)
    end(here, row.pk, WRONG)
    assert (is_in(here), is_in(there)) == (True, True)
    end(here, row.pk)
    assert (is_in(here), is_in(there)) == (True, False)
    here, others = client_of(dora), [client_of(dora) for _ in range(3)]
    end(here, "others")
    assert is_in(here)
    assert not any(is_in(other) for other in others)


def test_nobody_ends_the_session_of_somebody_else(dora, bob):
    theirs = client_of(bob)
    row = OpenSession.objects.get(user=bob)
    end(client_of(dora), row.pk)
    assert is_in(theirs)


def test_who_found_a_browser_open_guesses_no_password_on_the_page_of_sessions(dora):
    here, there = client_of(dora), client_of(dora)
    row = OpenSession.objects.get(session_key=there.session.session_key)
    for _ in range(10):
        end(here, row.pk, WRONG)
    end(here, row.pk)
    assert is_in(there)
    assert Event.objects.filter(kind="account.refused", actor="dora").count() == 10


def test_the_key_of_a_session_is_on_no_page(alice):
    here, there = client_of(alice), client_of(alice)
    text = here.get("/settings/sessions/").content.decode()
    assert there.session.session_key not in text
    assert here.session.session_key not in text


def test_a_session_is_over_after_twelve_hours_without_use(alice):
    client = client_of(alice)
    with time_machine.travel(now() + timedelta(hours=13)):
        assert not is_in(client)
    client, began = client_of(alice), now()
    for hours in (8, 16, 24):
        with time_machine.travel(began + timedelta(hours=hours)):
            assert is_in(client)


def test_a_session_in_use_is_over_after_a_month(alice, monkeypatch):
    assert timedelta(days=30) == sign_in.LONGEST_SESSION
    monkeypatch.setattr(sign_in, "LONGEST_SESSION", timedelta(hours=20))
    client, began = client_of(alice), now()
    for hours, expected in ((8, True), (16, True), (19, True), (20.1, False)):
        with time_machine.travel(began + timedelta(hours=hours)):
            assert is_in(client) is expected, hours


def test_pages_are_not_cached_and_the_end_of_a_session_clears_the_browser(alice):
    client = client_of(alice)
    for path in ("/", "/jobs/", "/plans/", "/docs/", "/settings/password/", "/nowhere/"):
        answer = client.get(path)
        assert "no-store" in answer["Cache-Control"], path
        assert "Clear-Site-Data" not in answer, path
    assert client.post("/logout/")["Clear-Site-Data"] == '"cache", "storage"'
    ended = client_of(alice)
    Session.objects.all().delete()
    assert ended.get("/jobs/")["Clear-Site-Data"] == '"cache", "storage"'
    assert "Clear-Site-Data" not in Client().get("/login/")


def test_a_message_is_kept_in_a_cookie_of_this_host_behind_tls(alice, settings):
    for is_secure, name in ((False, "messages"), (True, "__Host-messages")):
        client = client_of(alice)
        settings.SESSION_COOKIE_SECURE = is_secure
        sent = client.post("/settings/sessions/end/", {"session": "others"}).cookies[name]
        assert bool(sent["secure"]) is is_secure
        assert (sent["httponly"], sent["samesite"], sent["path"]) == (True, "Lax", "/")
        assert "No browser was logged out" in client.get("/settings/sessions/").content.decode()
        settings.SESSION_COOKIE_SECURE = False


def test_a_new_password_ends_every_browser(alice):
    browsers = [client_of(alice) for _ in range(2)]
    User.objects.get(pk=alice.pk).set_password("battery staple")
    user = User.objects.get(pk=alice.pk)
    user.set_password("battery staple")
    user.save()
    assert not any(is_in(browser) for browser in browsers)


def test_a_session_of_a_closed_account_does_not_return_with_it(alice):
    client = client_of(alice)
    for is_active in (False, True):
        alice.is_active = is_active
        alice.save()
        assert not is_in(client), is_active
    assert not OpenSession.objects.exists()


def test_what_is_over_is_forgotten(alice):
    client_of(alice)
    with time_machine.travel(now() + timedelta(hours=13)):
        assert sessions_forget_ended() == 1
    assert not OpenSession.objects.exists()


def test_a_visitor_has_no_session_and_a_form_token_of_this_host_alone(client):
    page = client.get("/login/")
    assert "csrfmiddlewaretoken" in page.content.decode()
    assert list(client.cookies) == ["visitor"]
    assert client.cookies["visitor"]["httponly"]
    assert Session.objects.count() == 0


def test_tokens_of_whoever_is_logged_in_are_in_the_session_and_in_no_cookie():
    User.objects.create_user("dora", password="correct horse")
    client = Client(enforce_csrf_checks=True)
    client.get("/login/")
    secret = client.cookies["visitor"].value
    form = {"username": "dora", "password": "correct horse"}
    client.post("/login/", form | {"csrfmiddlewaretoken": secret})
    client.cookies["visitor"] = "x" * 32
    page = client.get("/")
    assert client.session.get_expiry_age() == 12 * 3600
    assert client.session[CSRF_SESSION_KEY] != secret
    assert page.status_code == 200
    assert client.post("/logout/", {"csrfmiddlewaretoken": "x" * 32}).status_code == 403


def test_a_log_in_without_the_visitors_token_is_refused():
    User.objects.create_user("dora", password="correct horse")
    client = Client(enforce_csrf_checks=True)
    answer = client.post("/login/", {"username": "dora", "password": "correct horse"})
    assert answer.status_code == 403


# How often a password may be tried, and what whoever tried too often is told.


@pytest.fixture
def account(db) -> User:
    return User.objects.create_user("dora", password=PASSWORD, is_staff=True)


def guess(name: str = "dora", password: str = WRONG, page: str = "/login/", **extra):
    return Client().post(page, {"username": name, "password": password}, **extra)


def guess_all(count: int, **how) -> list[int]:
    return [guess(**how).status_code for _ in range(count)]


def test_of_twenty_tries_the_later_ten_are_refused_until_the_wait_is_over(account):
    assert guess_all(20) == [200] * 10 + [429] * 10
    answer = guess()
    assert "Try again in 15 minutes" in answer.content.decode()
    assert 800 < int(answer.headers["Retry-After"]) <= 901
    guess_all(10)
    assert guess(name=" DORA ").status_code == 429
    guess_all(10)
    answer = guess(password=PASSWORD, REMOTE_ADDR="192.0.2.7")
    assert answer.status_code == 302
    guess_all(10)
    assert guess(password=PASSWORD).status_code == 429
    with time_machine.travel(now() + sign_in.WINDOW + timedelta(seconds=2)):
        assert guess(password=PASSWORD).status_code == 302


def test_a_clock_that_was_set_back_locks_nobody_out_until_it_has_caught_up(account):
    with time_machine.travel(now() + timedelta(hours=1)):
        assert guess_all(11)[-1] == 429
    assert guess(password=PASSWORD).status_code == 302


def test_the_right_password_forgives_the_wrong_ones_before_it(account):
    guess_all(9)
    guess(password=PASSWORD)
    assert guess_all(10) == [200] * 10


def test_a_name_that_no_account_has_is_answered_in_the_same_way(account):
    known, unknown = guess_all(12), guess_all(12, name="nobody")
    assert known == unknown
    assert guess().content.count(b"Try again") == guess(name="nobody").content.count(b"Try again")


def test_one_address_that_tries_many_accounts_is_refused(account, monkeypatch):
    monkeypatch.setattr(sign_in, "PER_ADDRESS", 5)
    tried = [guess(name=f"person-{number}").status_code for number in range(6)]
    assert tried == [200] * 5 + [429]


def test_the_whole_site_has_a_limit(account, monkeypatch):
    monkeypatch.setattr(sign_in, "PER_SITE", 3)
    tried = [guess(name=f"p{n}", REMOTE_ADDR=f"192.0.2.{n}").status_code for n in range(4)]
    assert tried == [200] * 3 + [429]


def test_the_door_of_the_administration_counts_too(account):
    assert guess_all(12, page="/admin/login/?next=/admin/")[-2:] == [429, 429]


def test_a_try_counts_before_its_password_is_looked_at(account):
    for _ in range(10):
        sign_in.try_begin(name="dora", address="127.0.0.1")
    with pytest.raises(BusyProblem, match="no password is checked"):
        sign_in.try_begin(name="dora", address="127.0.0.1")


def test_what_no_limit_counts_any_more_is_forgotten(account):
    guess()
    with time_machine.travel(now() + sign_in.WINDOW + timedelta(seconds=2)):
        assert sign_in.tries_forget_old() == 1
    assert not LoginTry.objects.exists()


def test_the_name_that_was_tried_is_not_stored(account):
    guess(name="my-password-by-mistake")
    assert "mistake" not in repr(LoginTry.objects.values())


def test_every_login_and_refusal_is_in_the_audit_but_no_name_of_nobody(account, monkeypatch):
    monkeypatch.setattr(sign_in, "limited_addresses", Pace())
    guess(name="my-password-by-mistake")
    guess()
    guess(password=PASSWORD)
    guess_all(12, name="eve")
    rows = Event.objects.filter(kind__startswith="account.").order_by("pk")
    found = [(row.kind, row.actor, row.detail["way"], row.detail["address"]) for row in rows]
    assert found[:3] == [
        ("account.refused", "unknown", "login", "127.0.0.1"),
        ("account.refused", "dora", "login", "127.0.0.1"),
        ("account.login", "dora", "password", "127.0.0.1"),
    ]
    assert [way for _, _, way, _ in found[3:]] == ["login"] * 10 + ["limit"]
    assert "mistake" not in repr(rows.values())


def test_what_is_refused_leaves_a_line_with_who_where_and_when(alice, vera, charlie, capsys):
    theirs = Plan.objects.create(
        team=alice.memberships.get().team, owner=alice, name="theirs", draft={}
    )
    for client, path, status in (
        (client_of(vera), "/plans/new/", 403),
        (client_of(charlie), f"/plans/{theirs.pk}/", 404),
        (client_of(charlie), "/plans/a%0Aforged/", 404),
    ):
        assert client.get(path).status_code == status
        line = next(each for each in capsys.readouterr().out.splitlines() if "refused" in each)
        for part in ("127.0.0.1", path, str(status), "+00:00", "GET"):
            assert part in line, (part, line)


# A browser is named as its user knows it.


KHTML = "AppleWebKit/537.36 (KHTML, like Gecko)"
MAC = "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7)"
WINDOWS = "Mozilla/5.0 (Windows NT 10.0; Win64; x64)"
PHONE = "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15"


def test_a_browser_is_called_by_its_own_name():
    linux, apple = "Mozilla/5.0 (X11; Linux x86_64", "(KHTML, like Gecko) Version"
    for user_agent, words in [
        (f"{linux}) {KHTML} Chrome/140.0.0.0 Safari/537.36", "Chrome 140 on Linux"),
        (f"{WINDOWS} {KHTML} Chrome/140.0 Safari/537.36 Edg/140.0.1", "Edge 140 on Windows"),
        (f"{WINDOWS} {KHTML} Chrome/130.0 Safari/537.36 OPR/115.0", "Opera 115 on Windows"),
        (f"{linux}; rv:145.0) Gecko/20100101 Firefox/145.0", "Firefox 145 on Linux"),
        (f"{MAC} AppleWebKit/605.1.15 {apple}/18.1 Safari/605.1.15", "Safari 18 on macOS"),
        (f"{PHONE} {apple}/18.0 Mobile/15E148 Safari/604.1", "Safari 18 on iPhone"),
        (f"Mozilla/5.0 (Linux; Android 15) {KHTML} Chrome/140.0 Mobile", "Chrome 140 on Android"),
    ]:
        assert browser_words(user_agent) == words, user_agent
    for text, words in [("", "unknown"), ("curl/8.5.0", "curl/8.5.0")]:
        assert browser_words(text) == words, text
    assert len(browser_words("x" * 10_000)) == 40


# Logging in and out, the theme, and the pages that say no.


@pytest.fixture
def known() -> User:
    return User.objects.create_user("alice", password="correct horse")


def log_in(client: Client, password: str):
    return client.post("/login/", {"username": "alice", "password": password})


def test_a_stranger_is_asked_to_log_in(client, db):
    for path in ["/", "/plans/", "/models/", "/techniques/", "/docs/", "/search/"]:
        response = client.get(path)
        assert response.status_code == 302, path
        assert response["Location"].startswith("/login/"), path


def test_a_wrong_password_gives_nothing_away_and_the_right_one_opens_home(client, known):
    html = log_in(client, "wrong").content.decode()
    assert "The username or password is incorrect" in html
    assert "wrong" not in html.split("<form")[1]
    assert log_in(client, "correct horse")["Location"] == "/"


def test_logging_out_closes_the_pages(alice):
    client = client_of(alice)
    key = client.cookies["sessionid"].value
    client.post("/logout/")
    assert client.get("/plans/").status_code == 302
    client.cookies["sessionid"] = key
    assert client.get("/plans/").status_code == 302


def test_the_theme_is_kept_in_a_cookie_and_drawn_by_the_server(alice):
    client = client_of(alice)
    response = client.post("/theme/", {"theme": "dark", "next": "/plans/"})
    assert response["Location"] == "/plans/"
    assert 'data-theme="dark"' in client.get("/plans/").content.decode()
    client = client_of(alice)
    client.post("/theme/", {"theme": "system"})
    assert "data-theme=" not in client.get("/plans/").content.decode()
    response = client_of(alice).post("/theme/", {"theme": "<script>"})
    assert "theme" not in response.cookies
    client = client_of(alice)
    client.cookies["theme"] = '"><script>'
    assert "data-theme=" not in client.get("/plans/").content.decode()


def test_a_page_that_says_no_names_why_and_a_way_out(alice, vera):
    response = client_of(alice).get("/nothing/here/")
    assert response.status_code == 404
    assert "There is nothing at this address" in response.content.decode()
    response = client_of(vera).get("/plans/new/")
    assert response.status_code == 403
    assert "Practitioner" in response.content.decode()
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice)
    response = client.post("/theme/", {"theme": "dark"})
    assert response.status_code == 403
    assert "Your session expired" in response.content.decode()
    html = render_to_string("500.html")
    assert "An error occurred on this page" in html


def test_the_account_menu_says_role_and_team_without_inline_scripts(alice, team):
    html = client_of(alice).get("/").content.decode()
    assert "Practitioner" in html
    assert "Alice&#x27;s team" in html
    html = client_of(alice).get("/").content.decode()
    assert "<script>" not in html
    assert " onclick=" not in html
