"""What is said to run names a job kind, a library that is installed, and a test that is there."""

import ast
import json
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command

from planner.techniques.registry import TECHNIQUES
from runners.abilities import ABILITIES, OWN
from runners.launch import JOB_MODULES
from webapp.core.benches.ratios import PROOFS, stored
from webapp.docs.views import find_page

ROOT = Path(__file__).parents[3]
WITHOUT_HEADLINE = {"kv_cache", "adamw_8bit"}  # the review names it and gives no figure
EACH = pytest.mark.parametrize("key", sorted(ABILITIES))
TESTS = {each.test for each in ABILITIES.values()} | {
    proof.test for proofs in PROOFS.values() for proof in proofs
}


def printed(*options):
    out = StringIO()
    call_command("techniques", *options, stdout=out)
    return out.getvalue()


@pytest.mark.parametrize("test", sorted(TESTS))
def test_the_test_that_runs_it_is_there(test):
    path, _, name = test.partition("::")

    tree = ast.parse((ROOT / path).read_text())

    assert name in {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


@EACH
def test_it_is_a_technique_that_the_planner_knows_run_by_a_job_that_hosts_have(key):
    assert key in TECHNIQUES
    assert ABILITIES[key].job_kind in JOB_MODULES
    assert bool(ABILITIES[key].version) == (ABILITIES[key].library != OWN)


def test_every_technique_is_printed_with_its_state():
    rows = json.loads(printed("--json"))

    assert [row["id"] for row in rows] == list(TECHNIQUES)
    assert {row["id"] for row in rows if row["state"] != "planned"} == set(ABILITIES)
    assert all(bool(row["test"]) == (row["state"] != "planned") for row in rows)


def test_without_json_each_technique_is_a_line():
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
