"""Roles include the ones below; teams are chosen, never mixed."""

import pytest
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse

from tests.webapp.conftest import client_of
from webapp.accounts.models import ROLE_ORDER, Membership, Role
from webapp.accounts.roles import (
    SESSION_KEY,
    current_membership,
    current_role,
    has_role,
    is_at_least,
    require_role,
    visible_or_404,
)
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.mark.parametrize("held", ROLE_ORDER)
@pytest.mark.parametrize("wanted", ROLE_ORDER)
def test_a_role_includes_the_ones_below_it(held, wanted):
    assert is_at_least(held, wanted) == (ROLE_ORDER.index(held) >= ROLE_ORDER.index(wanted))


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


def test_the_first_team_is_the_current_one(request_of, alice, team, other_team):
    Membership.objects.create(user=alice, team=other_team, role=Role.VIEWER)
    assert current_membership(request_of(alice)).team == team


def test_the_session_chooses_the_team(request_of, alice, other_team):
    Membership.objects.create(user=alice, team=other_team, role=Role.VIEWER)
    request = request_of(alice, **{SESSION_KEY: other_team.pk})
    assert current_role(request) is Role.VIEWER


def test_the_session_cannot_choose_a_foreign_team(request_of, alice, team, other_team):
    request = request_of(alice, **{SESSION_KEY: other_team.pk})
    assert current_membership(request).team == team


def test_without_a_team_one_is_told_whom_to_ask(request_of, django_user_model):
    stranger = django_user_model.objects.create_user("stranger")
    with pytest.raises(PermissionDenied, match="Ask an admin"):
        current_membership(request_of(stranger))


@require_role(Role.OPERATOR)
def guarded(request) -> HttpResponse:
    return HttpResponse("in")


def test_the_decorator_lets_the_role_in(request_of, olga):
    assert guarded(request_of(olga)).content == b"in"


def test_the_decorator_names_what_is_held_and_what_is_needed(request_of, alice):
    with pytest.raises(PermissionDenied, match="Operator; yours is Practitioner"):
        guarded(request_of(alice))


def test_what_another_team_has_is_not_there(charlie, bob, draft):
    assert visible_or_404(Job, bob, pk=draft.pk) == draft
    with pytest.raises(Http404):
        visible_or_404(Job, charlie, pk=draft.pk)


def test_logging_in_is_asked_for_and_leads_back(client, db):
    answer = client.get("/jobs/")
    assert (answer.status_code, answer.headers["Location"]) == (302, "/login/?next=/jobs/")


def test_logging_out_ends_the_session(alice):
    client = client_of(alice)
    client.post("/logout/")
    assert client.get("/jobs/").status_code == 302
