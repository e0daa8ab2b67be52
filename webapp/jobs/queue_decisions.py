"""The decisions of a queue: assign devices to jobs as a pure function of a snapshot."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heapify, heappop, heappush, nsmallest
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeVar

# Input and output of a queue decision, as plain values.


FOREVER = math.inf


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold on a device, or on ``num_bytes`` of its memory, with the forecast time until its end.

    ``FOREVER`` if the end is unknown or overdue. ``job`` is None for what is no job.
    """

    job: str | None
    seconds: float = FOREVER
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One device with its holds: none if free, one of the whole, or several of its memory."""

    id: str
    index: int
    kind: str
    model: str
    memory_bytes: int
    holds: tuple[Hold, ...] = ()
    shareable_bytes: int = 0  # of its memory, for jobs that share it
    is_usable: bool = True  # present and not cordoned


@dataclass(frozen=True, slots=True)
class Host:
    """One host; its state and contact decide which jobs it accepts now."""

    id: str
    devices: tuple[Device, ...]
    takes_singles: bool = True
    takes_gangs: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """The request of one queued job; ``devices_per_host`` None means all devices of a host."""

    job: str
    team: str
    queued_at: float
    priority: int = 0
    rank: int | None = None
    num_hosts: int = 1
    devices_per_host: int | None = 1
    min_memory_bytes: int = 0
    host: str | None = None  # the only allowed host
    seconds: float | None = None  # upper bound with margin; None: unknown
    held_back: str = ""  # reason if a rule holds the job back
    own_devices: frozenset[str] = frozenset()  # devices that it may share although it is held back
    preferred: frozenset[str] = frozenset()  # hosts, of those that are equal otherwise
    num_bytes: int | None = None  # of each device's memory, which it shares; None: it shares none
    device_ratio: float = 1.0  # of a device, for the usage of its team

    @property
    def is_single(self) -> bool:
        """Return whether the job requests a single device."""
        return self.num_hosts == 1 and self.devices_per_host == 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one instant; ``used`` is each team's device-seconds divided by its share."""

    hosts: tuple[Host, ...]
    demands: tuple[Demand, ...]
    used: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    least_bytes: int | None = None  # that a job of the queue asks for of a device, to share it


Place = tuple[str, tuple[str, ...]]  # a host and some of its devices


@dataclass(frozen=True, slots=True)
class Grant:
    """A job with all its devices, the leader's host first."""

    job: str
    places: tuple[Place, ...]


class Why(StrEnum):
    """The reason why a job waits."""

    HELD_BACK = "held_back"  # a rule of the service, in ``Demand.held_back``
    IMPOSSIBLE = "impossible"  # the pool has too few such devices in total
    HOSTS = "hosts"  # hosts that have them accept no such job now
    DEVICES = "devices"  # devices are held
    RESERVED = "reserved"  # devices are free, but reserved for an earlier job


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job waits: figures of ``host``, the nearest to enough, and the forecast."""

    job: str
    why: Why
    host: str | None = None
    num_free: int = 0
    num_ready_hosts: int = 0  # hosts with enough free devices, for a gang
    start_seconds: float | None = None
    after: str | None = None  # the job whose end frees the devices
    behind: str | None = None  # the job that reserves the free devices


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for a queue: grants, waits, and the order of the jobs."""

    grants: tuple[Grant, ...]
    waits: tuple[Wait, ...]
    order: tuple[str, ...]


# Device availability during one decision of the queue policy.
#
# Only hosts changed by a turn are re-evaluated, so that a pool of thousands of devices with a long
# queue is decided in about the time that it takes to read it.


Entry = TypeVar("Entry", bound=tuple[Any, ...])
Rank = tuple[bool, str]  # whether a host is not preferred, and its id


class Use(NamedTuple):
    """A use of a device, or of some of its memory, from one instant to another, in seconds.

    A use that has begun starts at ``BEGUN``, a reserved one at its forecast start.
    """

    start: float
    end: float
    num_bytes: float  # FOREVER: all
    job: str | None


BEGUN = -math.inf
UNTOUCHED = 2**60  # bytes, more than any device has: what nobody uses yet is shared last


@dataclass(frozen=True, slots=True)
class Site:
    """Suitable devices of one model on one host, with the number that a job needs."""

    host: Host
    model: str
    devices: tuple[Device, ...]
    num_needed: int


@dataclass(frozen=True, slots=True)
class State:
    """Snapshot of a site: free devices, and the earliest start with its devices."""

    num_free: int
    start: float
    soonest: tuple[str, ...]


class Table:
    """The uses of each device, begun and reserved."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = sorted(hosts, key=lambda host: host.id)
        self._uses: dict[str, list[Use]] = {}
        self._profiles: dict[str, Profile] = {}
        self.free_at: dict[str, float] = {}  # when the last use ends
        self.taken: set[str] = set()  # devices of which a use has begun
        self.kept_from: dict[str, tuple[float, str]] = {}  # first reservations: start, job
        self._kept_start: dict[str, float] = {}  # of the earliest reservation
        self.keeping: set[str] = set()  # hosts with reserved devices
        self.changed: list[str] = []  # host ids, one entry per change
        self._rankings: dict[tuple[Any, ...], Ranking] = {}
        for device in (device for host in hosts for device in host.devices):
            self.free_at[device.id] = 0.0
            for hold in device.holds:
                num_bytes = FOREVER if hold.num_bytes is None else hold.num_bytes
                self._use(device.id, Use(BEGUN, hold.seconds, num_bytes, hold.job))

    def ranking(self, demand: Demand, *, is_on_own: bool = False) -> "Ranking":
        """Return the ranking of sites for a job's shape, refreshed to the current table.

        ``is_on_own``: only of the devices that it may share although it is held back.
        """
        own_devices = demand.own_devices if is_on_own else None
        shape = (
            demand.host, demand.min_memory_bytes, demand.devices_per_host, demand.is_single,
            demand.preferred, demand.num_bytes, own_devices,
        )  # fmt: skip
        if shape not in self._rankings:
            hosts = [host for host in self._hosts if demand.host in {None, host.id}]
            sites = [site for host in hosts for site in _sites_on(host, demand, own_devices)]
            self._rankings[shape] = Ranking(self, sites, demand)
        ranking = self._rankings[shape]
        ranking.refresh()
        return ranking

    def state_of(self, site: Site, num_bytes: int | None) -> State:
        """Return the current state of a site for a job that shares, or for one that does not."""
        if num_bytes is None:
            starts = self.free_at
            soonest = sorted(site.devices, key=lambda d: (starts[d.id], d.index, d.id))
        else:
            starts = {each.id: self._start_on(each, num_bytes) for each in site.devices}
            lefts = {each.id: self._left_on(each, num_bytes) for each in site.devices}
            soonest = sorted(
                site.devices, key=lambda d: (starts[d.id], lefts[d.id], d.index, d.id)
            )
        chosen = tuple(device.id for device in soonest[: site.num_needed])
        num_free = sum(self.is_open(device, 0.0, num_bytes) for device in site.devices)
        return State(num_free, starts[chosen[-1]], chosen)

    def is_open(self, device: Device, seconds: float, num_bytes: int | None) -> bool:
        """Return whether a job of this length may take the device now, or share its memory.

        A job of unknown length never precedes the job that reserved what it needs.
        """
        if device.id not in self._uses:
            return True
        if num_bytes is None or not device.shareable_bytes:
            if device.id in self.taken:
                return False
            return math.isfinite(seconds) and seconds <= self._kept_start[device.id]
        room = device.shareable_bytes - self._profile(device.id).most_until(seconds)
        return min(num_bytes, device.shareable_bytes) <= room

    def places_on(
        self, site: Site, seconds: float, num_bytes: int | None
    ) -> tuple[int, tuple[str, ...]]:
        """Return what a job leaves of a site and the devices that it takes now, unreserved first.

        What it leaves is counted in devices, or in bytes by a job that shares; negative if it has
        no room.
        """
        free = [device for device in site.devices if self.is_open(device, seconds, num_bytes)]
        left = len(free) - site.num_needed
        if num_bytes is None:
            free.sort(key=lambda d: (d.id in self.kept_from, d.index, d.id))
        elif left >= 0:
            lefts = {device.id: self._left_on(device, num_bytes) for device in free}
            free.sort(key=lambda d: (d.id in self.kept_from, lefts[d.id], d.index, d.id))
            left = sum(lefts[device.id] for device in free[: site.num_needed])
        return left, tuple(device.id for device in free[: site.num_needed])

    def freed_by(self, device: str, start: float) -> str | None:
        """Return the job whose end frees a device, or enough of it, at an instant."""
        begun = [use for use in self._uses.get(device, ()) if use.start == BEGUN]
        last = max(begun, key=lambda use: (use.end <= start, use.end, use.job or ""), default=None)
        return last.job if last else None

    def grant(self, demand: Demand, places: Sequence[Place]) -> None:
        """Assign the devices to the job."""
        ends = FOREVER if demand.seconds is None else demand.seconds
        self._add(places, Use(BEGUN, ends, _bytes_of(demand), demand.job))

    def keep(self, demand: Demand, places: Sequence[Place], start: float) -> None:
        """Reserve the devices for the job from an instant."""
        ends = FOREVER if demand.seconds is None else start + demand.seconds
        self._add(places, Use(start, ends, _bytes_of(demand), demand.job))
        for host, devices in places:
            self.keeping.add(host)
            for device in devices:
                self.kept_from.setdefault(device, (start, demand.job))

    def _add(self, places: Sequence[Place], use: Use) -> None:
        for host, devices in places:
            self.changed.append(host)
            for device in devices:
                self._use(device, use)

    def _use(self, device: str, use: Use) -> None:
        self._uses.setdefault(device, []).append(use)
        self._profiles.pop(device, None)
        self.free_at[device] = max(use.end, self.free_at[device])
        if use.start == BEGUN:
            self.taken.add(device)
        else:
            self._kept_start[device] = min(use.start, self._kept_start.get(device, FOREVER))

    def _start_on(self, device: Device, num_bytes: int | None) -> float:
        """Return when a job may take a device for as long as it likes, or share it."""
        if num_bytes is None or not device.shareable_bytes:
            return self.free_at[device.id]
        room = device.shareable_bytes - min(num_bytes, device.shareable_bytes)
        return self._profile(device.id).first_with(room)

    def _left_on(self, device: Device, num_bytes: int) -> int:
        """Return the bytes that a job leaves of what others share now, or of an untouched one."""
        left = device.shareable_bytes - num_bytes
        if device.id not in self.taken:
            return UNTOUCHED + left
        return left - int(min(self._profile(device.id).now_bytes, device.shareable_bytes))

    def _profile(self, device: str) -> "Profile":
        if device not in self._profiles:
            self._profiles[device] = Profile(self._uses.get(device, ()))
        return self._profiles[device]


def _bytes_of(demand: Demand) -> float:
    return FOREVER if demand.num_bytes is None else demand.num_bytes


class Profile:
    """The memory in use on a device from now on; it changes at ``times``, ascending from 0.

    What nobody knows the end of never ends, also at ``FOREVER``, when a use begins of which nobody
    knows the start.
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        changes: list[tuple[float, float, int]] = []  # at, bytes, devices as a whole
        for use in uses:
            is_whole = math.isinf(use.num_bytes)
            num_bytes, num_whole = (0.0, 1) if is_whole else (use.num_bytes, 0)
            if use.end > 0.0:
                changes.append((max(use.start, 0.0), num_bytes, num_whole))
                if math.isfinite(use.end):
                    changes.append((use.end, -num_bytes, -num_whole))
        changes.sort()
        self.times, used = [0.0], [0.0]
        num_bytes, num_whole = 0.0, 0
        for at, more_bytes, more_whole in changes:
            num_bytes, num_whole = num_bytes + more_bytes, num_whole + more_whole
            if at > self.times[-1]:
                self.times.append(at)
                used.append(0.0)
            used[-1] = FOREVER if num_whole else num_bytes
        self.now_bytes = used[0]
        self._most_until = list(accumulate(used, max))
        self._most_from = list(accumulate(reversed(used), max))[::-1]

    def most_until(self, seconds: float) -> float:
        """Return the most memory that is in use at once from now to an instant."""
        if math.isinf(seconds):
            return self._most_until[-1]
        return self._most_until[max(0, bisect_left(self.times, seconds) - 1)]

    def first_with(self, room: float) -> float:
        """Return from when on no more than so much memory is in use."""
        at = bisect_left(self._most_from, True, key=lambda most: most <= room)  # noqa: FBT003
        return self.times[at] if at < len(self.times) else FOREVER


class Ranking:
    """The sites for one job shape, ordered by free devices and by earliest start.

    Heaps hold the order; an entry whose site has changed since is dropped when it is popped.
    """

    def __init__(self, table: Table, sites: Sequence[Site], demand: Demand) -> None:
        self._table, self.sites = table, sites
        self._num_bytes = demand.num_bytes
        # By host: its place among hosts that are equal otherwise.
        self._rank = {
            site.host.id: (site.host.id not in demand.preferred, site.host.id) for site in sites
        }
        self.num_by_model = Counter(site.model for site in sites)
        self._is_open = [
            site.host.takes_singles if demand.is_single else site.host.takes_gangs
            for site in sites
        ]
        self._of_host: dict[str, list[int]] = {}
        for index, site in enumerate(sites):
            self._of_host.setdefault(site.host.id, []).append(index)
        self._seen = len(table.changed)
        self._versions = [0] * len(sites)
        self._states = [table.state_of(site, demand.num_bytes) for site in sites]
        self._roomy: set[int] = set()
        self._num_roomy: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}  # by host
        for index in range(len(sites)):
            self._update_roomy(index)
        models = sorted(self.num_by_model)
        self._tightest: dict[str, list[tuple[int, Rank, int, int]]] = {m: [] for m in models}
        self._keeping: dict[str, set[int]] = {model: set() for model in models}
        for index in range(len(sites)):
            self._update_tightest(index)
        near = [self._shortage_entry(index) for index in range(len(sites))]
        self._nearest = {False: near, True: [entry for entry in near if self._is_open[entry[2]]]}
        self._soonest: dict[str, list[tuple[float, Rank, tuple[str, ...], int, int]]] = {
            model: [] for model in models
        }
        for index, site in enumerate(sites):
            if self._is_open[index]:
                self._soonest[site.model].append(self._start_entry(index))
        for nearest in self._nearest.values():
            heapify(nearest)
        for soonest in self._soonest.values():
            heapify(soonest)

    def refresh(self) -> None:
        """Re-evaluate the sites of changed hosts."""
        changed = self._table.changed
        for host in dict.fromkeys(changed[self._seen :]):
            for index in self._of_host.get(host, ()):
                state = self._table.state_of(self.sites[index], self._num_bytes)
                self._states[index] = state
                self._versions[index] += 1
                self._update_roomy(index)
                self._update_tightest(index)
                heappush(self._nearest[False], self._shortage_entry(index))
                if self._is_open[index]:
                    heappush(self._nearest[True], self._shortage_entry(index))
                    heappush(self._soonest[self.sites[index].model], self._start_entry(index))
        self._seen = len(changed)

    def _update_tightest(self, index: int) -> None:
        """Record a site with room in the order of devices that a job would leave free.

        On hosts with reservations that depends on the job's length: they are evaluated per call.
        """
        site = self.sites[index]
        is_roomy = self._is_open[index] and index in self._roomy
        keeps = site.host.id in self._table.keeping
        keeping = self._keeping[site.model]
        (keeping.add if is_roomy and keeps else keeping.discard)(index)
        if is_roomy and not keeps:
            left = self._states[index].num_free - site.num_needed
            if self._num_bytes is not None:
                left, _ = self._table.places_on(site, FOREVER, self._num_bytes)
            entry = (left, self._rank[site.host.id], index, self._versions[index])
            heappush(self._tightest[site.model], entry)

    def _update_roomy(self, index: int) -> None:
        """Record whether a site has enough free devices, and how many such sites its host has."""
        site, is_roomy = self.sites[index], index in self._roomy
        if (self._states[index].num_free >= site.num_needed) == is_roomy:
            return
        (self._roomy.discard if is_roomy else self._roomy.add)(index)
        for is_open in (False, True) if self._is_open[index] else (False,):
            numbers = self._num_roomy[is_open]
            numbers[site.host.id] += -1 if is_roomy else 1
            if not numbers[site.host.id]:
                del numbers[site.host.id]

    def _shortage_entry(self, index: int) -> tuple[int, int, int, int]:
        free = self._states[index].num_free
        return (self.sites[index].num_needed - free, -free, index, self._versions[index])

    def _start_entry(self, index: int) -> tuple[float, Rank, tuple[str, ...], int, int]:
        state = self._states[index]
        return (
            state.start,
            self._rank[self.sites[index].host.id],
            state.soonest,
            index,
            self._versions[index],
        )

    def with_room(self, num: int, seconds: float) -> list[Site]:
        """Return ``num`` open sites of one model that a job of this length may use now.

        Sites where the job leaves the fewest devices free, of the first model that has ``num`` of
        them; an empty list if no model has.
        """
        candidates = (self._with_room(model, num, seconds) for model in self._tightest)
        return next((sites for sites in candidates if len(sites) == num), [])

    def _with_room(self, model: str, num: int, seconds: float) -> list[Site]:
        heap, versions = self._tightest[model], self._versions
        options = _first(heap, num, versions)
        for index in self._keeping[model]:
            site = self.sites[index]
            left, _ = self._table.places_on(site, seconds, self._num_bytes)
            if left >= 0:
                options.append((left, self._rank[site.host.id], index, versions[index]))
        return [self.sites[option[2]] for option in nsmallest(num, options)]

    def num_ready_hosts(self, *, is_open: bool) -> int:
        """Return the number of hosts with enough free devices; ``is_open``: only open hosts."""
        return len(self._num_roomy[is_open])

    def nearest(self, *, is_open: bool) -> tuple[Site, int] | None:
        """Return the site closest to having enough free devices, with its free count."""
        heap = self._nearest[is_open]
        while heap and heap[0][3] != self._versions[heap[0][2]]:
            heappop(heap)
        return (self.sites[heap[0][2]], -heap[0][1]) if heap else None

    def soonest(self, num: int) -> list[list[tuple[float, str, tuple[str, ...]]]]:
        """Return for each model the ``num`` open sites with the earliest starts, or all it has."""
        firsts = (_first(heap, num, self._versions) for heap in self._soonest.values())
        return [[(start, rank[1], ids) for start, rank, ids, *_ in entries] for entries in firsts]


def _first(heap: list[Entry], num: int, versions: Sequence[int]) -> list[Entry]:
    """Return the first current entries of a heap; drop outdated entries from it.

    An entry ends with the index of its site and the version.
    """
    entries: list[Entry] = []
    while heap and len(entries) < num:
        entry = heappop(heap)
        if entry[-1] == versions[entry[-2]]:
            entries.append(entry)
    for entry in entries:
        heappush(heap, entry)
    return entries


def _sites_on(host: Host, demand: Demand, own_devices: frozenset[str] | None) -> list[Site]:
    fit = [d for d in host.devices if d.is_usable and d.memory_bytes >= demand.min_memory_bytes]
    if own_devices is not None:
        is_whole = demand.devices_per_host is None
        own = [device for device in fit if device.id in own_devices]
        fit = own if not is_whole or len(own) == len(fit) else []
    if demand.devices_per_host is None:
        is_of_slots = all(device.kind == "slot" for device in fit)
        num_needed = 1 if is_of_slots else len(fit)  # slots are not hardware: one is enough
        return [Site(host, "", tuple(fit), num_needed)] if fit else []
    models = sorted({device.model for device in fit})
    groups = {model: tuple(d for d in fit if d.model == model) for model in models}
    needed = demand.devices_per_host
    return [
        Site(host, model, devices, needed)
        for model, devices in groups.items()
        if len(devices) >= needed
    ]


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


# Grants alone: decided until nothing that is free can go to a job that has not had its turn.


@dataclass(slots=True)
class Shape:
    """Demands alike in host and numbers of devices: how many remain, and where they might start.

    A bound from above, as if each were the shortest of them and needed the least memory.
    """

    host: str | None
    is_single: bool
    num_hosts: int
    devices_per_host: int | None
    is_sharing: bool
    num_left: int = 0
    seconds: float = FOREVER
    shared_bytes: int | None = None  # the least, if they share
    least_bytes: int = 2**63
    most_bytes: int = 0
    num_possible: int = 0  # hosts that may take one now

    def add(self, demand: Demand) -> None:
        """Count one demand."""
        self.num_left += 1
        self.seconds = min(self.seconds, FOREVER if demand.seconds is None else demand.seconds)
        self.least_bytes = min(self.least_bytes, demand.min_memory_bytes)
        if demand.num_bytes is not None:
            self.shared_bytes = min(self.shared_bytes or demand.num_bytes, demand.num_bytes)
        self.most_bytes = max(self.most_bytes, demand.min_memory_bytes)

    def is_possible_on(self, host: Host, table: Table) -> bool:
        """Return whether some demand of this shape might start on a host now."""
        if not (host.takes_singles if self.is_single else host.takes_gangs):
            return False
        fit = [d for d in host.devices if d.is_usable and d.memory_bytes >= self.least_bytes]
        num_open = sum(table.is_open(d, self.seconds, self.shared_bytes) for d in fit)
        if self.devices_per_host is not None:
            return num_open >= self.devices_per_host
        if any(device.kind == "slot" for device in fit):
            return num_open > 0
        whole = [device for device in fit if device.memory_bytes >= self.most_bytes]
        is_open = (table.is_open(d, self.seconds, self.shared_bytes) for d in whole)
        return num_open > 0 and all(is_open)


class Openings:
    """The shapes of demands that may still be granted; a turn only ever takes from them."""

    def __init__(self, snapshot: Snapshot, table: Table) -> None:
        self._table, self._hosts = table, {host.id: host for host in snapshot.hosts}
        shapes: dict[tuple[Any, ...], Shape] = {}
        for demand in snapshot.demands:
            if _may_start(demand):
                key = _shape_key(demand)
                if key not in shapes:
                    shapes[key] = Shape(*key)
                shapes[key].add(demand)
        self._of_host: dict[str, list[tuple[Any, ...]]] = {host: [] for host in self._hosts}
        for key, shape in shapes.items():
            for host in self._hosts if shape.host is None else self._hosts.keys() & {shape.host}:
                if shape.is_possible_on(self._hosts[host], table):
                    shape.num_possible += 1
                    self._of_host[host].append(key)
        self.live = {k: one for k, one in shapes.items() if one.num_possible >= one.num_hosts}
        self._num_seen, self._least_bytes = 0, snapshot.least_bytes

    def has_free(self) -> bool:
        """Return whether any device of a host that accepts jobs is free, reserved or not.

        One that jobs share is, if it has room for one of the queue.
        """
        return any(
            device.is_usable and self._table.is_open(device, 0.0, self._least_bytes)
            for host in self._hosts.values()
            if host.takes_singles or host.takes_gangs
            for device in host.devices
        )

    def take_turn(self, demand: Demand) -> None:
        """Forget a demand that had its turn, and what its devices no longer permit."""
        changed = self._table.changed[self._num_seen :]
        self._num_seen += len(changed)
        key = _shape_key(demand)
        if _may_start(demand) and key in self.live:
            self.live[key].num_left -= 1
            self._end_if_over(key)
        for host in set(changed):
            for other in list(self._of_host[host]):
                shape = self.live.get(other)
                if shape is None:
                    self._of_host[host].remove(other)
                elif not shape.is_possible_on(self._hosts[host], self._table):
                    self._of_host[host].remove(other)
                    shape.num_possible -= 1
                    self._end_if_over(other)

    def _end_if_over(self, key: tuple[Any, ...]) -> None:
        shape = self.live[key]
        if not shape.num_left or shape.num_possible < shape.num_hosts:
            del self.live[key]


def _may_start(demand: Demand) -> bool:
    return not demand.held_back or bool(demand.own_devices)


def _shape_key(demand: Demand) -> tuple[str | None, bool, int, int | None, bool]:
    return (
        demand.host, demand.is_single, demand.num_hosts, demand.devices_per_host,
        demand.num_bytes is not None,
    )  # fmt: skip


def grants_of(snapshot: Snapshot, turns: int | None = None) -> tuple[Grant, ...] | None:
    """Return the grants of ``decide``: all of them, without the turns after the last one.

    With ``turns`` the snapshot holds the candidates of the first turns alone: the answer is None
    if these leave a free device, which a job that is not in the snapshot might get.
    """
    table = Table(snapshot.hosts)
    openings = Openings(snapshot, table)
    grants: list[Grant] = []
    for demand in islice(in_order(snapshot) if openings.live else (), turns):
        outcome = _serve(demand, table)
        if isinstance(outcome, Grant):
            grants.append(outcome)
        openings.take_turn(demand)
        if not openings.live:
            break
    return None if turns is not None and openings.has_free() else tuple(grants)


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
    devices = demand.num_hosts * (demand.devices_per_host or 1) * demand.device_ratio
    return devices * (UNKNOWN_SECONDS if demand.seconds is None else demand.seconds)


# One turn


def _serve(demand: Demand, table: Table) -> Grant | Wait:
    """Grant all devices, else reserve all from the earliest start, else return the reason."""
    ranking = table.ranking(demand)
    if not any(num >= demand.num_hosts for num in ranking.num_by_model.values()):
        return _wait(demand, Why.IMPOSSIBLE, ranking)  # even on an idle pool
    if demand.held_back:
        on_own = table.ranking(demand, is_on_own=True) if demand.own_devices else None
        if on_own and (places := _places_now(demand, on_own, table)):
            table.grant(demand, places)
            return Grant(demand.job, places)
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
    last = _last_of(places, table) if demand.num_bytes is None else places[-1][1][-1]
    places_kept = _places_now(demand, ranking, table, past_kept=True)
    reservations = [
        table.kept_from[d] for _, ids in places_kept for d in ids if d in table.kept_from
    ]
    blocker = min(reservations)[1] if reservations else None  # its devices would be free now
    wait = replace(
        _wait(demand, Why.RESERVED if blocker else Why.DEVICES, ranking, is_open=True),
        start_seconds=None if math.isinf(start) else start,
        after=table.freed_by(last, start),
        behind=blocker,
    )
    table.keep(demand, places, start)
    return wait


def _places_now(
    demand: Demand, ranking: Ranking, table: Table, *, past_kept: bool = False
) -> tuple[Place, ...]:
    """Return devices for the whole job that are free or have room, or nothing.

    Hosts with the fewest devices left over come first, so that whole hosts remain for gangs; on
    a host, unreserved devices come first. A job that shares joins others before it begins an
    untouched device, where the least memory is left over. ``past_kept``: ignore reservations.
    """
    seconds = FOREVER if demand.seconds is None else demand.seconds
    seconds = 0.0 if past_kept else seconds
    sites = ranking.with_room(demand.num_hosts, seconds)
    return tuple(
        (site.host.id, table.places_on(site, seconds, demand.num_bytes)[1]) for site in sites
    )


def _last_of(places: Sequence[Place], table: Table) -> str:
    """Return the device that is free last."""
    return max((d for _, ids in places for d in ids), key=lambda d: (table.free_at[d], d))


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
