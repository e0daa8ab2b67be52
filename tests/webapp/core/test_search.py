"""Searches find names in any alphabet and case, in every list that has a search."""

import unicodedata
from pathlib import Path

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

import webapp
from tests.webapp.conftest import client_of, enrol, make_job
from webapp.core.search import FUNCTION, folded, register_function
from webapp.hosts.models import Host
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan

NAMES = {  # a name, and what finds it
    "ÜBUNGSRECHNER Größe": ["übungsrechner", "größe", "GRÖSSE", "u\u0308bungs", "Rechner"],
    "Сервер Москва": ["сервер", "МОСКВА", "москва", "ервер"],  # noqa: RUF001 -- Cyrillic it is
    "ΟΔΥΣΣΕΥΣ": ["οδυσσευς", "Οδυσσευσ"],
    "cafe\u0301 日本語": ["CAFÉ", "日本"],
    "50 %_\\ off": ["50 %", "%_\\", "OFF"],
}
NOT_FOUND = ["xyzzy", "5%", "c_fe", "\\\\"]


@pytest.mark.django_db
def test_each_search_finds_each_name_whatever_its_alphabet_and_case(team, alice, host):
    for name, queries in NAMES.items():
        Plan.objects.create(team=team, owner=alice, name=name, draft={})
        TeamModel.objects.create(team=team, name=name, config={})
        enrol(team, name=name)
        job = make_job(team, alice, host)
        type(job).objects.filter(pk=job.pk).update(name=name)
        for query in queries:
            everything = client_of(alice).get("/search/", {"q": query}).context["groups"]
            assert {heading for heading, _, rows in everything if (name in dict(rows).values())} >= {
                "Jobs", "Hosts", "Models of your team"
            }, (name, query)  # fmt: skip
            for path in ("/plans/", "/jobs/", "/models/"):
                page = client_of(alice).get(path, {"q": query}).content.decode()
                assert name.split(" ")[0] in page, (path, name, query)
    for query in NOT_FOUND:
        assert not Host.objects.filter(name__folded_contains=query).exists(), query


@pytest.mark.django_db
def test_a_database_folds_as_python_does():
    with connection.cursor() as cursor:
        for text in ("ÜB", "ΣΑΣ", "STRASSE straße", "e\u0301", "", None):
            cursor.execute("SELECT slipway_folded(%s)", [text])
            assert cursor.fetchone()[0] == (None if text is None else folded(text))


@pytest.mark.django_db
@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL calls no Python")
def test_ascii_names_are_searched_without_a_call_into_python_and_others_with_one(team):
    calls: list[str] = []
    names = [
        "Plain-01 ~",
        "tab\there",
        "300 \N{KELVIN SIGN}",
        "Stra\u00dfe",
        "\u0130x",
        "\u017fo",
        "",
    ]
    for name in names:
        TeamModel.objects.create(team=team, name=name, config={})
    connection.connection.create_function(
        FUNCTION, 1, lambda text: (calls.append(text), folded(text))[1], deterministic=True
    )
    try:
        for query in ("PLAIN", "-01 ~", "\t", "k", "ss", "i", "SO", "", "n-0"):
            found = set(TeamModel.objects.filter(name__folded_contains=query).values_list("name"))
            assert found == {(each,) for each in names if folded(query) in folded(each)}, query
    finally:
        register_function(connection)
    assert set(calls) == set(names[1:-1])


@given(st.text())
def test_a_text_is_found_in_any_case_and_normal_form(text):
    for form in ("NFC", "NFD"):
        assert folded(unicodedata.normalize(form, text)) == folded(text)
    assert folded(folded(text)) == folded(text)


def test_no_search_of_the_product_is_left_to_a_databases_own_cases():
    root = Path(webapp.__file__).parent
    for file in root.rglob("*.py"):
        text = file.read_text()
        for lookup in ("icontains", "istartswith", "iendswith", "iregex"):
            assert lookup not in text, (file, lookup)
