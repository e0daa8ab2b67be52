"""Queue policy: assign devices to jobs as a pure function of a snapshot.

Jobs are served in order: priority, manual rank, the team's usage relative to its share, then
age. Each job is granted all devices that it requests at once, or none. A waiting job reserves
devices from the instant at which they are forecast to be free; a later job may use them
before that only if its own forecast end precedes that instant.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from webapp.queue.snapshot import (
    FOREVER,
    Decision,
    Demand,
    Grant,
    Place,
    Snapshot,
    Wait,
    Why,
)
from webapp.queue.table import Ranking, Site, Table

UNKNOWN_SECONDS = 3600.0  # assumed length of a job of unknown length when team usage is compared


Until = Callable[[int, str], bool]  # (turn number from 1, job id) -> whether to stop


def nobody(_turn: int, _job: str) -> bool:
    """Return False: decide every turn."""
    return False


def decide(snapshot: Snapshot, until: Until = nobody) -> Decision:
    """Return the grants, and why the other jobs wait.

    A turn affects only later turns, so the first jobs of a long queue can be decided alone:
    ``until`` is called after each turn. After the first turn for which it returns True, only the
    order is computed.
    """
    table = Table(snapshot.hosts)
    grants: list[Grant] = []
    waits: list[Wait] = []
    order: list[str] = []
    is_deciding = True
    for turn, demand in enumerate(in_order(snapshot), 1):
        order.append(demand.job)
        if not is_deciding:
            continue
        outcome = _serve(demand, table)
        is_deciding = not until(turn, demand.job)
        if isinstance(outcome, Grant):
            grants.append(outcome)
        else:
            waits.append(outcome)
    return Decision(tuple(grants), tuple(waits), tuple(order))


def in_order(snapshot: Snapshot) -> Iterator[Demand]:
    """Yield the demands in order; each counts immediately towards its team's usage."""
    used = dict(snapshot.used)
    queues: dict[str, list[Demand]] = {}
    for demand in sorted(snapshot.demands, key=_own_key, reverse=True):
        queues.setdefault(demand.team, []).append(demand)
    while queues:
        team = min(queues, key=lambda name: _key(queues[name][-1], used.get(name, 0.0)))
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


# One turn


def _serve(demand: Demand, table: Table) -> Grant | Wait:
    """Grant all devices, else reserve all from the earliest start, else return the reason."""
    ranking = table.ranking(demand)
    if not any(num >= demand.num_hosts for num in ranking.num_by_model.values()):
        return _wait(demand, Why.IMPOSSIBLE, ranking)  # even on an idle pool
    if demand.held_back:
        return _wait(demand, Why.HELD_BACK, ranking)
    if places := _places_now(demand, ranking, table):
        table.grant(demand, places)
        return Grant(demand.job, places)
    best = _best_start(demand, ranking)
    if best is None:
        return _wait(demand, Why.HOSTS, ranking)
    return _reserve(demand, ranking, table, *best)


def _reserve(
    demand: Demand, ranking: Ranking, table: Table, start: float, places: Sequence[Place]
) -> Wait:
    """Reserve the devices for the job from its forecast start."""
    last = max((d for _, ids in places for d in ids), key=lambda d: (table.free_at[d], d))
    blocker = _blocking_job(demand, ranking, table)
    wait = replace(
        _wait(demand, Why.RESERVED if blocker else Why.DEVICES, ranking, is_open=True),
        start_seconds=None if math.isinf(start) else start,
        after=table.holder.get(last),
        behind=blocker,
    )
    table.keep(demand, places, start)
    return wait


def _blocking_job(demand: Demand, ranking: Ranking, table: Table) -> str | None:
    """Return the job whose reservation blocks this one from starting now, if any."""
    places = _places_now(demand, ranking, table, past_kept=True)
    reservations = [table.kept_from[d] for _, ids in places for d in ids if d in table.kept_from]
    return min(reservations)[1] if reservations else None


def _places_now(
    demand: Demand, ranking: Ranking, table: Table, *, past_kept: bool = False
) -> tuple[Place, ...]:
    """Return free devices for the whole job, or nothing.

    Hosts with the fewest devices left over come first, so that whole hosts remain for gangs; on
    a host, unreserved devices come first. ``past_kept``: ignore reservations.
    """
    seconds = FOREVER if demand.seconds is None else demand.seconds
    seconds = 0.0 if past_kept else seconds
    sites = ranking.with_room(demand.num_hosts, seconds)
    return tuple((site.host.id, _open_devices(site, table, seconds)) for site in sites)


def _open_devices(site: Site, table: Table, seconds: float) -> tuple[str, ...]:
    """Return the devices that a job takes on a site, unreserved ones first."""
    free = [device for device in site.devices if table.is_open(device, seconds)]
    free.sort(key=lambda d: (d.id in table.kept_from, d.index, d.id))
    return tuple(device.id for device in free[: site.num_needed])


def _best_start(demand: Demand, ranking: Ranking) -> tuple[float, tuple[Place, ...]] | None:
    """Return the earliest start of the whole job, and its devices."""
    whole = [gang for gang in ranking.soonest(demand.num_hosts) if len(gang) == demand.num_hosts]
    if not whole:
        return None
    gang = min(whole, key=lambda entries: (entries[-1][0], entries[-1][1]))
    return gang[-1][0], tuple((host, ids) for _, host, ids in gang)


def _wait(demand: Demand, why: Why, ranking: Ranking, *, is_open: bool = False) -> Wait:
    """Return the wait with its reason and the host closest to having enough devices."""
    nearest = ranking.nearest(is_open=is_open)
    return Wait(
        job=demand.job,
        why=why,
        host=nearest[0].host.id if nearest else None,
        num_free=nearest[1] if nearest else 0,
        num_ready_hosts=ranking.num_ready_hosts(is_open=is_open),
    )
