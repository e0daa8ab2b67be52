"""Hosts of one model in a replay: which devices are free, and when the others are forecast to be.

What a decision of the queue asks of hosts one by one is kept as sets, each a number with one bit
per host, and as one array of forecast ends, so that thousands of hosts are asked at once.
"""

from bisect import insort
from collections.abc import Mapping, Sequence

import numpy as np

FREE = -1.0  # the end of a use that is over; instants are in seconds from 0
FOREVER = 1e300  # the end of a use of which nobody knows the end: finite, so that arrays sort it
NO_DEVICE = np.inf

Taken = list[tuple[int, list[int]]]  # hosts of a block, and the devices that a job holds of each


class Block:
    """Hosts of one model in the order of their ids, with what waiting jobs reserve of them."""

    def __init__(self, ranks: Sequence[int], devices: Sequence[int]) -> None:
        """Take the place of each host among all of the fleet by id, and its number of devices."""
        self.ranks = ranks
        self._ends = [[FREE] * num for num in devices]  # forecast, of each device
        self._free = list(devices)  # devices that no job holds, by host
        self.num_free = self.num_devices = sum(devices)
        self._with_free = [0] * (max(devices) + 1)  # hosts by their free devices, as bits
        self._num_with_free = [0] * (max(devices) + 1)
        for host, num in enumerate(devices):
            self._with_free[num] |= 1 << host
            self._num_with_free[num] += 1
        sizes = range(max(devices) + 1)
        self._num_hosts = [sum(num >= least for num in devices) for least in sizes]
        # Row n: from when on n + 1 devices of a host are free.
        self._soonest = np.full((max(devices), len(devices)), NO_DEVICE)
        self._changed = set(range(len(devices)))  # hosts whose column there is old
        # Of one decision: ends after reservations, and the first start that is reserved.
        self._foreseen: dict[int, list[float]] = {}
        self._kept: dict[int, list[float | None]] = {}
        self._kept_hosts = 0  # as bits
        self._lengths: Mapping[int, float] = {}
        self._now = 0.0
        self._lost_on: dict[int, tuple[int, ...]] = {}  # by host, those numbers of devices
        self._num_lost: dict[int, int] = {}  # hosts that are free, but not for so many devices

    def num_hosts(self, devices: int) -> int:
        """Return the number of hosts that have so many devices."""
        return self._num_hosts[devices] if devices < len(self._num_hosts) else 0

    def num_roomy(self, devices: int) -> int:
        """Return the number of hosts with so many free devices, reserved or not."""
        return sum(self._num_with_free[devices:])

    # What jobs hold

    def place(self, num_hosts: int, devices: int, end: float) -> Taken | None:
        """Give a job devices until its forecast end where nothing is reserved, or nothing."""
        if self.num_roomy(devices) < num_hosts:
            return None
        taken: Taken = []
        for _, host in self._best_fit_hosts(devices, num_hosts):
            chosen = self._first_free(host, devices)
            self._take(host, chosen, end)
            taken.append((host, chosen))
        return taken

    def release(self, taken: Taken) -> None:
        """Free the devices of a job."""
        for host, devices in taken:
            ends = self._ends[host]
            for device in devices:
                ends[device] = FREE
            self._move(host, len(devices))

    def forget_end(self, taken: Taken) -> None:
        """Forget the forecast of a job that exceeded it."""
        for host, devices in taken:
            for device in devices:
                self._ends[host][device] = FOREVER
            self._changed.add(host)

    def _best_fit_hosts(self, devices: int, num: int, besides: int = 0) -> list[tuple[int, int]]:
        """Return up to ``num`` hosts where a job leaves the fewest devices: what is left, host."""
        found: list[tuple[int, int]] = []
        for count in range(devices, len(self._with_free)):
            hosts = self._with_free[count] & ~besides
            while hosts:
                lowest = hosts & -hosts
                found.append((count - devices, lowest.bit_length() - 1))
                if len(found) == num:
                    return found
                hosts ^= lowest
        return found

    def _first_free(self, host: int, num: int) -> list[int]:
        return [device for device, end in enumerate(self._ends[host]) if end == FREE][:num]

    def _take(self, host: int, devices: Sequence[int], end: float) -> None:
        ends = self._ends[host]
        for device in devices:
            ends[device] = end
        self._move(host, -len(devices))

    def _move(self, host: int, num: int) -> None:
        before = self._free[host]
        after = self._free[host] = before + num
        bit = 1 << host
        self._with_free[before] ^= bit
        self._with_free[after] ^= bit
        self._num_with_free[before] -= 1
        self._num_with_free[after] += 1
        self.num_free += num
        self._changed.add(host)

    # One decision, with reservations

    def begin(self, now: float, lengths: Mapping[int, float]) -> None:
        """Begin a decision; ``lengths``: by devices per host, the seconds of the shortest job."""
        self._now, self._lengths = now, lengths
        self._num_lost = dict.fromkeys(lengths, 0)

    def finish(self) -> None:
        """End the decision, and with it what was reserved."""
        self._changed.update(self._foreseen)
        self._foreseen, self._kept, self._kept_hosts, self._lost_on = {}, {}, 0, {}

    def num_open(self, devices: int) -> int:
        """Return on how many hosts the shortest waiting job of so many devices could start."""
        return self.num_roomy(devices) - self._num_lost[devices]

    def grant(self, num_hosts: int, devices: int, seconds: float) -> Taken | None:
        """Give a job devices that nobody holds, or reserved for a time within its length."""
        if self.num_roomy(devices) < num_hosts:
            return None
        found = self._best_fit_hosts(devices, num_hosts, self._kept_hosts)
        for host in self._kept:
            if self._free[host] >= devices:
                left = len(self._open(host, seconds)) - devices
                if left >= 0:
                    insort(found, (left, host))
        if len(found) < num_hosts:
            return None
        end = min(self._now + seconds, FOREVER)
        taken = [(host, self._choose(host, devices, seconds)) for _, host in found[:num_hosts]]
        for host, chosen in taken:
            self._take(host, chosen, end)
            if host in self._kept:
                foreseen = self._foreseen[host]
                for device in chosen:
                    foreseen[device] = max(end, foreseen[device])
                self._count_open(host)
        return taken

    def soonest(self, num_hosts: int, devices: int) -> list[tuple[float, int]] | None:
        """Return the hosts that have so many devices free first: when, and the host, in order.

        None if too few hosts have so many.
        """
        if self.num_hosts(devices) < num_hosts:
            return None
        for host in self._changed:
            ends = self._foreseen.get(host) or self._ends[host]
            self._soonest[: len(ends), host] = sorted(ends)
        self._changed.clear()
        starts = self._soonest[devices - 1]
        if num_hosts == 1:
            host = int(starts.argmin())
            return [(float(starts[host]), host)]
        last = np.partition(starts, num_hosts - 1)[num_hosts - 1]
        before = np.flatnonzero(starts < last)
        before = before[np.lexsort((before, starts[before]))]
        equal = np.flatnonzero(starts == last)[: num_hosts - len(before)]
        return [(float(starts[host]), int(host)) for host in (*before, *equal)]

    def keep(self, host: int, num: int, start: float, seconds: float) -> bool:
        """Reserve the devices of a host that are free first; return whether a job might use one.

        That is one that is free now, of which the reservation may leave too little.
        """
        if host not in self._kept:
            self._foreseen[host] = list(self._ends[host])
            self._kept[host] = [None] * len(self._ends[host])
            self._kept_hosts |= 1 << host
        ends, kept = self._foreseen[host], self._kept[host]
        end = min(start + seconds, FOREVER)
        for device in sorted(range(len(ends)), key=ends.__getitem__)[:num]:
            ends[device] = max(end, ends[device])
            earlier = kept[device]
            kept[device] = start if earlier is None else min(start, earlier)
        self._changed.add(host)
        return self._count_open(host)

    def _open(self, host: int, seconds: float) -> list[int]:
        """Return the devices of a host that a job of a length may take now."""
        end, kept = self._now + seconds, self._kept[host]
        return [
            device
            for device, until in enumerate(self._ends[host])
            if until == FREE and ((start := kept[device]) is None or FOREVER > end <= start)
        ]

    def _choose(self, host: int, num: int, seconds: float) -> list[int]:
        """Return the devices that a job takes of a host, those that nobody reserved first."""
        if host not in self._kept:
            return self._first_free(host, num)
        kept = self._kept[host]
        return sorted(self._open(host, seconds), key=lambda each: kept[each] is not None)[:num]

    def _count_open(self, host: int) -> bool:
        """Count for which numbers of devices a host with reservations is lost."""
        for devices in self._lost_on.pop(host, ()):
            self._num_lost[devices] -= 1
        free = self._free[host]
        if not free:
            return False
        self._lost_on[host] = tuple(
            devices
            for devices, seconds in self._lengths.items()
            if free >= devices > len(self._open(host, seconds))
        )
        for devices in self._lost_on[host]:
            self._num_lost[devices] += 1
        return True
