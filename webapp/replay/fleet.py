"""The queue of a fleet, decided step by step as ``webapp.jobs.queue_decisions`` decides it.

The queue's own module decides a snapshot from the start. Here hosts, usage and waiting jobs stay
as they are between two decisions, and only what changed is looked at again. It covers jobs that
take whole devices of any host of a model; shared devices, named hosts, team limits and hosts out
of contact are left out. ``tests/webapp/replay`` holds both equal.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from webapp.jobs.pool_state import FAIR_DAYS
from webapp.jobs.queue_decisions import UNKNOWN_SECONDS
from webapp.replay.blocks import FOREVER, Block, Taken

DAY = 86_400.0


class Shape(NamedTuple):
    """What a job asks for: hosts, devices of each, and the blocks that have such devices."""

    num_hosts: int
    devices: int
    blocks: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Return the devices of all hosts."""
        return self.num_hosts * self.devices


class Held(NamedTuple):
    """The devices that a job holds, all of one block."""

    block: int
    taken: Taken


class Usage:
    """The device-seconds of a team in the last days, from the instants at which it changed."""

    def __init__(self, seconds: float = FAIR_DAYS * DAY) -> None:
        """Take the length of the window."""
        self._window = seconds
        self._now = _Total()
        self._before = _Total()  # the same, as of the beginning of the window
        self._changes: deque[tuple[float, int]] = deque()

    def change(self, now: float, num: int) -> None:
        """Count devices that the team takes now, or frees."""
        self._now.change(now, num)
        self._changes.append((now, num))

    def used(self, now: float) -> float:
        """Return the device-seconds from the beginning of the window until now."""
        since = now - self._window
        while self._changes and self._changes[0][0] <= since:
            self._before.change(*self._changes.popleft())
        return self._now.at(now) - self._before.at(since)


class _Total:
    """Device-seconds from the beginning, and the devices that are held since the last change."""

    def __init__(self) -> None:
        self.seconds, self.since, self.num = 0.0, 0.0, 0

    def at(self, now: float) -> float:
        return self.seconds + self.num * max(0.0, now - self.since)

    def change(self, now: float, num: int) -> None:
        self.seconds, self.since = self.at(now), now
        self.num += num


class Queue:
    """The waiting jobs of each team, in the order of the queue."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        seconds: Sequence[float],
        teams: Sequence[int],
        priorities: Sequence[int],
        weights: Sequence[float],
    ) -> None:
        """Take the jobs' shapes, forecast seconds, teams and priorities; the teams' weights.

        Jobs are numbered in the order of their submission. ``FOREVER``: no forecast.
        """
        self._shapes, self._seconds = shapes, seconds
        self._teams, self._priorities, self._weights = teams, priorities, weights
        self.usage = [Usage() for _ in weights]
        self.shapes: Counter[Shape] = Counter()  # of the waiting jobs
        self._lines: dict[int, dict[int, OrderedDict[int, None]]] = {}  # by priority, then team
        self._shortest: dict[int, list[tuple[float, int]]] = {}  # by devices per host: heaps
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return len(self._waiting)

    def add(self, job: int) -> None:
        """Let a job wait."""
        lines = self._lines.setdefault(self._priorities[job], {})
        lines.setdefault(self._teams[job], OrderedDict())[job] = None
        shape = self._shapes[job]
        self.shapes[shape] += 1
        heappush(self._shortest.setdefault(shape.devices, []), (self._seconds[job], job))
        self._waiting.add(job)

    def remove(self, job: int) -> None:
        """Let a job go that has its devices."""
        lines = self._lines[self._priorities[job]]
        line = lines[self._teams[job]]
        del line[job]
        if not line:
            del lines[self._teams[job]]
        shape = self._shapes[job]
        self.shapes[shape] -= 1
        if not self.shapes[shape]:
            del self.shapes[shape]
        self._waiting.discard(job)

    def lengths(self) -> dict[int, float]:
        """Return the seconds of the shortest waiting job, by devices per host."""
        found = {}
        for devices, heap in self._shortest.items():
            while heap and heap[0][1] not in self._waiting:
                heappop(heap)
            if heap:
                found[devices] = heap[0][0]
        return found

    def in_order(self, now: float) -> Iterator[int]:
        """Yield the jobs in their order; each counts immediately towards its team's usage."""
        teams = {team for lines in self._lines.values() for team in lines}
        used = {team: self.usage[team].used(now) / self._weights[team] for team in teams}
        for priority in sorted(self._lines, reverse=True):
            jobs = {team: iter(line) for team, line in self._lines[priority].items()}
            heads = [(used[team], next(line), team) for team, line in jobs.items()]
            heapify(heads)
            while heads:
                _, job, team = heads[0]
                yield job
                seconds = self._seconds[job]
                length = UNKNOWN_SECONDS if seconds >= FOREVER else seconds
                used[team] += self._shapes[job].num_devices * length / self._weights[team]
                following = next(jobs[team], None)
                if following is None:
                    heappop(heads)
                else:
                    heapreplace(heads, (used[team], following, team))


class Fleet:
    """All hosts, in blocks of one model that are sorted by the model's name."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        """Take the blocks."""
        self.blocks = blocks

    def is_possible(self, shape: Shape) -> bool:
        """Return whether a job could start while all hosts are idle."""
        return any(
            self.blocks[b].num_hosts(shape.devices) >= shape.num_hosts for b in shape.blocks
        )

    def place(self, shape: Shape, end: float) -> Held | None:
        """Give a job devices while no other waits, or nothing."""
        for block in shape.blocks:
            taken = self.blocks[block].place(shape.num_hosts, shape.devices, end)
            if taken:
                return Held(block, taken)
        return None

    def decide(
        self,
        now: float,
        queue: Queue,
        shapes: Sequence[Shape],
        seconds: Sequence[float],
        turns: int | None = None,
    ) -> tuple[dict[int, Held], bool]:
        """Give the waiting jobs devices; return who got which, and whether ``turns`` ended it.

        ``turns`` is how many jobs get a reservation instead, at most. The jobs are left in the
        queue.
        """
        left = Counter(queue.shapes)
        lengths = queue.lengths()
        for block in self.blocks:
            block.begin(now, lengths)
        live = {shape for shape in left if self._is_live(shape)}
        grants: dict[int, Held] = {}
        is_cut = False
        if live:
            num_waiting = 0
            for job in queue.in_order(now):
                if num_waiting == turns:
                    is_cut = True
                    break
                shape = shapes[job]
                held = self._grant(shape, seconds[job])
                if held:
                    grants[job] = held
                else:
                    num_waiting += 1
                if held or self._reserve(shape, seconds[job]):
                    live = {each for each in live if self._is_live(each)}
                left[shape] -= 1
                if not left[shape]:
                    live.discard(shape)
                if not live:
                    break
        for block in self.blocks:
            block.finish()
        return grants, is_cut

    def _is_live(self, shape: Shape) -> bool:
        """Return whether a waiting job of a shape might start now, if it were the shortest."""
        return any(
            self.blocks[block].num_open(shape.devices) >= shape.num_hosts for block in shape.blocks
        )

    def _grant(self, shape: Shape, seconds: float) -> Held | None:
        for block in shape.blocks:
            taken = self.blocks[block].grant(shape.num_hosts, shape.devices, seconds)
            if taken:
                return Held(block, taken)
        return None

    def _reserve(self, shape: Shape, seconds: float) -> bool:
        """Reserve devices from the earliest start; return whether a host of them has free ones."""
        best: tuple[float, int, int, list[tuple[float, int]]] | None = None
        for index in shape.blocks:
            block = self.blocks[index]
            gang = block.soonest(shape.num_hosts, shape.devices)
            if gang:
                start, last = gang[-1]
                if best is None or (start, block.ranks[last]) < best[:2]:
                    best = (start, block.ranks[last], index, gang)
        if best is None:
            return False
        start, _, index, gang = best
        block = self.blocks[index]
        were_free = [block.keep(host, shape.devices, start, seconds) for _, host in gang]
        return any(were_free)
