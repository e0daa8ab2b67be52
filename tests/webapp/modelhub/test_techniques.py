"""The technique pages, from the planner's own registry."""

import pytest

from planner.techniques.registry import TECHNIQUES
from tests.webapp.conftest import client_of
from webapp.core.benches.ratios import stored
from webapp.modelhub.techniques import row_of

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


@pytest.mark.parametrize(("key", "word"), [("gptq", "GPTQ"), ("lora", "LoRA"), ("zero_3", "ZeRO")])
def test_the_list_says_how_far_each_has_come_as_the_command_does(alice, key, word):
    groups = client_of(alice).get("/techniques/").context["groups"]
    shown = {technique.key: state for _, rows in groups for technique, state in rows}

    assert shown[key] == row_of(key, stored())["state"]
    assert word in TECHNIQUES[key].title


def test_a_proven_one_shows_its_ratio_with_interval_place_and_date(alice):
    ratio = row_of("lora", stored())["ratios"][0]

    html = client_of(alice).get("/techniques/lora/").content.decode()

    assert f"{ratio['value']:.2f}" in html
    assert ratio["machine"] in html
    assert ratio["date"] in html


def test_a_planned_one_shows_no_measurement(alice):
    assert (
        "What was measured of it" not in client_of(alice).get("/techniques/pcc/").content.decode()
    )
