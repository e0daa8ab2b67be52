"""The suggested changes of a plan that fits nowhere are searched once, when they are shown."""

import pytest

from planner import api
from tests.webapp.conftest import client_of
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, plan_compute, plan_keep

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def unfitting(plan_of, monkeypatch):
    """A draft that fits nowhere, with its brief answer, and the full searches made for it."""
    made = plan_of("finetune", "catalog")
    made.draft["model"]["catalog_id"] = "meta-llama/Llama-3.1-70B"
    made.draft["hardware"] |= {"choice": "catalog", "device": "rtx-3060-12gb"}
    plan_compute(made, brief=True)
    searches, search = [], api.plan
    monkeypatch.setattr(api, "plan", lambda asked: searches.append(asked) or search(asked))
    return made, searches


def test_a_save_searches_no_suggestions_and_the_page_loads_them(unfitting, alice):
    made, searches = unfitting
    client, page = client_of(alice), f"/plans/{made.pk}/"

    plan_keep(made)
    shown = client.get(page).content.decode()

    assert not searches
    assert f"{page}offers/" in shown
    assert client.get(f"{page}?offers=1").content.decode().count('name="suggestion"') > 1
    assert client.get(f"{page}offers/").content.decode().count('name="suggestion"') > 1
    assert "offers/" not in client.get(page).content.decode()
    assert len(searches) == 1


def test_a_second_request_takes_what_the_first_has_stored(unfitting):
    made, searches = unfitting
    other = Plan.objects.get(pk=made.pk)
    assert current_answer(other) == current_answer(made)
    assert len(searches) == 1
