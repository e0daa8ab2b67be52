"""Who gets which devices: examples to check by hand, and laws of every decision."""

import math
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from webapp.jobs import queue_decisions
from webapp.jobs.queue_decisions import (
    FOREVER,
    Decision,
    Demand,
    Device,
    Grant,
    Hold,
    Host,
    Snapshot,
    Wait,
    Why,
    decide,
    grants_of,
)

GIB = 1024**3


def device(name: str, **changes) -> Device:
    fields = {"index": int(name[1:] or 0), "kind": "gpu", "model": "L4", "memory_bytes": 24 * GIB}
    return Device(id=name, **{**fields, **changes})


def busy(name: str, seconds: float = FOREVER, by: str = "running") -> Device:
    return device(name, holds=(Hold(by, seconds),))


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


def test_priority_goes_before_a_rank_given_by_hand_and_that_before_age():
    found = decided([box(1)], [demand("new", 2), demand("old", 1)])
    assert (granted(found), found.order) == ({"old": ["a0"]}, ("old", "new"))
    found = decided([box(1)], [demand("old", 1), demand("urgent", 2, priority=1)])
    assert granted(found) == {"urgent": ["a0"]}
    found = decided([box(1)], [demand("low", 1, priority=-1), demand("normal", 2)])
    assert granted(found) == {"normal": ["a0"]}
    jobs = [demand("old", 1), demand("ranked", 3, rank=1), demand("high", 4, priority=1)]
    assert decided([box(1)], jobs).order == ("high", "ranked", "old")


def test_teams_take_turns_by_what_they_used_and_by_their_shares():
    jobs = [demand("greedy", 1, team="x"), demand("modest", 2, team="y")]
    found = decided([box(1)], jobs, used={"x": 900.0, "y": 10.0})
    assert found.order == ("modest", "greedy")

    jobs = [demand(f"x{i}", i, team="x") for i in range(3)]
    jobs += [demand(f"y{i}", 10 + i, team="y") for i in range(3)]
    assert decided([box(1)], jobs).order == ("x0", "y0", "x1", "y1", "x2", "y2")

    held = demand("held", 1, team="a", held_back="It rests.")
    found = decided([box(1)], [held, demand("next", 2, team="a"), demand("other", 3, team="b")])
    assert found.order == ("held", "next", "other")

    jobs = [demand(f"x{i}", i, team="x") for i in range(4)]
    jobs += [demand(f"y{i}", 10 + i, team="y") for i in range(2)]
    found = decided([box(1)], jobs, shares={"x": 2.0})
    assert found.order == ("x0", "y0", "x1", "x2", "y1", "x3")


# All or nothing


def test_a_gang_of_devices_is_granted_whole_or_not_at_all():
    assert granted(decided([box(4)], [demand("gang", devices_per_host=4)])) == {
        "gang": ["a0", "a1", "a2", "a3"]
    }
    hosts = [host("a", device("a0"), busy("a1"))]
    found = decided(hosts, [demand("gang", devices_per_host=2)])
    assert (found.grants, wait_of(found, "gang").num_free) == ((), 1)
    found = decided([box(2, "a"), box(2, "b")], [demand("g", num_hosts=2, devices_per_host=2)])
    assert found.grants == (Grant("g", (("a", ("a0", "a1")), ("b", ("b0", "b1")))),)


def test_a_gang_is_of_one_kind_of_device_and_all_means_those_that_may_be_used():
    hosts = [host("a", device("a0"), device("a1", is_usable=False), device("a2"))]
    found = decided(hosts, [demand("whole", devices_per_host=None)])
    assert granted(found) == {"whole": ["a0", "a2"]}
    hosts = [host("a", device("a0"), device("a1", model="T4"), device("a2"))]
    found = decided(hosts, [demand("pair", devices_per_host=2)])
    assert granted(found) == {"pair": ["a0", "a2"]}


# Devices that jobs share by memory


def sharing(name: str, *holds: Hold) -> Device:
    fields = {"memory_bytes": 24, "shareable_bytes": 20, "holds": holds}
    return device(name, **fields)


def test_one_that_shares_joins_where_the_least_is_left_before_it_begins_a_free_device():
    roomy, tight = Hold("p", num_bytes=4), Hold("q", num_bytes=12)
    hosts = [
        host("a", sharing("a0")),
        host("b", sharing("b0", roomy)),
        host("c", sharing("c0", tight)),
    ]
    jobs = [demand(f"j{n}", n, num_bytes=7) for n in range(5)]
    found = decided(hosts, jobs)
    assert granted(found) == {"j0": ["c0"], "j1": ["b0"], "j2": ["b0"], "j3": ["a0"], "j4": ["a0"]}
    alone = decided([hosts[1]], [demand("all", seconds=9.0), demand("j", 1, num_bytes=7)])
    assert granted(alone) == {}  # it is kept for the one that came first
    assert granted(decided([hosts[0]], [demand("large", num_bytes=99)])) == {"large": ["a0"]}
    slots = [host("a", device("a0", kind="slot"))]
    assert len(decided(slots, [demand(f"j{n}", num_bytes=1) for n in range(2)]).grants) == 1


def test_room_is_forecast_from_those_that_leave_and_later_ones_use_what_is_not_reserved():
    holds = Hold("soon", 10.0, 8), Hold("later", 50.0, 8)
    hosts = [host("a", sharing("a0", *holds))]
    first = demand("first", num_bytes=10)
    jobs = [first, demand("small", 1, num_bytes=2), demand("more", 2, num_bytes=3)]
    found = decided(hosts, jobs)
    assert granted(found) == {"small": ["a0"]}  # 8 + 10 + 2 once the soon one has left
    wait, more = wait_of(found, "first"), wait_of(found, "more")
    assert (wait.why, wait.start_seconds, wait.after) == (Why.DEVICES, 10.0, "soon")
    assert (more.why, more.start_seconds, more.after) == (Why.DEVICES, 50.0, "later")
    all_of_it = decided(hosts, [demand("all", seconds=5.0), demand("small", 1, num_bytes=2)])
    wait, small = wait_of(all_of_it, "all"), wait_of(all_of_it, "small")
    assert (wait.start_seconds, wait.after) == (50.0, "later")
    assert (small.why, small.behind, small.start_seconds) == (Why.RESERVED, "all", 55.0)
    short = demand("short", 1, num_bytes=2, seconds=9.0)
    assert granted(decided(hosts, [demand("all", seconds=5.0), short])) == {"short": ["a0"]}


def test_one_whose_team_may_hold_no_further_device_shares_those_that_it_has():
    hosts = [host("a", sharing("a0")), host("b", sharing("b0", Hold("own", num_bytes=4)))]
    held = {"held_back": "The team holds 1 of 1.", "num_bytes": 10}
    jobs = [demand("j", own_devices=frozenset({"b0"}), **held), demand("k", 1, **held)]
    found = decided(hosts, jobs)
    assert (granted(found), wait_of(found, "k").why) == ({"j": ["b0"]}, Why.HELD_BACK)
    full = decided(hosts, [demand("j", own_devices=frozenset({"b0"}), **held | {"num_bytes": 17})])
    assert (full.grants, wait_of(full, "j").why) == ((), Why.HELD_BACK)
    pair = [host("a", sharing("a0"), sharing("a1"))]
    whole = demand("j", own_devices=frozenset({"a0"}), devices_per_host=None, **held)
    assert decided(pair, [whole]).grants == ()  # it wants the other device too


# What may be taken


def test_too_little_memory_or_a_cordoned_device_will_not_do():
    hosts = [host("a", device("a0", memory_bytes=8 * GIB), device("a1"))]
    found = decided(hosts, [demand("big", min_memory_bytes=20 * GIB)])
    assert granted(found) == {"big": ["a1"]}
    hosts = [host("a", device("a0", is_usable=False))]
    assert wait_of(decided(hosts, [demand("one")]), "one").why is Why.IMPOSSIBLE


def test_a_host_takes_what_its_state_allows_and_a_pinned_job_waits_for_it():
    hosts = [host("a", device("a0"), device("a1"), takes_gangs=False)]
    found = decided(hosts, [demand("pair", 1, devices_per_host=2), demand("one", 2)])
    assert granted(found) == {"one": ["a0"]}
    assert wait_of(found, "pair").why is Why.HOSTS

    shut = host("a", device("a0"), takes_singles=False, takes_gangs=False)
    found = decided([shut, box(1, "b")], [demand("one", host="a"), demand("two", 1)])
    assert granted(found) == {"two": ["b0"]}

    found = decided([host("a", busy("a0")), box(1, "b")], [demand("one", host="a")])
    assert wait_of(found, "one").host == "a"


def test_singles_share_a_host_each_on_its_device_where_the_least_stays_free():
    found = decided([box(3)], [demand("one", 1), demand("two", 2)])
    assert granted(found) == {"one": ["a0"], "two": ["a1"]}
    hosts = [box(4, "a"), host("b", device("b0"), busy("b1"))]
    assert granted(decided(hosts, [demand("one")])) == {"one": ["b0"]}


# Reservation and backfill

HALF_BUSY = (host("a", device("a0"), busy("a1", seconds=100.0, by="long")),)
PAIR = demand("pair", 1, devices_per_host=2, seconds=50.0)


def test_of_hosts_that_are_equal_otherwise_a_preferred_one_is_taken():
    """It breaks ties alone: a tighter fit goes first, and nobody waits for a preferred host."""
    wish = frozenset({"b"})
    equal = [box(2, "a"), box(2, "b")]
    assert granted(decided(equal, [demand("j", preferred=wish)]))["j"][0].startswith("b")
    assert granted(decided(equal, [demand("j")]))["j"][0].startswith("a")
    tighter = [box(1, "a"), box(2, "b")]
    assert granted(decided(tighter, [demand("j", preferred=wish)]))["j"][0].startswith("a")
    held = [box(1, "a"), host("b", busy("b0", 60.0))]
    assert granted(decided(held, [demand("j", preferred=wish)]))["j"][0].startswith("a")
    both = [demand("j", preferred=wish), demand("k", 1.0, preferred=wish)]
    assert set(granted(decided(equal, both))) == {"j", "k"}
    soon = [host("a", busy("a0", 60.0)), host("b", busy("b0", 60.0))]
    short = demand("short", 1.0, seconds=5.0, preferred=wish)
    assert wait_of(decided(soon, [demand("j", preferred=wish), short]), "j").start_seconds == 60.0


def test_only_a_job_that_ends_before_the_gangs_start_may_go_first():
    wait = wait_of(decided(HALF_BUSY, [PAIR]), "pair")
    assert (wait.why, wait.start_seconds, wait.after) == (Why.DEVICES, 100.0, "long")

    found = decided(HALF_BUSY, [PAIR, demand("short", 2, seconds=99.0)])
    assert granted(found) == {"short": ["a0"]}

    found = decided(HALF_BUSY, [PAIR, demand("longer", 2, seconds=101.0)])
    wait = wait_of(found, "longer")
    assert (found.grants, wait.why, wait.behind) == ((), Why.RESERVED, "pair")
    assert wait.start_seconds == 150.0

    found = decided(HALF_BUSY, [PAIR, demand("unknown", 2)])
    assert found.grants == ()

    found = decided([*HALF_BUSY, box(1, "b")], [PAIR, demand("unknown", 2)])
    assert granted(found) == {"unknown": ["b0"]}


def test_only_a_short_job_may_go_before_a_gang_whose_start_nobody_knows():
    hosts = [host("a", device("a0"), busy("a1"))]
    found = decided(hosts, [PAIR, demand("short", 2, seconds=9.0)])
    assert (granted(found), wait_of(found, "pair").start_seconds) == ({"short": ["a0"]}, None)
    found = decided(hosts, [PAIR, demand("unknown", 2)])
    assert found.grants == ()


def test_a_gang_waits_for_what_is_free_soonest_and_counts_what_is_ready():
    hosts = [
        host("a", busy("a0", 300.0), busy("a1", 10.0)),
        host("b", busy("b0", 80.0), busy("b1", 90.0, by="soon")),
    ]
    wait = wait_of(decided(hosts, [PAIR]), "pair")
    assert (wait.start_seconds, wait.after) == (90.0, "soon")

    hosts = [box(2, "a"), host("b", device("b0"), busy("b1", 60.0))]
    wait = wait_of(decided(hosts, [demand("g", num_hosts=2, devices_per_host=2)]), "g")
    assert (wait.num_ready_hosts, wait.start_seconds) == (1, 60.0)


def test_what_can_never_run_or_is_held_back_keeps_nobody_waiting():
    found = decided([box(2)], [demand("huge", 1, devices_per_host=8), demand("one", 2)])
    assert wait_of(found, "huge").why is Why.IMPOSSIBLE
    assert granted(found) == {"one": ["a0"]}
    jobs = [demand("resting", 1, held_back="the last check failed"), demand("one", 2)]
    found = decided([box(1)], jobs)
    assert (granted(found), wait_of(found, "resting").why) == ({"one": ["a0"]}, Why.HELD_BACK)
    for hosts in [(), (host("a"),)]:
        assert wait_of(decided(hosts, [demand("one")]), "one").why is Why.IMPOSSIBLE, hosts


# Laws that every decision keeps, whatever the pool and whoever waits.


SECONDS = st.one_of(st.none(), st.integers(1, 500).map(float))


@st.composite
def hosts(draw, max_hosts: int = 4) -> tuple[Host, ...]:
    return tuple(
        Host(
            id=f"h{number}",
            devices=tuple(
                draw(devices(f"h{number}d{index}", index))
                for index in range(draw(st.integers(0, 4)))
            ),
            takes_singles=(singles := draw(st.booleans())),
            takes_gangs=singles and draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, max_hosts)))
    )


@st.composite
def devices(draw, name: str, index: int) -> Device:
    left = draw(st.sampled_from([10.0, 100.0, 400.0, FOREVER]))
    later = draw(st.sampled_from([10.0, 200.0, FOREVER]))
    whole = Hold(f"holder of {name}", left)
    parts = (replace(whole, num_bytes=6), Hold(f"other on {name}", later, 5))
    return Device(
        id=name,
        index=index,
        kind="gpu",
        model=draw(st.sampled_from(["L4", "L4", "T4"])),
        memory_bytes=draw(st.sampled_from([16, 24, 24])),
        holds=draw(st.sampled_from([(), (), (whole,), (whole,), parts[:1], parts])),
        shareable_bytes=16,
        is_usable=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def demands(draw) -> tuple[Demand, ...]:
    return tuple(
        Demand(
            job=f"j{number}",
            team=draw(st.sampled_from("xyz")),
            queued_at=float(draw(st.integers(0, 50))),
            priority=draw(st.integers(-1, 1)),
            rank=draw(st.one_of(st.none(), st.none(), st.integers(1, 9))),
            num_hosts=draw(st.sampled_from([1, 1, 1, 2, 3])),
            devices_per_host=draw(st.sampled_from([1, 1, 2, 3, None])),
            min_memory_bytes=draw(st.sampled_from([0, 0, 20])),
            host=draw(st.sampled_from([None, None, None, "h0"])),
            seconds=draw(SECONDS),
            held_back=draw(st.sampled_from(["", "", "", "it rests"])),
            own_devices=draw(st.sampled_from([frozenset(), frozenset({"h0d0", "h0d1"})])),
            num_bytes=draw(st.sampled_from([None, None, 2, 5, 10, 99])),
        )
        for number in range(draw(st.integers(0, 9)))
    )


def snapshot_of(hosts, demands, **fields) -> Snapshot:
    wants = [demand.num_bytes for demand in demands if demand.num_bytes is not None]
    return Snapshot(hosts, demands, least_bytes=min(wants, default=None), **fields)


snapshots = st.builds(
    snapshot_of,
    hosts=hosts(),
    demands=demands(),
    used=st.dictionaries(st.sampled_from("xyz"), st.floats(0, 1e6)),
    shares=st.dictionaries(st.sampled_from("xyz"), st.floats(0.5, 4)),
)


def taken(decision: Decision) -> list[str]:
    return [d for grant in decision.grants for _, ids in grant.places for d in ids]


def every_job_is_answered_once(snapshot: Snapshot, found: Decision) -> None:
    answered = [g.job for g in found.grants] + [w.job for w in found.waits]
    assert sorted(answered) == sorted(d.job for d in snapshot.demands) == sorted(found.order)


def no_device_is_given_twice_but_to_those_whose_memory_fits(
    snapshot: Snapshot, found: Decision
) -> None:
    asked = {demand.job: demand.num_bytes for demand in snapshot.demands}
    devices = [device for host in snapshot.hosts for device in host.devices]
    parts = {device.id: [hold.num_bytes for hold in device.holds] for device in devices}
    for grant in found.grants:
        for device_id in (device_id for _, ids in grant.places for device_id in ids):
            parts[device_id].append(asked[grant.job])
    for device_id in taken(found):
        on_it = parts[device_id]
        assert len(on_it) == 1 or (None not in on_it and sum(on_it) <= 16), on_it


def a_grant_is_all_that_was_asked_for(snapshot: Snapshot, found: Decision) -> None:
    by_host = {host.id: host for host in snapshot.hosts}
    asked = {demand.job: demand for demand in snapshot.demands}
    for grant in found.grants:
        demand = asked[grant.job]
        assert len({host for host, _ in grant.places}) == demand.num_hosts == len(grant.places)
        for host, ids in grant.places:
            fit = [d for d in by_host[host].devices if d.is_usable]
            fit = [d for d in fit if d.memory_bytes >= demand.min_memory_bytes]
            assert len(ids) == (demand.devices_per_host or len(fit))
            assert set(ids) <= {d.id for d in fit}


def only_hosts_that_take_such_jobs_get_them(snapshot: Snapshot, found: Decision) -> None:
    by_host = {host.id: host for host in snapshot.hosts}
    asked = {demand.job: demand for demand in snapshot.demands}
    for grant in found.grants:
        demand = asked[grant.job]
        for host, _ in grant.places:
            is_single = demand.is_single
            assert by_host[host].takes_singles if is_single else by_host[host].takes_gangs
            assert demand.host in {None, host}


def priority_and_then_rank_decide_the_order(snapshot: Snapshot, found: Decision) -> None:
    asked = {demand.job: demand for demand in snapshot.demands}
    keys = [
        (-asked[job].priority, math.inf if asked[job].rank is None else asked[job].rank)
        for job in found.order
    ]
    assert keys == sorted(keys)


def the_first_who_can_start_is_never_refused_what_is_free(_: Snapshot, found: Decision) -> None:
    """Nobody is before it, so nothing can be kept from it."""
    waits = {wait.job: wait for wait in found.waits}
    if found.order and found.order[0] in waits:
        assert waits[found.order[0]].why is not Why.RESERVED


def a_later_job_changes_nothing_for_an_earlier_one(snapshot: Snapshot, whole: Decision) -> None:
    if not whole.order:
        return
    last = whole.order[-1]
    fewer = replace(snapshot, demands=tuple(d for d in snapshot.demands if d.job != last))
    without = decide(fewer)
    assert without.grants == tuple(g for g in whole.grants if g.job != last)
    assert without.waits == tuple(w for w in whole.waits if w.job != last)


def the_order_in_which_rows_are_read_decides_nothing(
    snapshot: Snapshot, found: Decision, shuffler: Random
) -> None:
    hosts, demands = list(snapshot.hosts), list(snapshot.demands)
    shuffler.shuffle(hosts)
    shuffler.shuffle(demands)
    assert decide(replace(snapshot, hosts=tuple(hosts), demands=tuple(demands))) == found


@given(snapshots, st.randoms(use_true_random=False))
def test_every_decision_keeps_every_law(snapshot, shuffler):
    found = decide(snapshot)

    every_job_is_answered_once(snapshot, found)
    no_device_is_given_twice_but_to_those_whose_memory_fits(snapshot, found)
    a_grant_is_all_that_was_asked_for(snapshot, found)
    only_hosts_that_take_such_jobs_get_them(snapshot, found)
    priority_and_then_rank_decide_the_order(snapshot, found)
    the_first_who_can_start_is_never_refused_what_is_free(snapshot, found)
    a_later_job_changes_nothing_for_an_earlier_one(snapshot, found)
    the_order_in_which_rows_are_read_decides_nothing(snapshot, found, shuffler)


# No starvation: a gang among ever new small jobs


def advance(hosts: tuple[Host, ...], seconds: float) -> tuple[Host, ...]:
    """Let time pass; whoever reaches the end of its forecast lets go."""

    def later(device: Device) -> Device:
        left = (replace(hold, seconds=hold.seconds - seconds) for hold in device.holds)
        return replace(device, holds=tuple(hold for hold in left if hold.seconds > 0))

    return tuple(replace(h, devices=tuple(map(later, h.devices))) for h in hosts)


def hold(hosts: tuple[Host, ...], decision: Decision, demands: dict[str, Demand]):
    holds: dict[str, tuple[Hold, ...]] = {}
    for grant in decision.grants:
        demand = demands[grant.job]
        for device_id in (device_id for _, ids in grant.places for device_id in ids):
            held = Hold(grant.job, demand.seconds, demand.num_bytes)
            holds[device_id] = (*holds.get(device_id, ()), held)
    return tuple(
        replace(
            host,
            devices=tuple(
                replace(d, holds=(*d.holds, *holds.get(d.id, ()))) for d in host.devices
            ),
        )
        for host in hosts
    )


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60)
def test_a_gang_starts_when_it_was_first_forecast_whatever_comes_after_it(shuffler, wide, deep):
    """Small jobs of any known length arrive at every step; the gang's start never moves back."""
    pool = tuple(
        Host(f"h{n}", tuple(Device(f"h{n}d{i}", i, "gpu", "L4", 24, (), 20) for i in range(4)))
        for n in range(3)
    )
    gang = Demand("gang", "x", 0.0, num_hosts=wide, devices_per_host=deep, seconds=30.0)
    if shuffler.random() < 0.5:  # it wants most of a device and shares the rest
        gang = replace(gang, num_hosts=1, devices_per_host=1, num_bytes=14)
    wanted = {"gang": gang}

    def small(name: str, queued_at: float, least: float) -> Demand:
        num_bytes = shuffler.choice([None, 1, 4, 9])
        seconds = shuffler.uniform(least, 60)
        wanted[name] = Demand(name, "y", queued_at, seconds=seconds, num_bytes=num_bytes)
        return wanted[name]

    first = tuple(small(f"old{i}", -1.0, 5) for i in range(shuffler.choice([10, 30])))
    pool = hold(pool, decide(Snapshot(pool, first)), wanted)
    promised = None
    for step in range(100):
        found = decide(Snapshot(pool, (gang, small(f"new{step}", 1.0 + step, 1))))
        if any(grant.job == "gang" for grant in found.grants):
            break
        start = step + next(w.start_seconds for w in found.waits if w.job == "gang")
        promised = start if promised is None else promised
        assert start <= promised + 1e-6
        pool = advance(hold(pool, found, wanted), 1.0)
    assert promised is None or step <= math.ceil(promised)


@given(snapshots, st.integers(1, 9))
def test_the_first_turns_are_decided_alone_as_among_all(snapshot, number):
    whole = decide(snapshot)
    part = decide(snapshot, lambda turn, _job: turn >= number)
    first = set(whole.order[:number])
    assert part.order == whole.order
    assert part.grants == tuple(one for one in whole.grants if one.job in first)
    assert part.waits == tuple(one for one in whole.waits if one.job in first)


@given(snapshots, st.integers(1, 9))
def test_grants_alone_are_those_of_the_whole_decision(snapshot, number):
    whole = decide(snapshot)
    assert grants_of(snapshot) == whole.grants
    first = set(whole.order[:number])
    part = replace(snapshot, demands=tuple(d for d in snapshot.demands if d.job in first))
    assert grants_of(part, number) in {None, whole.grants}


def long_queue(shuffler: Random, *, num_jobs: int, share_held: float) -> Snapshot:
    """A pool of unlike hosts, some of whose devices are held, and a queue of every kind of job."""
    hosts = tuple(
        Host(
            f"h{n}",
            tuple(
                Device(
                    f"h{n}d{i}", i, "slot" if n == 4 else "gpu", shuffler.choice(["L4", "H100"]),
                    shuffler.choice([24, 80]), held, 0 if n == 4 else 20,
                    is_usable=shuffler.random() < 0.95,
                )
                for i in range(4)
                for held in [
                    (
                        Hold(
                            "r", shuffler.choice([FOREVER, 20.0, 90.0]),
                            shuffler.choice([None, None, 4, 12]),
                        ),
                    )
                    if shuffler.random() < share_held
                    else ()
                ]
            ),
            takes_singles=n != 3,
            takes_gangs=n not in {2, 3},
        )
        for n in range(6)
    )  # fmt: skip
    demands = tuple(
        Demand(
            f"j{number}", shuffler.choice("xyz"), float(number),
            priority=shuffler.choice([0, 0, 0, 1]),
            rank=shuffler.choice([None, None, None, 2]),
            num_hosts=shuffler.choice([1, 1, 1, 2, 3]),
            devices_per_host=shuffler.choice([1, 1, 2, 3, 4, None]),
            min_memory_bytes=shuffler.choice([0, 0, 30, 90]),
            host=shuffler.choice([None, None, None, "h1"]),
            seconds=shuffler.choice([None, 10.0, 50.0, 100.0]),
            held_back=shuffler.choice(["", "", "", "quota"]),
            own_devices=shuffler.choice([frozenset(), frozenset({"h0d0", "h1d2"})]),
            num_bytes=shuffler.choice([None, None, 3, 10, 30]),
        )
        for number in range(num_jobs)
    )  # fmt: skip
    return snapshot_of(hosts, demands, used={"x": 50.0}, shares={"x": 2.0})


@given(st.randoms(use_true_random=False), st.integers(1, 40), st.sampled_from([0.0, 0.4, 0.8, 1]))
@settings(max_examples=300)
def test_a_long_queue_is_granted_the_same_whether_its_end_is_decided_or_not(
    shuffler, turns, share_held
):
    snapshot = long_queue(shuffler, num_jobs=60, share_held=share_held)
    whole = decide(snapshot)
    assert grants_of(snapshot) == whole.grants
    first = set(whole.order[:turns])
    part = replace(snapshot, demands=tuple(d for d in snapshot.demands if d.job in first))
    assert grants_of(part, turns) in {None, whole.grants}


def test_turns_behind_the_last_possible_grant_are_not_decided(monkeypatch):
    served: list[str] = []
    serve = queue_decisions._serve
    monkeypatch.setattr(
        queue_decisions,
        "_serve",
        lambda one, table: (served.append(one.job), serve(one, table))[1],
    )
    singles = [demand(f"j{n:02}", float(n), seconds=60.0) for n in range(50)]
    gangs = [demand(f"g{n}", 90.0 + n, devices_per_host=3) for n in range(9)]
    full = host("a", busy("d0"), busy("d1"))
    half = host("a", device("d0"), busy("d1", 30.0), busy("d2", 30.0), busy("d3", 30.0))
    for hosts, demands, num_grants, num_turns in (
        ([full], singles, 0, 0),
        ([box(3)], singles, 3, 3),
        ([half], [replace(gangs[0], queued_at=-1.0), *singles, *gangs[1:]], 0, 1),
        ([half], [*singles, *gangs], 1, 1),
        ([half], gangs, 0, 0),
        ([box(2)], [replace(one, held_back="quota") for one in singles], 0, 0),
    ):
        served.clear()
        grants = grants_of(Snapshot(tuple(hosts), tuple(demands)))
        assert (len(grants), len(served)) == (num_grants, num_turns), demands[0]
