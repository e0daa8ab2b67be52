"""The technique pages, from the planner's own registry."""

import pytest

from planner.techniques.registry import TECHNIQUES
from tests.webapp.conftest import client_of

pytestmark = pytest.mark.django_db


def test_the_list_links_every_technique(alice):
    html = client_of(alice).get("/techniques/").content.decode()

    assert all(f'href="/techniques/{key}/"' in html for key in TECHNIQUES)


@pytest.mark.parametrize("key", sorted(TECHNIQUES))
def test_every_technique_shows_its_effect_and_its_source(alice, key):
    context = client_of(alice).get(f"/techniques/{key}/").context

    assert context["technique"].effect
    assert context["technique"].source
    assert context["phases"]


def test_the_list_filters_by_name(alice):
    context = client_of(alice).get("/techniques/?q=lora").context

    assert 0 < context["num"] < len(TECHNIQUES)


def test_an_unknown_technique_is_not_found(alice):
    assert client_of(alice).get("/techniques/alchemy/").status_code == 404
