"""Roles, teams and networks: who may do what, from where, and what no write may do."""

import re
from itertools import product

import pytest
from django.contrib import admin
from django.contrib.auth import authenticate
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.test import Client
from django.urls import path

from runners.shared import messages
from tests.plugins.extent import sample
from tests.webapp.accounts.test_matrix import HOST, RULES, addresses
from tests.webapp.conftest import client_of
from webapp.accounts.backends import MembershipBackend
from webapp.accounts.models import ROLE_ORDER, Membership, Role, memberships_of, team_ids_of
from webapp.accounts.networks import lies_in
from webapp.accounts.services import (
    SESSION_KEY,
    admin_ensure,
    current_membership,
    current_role,
    has_role,
    is_at_least,
    member_add,
    require_role,
    team_create,
    visible_or_404,
)
from webapp.audit.models import Event
from webapp.core.ids import new_ulid
from webapp.core.site_settings import SettingError, admin_networks
from webapp.hosts.models import EnrolmentToken
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel

# Roles include the ones below; teams are chosen, never mixed.


pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_role_includes_the_ones_below_it():
    for held in ROLE_ORDER:
        for wanted in ROLE_ORDER:
            includes = ROLE_ORDER.index(held) >= ROLE_ORDER.index(wanted)
            assert is_at_least(held, wanted) == includes, (held, wanted)


def test_a_role_holds_in_its_own_team_only(olga, team, other_team):
    assert has_role(olga, team, Role.PRACTITIONER)
    assert not has_role(olga, other_team, Role.VIEWER)


@pytest.fixture
def request_of(rf):
    def make(user, **session):
        request = rf.get("/")
        request.user, request.session = user, session
        return request

    return make


def test_the_first_team_is_the_current_one_until_the_session_chooses(
    request_of, alice, team, other_team
):
    Membership.objects.create(user=alice, team=other_team, role=Role.VIEWER)
    assert current_membership(request_of(alice)).team == team
    request = request_of(alice, **{SESSION_KEY: other_team.pk})
    assert current_role(request) is Role.VIEWER


def test_the_session_cannot_choose_a_foreign_team(request_of, alice, team, other_team):
    request = request_of(alice, **{SESSION_KEY: other_team.pk})
    assert current_membership(request).team == team


def test_without_a_team_one_is_told_whom_to_ask(request_of, django_user_model):
    stranger = django_user_model.objects.create_user("stranger")
    with pytest.raises(PermissionDenied, match="Ask an admin"):
        current_membership(request_of(stranger))


def test_a_sessions_user_is_read_with_the_teams_anew_for_each_request(
    alice, team, other_team, django_user_model, django_assert_num_queries
):
    read = MembershipBackend().get_user
    with django_assert_num_queries(1):
        user = read(alice.pk)
        assert [each.team for each in memberships_of(user)] == [team]
        assert has_role(user, team, Role.PRACTITIONER)
    member_add(team=other_team, user=alice, role=Role.VIEWER)
    Membership.objects.filter(user=alice, team=team).delete()
    assert team_ids_of(read(alice.pk)) == [other_team.pk]
    stranger = django_user_model.objects.create_user("stranger")
    assert read(stranger.pk) == stranger
    User.objects.filter(pk__in=[alice.pk, stranger.pk]).update(is_active=False)
    assert (read(alice.pk), read(stranger.pk), read(0)) == (None, None, None)


def test_a_tokens_memberships_are_read_once(alice, team, django_assert_num_queries):
    alice.token_team_id = team.pk
    with django_assert_num_queries(1):
        assert has_role(alice, team, Role.PRACTITIONER)
        assert team_ids_of(alice) == [team.pk]


def test_a_session_of_djangos_backend_lasts_and_a_wrong_password_is_hashed_once(
    alice, monkeypatch
):
    browser = Client()
    browser.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    assert browser.get("/").status_code == 200
    hashed = []
    monkeypatch.setattr(User, "check_password", lambda _self, raw: hashed.append(raw))
    monkeypatch.setattr(User, "set_password", lambda _self, raw: hashed.append(raw))
    for name in ("alice", "nobody"):
        assert authenticate(username=name, password="wrong") is None
    assert hashed == ["wrong", "wrong"]


@require_role(Role.OPERATOR)
def guarded(request) -> HttpResponse:
    return HttpResponse("in")


def test_the_decorator_lets_the_role_in_or_names_what_is_needed(request_of, olga, alice):
    assert guarded(request_of(olga)).content == b"in"
    with pytest.raises(PermissionDenied, match="Operator; yours is Practitioner"):
        guarded(request_of(alice))


def test_what_another_team_has_is_not_there(charlie, bob, draft):
    assert visible_or_404(Job, bob, pk=draft.pk) == draft
    with pytest.raises(Http404):
        visible_or_404(Job, charlie, pk=draft.pk)


def test_logging_in_is_asked_for_and_leads_back(client, db):
    answer = client.get("/jobs/")
    assert (answer.status_code, answer.headers["Location"]) == (302, "/login/?next=/jobs/")


# The first account, and the commands that make it and a host's token.


def test_the_first_admin_leads_the_home_team():
    admin_ensure()
    membership = Membership.objects.get()
    assert (membership.user.username, membership.team.name) == ("admin", "Home team")
    assert membership.role == Role.ADMIN


def test_passwords_differ_between_installations():
    first = admin_ensure()
    User.objects.update(is_superuser=False, username="former")
    assert admin_ensure() != first


def test_a_team_of_a_name_exists_once_and_a_member_added_again_changes_role(team, alice):
    assert team_create(name="A") == team_create(name="A")
    member_add(team=team, user=alice, role=Role.OPERATOR)
    assert Membership.objects.get(user=alice).role == Role.OPERATOR


# What no write may do: come without a token, by a link, or set what its form does not show.
# The addresses are those of the matrix, which come from the URL configuration.


FOR_PEOPLE = [route for route, rule in RULES.items() if rule.needs != HOST]
POST_ONLY = [route for route in FOR_PEOPLE if RULES[route].method == "post"]
BY_TOKEN = "api/v1/hosts/enroll"  # whoever calls it is no browser and holds a one-time token
CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,'
    ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}'
)


def filled(route: str) -> str:
    """Return an address with something in the place of every argument."""
    return "/" + re.sub(r"<[^>]+>", "1", route)


def test_a_new_address_without_a_rule_is_found():
    added = [path("jobs/<slug:job_id>/transfer/", client_of)]
    assert set(addresses(added)) - set(RULES) == {"jobs/<slug:job_id>/transfer/"}


def test_no_change_is_made_without_a_csrf_token_or_by_following_a_link(olga):
    client = Client(enforce_csrf_checks=True)
    client.force_login(olga)
    before = Event.objects.count()
    for route in FOR_PEOPLE:
        if route != BY_TOKEN:
            assert client.post(filled(route)).status_code in {403, 405}, route
            assert Event.objects.count() == before, route
    client = client_of(olga)
    for route in POST_ONLY:
        if route != BY_TOKEN:
            assert client.get(filled(route)).status_code == 405, route


def test_the_administration_opens_to_staff_alone(olga):
    client = client_of(olga)
    for route in sorted(set(addresses(admin.site.get_urls()))):
        address = "/admin/" + re.sub(r"<[^>]+>|\(\?P.*", "1", route)
        assert client.get(address).status_code in {301, 302, 403, 404}, route


def foreign(other_team, charlie) -> dict[str, str]:
    """Return fields that no form shows, each set to somebody else's."""
    return {
        **dict.fromkeys(("team", "team_id"), other_team.pk),
        **dict.fromkeys(("owner", "owner_id", "created_by"), str(charlie.pk)),
        **dict.fromkeys(("id", "pk"), new_ulid()),
        **dict.fromkeys(("is_staff", "is_superuser", "role", "state"), "admin"),
        "token_hash": "0" * 64,
    }


def test_no_form_takes_a_hidden_field(alice, team, other_team, charlie, olga, bob):
    hidden = foreign(other_team, charlie)
    client_of(alice).post("/models/new/", {**hidden, "name": "Ours", "config": CONFIG})
    model = TeamModel.objects.get()
    assert (model.team, model.source) == (team, "config")
    assert model.pk != hidden["pk"]
    client_of(olga).post("/hosts/add/", {**hidden, "name": "Box", "pool": "default"})
    token = EnrolmentToken.objects.get()
    assert (token.team, token.created_by) == (team, olga)
    assert token.token_hash != hidden["token_hash"]
    client_of(bob).post("/theme/", foreign(other_team, charlie))
    client_of(bob).post("/team/", {"team": team.pk, "role": "admin"})
    bob.refresh_from_db()
    assert (bob.is_staff, bob.is_superuser) == (False, False)
    assert bob.memberships.get().role == "practitioner"


def test_a_job_that_runs_again_takes_no_hidden_field(bob, job, team, other_team, charlie):
    client_of(bob).post(f"/jobs/{job.pk}/run-again/", foreign(other_team, charlie))
    cloned = Job.objects.exclude(pk=job.pk).get()
    assert (cloned.team, cloned.owner) == (team, bob)


def test_what_a_host_sends_has_no_field_for_whose_it_is():
    refused = {"team", "team_id", "owner", "state", "role"}
    sent = (messages.ClaimRequest, messages.EnrollRequest, messages.EventBatch, messages.Beat)
    for body in sent:
        assert refused & set(body.model_fields) == set(), body


# The administration opens from the networks that the site names, and from no other.


OFFICE = admin_networks({"SLIPWAY_ADMIN_NETWORKS": "192.0.2.0/24, 2001:db8::/32"})


def test_only_an_address_of_the_list_comes_in():
    for address in ["192.0.2.7", "2001:db8::1", "::ffff:192.0.2.7"]:
        assert lies_in(address, OFFICE), address
    for address in ["192.0.3.7", "::1", "", "unknown", "192.0.2.7, 10.0.0.1"]:
        assert not lies_in(address, OFFICE), address
    assert lies_in("203.0.113.9", admin_networks({}))
    for text in ["office", "10.0.0.1/8", "10.0.0.0/99", "10.0.0.0/8;192.0.2.1"]:
        with pytest.raises(SettingError, match=r"such as 10\.0\.0\.0/8,192\.0\.2\.7"):
            admin_networks({"SLIPWAY_ADMIN_NETWORKS": text})


def test_from_elsewhere_no_address_of_the_administration_is_there(settings):
    settings.ADMIN_NETWORKS = OFFICE
    client = client_of(User.objects.create_superuser("root"))
    routes = sorted(set(addresses(admin.site.get_urls())))
    assert len(routes) > 100
    for route, method in sample(product(routes, (client.get, client.post))):
        answer = method(f"/admin{filled(route)}", REMOTE_ADDR="203.0.113.9")
        assert answer.status_code == 404, route


def test_from_the_office_it_opens_and_the_rest_of_the_site_from_everywhere(settings, alice):
    settings.ADMIN_NETWORKS = OFFICE
    client = client_of(User.objects.create_superuser("root"))
    assert client.get("/admin/", REMOTE_ADDR="192.0.2.7").status_code == 200
    settings.ADMIN_NETWORKS = OFFICE
    assert client_of(alice).get("/jobs/", REMOTE_ADDR="203.0.113.9").status_code == 200
