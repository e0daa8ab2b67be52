"""Who gets in, where they land, and how soon a change of role is felt."""

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.webapp.conftest import client_of, make_job
from webapp.accounts.models import Membership, Role
from webapp.accounts.services import SESSION_KEY, member_add
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")
PASSWORD = "correct horse"


@pytest.fixture
def known() -> User:
    return User.objects.create_user("dora", password=PASSWORD)


def log_in(client: Client, name: str = "dora", password: str = PASSWORD, after: str = ""):
    query = {"next": after} if after else {}
    data = {"username": name, "password": password, **query}
    return client.post("/login/", data, query_params=query)


def is_in(client: Client) -> bool:
    return client.get("/docs/").status_code == 200


# Logging in


def test_logging_in_leads_to_the_page_that_was_asked_for(client, known):
    door = client.get("/jobs/?page=2")["Location"]
    answer = client.post(door, {"username": "dora", "password": PASSWORD})
    assert answer["Location"] == "/jobs/?page=2"


def test_logging_in_leads_to_no_other_site(known):
    for after in (
        "https://elsewhere.example/", "//elsewhere.example/", "///elsewhere.example",
        "javascript:alert(1)", "http:elsewhere.example",
    ):  # fmt: skip
        assert log_in(Client(), after=after)["Location"] == "/", after


def test_closing_an_account_ends_its_open_session(client, known):
    log_in(client)
    before = is_in(client)
    User.objects.filter(pk=known.pk).update(is_active=False)
    assert (before, is_in(client)) == (True, False)


def test_an_unknown_strange_or_closed_name_is_refused_in_the_words_of_a_wrong_password(
    client, known
):
    unknown = log_in(client, name="nobody").context["form"].non_field_errors()
    wrong = log_in(client, password="wrong").context["form"].non_field_errors()
    assert unknown == wrong
    assert len(unknown) == 1
    for name in ["", "<b>dora</b>", "x" * 500, "' OR 1=1 --"]:
        answer = log_in(client, name=name)
        assert answer.status_code == 200, name
        assert "<b>dora" not in answer.content.decode(), name
        assert not is_in(client), name
    User.objects.filter(pk=known.pk).update(is_active=False)
    answer = log_in(client)
    assert answer.status_code == 200
    assert "The username or password is incorrect" in answer.content.decode()
    assert not is_in(client)


def test_logging_in_gives_a_new_session_which_a_new_password_ends(client, known):
    client.get("/login/")
    session = client.session
    session["kept"] = 1
    session.save()
    before = session.session_key
    log_in(client)
    assert client.session.session_key != before
    log_in(client)
    assert client.get("/logout/").status_code == 405
    assert is_in(client)
    log_in(client)
    known.set_password("battery staple")
    known.save()
    assert not is_in(client)


# Themes


def test_a_theme_leads_back_to_our_pages_only(alice):
    for after in [
        "https://elsewhere.example/",
        "//elsewhere.example",
        "javascript:alert(1)",
        "\\\\evil",
        "",
    ]:
        answer = client_of(alice).post("/theme/", {"theme": "light", "next": after})
        assert answer["Location"] == "/", after


def test_a_theme_is_kept_for_a_year_by_whoever_is_not_logged_in(client, db):
    cookie = client.post("/theme/", {"theme": "dark"}).cookies["theme"]
    assert (cookie.value, cookie["max-age"]) == ("dark", 31_536_000)
    assert cookie["samesite"] == "Lax"
    assert 'data-theme="dark"' in client.get("/login/").content.decode()
    client.post("/theme/", {"theme": "dark"})
    client.post("/theme/", {"theme": "purple"})
    assert client.cookies["theme"].value == "dark"


def test_behind_tls_a_theme_is_in_a_cookie_of_this_host(client, db, settings):
    settings.SESSION_COOKIE_SECURE = True
    client.cookies["theme"] = "light"  # of a time without TLS, or of another host
    cookie = client.post("/theme/", {"theme": "dark"}).cookies["__Host-theme"]
    assert (cookie.value, cookie["secure"], cookie["path"]) == ("dark", True, "/")
    assert 'data-theme="dark"' in client.get("/login/").content.decode()


# Roles


def test_a_new_role_counts_from_the_next_request_on(vera, team):
    client = client_of(vera)
    before = client.get("/models/new/").status_code
    member_add(team=team, user=vera, role=Role.PRACTITIONER)
    assert (before, client.get("/models/new/").status_code) == (403, 200)


def test_a_role_that_was_taken_counts_from_the_next_request_on(olga, team):
    client = client_of(olga)
    before = client.get("/hosts/add/").status_code
    member_add(team=team, user=olga, role=Role.VIEWER)
    answer = client.get("/hosts/add/")
    assert (before, answer.status_code) == (200, 403)
    assert "needs the role Operator; yours is Viewer" in answer.content.decode()


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.ADMIN])
def test_a_higher_role_does_what_the_lower_ones_do(bob, team, role):
    member_add(team=team, user=bob, role=role)
    client = client_of(bob)
    answers = [client.get(path).status_code for path in ("/hosts/add/", "/models/new/", "/jobs/")]
    assert answers == [200, 200, 200]


def test_whoever_leaves_a_team_finds_nothing_of_it_again(bob, alice, team, host):
    job = make_job(team, alice, host)
    model = TeamModel.objects.create(team=team, name="ours", config={})
    client = client_of(bob)
    paths = (f"/jobs/{job.pk}/", f"/models/{model.pk}/", f"/hosts/{host.slug}/")
    before = [client.get(path).status_code for path in paths]
    Membership.objects.filter(user=bob).delete()
    assert before == [200, 200, 200]
    assert [client.get(path).status_code for path in paths] == [404, 404, 404]


def test_a_member_of_two_teams_reads_both_and_makes_in_the_chosen_one(alice, other_team, charlie):
    member_add(team=other_team, user=alice, role=Role.PRACTITIONER)
    theirs = TeamModel.objects.create(team=other_team, name="their model", config={})
    client = client_of(alice)
    session = client.session
    session[SESSION_KEY] = other_team.pk
    session.save()
    client.get("/plans/new/")
    assert client.get(f"/models/{theirs.pk}/").status_code == 200
    assert Plan.objects.get().team == other_team


def test_a_viewer_of_the_chosen_team_makes_nothing_there(alice, other_team):
    member_add(team=other_team, user=alice, role=Role.VIEWER)
    client = client_of(alice)
    session = client.session
    session[SESSION_KEY] = other_team.pk
    session.save()
    assert client.get("/plans/new/").status_code == 403
    assert not Plan.objects.exists()


def test_a_chosen_team_that_one_has_left_gives_way_to_the_own_one(alice, team, other_team):
    member_add(team=other_team, user=alice, role=Role.PRACTITIONER)
    client = client_of(alice)
    session = client.session
    session[SESSION_KEY] = other_team.pk
    session.save()
    Membership.objects.filter(user=alice, team=other_team).delete()
    client.get("/plans/new/")
    assert Plan.objects.get().team == team


def test_someone_without_a_team_reads_empty_pages(known, host, team, alice):
    job = make_job(team, alice, host)
    for path in ["/", "/plans/", "/jobs/", "/hosts/", "/models/", "/search/?q=a"]:
        answer = client_of(known).get(path)
        text = answer.content.decode()
        assert answer.status_code == 200, path
        assert f"/hosts/{host.slug}/" not in text, path
        assert job.pk not in text, path


# Choosing a team


def in_two_teams(user, other_team, role=Role.PRACTITIONER):
    member_add(team=other_team, user=user, role=role)
    return client_of(user)


def test_whoever_is_in_two_teams_is_offered_the_other_one_alone(alice, team, other_team, bob):
    page = in_two_teams(alice, other_team).get("/plans/").content.decode()
    assert f"Switch to {other_team.name}".replace("'", "&#x27;") in page
    assert f'value="{other_team.pk}"' in page
    assert f'value="{team.pk}"' not in page
    assert "/team/" not in client_of(bob).get("/plans/").content.decode()


def test_a_chosen_team_gets_what_is_made_next(alice, other_team):
    client = in_two_teams(alice, other_team)
    answer = client.post("/team/", {"team": other_team.pk, "next": "/jobs/"})
    client.get("/plans/new/")
    assert (answer.status_code, answer.headers["Location"]) == (302, "/jobs/")
    assert Plan.objects.get().team == other_team


def test_the_menu_says_the_role_in_the_chosen_team(alice, other_team):
    client = in_two_teams(alice, other_team, Role.VIEWER)
    client.post("/team/", {"team": other_team.pk})
    assert "Viewer · Charlie" in client.get("/plans/").content.decode()


def test_one_can_choose_back(alice, team, other_team):
    client = in_two_teams(alice, other_team)
    client.post("/team/", {"team": other_team.pk})
    client.post("/team/", {"team": team.pk})
    client.get("/plans/new/")
    assert Plan.objects.get().team == team


def test_a_team_that_one_is_not_in_or_that_is_none_cannot_be_chosen(charlie, alice, team, job):
    client = client_of(charlie)
    assert client.post("/team/", {"team": team.pk}).status_code == 404
    assert client.get(f"/jobs/{job.pk}/").status_code == 404
    assert client.session.get(SESSION_KEY) is None
    for sent in ["", "nope", "1", "a" * 5000]:
        assert client_of(alice).post("/team/", {"team": sent}).status_code == 404, sent


def test_choosing_a_team_is_a_post_that_leads_to_pages_of_this_site_alone(alice, other_team):
    client = in_two_teams(alice, other_team)
    answer = client.post("/team/", {"team": other_team.pk, "next": "https://elsewhere.example/"})
    assert answer.headers["Location"] == "/"
    client = in_two_teams(alice, other_team)
    assert client.get(f"/team/?team={other_team.pk}").status_code == 405
    assert client.session.get(SESSION_KEY) is None
