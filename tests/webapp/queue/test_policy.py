"""Who gets which devices: examples that a person can check by hand."""

import pytest

from webapp.queue.policy import (
    FOREVER,
    Decision,
    Demand,
    Device,
    Grant,
    Host,
    Snapshot,
    Wait,
    Why,
    decide,
)

GIB = 1024**3


def device(name: str, **changes) -> Device:
    fields = {"index": int(name[1:] or 0), "kind": "gpu", "model": "L4", "memory_bytes": 24 * GIB}
    return Device(id=name, **{**fields, **changes})


def busy(name: str, seconds: float = FOREVER, by: str = "running") -> Device:
    return device(name, is_held=True, free_seconds=seconds, held_by=by)


def host(name: str, *devices: Device, **changes) -> Host:
    return Host(name, devices, **changes)


def demand(job: str, queued_at: float = 0.0, **changes) -> Demand:
    return Demand(job=job, queued_at=queued_at, **{"team": "t", **changes})


def decided(hosts, demands, **changes) -> Decision:
    return decide(Snapshot(tuple(hosts), tuple(demands), **changes))


def granted(decision: Decision) -> dict[str, list[str]]:
    return {g.job: [d for _, ids in g.places for d in ids] for g in decision.grants}


def wait_of(decision: Decision, job: str) -> Wait:
    return next(wait for wait in decision.waits if wait.job == job)


def box(num: int, name: str = "a") -> Host:
    return host(name, *(device(f"{name}{i}") for i in range(num)))


# Order


def test_the_oldest_goes_first():
    found = decided([box(1)], [demand("new", 2), demand("old", 1)])
    assert (granted(found), found.order) == ({"old": ["a0"]}, ("old", "new"))


def test_priority_goes_before_age():
    found = decided([box(1)], [demand("old", 1), demand("urgent", 2, priority=1)])
    assert granted(found) == {"urgent": ["a0"]}


def test_low_priority_goes_last():
    found = decided([box(1)], [demand("low", 1, priority=-1), demand("normal", 2)])
    assert granted(found) == {"normal": ["a0"]}


def test_a_rank_given_by_hand_goes_before_age_but_not_before_priority():
    jobs = [demand("old", 1), demand("ranked", 3, rank=1), demand("high", 4, priority=1)]
    assert decided([box(1)], jobs).order == ("high", "ranked", "old")


def test_the_team_that_used_less_goes_first():
    jobs = [demand("greedy", 1, team="x"), demand("modest", 2, team="y")]
    found = decided([box(1)], jobs, used={"x": 900.0, "y": 10.0})
    assert found.order == ("modest", "greedy")


def test_teams_that_used_the_same_take_turns():
    jobs = [demand(f"x{i}", i, team="x") for i in range(3)]
    jobs += [demand(f"y{i}", 10 + i, team="y") for i in range(3)]
    assert decided([box(1)], jobs).order == ("x0", "y0", "x1", "y1", "x2", "y2")


def test_what_is_held_back_costs_its_team_no_turn():
    held = demand("held", 1, team="a", held_back="It rests.")
    found = decided([box(1)], [held, demand("next", 2, team="a"), demand("other", 3, team="b")])
    assert found.order == ("held", "next", "other")


def test_a_double_share_gets_two_turns_for_one():
    jobs = [demand(f"x{i}", i, team="x") for i in range(4)]
    jobs += [demand(f"y{i}", 10 + i, team="y") for i in range(2)]
    found = decided([box(1)], jobs, shares={"x": 2.0})
    assert found.order == ("x0", "y0", "x1", "x2", "y1", "x3")


# All or nothing


def test_a_gang_of_devices_is_granted_whole():
    assert granted(decided([box(4)], [demand("gang", devices_per_host=4)])) == {
        "gang": ["a0", "a1", "a2", "a3"]
    }


def test_a_gang_that_does_not_fit_now_gets_nothing():
    hosts = [host("a", device("a0"), busy("a1"))]
    found = decided(hosts, [demand("gang", devices_per_host=2)])
    assert (found.grants, wait_of(found, "gang").num_free) == ((), 1)


def test_a_gang_of_hosts_takes_as_many_of_each():
    found = decided([box(2, "a"), box(2, "b")], [demand("g", num_hosts=2, devices_per_host=2)])
    assert found.grants == (Grant("g", (("a", ("a0", "a1")), ("b", ("b0", "b1")))),)


def test_all_devices_of_a_host_means_all_that_may_be_used():
    hosts = [host("a", device("a0"), device("a1", is_usable=False), device("a2"))]
    found = decided(hosts, [demand("whole", devices_per_host=None)])
    assert granted(found) == {"whole": ["a0", "a2"]}


def test_a_gang_is_of_one_kind_of_device():
    hosts = [host("a", device("a0"), device("a1", model="T4"), device("a2"))]
    found = decided(hosts, [demand("pair", devices_per_host=2)])
    assert granted(found) == {"pair": ["a0", "a2"]}


# What may be taken


def test_too_little_memory_will_not_do():
    hosts = [host("a", device("a0", memory_bytes=8 * GIB), device("a1"))]
    found = decided(hosts, [demand("big", min_memory_bytes=20 * GIB)])
    assert granted(found) == {"big": ["a1"]}


def test_a_cordoned_device_is_never_taken():
    hosts = [host("a", device("a0", is_usable=False))]
    assert wait_of(decided(hosts, [demand("one")]), "one").why is Why.IMPOSSIBLE


def test_a_degraded_host_takes_singles_and_no_gang():
    hosts = [host("a", device("a0"), device("a1"), takes_gangs=False)]
    found = decided(hosts, [demand("pair", 1, devices_per_host=2), demand("one", 2)])
    assert granted(found) == {"one": ["a0"]}
    assert wait_of(found, "pair").why is Why.HOSTS


def test_a_host_that_takes_nothing_is_left_alone():
    shut = host("a", device("a0"), takes_singles=False, takes_gangs=False)
    found = decided([shut, box(1, "b")], [demand("one", host="a"), demand("two", 1)])
    assert granted(found) == {"two": ["b0"]}


def test_a_pinned_job_waits_for_its_host():
    found = decided([host("a", busy("a0")), box(1, "b")], [demand("one", host="a")])
    assert wait_of(found, "one").host == "a"


def test_singles_share_a_host_each_on_its_device():
    found = decided([box(3)], [demand("one", 1), demand("two", 2)])
    assert granted(found) == {"one": ["a0"], "two": ["a1"]}


def test_a_single_goes_where_the_least_stays_free():
    hosts = [box(4, "a"), host("b", device("b0"), busy("b1"))]
    assert granted(decided(hosts, [demand("one")])) == {"one": ["b0"]}


# Reservation and backfill

HALF_BUSY = (host("a", device("a0"), busy("a1", seconds=100.0, by="long")),)
PAIR = demand("pair", 1, devices_per_host=2, seconds=50.0)


def test_a_waiting_gang_is_told_when_and_after_whom():
    wait = wait_of(decided(HALF_BUSY, [PAIR]), "pair")
    assert (wait.why, wait.start_seconds, wait.after) == (Why.DEVICES, 100.0, "long")


def test_a_job_that_ends_before_the_gangs_start_may_go_first():
    found = decided(HALF_BUSY, [PAIR, demand("short", 2, seconds=99.0)])
    assert granted(found) == {"short": ["a0"]}


def test_a_job_that_would_delay_the_gang_may_not():
    found = decided(HALF_BUSY, [PAIR, demand("longer", 2, seconds=101.0)])
    wait = wait_of(found, "longer")
    assert (found.grants, wait.why, wait.behind) == ((), Why.RESERVED, "pair")
    assert wait.start_seconds == 150.0


def test_a_job_of_unknown_length_may_not_either():
    found = decided(HALF_BUSY, [PAIR, demand("unknown", 2)])
    assert found.grants == ()


def test_a_short_job_may_go_before_a_gang_whose_start_nobody_knows():
    hosts = [host("a", device("a0"), busy("a1"))]
    found = decided(hosts, [PAIR, demand("short", 2, seconds=9.0)])
    assert (granted(found), wait_of(found, "pair").start_seconds) == ({"short": ["a0"]}, None)


def test_a_job_of_unknown_length_may_not_go_before_such_a_gang():
    hosts = [host("a", device("a0"), busy("a1"))]
    found = decided(hosts, [PAIR, demand("unknown", 2)])
    assert found.grants == ()


def test_the_other_host_is_nobodys():
    found = decided([*HALF_BUSY, box(1, "b")], [PAIR, demand("unknown", 2)])
    assert granted(found) == {"unknown": ["b0"]}


def test_a_gang_waits_for_the_host_that_is_free_soonest():
    hosts = [
        host("a", busy("a0", 300.0), busy("a1", 10.0)),
        host("b", busy("b0", 80.0), busy("b1", 90.0, by="soon")),
    ]
    wait = wait_of(decided(hosts, [PAIR]), "pair")
    assert (wait.start_seconds, wait.after) == (90.0, "soon")


def test_what_can_never_run_keeps_nobody_waiting():
    found = decided([box(2)], [demand("huge", 1, devices_per_host=8), demand("one", 2)])
    assert wait_of(found, "huge").why is Why.IMPOSSIBLE
    assert granted(found) == {"one": ["a0"]}


def test_what_is_held_back_keeps_nobody_waiting():
    jobs = [demand("resting", 1, held_back="the last check failed"), demand("one", 2)]
    found = decided([box(1)], jobs)
    assert (granted(found), wait_of(found, "resting").why) == ({"one": ["a0"]}, Why.HELD_BACK)


def test_a_gang_counts_the_hosts_that_are_ready_for_it():
    hosts = [box(2, "a"), host("b", device("b0"), busy("b1", 60.0))]
    wait = wait_of(decided(hosts, [demand("g", num_hosts=2, devices_per_host=2)]), "g")
    assert (wait.num_ready_hosts, wait.start_seconds) == (1, 60.0)


@pytest.mark.parametrize("hosts", [(), (host("a"),)])
def test_an_empty_pool_gives_nothing(hosts):
    assert wait_of(decided(hosts, [demand("one")]), "one").why is Why.IMPOSSIBLE
