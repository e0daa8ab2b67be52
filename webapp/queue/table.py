"""Device availability during one decision of the queue policy.

Only hosts changed by a turn are re-evaluated, so that a pool of thousands of devices with a
long queue is decided in about the time that it takes to read it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any, TypeVar

from webapp.queue.snapshot import FOREVER, Demand, Device, Host, Place

Entry = TypeVar("Entry", bound=tuple[Any, ...])


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
    """Holder and reservation of each device."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = sorted(hosts, key=lambda host: host.id)
        devices = [device for host in hosts for device in host.devices]
        self.free_at = {d.id: d.free_seconds if d.is_held else 0.0 for d in devices}
        self.holder = {d.id: d.held_by for d in devices if d.is_held}
        self.kept_from: dict[str, tuple[float, str]] = {}  # reservations: start, job
        self.keeping: set[str] = set()  # hosts with reserved devices
        self.changed: list[str] = []  # host ids, one entry per change
        self._rankings: dict[tuple[str | None, int, int | None, bool], Ranking] = {}

    def ranking(self, demand: Demand) -> "Ranking":
        """Return the ranking of sites for a job's shape, refreshed to the current table."""
        shape = (
            demand.host, demand.min_memory_bytes, demand.devices_per_host, demand.is_single,
        )  # fmt: skip
        if shape not in self._rankings:
            hosts = [host for host in self._hosts if demand.host in {None, host.id}]
            sites = [site for host in hosts for site in _sites_on(host, demand)]
            self._rankings[shape] = Ranking(self, sites, is_single=demand.is_single)
        ranking = self._rankings[shape]
        ranking.refresh()
        return ranking

    def state_of(self, site: Site) -> State:
        """Return the current state of a site."""
        free_at = self.free_at
        soonest = sorted(site.devices, key=lambda d: (free_at[d.id], d.index, d.id))
        chosen = tuple(device.id for device in soonest[: site.num_needed])
        num_free = sum(1 for device in site.devices if device.id not in self.holder)
        return State(num_free, free_at[chosen[-1]], chosen)

    def is_open(self, device: Device, seconds: float) -> bool:
        """Return whether a job of this length may take the device now.

        A job of unknown length never precedes the job that reserved the device.
        """
        if device.id in self.holder:
            return False
        reservation = self.kept_from.get(device.id)
        return reservation is None or (math.isfinite(seconds) and seconds <= reservation[0])

    def grant(self, demand: Demand, places: Sequence[Place]) -> None:
        """Assign the devices to the job."""
        ends = FOREVER if demand.seconds is None else demand.seconds
        for host, devices in places:
            self.changed.append(host)
            for device in devices:
                self.holder[device] = demand.job
                self.free_at[device] = max(ends, self._kept_until(device))

    def keep(self, demand: Demand, places: Sequence[Place], start: float) -> None:
        """Reserve the devices for the job from an instant."""
        ends = FOREVER if demand.seconds is None else start + demand.seconds
        for host, devices in places:
            self.changed.append(host)
            self.keeping.add(host)
            for device in devices:
                self.kept_from.setdefault(device, (start, demand.job))
                self.free_at[device] = max(ends, self._kept_until(device))

    def _kept_until(self, device: str) -> float:
        return self.free_at[device] if device in self.kept_from else 0.0


class Ranking:
    """The sites for one job shape, ordered by free devices and by earliest start.

    Heaps hold the order; an entry whose site has changed since is dropped when it is popped.
    """

    def __init__(self, table: Table, sites: Sequence[Site], *, is_single: bool) -> None:
        self._table, self.sites = table, sites
        self.num_by_model = Counter(site.model for site in sites)
        self._is_open = [
            site.host.takes_singles if is_single else site.host.takes_gangs for site in sites
        ]
        self._of_host: dict[str, list[int]] = {}
        for index, site in enumerate(sites):
            self._of_host.setdefault(site.host.id, []).append(index)
        self._seen = len(table.changed)
        self._versions = [0] * len(sites)
        self._states = [table.state_of(site) for site in sites]
        self._roomy = {index for index in range(len(sites)) if self._has_room(index)}
        models = sorted(self.num_by_model)
        self._tightest: dict[str, list[tuple[int, str, int, int]]] = {m: [] for m in models}
        self._keeping: dict[str, set[int]] = {model: set() for model in models}
        for index in range(len(sites)):
            self._update_tightest(index)
        near = [self._shortage_entry(index) for index in range(len(sites))]
        self._nearest = {False: near, True: [entry for entry in near if self._is_open[entry[2]]]}
        self._soonest: dict[str, list[tuple[float, str, tuple[str, ...], int, int]]] = {
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
                self._states[index] = self._table.state_of(self.sites[index])
                self._versions[index] += 1
                (self._roomy.add if self._has_room(index) else self._roomy.discard)(index)
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
            heappush(
                self._tightest[site.model], (left, site.host.id, index, self._versions[index])
            )

    def _has_room(self, index: int) -> bool:
        return self._states[index].num_free >= self.sites[index].num_needed

    def _shortage_entry(self, index: int) -> tuple[int, int, int, int]:
        free = self._states[index].num_free
        return (self.sites[index].num_needed - free, -free, index, self._versions[index])

    def _start_entry(self, index: int) -> tuple[float, str, tuple[str, ...], int, int]:
        state = self._states[index]
        return (
            state.start,
            self.sites[index].host.id,
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
            left = sum(self._table.is_open(d, seconds) for d in site.devices) - site.num_needed
            if left >= 0:
                options.append((left, site.host.id, index, versions[index]))
        return [self.sites[option[2]] for option in nsmallest(num, options)]

    def num_ready_hosts(self, *, is_open: bool) -> int:
        """Return the number of hosts with enough free devices; ``is_open``: only open hosts."""
        ready = (index for index in self._roomy if self._is_open[index] or not is_open)
        return len({self.sites[index].host.id for index in ready})

    def nearest(self, *, is_open: bool) -> tuple[Site, int] | None:
        """Return the site closest to having enough free devices, with its free count."""
        heap = self._nearest[is_open]
        while heap and heap[0][3] != self._versions[heap[0][2]]:
            heappop(heap)
        return (self.sites[heap[0][2]], -heap[0][1]) if heap else None

    def soonest(self, num: int) -> list[list[tuple[float, str, tuple[str, ...]]]]:
        """Return for each model the ``num`` open sites with the earliest starts, or all it has."""
        firsts = (_first(heap, num, self._versions) for heap in self._soonest.values())
        return [[entry[:3] for entry in entries] for entries in firsts]


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


def _sites_on(host: Host, demand: Demand) -> list[Site]:
    fit = [d for d in host.devices if d.is_usable and d.memory_bytes >= demand.min_memory_bytes]
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
