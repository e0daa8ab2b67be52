"""The technique pages and their command: what runs a technique is installed, and is tested."""

import ast
import json
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command

from planner.techniques.registry import TECHNIQUES
from runners.host.abilities import ABILITIES, OWN
from runners.jobspec.kinds import KINDS
from tests.webapp.conftest import client_of
from webapp.bench.ratios import PROOFS, stored
from webapp.bench.technique_states import row_of
from webapp.pages.docs import find_page

pytestmark = pytest.mark.django_db


def test_the_list_links_every_technique_and_filters_by_name(alice):
    client = client_of(alice)
    html = client.get("/techniques/").content.decode()
    assert all(f'href="/techniques/{key}/"' in html for key in TECHNIQUES)
    assert 0 < client.get("/techniques/?q=lora").context["num"] < len(TECHNIQUES)


def test_every_technique_has_a_page_with_effect_source_and_settings(alice):
    client, wrong = client_of(alice), []
    for key, technique in TECHNIQUES.items():
        context = client.get(f"/techniques/{key}/").context
        shown = context["technique"]
        settings = json.loads(context["settings"]).keys()
        if not (shown.effect and shown.source and context["phases"]):
            wrong.append((key, shown, context["phases"]))
        if settings != dict(technique.settings).keys():
            wrong.append((key, settings, technique.settings))
    assert not wrong, wrong
    assert client.get("/techniques/alchemy/").status_code == 404


def test_the_list_says_how_far_each_has_come_as_the_command_does(alice):
    groups = client_of(alice).get("/techniques/").context["groups"]
    shown = {technique.key: state for _, rows in groups for technique, state in rows}
    for key, word in (("gptq", "GPTQ"), ("lora", "LoRA"), ("zero_3", "ZeRO")):
        assert shown[key] == row_of(key, stored())["state"], key
        assert word in TECHNIQUES[key].title


def test_only_a_proven_one_shows_a_ratio_with_interval_place_and_date(alice):
    client, ratio = client_of(alice), row_of("lora", stored())["ratios"][0]

    html = client.get("/techniques/lora/").content.decode()

    assert f"{ratio['value']:.2f}" in html
    assert ratio["machine"] in html
    assert ratio["date"] in html
    assert "<h2>Measurements</h2>" in html
    assert "<h2>Measurements</h2>" not in client.get("/techniques/pcc/").content.decode()


# What is said to run names a job kind, a library that is installed, and a test that is there


ROOT = Path(__file__).parents[3]
WITHOUT_HEADLINE = {"kv_cache", "adamw_8bit"}  # the review names it and gives no figure
TESTS = {each.test for each in ABILITIES.values()} | {
    proof.test for proofs in PROOFS.values() for proof in proofs
}


def printed(*options):
    out = StringIO()
    call_command("techniques", *options, stdout=out)
    return out.getvalue()


def test_every_test_that_runs_a_technique_is_there():
    named = {}
    for path, _, name in (test.partition("::") for test in TESTS):
        named.setdefault(path, set()).add(name)
    for path, names in named.items():
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        lost = names - {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
        assert not lost, (path, lost)


def test_the_planner_knows_each_and_hosts_have_the_job_that_runs_it():
    wrong = [
        (key, ability)
        for key, ability in ABILITIES.items()
        if key not in TECHNIQUES
        or ability.job_kind not in KINDS
        or bool(ability.version) != (ability.library != OWN)
    ]
    assert not wrong, wrong


def test_every_technique_is_printed_with_its_state_as_json_or_as_a_line():
    rows = json.loads(printed("--json"))
    assert [row["id"] for row in rows] == list(TECHNIQUES)
    assert {row["id"] for row in rows if row["state"] != "planned"} == set(ABILITIES)
    assert all(bool(row["test"]) == (row["state"] != "planned") for row in rows)

    lines = printed().splitlines()
    assert len(lines) == len(TECHNIQUES)
    assert any(line.split() == ["awq", "runs", "compress:", "own", "code"] for line in lines)


def test_the_page_of_the_documentation_shows_every_row_and_every_ratio():
    html = find_page("techniques").html
    for row in json.loads(printed("--json")):
        assert f"<code>{row['id']}</code>" in html
        assert all(each["name"] in html for each in row["ratios"])
    assert "[[" not in html


def test_what_is_proven_names_its_ratios_and_the_headline_they_are_held_against():
    proven = [row for row in json.loads(printed("--json")) if row["state"] == "proven"]

    assert proven
    for row in proven:
        assert [each["name"] for each in row["ratios"]] == [p.ratio for p in PROOFS[row["id"]]]
        assert all(each["low"] > each["floor"] for each in row["ratios"])
        assert row["headline"] or row["id"] in WITHOUT_HEADLINE


def test_a_ratio_says_how_often_when_where_and_by_what_it_was_taken():
    for each in stored().values():
        assert each.low <= each.value <= each.high
        assert each.command.startswith("manage.py bench ")
        assert {"python", "torch", "transformers"} <= set(each.versions)
        assert "cores" in each.machine
