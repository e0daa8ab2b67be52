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

ROOT = Path(__file__).parents[3]
EACH = pytest.mark.parametrize("key", sorted(ABILITIES))


def printed(*options):
    out = StringIO()
    call_command("techniques", *options, stdout=out)
    return out.getvalue()


@EACH
def test_the_test_that_runs_it_is_there(key):
    path, _, name = ABILITIES[key].test.partition("::")

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
    assert any(line.split() == ["gptq", "runs", "compress:", "own", "code"] for line in lines)
