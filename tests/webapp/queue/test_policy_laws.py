"""Laws that every decision keeps, whatever the pool and whoever waits."""

import math
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from webapp.queue.policy import FOREVER, Decision, Demand, Device, Host, Snapshot, Why, decide

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
    is_held = draw(st.booleans())
    return Device(
        id=name,
        index=index,
        kind="gpu",
        model=draw(st.sampled_from(["L4", "L4", "T4"])),
        memory_bytes=draw(st.sampled_from([16, 24, 24])),
        is_held=is_held,
        free_seconds=draw(st.sampled_from([10.0, 100.0, 400.0, FOREVER])) if is_held else 0.0,
        held_by=f"holder of {name}" if is_held else None,
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
        )
        for number in range(draw(st.integers(0, 9)))
    )


snapshots = st.builds(
    Snapshot,
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


def no_device_is_given_twice_or_while_it_is_held(snapshot: Snapshot, found: Decision) -> None:
    given_out = taken(found)
    held = {d.id for host in snapshot.hosts for d in host.devices if d.is_held}
    assert len(given_out) == len(set(given_out))
    assert not held & set(given_out)


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
    no_device_is_given_twice_or_while_it_is_held(snapshot, found)
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
        left = device.free_seconds - seconds
        if not device.is_held or left <= 0:
            return replace(device, is_held=False, free_seconds=0.0, held_by=None)
        return replace(device, free_seconds=left)

    return tuple(replace(h, devices=tuple(map(later, h.devices))) for h in hosts)


def hold(hosts: tuple[Host, ...], decision: Decision, lengths: dict[str, float]):
    holder = {d: g.job for g in decision.grants for _, ids in g.places for d in ids}
    return tuple(
        replace(
            host,
            devices=tuple(
                replace(d, is_held=True, held_by=holder[d.id], free_seconds=lengths[holder[d.id]])
                if d.id in holder
                else d
                for d in host.devices
            ),
        )
        for host in hosts
    )


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60)
def test_a_gang_starts_when_it_was_first_forecast_whatever_comes_after_it(shuffler, wide, deep):
    """Small jobs of any known length arrive at every step; the gang's start never moves back."""
    pool = tuple(
        Host(f"h{n}", tuple(Device(f"h{n}d{i}", i, "gpu", "L4", 24) for i in range(4)))
        for n in range(3)
    )
    gang = Demand("gang", "x", 0.0, num_hosts=wide, devices_per_host=deep, seconds=30.0)
    lengths = {"gang": 30.0}
    first = [Demand(f"old{i}", "y", -1.0, seconds=shuffler.uniform(5, 60)) for i in range(10)]
    lengths |= {one.job: one.seconds for one in first}
    pool = hold(pool, decide(Snapshot(pool, tuple(first))), lengths)
    promised = None
    for step in range(100):
        small = Demand(f"new{step}", "y", 1.0 + step, seconds=shuffler.uniform(1, 60))
        lengths[small.job] = small.seconds
        found = decide(Snapshot(pool, (gang, small)))
        if any(grant.job == "gang" for grant in found.grants):
            break
        start = step + next(w.start_seconds for w in found.waits if w.job == "gang")
        promised = start if promised is None else promised
        assert start <= promised + 1e-6
        pool = advance(hold(pool, found, lengths), 1.0)
    assert promised is None or step <= math.ceil(promised)


@given(snapshots, st.integers(1, 9))
def test_the_first_turns_are_decided_alone_as_among_all(snapshot, number):
    whole = decide(snapshot)
    part = decide(snapshot, lambda turn, _job: turn >= number)

    first = set(whole.order[:number])
    assert part.order == whole.order
    assert part.grants == tuple(one for one in whole.grants if one.job in first)
    assert part.waits == tuple(one for one in whole.waits if one.job in first)
