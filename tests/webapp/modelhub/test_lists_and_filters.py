"""The lists of models and techniques under every filter, and the search over all of them."""

import pytest

from planner.catalog.models import list_models
from planner.techniques.registry import TECHNIQUES
from tests.webapp.conftest import client_of
from webapp.core.clock import now
from webapp.hosts.machines import virtual_host_create
from webapp.jobs.models import Job
from webapp.modelhub.catalog import catalog_rows
from webapp.modelhub.models import TeamModel, demo_config
from webapp.pages.model_catalog import PAGE_SIZE
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db


def page(user, path: str, **query):
    response = client_of(user).get(path, query)
    assert response.status_code == 200
    return response


def listed(user, query: str, **more) -> list[str]:
    """Return the ids on all pages of the catalog."""
    found, number = [], 1
    while True:
        context = page(user, "/models/", q=query, page=number, **more).context
        found += [row.entry.id for row, _ in context["rows"]]
        if not context["page"].has_next():
            return found
        number += 1


def own(team, name: str, **fields) -> TeamModel:
    known = {"source": "config", "config": demo_config(), **fields}
    return TeamModel.objects.create(team=team, name=name, **known)


# Models


def test_no_filter_lists_the_whole_catalog_and_counts_it(alice):
    response = page(alice, "/models/")
    assert listed(alice, "") == [entry.id for entry in list_models()]
    assert len(response.context["rows"]) == PAGE_SIZE
    assert len(response.content) < 60_000
    assert f"{len(list_models())} published configurations" in response.content.decode()


def test_words_of_a_filter_may_come_in_any_order_and_each_leaves_fewer(alice):
    for query in ["8b llama", "LLAMA 8B", "  llama \t 8b  ", "llama llama 8b"]:
        found = listed(alice, query)
        assert found == listed(alice, "llama 8b"), query
        assert "meta-llama/Llama-3.1-8B" in found, query

    one, two = listed(alice, "qwen"), listed(alice, "qwen 7b")
    assert set(two) < set(one)
    assert all("7b" in name.lower() for name in two)


def test_the_teams_models_are_listed_the_newest_first_and_filtered_by_name(alice, team):
    own(team, "old")
    own(team, "new")
    found = page(alice, "/models/").context["team_models"]
    assert [model.name for model in found] == ["new", "old"]

    own(team, "Llama of ours")
    own(team, "Something else")
    found = page(alice, "/models/", q="lLaMa").context["team_models"]
    assert [model.name for model in found] == ["Llama of ours"]
    assert not page(alice, "/models/", q="lLaMa", kind="moe").context["team_models"]


def test_a_team_model_says_whether_and_where_its_weights_lie(alice, team, host):
    assert "Models of your team" not in page(alice, "/models/").content.decode()

    own(team, "paper only")
    assert "config only, no weights" in page(alice, "/models/").content.decode()

    host.name = "Rack seven"
    host.save()
    own(team, "real", source="folder", host=host, path="llama")
    assert "Rack seven" in page(alice, "/models/").content.decode()


def test_facets_narrow_the_catalog_and_columns_order_it(alice):
    rows = {row.entry.id: row for row in catalog_rows()}
    for query, holds in [
        ({"size": "4"}, lambda row: 1e9 <= row.parameters < 4e9),
        ({"kind": "moe"}, lambda row: row.shape.is_moe),
        (
            {"kind": "dense", "size": "more"},
            lambda row: not row.shape.is_moe and row.parameters >= 80e9,
        ),
        ({"context": "1m"}, lambda row: row.shape.max_position_embeddings >= 1_000_000),
        ({"maker": "Qwen"}, lambda row: row.entry.id.startswith("Qwen/")),
    ]:
        found = listed(alice, "", **query)
        assert set(found) == {name for name, row in rows.items() if holds(row)}, query
        assert 0 < len(found) < len(rows), query
    sizes = [rows[name].parameters for name in listed(alice, "qwen", sort="-parameters")]
    assert sizes == sorted(sizes, reverse=True)
    html = page(alice, "/models/", kind="moe", sort="-parameters").content.decode()
    assert 'aria-sort="descending"><a class="sort" href="?kind=moe&amp;sort=parameters">' in html
    assert "?kind=moe&amp;sort=-parameters&amp;page=2" in html
    assert '<input type="hidden" name="sort" value="-parameters">' in html
    for wrong in ({"size": "9"}, {"sort": "colour"}, {"maker": "nobody"}, {"page": "0"}):
        assert client_of(alice).get("/models/", wrong).status_code == 400, wrong


def test_each_model_says_whether_it_fits_the_first_measured_host(alice, host):
    context = page(alice, "/models/", sort="parameters").context
    fits = {row.entry.id: dtype for row, dtype in context["rows"]}
    assert context["host"] == host
    assert "bf16" in fits.values()
    largest = page(alice, "/models/", sort="-parameters").context["rows"]
    assert {dtype for _, dtype in largest} == {""}


def test_a_model_fits_a_host_over_all_its_devices(alice, team):
    def fits(num_devices: int) -> dict[str, bool | None]:
        host = virtual_host_create(
            team=team, name=f"of {num_devices}", device="a100-80gb-sxm",
            num_devices=num_devices, memory_bytes=None, by="olga",
        )  # fmt: skip
        found = page(alice, "/models/meta-llama/Llama-3.1-70B/").context["fits"]
        (row,) = [each for each in found if each.host == host]
        return {dtype: is_fitting for dtype, is_fitting, _ in row.cells}

    assert not fits(1)["bf16"]
    assert fits(4)["bf16"]
    assert fits(7)["bf16"]  # four of them: seven divide no heads


# Techniques


def grouped(user, query: str = "") -> dict[str, set[str]]:
    groups = page(user, "/techniques/", q=query).context["groups"]
    return {name: {one.key for one, _ in group} for name, group in groups}


def test_a_technique_of_two_phases_counts_once_and_is_found_by_key_and_title(alice):
    context = page(alice, "/techniques/").context
    several = {key for key, one in TECHNIQUES.items() if len(one.phases) > 1}
    shown = [one.key for _, group in context["groups"] for one, _ in group]
    assert several
    assert all(shown.count(key) == len(TECHNIQUES[key].phases) for key in TECHNIQUES)
    assert context["num"] == len(TECHNIQUES)

    key, one = next((k, t) for k, t in TECHNIQUES.items() if k.lower() not in t.title.lower())
    by_key, by_title = (set().union(*grouped(alice, q).values()) for q in (key, one.title))
    assert key in by_key
    assert key in by_title

    for key in ["%3Cscript%3E", "LORA", "..", "lora%20", "x" * 300]:
        assert client_of(alice).get(f"/techniques/{key}/").status_code == 404, key


def test_a_filter_without_a_hit_says_so_and_one_of_blanks_is_none(alice):
    text = page(alice, "/techniques/", q="<b>alchemy</b>").content.decode()
    assert "No technique has “&lt;b&gt;alchemy" in text
    assert "<table>" not in text
    assert grouped(alice, " \t ") == grouped(alice)


# The search over everything


def groups(user, query: str) -> dict[str, list]:
    found = page(user, "/search/", q=query).context["groups"]
    return {heading: results for heading, _, results in found}


def test_a_search_of_less_than_two_letters_asks_for_more_and_a_hostile_one_is_text(alice):
    for query in ["", " ", "a", " a "]:
        response = page(alice, "/search/", q=query)
        assert response.context["groups"] == [], query
        assert "Type at least two letters" in response.content.decode(), query

    text = page(alice, "/search/", q='"><script>alert(1)</script>').content.decode()
    assert "<script>alert(1)" not in text


def test_a_search_finds_a_thing_of_each_kind_by_its_name(alice, team, host, draft):
    for thing in (host, draft):
        thing.name = "zebra"
        thing.save()
    own(team, "zebra")
    Plan.objects.create(team=team, owner=alice, name="Zebra crossing")

    assert set(groups(alice, "ZEBRA")) == {"Plans", "Jobs", "Hosts", "Models of your team"}


def test_a_group_shows_eight_of_nine_and_no_deleted_job(alice, draft, team):
    Job.objects.filter(pk=draft.pk).update(name="zebra", deleted_at=now())
    assert groups(alice, "zebra") == {}

    for number in range(9):
        own(team, f"zebra {number}")
    assert len(groups(alice, "zebra")["Models of your team"]) == 8
