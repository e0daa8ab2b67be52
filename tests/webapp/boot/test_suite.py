"""The suite itself: its levels and extents, commit subjects, and the list of mutants."""

import datetime as dt
import gc
import itertools
import os
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from operator import itemgetter
from unittest.mock import Mock

import pytest
from django.apps import apps
from django.db import connection, router
from django.db.migrations.loader import MigrationLoader

from tests.mutants import server, tool
from tests.plugins import costs, databases, extent, order, unstable
from tests.webapp.boot.conftest import run_pytest
from webapp.boot import subjects, suite
from webapp.boot.suite import ROOT
from webapp.core.queries import replaced_migrations

# How ``manage.py test`` chooses tests, and what a run prints beside their results.


@pytest.mark.slow
def test_arguments_go_to_pytest_unchanged(monkeypatch, tmp_path, capfd):
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    monkeypatch.setattr(suite.environment, "ensure", lambda *_, **__: None)
    assert suite.main(["-q", str(tmp_path)]) == 0
    assert capfd.readouterr().out.strip().splitlines()[-1].startswith("1 passed")


def test_a_level_is_chosen_by_the_first_argument(monkeypatch):
    monkeypatch.setattr(suite.environment, "ensure", lambda *_, **__: None)
    for arguments, module, contains, lacks in (
        ([], "pytest", ["--gate", "tests/planner", suite.JOURNEY], ["tests/system"]),
        (["--all"], "pytest", ["-n"], ["--gate", "tests/planner"]),
        (["--nightly"], "pytest", ["--nightly", "-n"], ["--gate"]),
        (["-m", "faults"], "pytest", ["-m", "faults"], ["-n"]),
        (["--mutants", "--list"], "tests.mutants.tool", ["--list"], ["--mutants"]),
    ):
        started = Mock(return_value=0)
        monkeypatch.setattr(suite, "run_module", started)
        monkeypatch.setenv("HYPOTHESIS_PROFILE", "")
        monkeypatch.delenv("HYPOTHESIS_PROFILE")
        assert suite.main(arguments) == 0, arguments
        started.assert_called_once()
        name, *words = started.call_args.args
        assert name == module, arguments
        assert set(contains) <= set(words), arguments
        assert not set(lacks) & set(words), arguments
        repeatable = os.environ.get("HYPOTHESIS_PROFILE") == "repeatable"
        assert repeatable == (not arguments), arguments


def test_every_test_file_belongs_to_the_gate_or_to_the_system_tests():
    folders = {*suite.GATE, "tests/system"}
    found = [path.relative_to(suite.ROOT) for path in (suite.ROOT / "tests").rglob("test_*.py")]
    assert [path for path in found if not any(path.is_relative_to(one) for one in folders)] == []
    for name, entry in unstable.read().items():
        assert (suite.ROOT / name.partition("::")[0]).exists(), name
        assert entry["cause"]
        assert isinstance(entry["since"], dt.date)


def test_the_tests_see_neither_the_users_data_nor_a_ban_on_bytecode(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://live")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    seen = suite.quiet_environment()
    assert {"DATABASE_URL", "PYTHONDONTWRITEBYTECODE"} & set(seen) == set()
    assert seen["PATH"].startswith(str(suite.Path(sys.executable).parent))


def run_one_browser_test(tmp_path, chromium: str) -> str:
    """The output of pytest for one browser test, with the given program as Chromium."""
    lines = "import pytest\n\n@pytest.mark.browser\ndef test_browser():\n    assert True\n"
    (tmp_path / "test_page.py").write_text(lines)
    words = ("-q", "-p", "tests.plugins.packages", str(tmp_path))
    return run_pytest(*words, SLIPWAY_CHROMIUM=chromium)[1]


def test_a_missing_package_is_named_with_what_is_left_out(tmp_path):
    printed = run_one_browser_test(tmp_path, "/nowhere/chromium")
    assert "LEFT OUT, for want of Debian packages: chromium (browser tests)" in printed
    assert printed.strip().splitlines()[-1].startswith("1 skipped")


@pytest.mark.slow
def test_no_package_is_named_when_none_is_missing(tmp_path):
    printed = run_one_browser_test(tmp_path, sys.executable)
    assert "LEFT OUT" not in printed
    assert "1 passed" in printed


ORDERED = """
def test_a(): pass
def test_b(): pass
"""


def test_the_seed_of_the_order_is_printed_and_repeats_it(tmp_path):
    (tmp_path / "test_one.py").write_text(ORDERED)
    _, printed = run_pytest("-q", "-p", "tests.plugins.order", str(tmp_path))
    assert "Random seed: repeat with --randomly-seed=" in printed


def test_the_longest_files_come_first_in_their_order():
    names = ["tests/planner/test_small.py", *reversed(order.FIRST)]
    items = [Mock(nodeid=f"{name}::test_it", path=ROOT / name) for name in names]
    order.pytest_collection_modifyitems(items)
    assert [item.nodeid.partition("::")[0] for item in items] == [*order.FIRST, names[0]]
    assert [name for name in order.FIRST if not (ROOT / name).exists()] == []


TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="for workers of xdist")
def test_a_worker_collects_garbage_again_but_not_what_it_has_imported():
    assert gc.isenabled()
    assert gc.get_freeze_count() > 50_000


@pytest.mark.skipif(connection.vendor != "sqlite", reason="files of SQLite are copied")
def test_the_databases_that_a_run_copies_have_every_migration_and_the_tables_of_their_models():
    known = set(MigrationLoader(None, ignore_no_migrations=True).disk_migrations)
    known |= {(app, name) for app, names in replaced_migrations().items() for name in names}
    models = apps.get_models(include_auto_created=True)
    with databases.migrated_folder() as folder:
        for alias, name in databases.FILES.items():
            with closing(sqlite3.connect(folder / name)) as copy:
                applied = set(copy.execute("SELECT app, name FROM django_migrations"))
                tables = {table for (table,) in copy.execute(TABLES)}
            assert applied == known, alias
            own = {
                each._meta.db_table for each in models if router.allow_migrate_model(alias, each)
            }
            assert tables == own | {"django_migrations"}, alias


UNSTABLE = """
import pytest

def test_steady(): pass
@pytest.mark.slow
def test_slow(): pass
def test_shaky(): assert False
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--gate"], "1 passed, 2 deselected"), ([], "2 passed, 1 xfailed")],
)
def test_an_unstable_or_slow_test_is_left_out_of_the_gate_and_run_by_all_others(
    tmp_path, words, expected
):
    (tmp_path / "test_one.py").write_text(UNSTABLE)
    listed = tmp_path / "unstable.toml"
    name = "test_one.py::test_shaky"
    listed.write_text(f'[[test]]\nid = "{name}"\ncause = "a race"\nsince = 2026-01-01\n')
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from pathlib import Path\nfrom tests.plugins import unstable\n"
        f"unstable.LIST = Path({str(listed)!r})\n"
    )

    status, printed = run_pytest(
        "-q", "-p", "plugin", "-p", "tests.plugins.unstable", "-p", "tests.plugins.extent", *words, f"--rootdir={tmp_path}", str(tmp_path),
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip

    assert status == 0, printed
    assert expected in printed
    assert ("UNSTABLE failed" in printed) == (not words)
    assert "Unstable for more than two weeks" in printed


# The suite meets every pair of values, and a nightly run every combination.


AXES = ("abcde", range(4), (True, False), "xyz")
LINES = """
import pathlib, pytest
from hypothesis import given, settings, strategies
from tests.plugins.extent import combinations

@pytest.mark.parametrize(("one", "two", "three"), combinations("abc", "de", "fgh"))
def test_product(one, two, three): pass

@settings(max_examples=7)
@given(strategies.integers())
def test_property(number):
    with pathlib.Path({told!r}).open("a") as told:
        told.write("x")
"""


def test_every_two_values_of_two_axes_meet_in_fewer_cases_than_all():
    found = extent.combinations(*AXES)
    for first, second in itertools.combinations(range(len(AXES)), 2):
        met = {(row[first], row[second]) for row in found}
        assert met == set(itertools.product(AXES[first], AXES[second]))
    assert len(found) < len(list(itertools.product(*AXES))) / 4
    assert found == extent.combinations(*AXES)
    assert extent.combinations("abc") == [("a",), ("b",), ("c",)]


def test_the_gate_takes_a_quarter_and_one_of_each_kind_by_the_seed(monkeypatch):
    cases = [(kind, number) for kind in "abc" for number in range(100)] + [("rare", 0)]
    monkeypatch.setattr(extent, "_gate_seed", [])
    assert extent.sample(cases) == cases
    assert extent.num_examples(30) == 30
    drawn = []
    for seed in range(40):
        monkeypatch.setattr(extent, "_gate_seed", [seed])
        found = extent.sample(cases, kind=itemgetter(0))
        assert found == extent.sample(cases, kind=itemgetter(0))
        assert found == sorted(set(found), key=cases.index)
        assert (len(found), {kind for kind, _ in found}) == (76, {"a", "b", "c", "rare"})
        drawn += found
    assert set(drawn) == set(cases)
    assert len(extent.sample(cases[:3], kind=itemgetter(1))) == 3
    assert [extent.num_examples(number) for number in (1, 5, 30, 100)] == [1, 5, 8, 25]
    for share in (0.2, 1.1):
        with pytest.raises(ValueError, match=f"share is {share}"):
            extent.sample(cases, share=share)


def test_the_gate_runs_every_cheap_test_and_costly_ones_within_its_budget_by_the_seed():
    listed = {f"test_{number}.py::test_it": 2.0 for number in range(40)}
    tests = [f"{name}[{case}]" for name in listed for case in "ab"] + ["test_0.py::test_cheap"]
    always = f"{costs.ALWAYS[-1]}::test_it"
    for seed in range(30):
        found = costs.drawn([*tests, always], listed | {always: 9.0}, seed, budget=20.0)
        assert {"test_0.py::test_cheap", always} < found
        assert len(found) == 2 + 10
        assert found == costs.drawn([*tests, always], listed | {always: 9.0}, seed, budget=20.0)
    every = set().union(*(costs.drawn(tests, listed, seed, 20.0) for seed in range(99)))
    assert every == set(tests)


def test_each_costly_test_that_is_listed_exists():
    """A renamed one counts as cheap and would run always: record the list anew."""
    gone = []
    for name in costs.read():
        file, _, function = name.partition("::")
        path = ROOT / file
        if not path.exists() or function.partition("::")[0] not in path.read_text():
            gone.append(name)
    assert gone == []
    assert [place for place in costs.ALWAYS if not (ROOT / place).exists()] == []


def test_a_run_records_what_each_test_took(tmp_path, write):
    write("def test_long(): pass\n")
    plugin = tmp_path / "recorder.py"
    plugin.write_text(
        "from pathlib import Path\nfrom tests.plugins import costs\n"
        f"costs.LIST, costs.COSTLY_SECONDS = Path({str(tmp_path / 'costs.csv')!r}), 0.0\n"
    )
    words = (
        "-p",
        "recorder",
        "-p",
        "tests.plugins.costs",
        "--record-costs",
        f"--rootdir={tmp_path}",
    )
    status, printed = run_pytest("-q", *words, str(tmp_path), PYTHONPATH=str(tmp_path))
    assert status == 0, printed
    head, row = (tmp_path / "costs.csv").read_text().splitlines()
    assert (head, row.partition(",")[0]) == ("test,seconds", "tests/test_one.py::test_long")


@pytest.mark.parametrize(
    ("words", "cases", "examples"),
    [((), 9, 7), (("-p", "tests.plugins.unstable", "--gate"), 9, 5), (("--nightly",), 18, 500)],
)
def test_a_nightly_run_takes_all_cases_and_many_examples_and_the_gate_few(
    tmp_path, write, words, cases, examples
):
    told = tmp_path / "told.txt"
    write(LINES.format(told=str(told)))
    status, printed = run_pytest("-q", "-p", "tests.plugins.extent", *words, str(tmp_path))
    assert status == 0, printed
    assert f"{cases + 1} passed" in printed.splitlines()[-1]
    assert len(told.read_text()) == examples


def test_a_failing_example_is_printed_with_a_way_to_repeat_it(tmp_path, write):
    write("from hypothesis import given, strategies\n"
          "@given(strategies.integers())\n"
          "def test_small(number): assert number < 100\n")  # fmt: skip
    status, printed = run_pytest(
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:schemathesis",
        str(tmp_path),
        HYPOTHESIS_PROFILE="fresh",
    )
    assert status == 1
    assert "number=100" in printed
    assert "@reproduce_failure(" in printed


def test_a_bad_subject_is_explained_and_refused_and_a_good_one_has_no_fault(tmp_path, capsys):
    for subject in [
        "house: Start every process.",
        "webapp, runners: Agree on one field.",
        "Merge branch 'x'",
    ]:
        assert subjects.fault(subject) is None, subject
    for subject, fault in [
        ("house: start every process.", "not of the form"),
        ("house: Start every process", "not of the form"),
        ("Start every process.", "not of the form"),
        ("house: " + "X" * 80 + ".", "at most 72"),
    ]:
        assert fault in subjects.fault(subject), subject
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("wip\n\nbody")
    assert subjects.main(message) == 1
    assert "'wip'" in capsys.readouterr().err


# The list of mutants is fit to be run, and its tool tells killed from survived and invalid.


MUTANTS = tool.read_list(ROOT / tool.LIST)
NUM_BY_AREA = {
    "cost": 12, "search": 10, "transitions": 8, "claims": 6, "ingest": 6, "signing": 6, "roles": 6,
    "policy": 6,
}  # fmt: skip
KINDS = {
    "comparison", "arithmetic", "off_by_one", "removed_guard", "swapped_state", "boolean",
    "constant",
}  # fmt: skip


def test_every_mutant_changes_one_place_and_names_tests_that_exist():
    wrong = []
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text()
        try:
            planted = tool.planted(source, mutant)
        except tool.StaleError as error:
            wrong.append(str(error))
        else:
            wrong += [] if planted != source else [mutant.id]
    assert not wrong, wrong
    assert Counter(mutant.area for mutant in MUTANTS) == NUM_BY_AREA
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.kind for mutant in MUTANTS} == KINDS
    named = {target for mutant in MUTANTS for target in (*mutant.tests, *mutant.wider)}
    assert [target for target in named if not (ROOT / target).exists()] == []


# A project of two functions, of which one has a test

TOY = tool.Mutant(
    id="toy-01", file="toy/sums.py", function="add", kind="arithmetic", harm="sums are wrong",
    old="a + b", new="a - b", tests=("test_sums.py",),
)  # fmt: skip


@pytest.fixture
def toy(tmp_path):
    root = tmp_path / "project"
    (root / "toy").mkdir(parents=True)
    (root / "toy" / "__init__.py").write_text("")
    (root / "toy" / "sums.py").write_text(
        "def add(a, b):\n    return a + b\n\n\ndef both(a, b):\n    return a and b\n"
    )
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--disable-plugin-autoload"]\n'
    )
    (root / "test_sums.py").write_text(
        "from toy import sums\n\n\ndef test_sum():\n    assert sums.add(2, 1) == 3\n"
    )
    (root / "test_red.py").write_text("def test_red():\n    assert False\n")
    return root


def verdicts(root, *mutants) -> list[str]:
    return [one.verdict for one in tool.run_all(root, mutants, jobs=1, libraries=())]


def test_a_mutant_is_killed_by_a_test_that_fails_with_it_alone(toy):
    unproven = replace(TOY, function="both", old="a and b", new="a or b")
    red_anyway = replace(TOY, tests=("test_red.py",))
    without_tests = replace(TOY, tests=("test_gone.py",))
    found = verdicts(toy, TOY, unproven, red_anyway, without_tests)
    assert found == [tool.KILLED, tool.SURVIVED, tool.INVALID, tool.INVALID]
    assert "a + b" in (toy / "toy" / "sums.py").read_text()


def test_tests_that_do_not_end_in_time_are_stopped(toy, monkeypatch):
    monkeypatch.setattr(server, "LIMIT_SECONDS", 0.5)
    (toy / "test_endless.py").write_text("import time\n\n\ndef test_one():\n    time.sleep(60)\n")
    with server.servers(toy, ["toy"], [], 1) as (only,):
        assert only.run(["test_endless.py"]).status is None


class Told:
    """A server whose runs end as they are told to."""

    def __init__(self, copy, *runs) -> None:
        self.copy, self.runs = copy, list(runs)

    def run(self, _targets):
        return self.runs.pop(0)


def test_what_ends_no_better_without_the_mutant_is_invalid(toy):
    for runs, verdict in [
        ([server.Run(None), server.Run(0)], tool.KILLED),
        ([server.Run(None), server.Run(None)], tool.INVALID),
        ([server.Run(1, "test_sums.py::test_sum"), server.Run(1)], tool.INVALID),
        ([server.Run(0), server.Run(1, "test_wider.py::test_one"), server.Run(0)], tool.KILLED),
        ([server.Run(0), server.Run(5)], tool.INVALID),
        ([server.Run(0), server.Run(0)], tool.SURVIVED),
    ]:
        wider = replace(TOY, wider=("test_wider.py",))
        assert tool.judge(wider, Told(toy, *runs)).verdict == verdict, runs


def test_a_stale_mutant_is_refused_by_its_name(toy):
    for changes, words in [
        ({"old": "a * b"}, "toy-01: add of toy/sums.py holds its fragment 0 times, not once."),
        ({"old": "a"}, "toy-01: add of toy/sums.py holds its fragment 3 times, not once."),
        ({"function": "Sum.add"}, "toy-01: toy/sums.py has 0 of Sum.add, not one."),
        ({"new": "a +"}, "toy-01: toy/sums.py does not parse with it"),
        ({"file": "toy/gone.py"}, "toy-01: there is no toy/gone.py."),
    ]:
        with pytest.raises(tool.StaleError, match=words.replace("+", r"\+")):
            tool.check([replace(TOY, **changes)], toy)


def test_nine_of_ten_are_to_be_killed_and_none_may_be_invalid(monkeypatch):
    for found, status in [
        ([tool.KILLED] * 9 + [tool.SURVIVED], 0),
        ([tool.KILLED] * 8 + [tool.SURVIVED] * 2, 1),
        ([tool.KILLED] * 19 + [tool.INVALID], 1),
    ]:
        outcomes = [tool.Outcome(TOY, verdict, "", 0.0) for verdict in found]
        monkeypatch.setattr(tool, "run_all", Mock(return_value=outcomes))
        assert tool.main(["--only", "cost"]) == status, found


def test_the_list_is_printed_without_running_any_and_unknown_names_are_refused(capsys):
    assert tool.main(["--list", "--only", "claims"]) == 0
    assert capsys.readouterr().out.count("webapp/agents/dispatch.py") == NUM_BY_AREA["claims"]
    assert tool.main(["--only", "cost-99"]) == 2
    assert "cost-99" in capsys.readouterr().out
