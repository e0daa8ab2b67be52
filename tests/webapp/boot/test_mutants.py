"""The list of mutants is fit to be run, and its tool tells killed from survived and invalid."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.mutants import server, tool
from webapp.boot.suite import ROOT

MUTANTS = tool.read_list(ROOT / tool.LIST)
NUM_BY_AREA = {
    "cost": 12, "search": 10, "transitions": 8, "claims": 6, "ingest": 6, "signing": 6, "roles": 6,
    "policy": 6,
}  # fmt: skip
KINDS = {
    "comparison", "arithmetic", "off_by_one", "removed_guard", "swapped_state", "boolean",
    "constant",
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.id for mutant in MUTANTS])
def test_a_mutant_changes_one_place_and_parses(mutant):
    source = (ROOT / mutant.file).read_text()

    assert tool.planted(source, mutant) != source


def test_every_area_has_its_mutants():
    assert Counter(mutant.area for mutant in MUTANTS) == NUM_BY_AREA
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.kind for mutant in MUTANTS} == KINDS


def test_the_tests_that_mutants_name_exist():
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
    monkeypatch.setattr(server, "LIMIT_SECONDS", 2.0)
    (toy / "test_endless.py").write_text("import time\n\n\ndef test_one():\n    time.sleep(60)\n")

    with server.servers(toy, ["toy"], [], 1) as (only,):
        assert only.run(["test_endless.py"]).status is None


class Told:
    """A server whose runs end as they are told to."""

    def __init__(self, copy, *runs) -> None:
        self.copy, self.runs = copy, list(runs)

    def run(self, _targets):
        return self.runs.pop(0)


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([server.Run(None), server.Run(0)], tool.KILLED),
        ([server.Run(None), server.Run(None)], tool.INVALID),
        ([server.Run(1, "test_sums.py::test_sum"), server.Run(1)], tool.INVALID),
        ([server.Run(0), server.Run(1, "test_wider.py::test_one"), server.Run(0)], tool.KILLED),
        ([server.Run(0), server.Run(5)], tool.INVALID),
        ([server.Run(0), server.Run(0)], tool.SURVIVED),
    ],
)
def test_what_ends_no_better_without_the_mutant_is_invalid(toy, runs, verdict):
    wider = replace(TOY, wider=("test_wider.py",))

    assert tool.judge(wider, Told(toy, *runs)).verdict == verdict


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"old": "a * b"}, "toy-01: add of toy/sums.py holds its fragment 0 times, not once."),
        ({"old": "a"}, "toy-01: add of toy/sums.py holds its fragment 3 times, not once."),
        ({"function": "Sum.add"}, "toy-01: toy/sums.py has 0 of Sum.add, not one."),
        ({"new": "a +"}, "toy-01: toy/sums.py does not parse with it"),
        ({"file": "toy/gone.py"}, "toy-01: there is no toy/gone.py."),
    ],
)
def test_a_stale_mutant_is_refused_by_its_name(toy, changes, words):
    with pytest.raises(tool.StaleError, match=words.replace("+", r"\+")):
        tool.check([replace(TOY, **changes)], toy)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ([tool.KILLED] * 9 + [tool.SURVIVED], 0),
        ([tool.KILLED] * 8 + [tool.SURVIVED] * 2, 1),
        ([tool.KILLED] * 19 + [tool.INVALID], 1),
    ],
)
def test_nine_of_ten_are_to_be_killed_and_none_may_be_invalid(monkeypatch, found, status):
    outcomes = [tool.Outcome(TOY, verdict, "", 0.0) for verdict in found]
    monkeypatch.setattr(tool, "run_all", lambda *_, **__: outcomes)

    assert tool.main(["--only", "cost"]) == status


def test_the_list_is_printed_without_running_any(capsys):
    assert tool.main(["--list", "--only", "claims"]) == 0
    assert capsys.readouterr().out.count("webapp/jobs/claims.py") == NUM_BY_AREA["claims"]


def test_a_name_that_no_mutant_has_is_refused(capsys):
    assert tool.main(["--only", "cost-99"]) == 2
    assert "cost-99" in capsys.readouterr().out
