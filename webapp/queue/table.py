"""What is free when, while one job after another has its turn.

Only hosts that a turn changed are looked at anew: a pool of thousands of devices with a long
queue is decided in the time that it takes to read it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from webapp.queue.snapshot import FOREVER, Demand, Device, Host, Place


@dataclass(frozen=True, slots=True)
class Site:
    """Devices of one model on one host that would do, with how many a job needs of them."""

    host: Host
    model: str
    devices: tuple[Device, ...]
    num_needed: int


@dataclass(frozen=True, slots=True)
class State:
    """A site at one moment: free devices, and the earliest start with the devices for it."""

    num_free: int
    start: float
    soonest: tuple[str, ...]


class Table:
    """Who holds and who keeps each device."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = sorted(hosts, key=lambda host: host.id)
        devices = [device for host in hosts for device in host.devices]
        self.free_at = {d.id: d.free_seconds if d.is_held else 0.0 for d in devices}
        self.holder = {d.id: d.held_by for d in devices if d.is_held}
        self.kept_from: dict[str, tuple[float, str]] = {}  # reserved: since when, for whom
        self._turn = {host.id: 0 for host in hosts}  # how often the host changed
        self._sites: dict[tuple[str | None, int, int | None], list[Site]] = {}
        self._states: dict[int, tuple[int, State]] = {}

    def sites(self, demand: Demand) -> list[Site]:
        """Return where the job, or a member of it, could run if everything were free."""
        shape = (demand.host, demand.min_memory_bytes, demand.devices_per_host)
        if shape not in self._sites:
            hosts = [host for host in self._hosts if demand.host in {None, host.id}]
            self._sites[shape] = [site for host in hosts for site in _sites_on(host, demand)]
        return self._sites[shape]

    def state(self, site: Site) -> State:
        """Return how a site stands now."""
        turn = self._turn[site.host.id]
        known = self._states.get(id(site))
        if known is None or known[0] != turn:
            known = (turn, self._look(site))
            self._states[id(site)] = known
        return known[1]

    def _look(self, site: Site) -> State:
        free_at = self.free_at
        soonest = sorted(site.devices, key=lambda d: (free_at[d.id], d.index, d.id))
        chosen = tuple(device.id for device in soonest[: site.num_needed])
        num_free = sum(1 for device in site.devices if device.id not in self.holder)
        return State(num_free, free_at[chosen[-1]], chosen)

    def is_open(self, device: Device, seconds: float) -> bool:
        """Return whether a job of that length may have the device now.

        One of unknown length never goes before a job for which the device is kept.
        """
        if device.id in self.holder:
            return False
        kept = self.kept_from.get(device.id)
        return kept is None or (math.isfinite(seconds) and seconds <= kept[0])

    def grant(self, demand: Demand, places: Sequence[Place]) -> None:
        """Let the job hold the devices."""
        ends = FOREVER if demand.seconds is None else demand.seconds
        for host, devices in places:
            self._turn[host] += 1
            for device in devices:
                self.holder[device] = demand.job
                self.free_at[device] = max(ends, self._kept_until(device))

    def keep(self, demand: Demand, places: Sequence[Place], start: float) -> None:
        """Reserve the devices for the job from an instant on."""
        ends = FOREVER if demand.seconds is None else start + demand.seconds
        for host, devices in places:
            self._turn[host] += 1
            for device in devices:
                self.kept_from.setdefault(device, (start, demand.job))
                self.free_at[device] = max(ends, self._kept_until(device))

    def _kept_until(self, device: str) -> float:
        return self.free_at[device] if device in self.kept_from else 0.0


def _sites_on(host: Host, demand: Demand) -> list[Site]:
    fit = [d for d in host.devices if d.is_usable and d.memory_bytes >= demand.min_memory_bytes]
    if demand.devices_per_host is None:
        is_of_slots = all(device.kind == "slot" for device in fit)
        num_needed = 1 if is_of_slots else len(fit)  # slots are no hardware: one is enough
        return [Site(host, "", tuple(fit), num_needed)] if fit else []
    models = sorted({device.model for device in fit})
    groups = {model: tuple(d for d in fit if d.model == model) for model in models}
    needed = demand.devices_per_host
    return [
        Site(host, model, devices, needed)
        for model, devices in groups.items()
        if len(devices) >= needed
    ]
