"""The bench's figures exist and are counted; how large they are is not a test's business."""

from functools import cache

import pytest

from planner import speed
from planner.search import engine
from planner.search.engine import explore
from planner.search.scoring import score
from tests.plugins.extent import first

LOADS = {"one card, serving, open loop", "one card, serving, burst", "one card, training"}
SOME = first(sorted(speed.REPLANS, key=lambda name: name not in LOADS), len(LOADS))


@cache
def rows():
    """Return the bench's rows by name, measured once: those of some re-plans, all nightly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "REPLANS", {name: speed.REPLANS[name] for name in SOME})
        return {name: row for name, *row in speed.figures(rounds=1)}


def num_replans(names):
    return sum(1 + len(speed.changes(speed.REPLANS[name])) for name in names)


def test_the_bench_shows_rates_plans_and_re_plans_each_with_its_goal():
    kinds = [name.split(":")[0] for name in rows()]

    assert {kind: kinds.count(kind) for kind in kinds} == {
        "strategies scored": 4,
        "plan": 5,
        "re-plan": num_replans(SOME),
    }
    assert num_replans(speed.REPLANS) == 40
    assert all(value > 0 and goal for value, _, goal in rows().values())


def test_a_rate_is_in_strategies_a_second_and_a_plan_in_seconds():
    for name, (_, unit, _) in rows().items():
        assert unit == ("1/s" if name.startswith("strategies") else "s")


def test_every_load_is_measured_with_a_plan_and_a_re_plan():
    for load in ("open loop", "burst"):
        assert any(load in name for name in rows() if name.startswith("plan"))
        assert any(load in name for name in rows() if name.startswith("re-plan"))


@pytest.mark.parametrize("load", speed.REPLANS)
def test_a_re_plan_changes_one_thing_of_the_same_model_hardware_and_load(load):
    before = speed.REPLANS[load]

    for after in speed.changes(before).values():
        differing = [name for name, value in after if value != getattr(before, name)]
        assert differing in (["objective"], ["pins"], ["constraints"])


def test_a_target_out_of_reach_is_out_of_reach_and_another_one_is_not():
    for name, request in speed.REPLANS.items():
        if not name.endswith("nothing fits"):
            asked = speed.changes(request)
            assert len(explore(asked["a target"]).table.feasible)
            assert not len(explore(asked["a target out of reach"]).table.feasible)


def test_nothing_is_remembered_when_a_plan_is_measured(monkeypatch):
    scored = []
    monkeypatch.setattr(engine, "score", lambda *args: scored.append(1) or score(*args))
    speed.planning_seconds(speed.WIZARD, rounds=1)
    once = len(scored)

    speed.planning_seconds(speed.WIZARD, rounds=3)

    assert len(scored) - once >= 3 * once / 2


def test_what_is_said_not_to_fit_does_not_fit():
    for name, request in speed.REPLANS.items():
        feasible = len(explore(request).table.feasible)
        assert (feasible == 0) == name.endswith("nothing fits")
