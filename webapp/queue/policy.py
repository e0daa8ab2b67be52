"""Who gets which devices: a pure decision, the same for the same snapshot.

Jobs are served in order: priority, the rank that a person gave, what the team has used against
its share, then age. Each is granted everything that it asks for at once, or nothing. A job that
has to wait reserves devices from the instant at which they are forecast to be free; a later job
may use them before only if its own forecast end lies before that instant.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest

from webapp.queue.snapshot import (
    FOREVER,
    Decision,
    Demand,
    Grant,
    Host,
    Place,
    Snapshot,
    Wait,
    Why,
)
from webapp.queue.table import Site, Table

UNKNOWN_SECONDS = 3600.0  # what a job of unknown length counts as when teams are compared


def decide(snapshot: Snapshot) -> Decision:
    """Return who gets what now, and why the others wait."""
    table = Table(snapshot.hosts)
    grants: list[Grant] = []
    waits: list[Wait] = []
    order: list[str] = []
    for demand in in_order(snapshot):
        order.append(demand.job)
        outcome = _serve(demand, table)
        if isinstance(outcome, Grant):
            grants.append(outcome)
        else:
            waits.append(outcome)
    return Decision(tuple(grants), tuple(waits), tuple(order))


def in_order(snapshot: Snapshot) -> Iterator[Demand]:
    """Yield the demands in turn; each turn counts at once towards what its team has used."""
    used = dict(snapshot.used)
    queues: dict[str, list[Demand]] = {}
    for demand in sorted(snapshot.demands, key=_own_key, reverse=True):
        queues.setdefault(demand.team, []).append(demand)
    while queues:
        team = min(queues, key=lambda one: _key(queues[one][-1], used.get(one, 0.0)))
        demand = queues[team].pop()
        if not queues[team]:
            del queues[team]
        used[team] = used.get(team, 0.0) + _cost(demand) / snapshot.shares.get(team, 1.0)
        yield demand


def _own_key(demand: Demand) -> tuple[int, float, float, str]:
    rank = FOREVER if demand.rank is None else demand.rank
    return (-demand.priority, rank, demand.queued_at, demand.job)


def _key(demand: Demand, used: float) -> tuple[int, float, float, float, str]:
    priority, rank, queued_at, job = _own_key(demand)
    return (priority, rank, used if demand.rank is None else 0.0, queued_at, job)


def _cost(demand: Demand) -> float:
    if demand.held_back:
        return 0.0
    devices = demand.num_hosts * (demand.devices_per_host or 1)
    return devices * (UNKNOWN_SECONDS if demand.seconds is None else demand.seconds)


# One job's turn


def _serve(demand: Demand, table: Table) -> Grant | Wait:
    """Grant all, or reserve all from the earliest instant on, or say why neither is possible."""
    sites = table.sites(demand)
    if not _is_possible(demand, sites):
        return _wait(demand, Why.IMPOSSIBLE, sites, table)
    if demand.held_back:
        return _wait(demand, Why.HELD_BACK, sites, table)
    open_sites = [site for site in sites if _takes(site.host, demand)]
    if places := _places_now(demand, open_sites, table):
        table.grant(demand, places)
        return Grant(demand.job, places)
    best = _best_start(demand, open_sites, table)
    if best is None:
        return _wait(demand, Why.HOSTS, sites, table)
    return _reserve(demand, open_sites, table, *best)


def _takes(host: Host, demand: Demand) -> bool:
    return host.takes_singles if demand.is_single else host.takes_gangs


def _is_possible(demand: Demand, sites: Sequence[Site]) -> bool:
    """Return whether enough hosts have it, whatever is free."""
    return any(num >= demand.num_hosts for num in Counter(site.model for site in sites).values())


def _reserve(
    demand: Demand, sites: Sequence[Site], table: Table, start: float, places: Sequence[Place]
) -> Wait:
    """Keep the devices for the job from its forecast start on."""
    last = max((d for _, ids in places for d in ids), key=lambda d: (table.free_at[d], d))
    kept = _kept_now(demand, sites, table)
    wait = replace(
        _wait(demand, Why.RESERVED if kept else Why.DEVICES, sites, table),
        start_seconds=None if math.isinf(start) else start,
        after=table.holder.get(last),
        behind=kept,
    )
    table.keep(demand, places, start)
    return wait


def _kept_now(demand: Demand, sites: Sequence[Site], table: Table) -> str | None:
    """Return for whom the devices are kept that the job could else have now, if there are any."""
    places = _places_now(demand, sites, table, past_kept=True)
    kept = [table.kept_from[d] for _, ids in places for d in ids if d in table.kept_from]
    return min(kept)[1] if kept else None


def _places_now(
    demand: Demand, sites: Sequence[Site], table: Table, *, past_kept: bool = False
) -> tuple[Place, ...]:
    """Return devices for the whole job that it may have now, or nothing.

    Hosts on which the least stays free come first, so that whole hosts are left to gangs; on a
    host, devices that nobody waits for come first. ``past_kept``: as if none were kept.
    """
    seconds = FOREVER if demand.seconds is None else demand.seconds
    seconds = 0.0 if past_kept else seconds
    by_model: dict[str, list[tuple[int, str, tuple[str, ...]]]] = {}
    for site in sites:
        if table.state(site).num_free < site.num_needed:
            continue
        free = [device for device in site.devices if table.is_open(device, seconds)]
        if len(free) >= site.num_needed:
            free.sort(key=lambda d: (d.id in table.kept_from, d.index, d.id))
            ids = tuple(device.id for device in free[: site.num_needed])
            left = len(free) - site.num_needed
            by_model.setdefault(site.model, []).append((left, site.host.id, ids))
    for _, options in sorted(by_model.items()):
        if len(options) >= demand.num_hosts:
            chosen = sorted(options)[: demand.num_hosts]
            return tuple((host, ids) for _, host, ids in chosen)
    return ()


def _best_start(
    demand: Demand, sites: Sequence[Site], table: Table
) -> tuple[float, tuple[Place, ...]] | None:
    """Return the earliest instant at which the whole job could start, and on what."""
    by_model: dict[str, list[tuple[float, str, tuple[str, ...]]]] = {}
    for site in sites:
        state = table.state(site)
        by_model.setdefault(site.model, []).append((state.start, site.host.id, state.soonest))
    gangs = [nsmallest(demand.num_hosts, options) for _, options in sorted(by_model.items())]
    whole = [gang for gang in gangs if len(gang) == demand.num_hosts]
    if not whole:
        return None
    gang = min(whole, key=lambda one: (one[-1][0], one[-1][1]))
    return gang[-1][0], tuple((host, ids) for _, host, ids in gang)


def _wait(demand: Demand, why: Why, sites: Sequence[Site], table: Table) -> Wait:
    """Return the reason with the host that comes nearest to enough."""
    free = [(table.state(site).num_free, site) for site in sites]
    nearest = max(free, key=lambda one: (one[0] - one[1].num_needed, one[0]), default=None)
    return Wait(
        job=demand.job,
        why=why,
        host=nearest[1].host.id if nearest else None,
        num_free=nearest[0] if nearest else 0,
        num_ready_hosts=len({s.host.id for n, s in free if n >= s.num_needed}),
    )
