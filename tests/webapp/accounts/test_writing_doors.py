"""What no write may do: come without a token, by a link, or set what its form does not show.

The addresses are those of the matrix, which come from the URL configuration.
"""

import re

import pytest
from django.contrib import admin
from django.test import Client
from django.urls import path

from runners import messages
from tests.webapp.accounts.test_matrix import HOST, RULES, addresses
from tests.webapp.conftest import client_of
from webapp.core.ids import new_ulid
from webapp.hosts.models import EnrolmentToken
from webapp.jobs.models import Event, Job
from webapp.modelhub.models import TeamModel

pytestmark = pytest.mark.django_db(databases="__all__")
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


def test_no_address_takes_a_change_without_a_csrf_token(olga):
    client = Client(enforce_csrf_checks=True)
    client.force_login(olga)
    before = Event.objects.count()

    for route in FOR_PEOPLE:
        if route != BY_TOKEN:
            assert client.post(filled(route)).status_code in {403, 405}, route
            assert Event.objects.count() == before, route


def test_no_change_is_made_by_following_a_link(olga):
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


def test_a_new_model_takes_no_hidden_field(alice, team, other_team, charlie):
    hidden = foreign(other_team, charlie)
    client_of(alice).post("/models/new/", {**hidden, "name": "Ours", "config": CONFIG})

    model = TeamModel.objects.get()
    assert (model.team, model.source) == (team, "config")
    assert model.pk != hidden["pk"]


def test_a_new_token_takes_no_hidden_field(olga, team, other_team, charlie):
    hidden = foreign(other_team, charlie)
    client_of(olga).post("/hosts/add/", {**hidden, "name": "Box", "pool": "default"})

    token = EnrolmentToken.objects.get()
    assert (token.team, token.created_by) == (team, olga)
    assert token.token_hash != hidden["token_hash"]


def test_a_job_that_runs_again_takes_no_hidden_field(bob, job, team, other_team, charlie):
    client_of(bob).post(f"/jobs/{job.pk}/run-again/", foreign(other_team, charlie))

    cloned = Job.objects.exclude(pk=job.pk).get()
    assert (cloned.team, cloned.owner) == (team, bob)


def test_no_form_changes_a_role(bob, team, other_team, charlie):
    client_of(bob).post("/theme/", foreign(other_team, charlie))
    client_of(bob).post("/team/", {"team": team.pk, "role": "admin"})

    bob.refresh_from_db()
    assert (bob.is_staff, bob.is_superuser) == (False, False)
    assert bob.memberships.get().role == "practitioner"


def bodies() -> list[type]:
    """Return the documents that hosts send."""
    return [messages.ClaimRequest, messages.EnrollRequest, messages.EventBatch, messages.Beat]


@pytest.mark.parametrize("body", bodies(), ids=lambda body: body.__name__)
def test_what_a_host_sends_has_no_field_for_whose_it_is(body):
    assert {"team", "team_id", "owner", "state", "role"} & set(body.model_fields) == set()
