"""Who gets which devices: a pure decision, the same for the same snapshot.

Jobs are served in order: priority, the rank that a person gave, what the team has used against
its share, then age. Each is granted everything that it asks for at once, or nothing. A job that
has to wait reserves devices from the instant at which they are forecast to be free; a later job
may use them before only if its own forecast end lies before that instant.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

FOREVER = math.inf
UNKNOWN_SECONDS = 3600.0  # what a job of unknown length counts as when teams are compared


@dataclass(frozen=True, slots=True)
class Device:
    """One device: ``free_seconds`` is 0 when it is free, else when its holder is forecast to end.

    A holder of unknown end, or one that has outlasted its forecast, is ``FOREVER``.
    """

    id: str
    index: int
    kind: str
    model: str
    memory_bytes: int
    free_seconds: float = 0.0
    is_held: bool = False
    held_by: str | None = None  # the job
    is_usable: bool = True  # present and not cordoned


@dataclass(frozen=True, slots=True)
class Host:
    """One host: what it may be given now depends on its state and on how well it is heard."""

    id: str
    devices: tuple[Device, ...]
    takes_singles: bool = True
    takes_gangs: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """What one queued job asks for; ``devices_per_host`` None is all devices of a host."""

    job: str
    team: str
    queued_at: float
    priority: int = 0
    rank: int | None = None
    num_hosts: int = 1
    devices_per_host: int | None = 1
    min_memory_bytes: int = 0
    host: str | None = None  # the only one that will do
    seconds: float | None = None  # no longer than this, with margin; None: unknown
    held_back: str = ""  # why it may not be tried now, whatever is free

    @property
    def is_single(self) -> bool:
        """Return whether it asks for no more than one device."""
        return self.num_hosts == 1 and self.devices_per_host == 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one instant; ``used`` is each team's device-seconds over its share."""

    hosts: tuple[Host, ...]
    demands: tuple[Demand, ...]
    used: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


Place = tuple[str, tuple[str, ...]]  # a host and devices of it


@dataclass(frozen=True, slots=True)
class Grant:
    """A job and everything that it asked for, the leading host first."""

    job: str
    places: tuple[Place, ...]


class Why(StrEnum):
    """What keeps a job waiting."""

    HELD_BACK = "held_back"  # a rule of the service, in ``Demand.held_back``
    IMPOSSIBLE = "impossible"  # the pool has too little of it altogether
    HOSTS = "hosts"  # hosts that have it take no such job now
    DEVICES = "devices"  # devices are held
    RESERVED = "reserved"  # devices are free, but kept for an earlier job


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job waits, in figures: of ``host``, the nearest to enough, and of the forecast."""

    job: str
    why: Why
    host: str | None = None
    num_free: int = 0
    num_ready_hosts: int = 0  # hosts with enough free devices, of those that a gang asks for
    start_seconds: float | None = None
    after: str | None = None  # the job whose end makes room
    behind: str | None = None  # the job for which free devices are kept


@dataclass(frozen=True, slots=True)
class Decision:
    """Everybody's turn: grants, waits, and the order in which jobs were considered."""

    grants: tuple[Grant, ...]
    waits: tuple[Wait, ...]
    order: tuple[str, ...]


def decide(snapshot: Snapshot) -> Decision:
    """Return who gets what now, and why the others wait."""
    table = _Table(snapshot.hosts)
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


class _Table:
    """What is free when, while one job after another is served."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = sorted(hosts, key=lambda host: host.id)
        devices = [device for host in hosts for device in host.devices]
        self.free_at = {d.id: d.free_seconds if d.is_held else 0.0 for d in devices}
        self.holder = {d.id: d.held_by for d in devices if d.is_held}
        self.kept_from: dict[str, tuple[float, str]] = {}  # reserved: since when, for whom

    def is_open(self, device: Device, seconds: float) -> bool:
        """Return whether a job of that length may have the device now.

        One of unknown length never goes before a job for which the device is kept.
        """
        if not self.is_free(device):
            return False
        kept = self.kept_from.get(device.id)
        return kept is None or (math.isfinite(seconds) and seconds <= kept[0])

    def is_free(self, device: Device) -> bool:
        """Return whether nobody holds the device."""
        return device.id not in self.holder

    def grant(self, demand: Demand, places: Sequence[Place]) -> None:
        """Let the job hold the devices."""
        for _, devices in places:
            for device in devices:
                self.holder[device] = demand.job
                ends = FOREVER if demand.seconds is None else demand.seconds
                self.free_at[device] = max(ends, self._kept_until(device))

    def keep(self, demand: Demand, places: Sequence[Place], start: float) -> None:
        """Reserve the devices for the job from an instant on."""
        ends = FOREVER if demand.seconds is None else start + demand.seconds
        for _, devices in places:
            for device in devices:
                self.kept_from.setdefault(device, (start, demand.job))
                self.free_at[device] = max(ends, self._kept_until(device))

    def _kept_until(self, device: str) -> float:
        return self.free_at[device] if device in self.kept_from else 0.0


@dataclass(frozen=True, slots=True)
class _Site:
    """Devices of one model on one host that would do, with how many a job needs of them."""

    host: Host
    model: str
    devices: tuple[Device, ...]
    num_needed: int


def _sites(demand: Demand, table: _Table) -> list[_Site]:
    """Return where the job, or a member of it, could run if everything were free."""
    found = []
    for host in table.hosts:
        if demand.host not in {None, host.id}:
            continue
        fit = [d for d in host.devices if d.is_usable]
        fit = [d for d in fit if d.memory_bytes >= demand.min_memory_bytes]
        if demand.devices_per_host is None:
            models = {"": fit}
        else:
            models = {d.model: [e for e in fit if e.model == d.model] for d in fit}
        for model, devices in sorted(models.items()):
            needed = demand.devices_per_host or len(devices)
            if devices and len(devices) >= needed:
                found.append(_Site(host, model, tuple(devices), needed))
    return found


def _takes(host: Host, demand: Demand) -> bool:
    return host.takes_singles if demand.is_single else host.takes_gangs


def _serve(demand: Demand, table: _Table) -> Grant | Wait:
    """Grant all, or reserve all from the earliest instant on, or say why neither is possible."""
    sites = _sites(demand, table)
    if _best_start(demand, sites, dict.fromkeys(table.free_at, 0.0)) is None:
        return _wait(demand, Why.IMPOSSIBLE, sites, table)
    if demand.held_back:
        return _wait(demand, Why.HELD_BACK, sites, table)
    open_sites = [site for site in sites if _takes(site.host, demand)]
    if places := _places_now(demand, open_sites, table):
        table.grant(demand, places)
        return Grant(demand.job, places)
    best = _best_start(demand, open_sites, table.free_at)
    if best is None:
        return _wait(demand, Why.HOSTS, sites, table)
    return _reserve(demand, open_sites, table, *best)


def _reserve(
    demand: Demand, sites: Sequence[_Site], table: _Table, start: float, places: Sequence[Place]
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


def _kept_now(demand: Demand, sites: Sequence[_Site], table: _Table) -> str | None:
    """Return for whom the devices are kept that the job could else have now, if there are any."""
    bare = _Table(table.hosts)
    bare.holder = table.holder
    places = _places_now(demand, sites, bare)
    kept = [table.kept_from[d] for _, ids in places for d in ids if d in table.kept_from]
    return min(kept)[1] if kept else None


def _places_now(demand: Demand, sites: Sequence[_Site], table: _Table) -> tuple[Place, ...]:
    """Return devices for the whole job that it may have now, or nothing.

    Hosts on which the least stays free come first, so that whole hosts are left to gangs; on a
    host, devices that nobody waits for come first.
    """
    seconds = FOREVER if demand.seconds is None else demand.seconds
    by_model: dict[str, list[tuple[int, str, tuple[str, ...]]]] = {}
    for site in sites:
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
    demand: Demand, sites: Sequence[_Site], free_at: Mapping[str, float]
) -> tuple[float, tuple[Place, ...]] | None:
    """Return the earliest instant at which the whole job could start, and on what."""
    by_model: dict[str, list[tuple[float, str, tuple[str, ...]]]] = {}
    for site in sites:
        soonest = sorted(site.devices, key=lambda d: (free_at[d.id], d.index, d.id))
        chosen = soonest[: site.num_needed]
        start = free_at[chosen[-1].id]
        ids = tuple(device.id for device in chosen)
        by_model.setdefault(site.model, []).append((start, site.host.id, ids))
    gangs = [sorted(options)[: demand.num_hosts] for _, options in sorted(by_model.items())]
    whole = [gang for gang in gangs if len(gang) == demand.num_hosts]
    if not whole:
        return None
    gang = min(whole, key=lambda one: (one[-1][0], one[-1][1]))
    return gang[-1][0], tuple((host, ids) for _, host, ids in gang)


def _wait(demand: Demand, why: Why, sites: Sequence[_Site], table: _Table) -> Wait:
    """Return the reason with the host that comes nearest to enough."""
    free = [(sum(1 for device in site.devices if table.is_free(device)), site) for site in sites]
    nearest = max(free, key=lambda one: (one[0] - one[1].num_needed, one[0]), default=None)
    return Wait(
        job=demand.job,
        why=why,
        host=nearest[1].host.id if nearest else None,
        num_free=nearest[0] if nearest else 0,
        num_ready_hosts=len({s.host.id for n, s in free if n >= s.num_needed}),
    )
