"""A replay decides as the queue does: its steps beside decisions of the queue's own module."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from webapp.jobs.pool_state import FAIR_DAYS
from webapp.jobs.queue_decisions import FOREVER as UNKNOWN
from webapp.jobs.queue_decisions import Demand, Device, Hold, Host, Snapshot, decide
from webapp.replay.blocks import FOREVER, Block
from webapp.replay.fleet import Fleet, Held, Shape
from webapp.replay.replaying import replay
from webapp.replay.traces import Trace

DAY = 86_400.0


@dataclass
class Case:
    """A random trace on a random fleet of up to two models."""

    dice: Random
    hosts: list[tuple[str, int]] = field(default_factory=list)  # model and devices, by id

    def __post_init__(self) -> None:
        models = ["A", "B"][: self.dice.randint(1, 2)]
        self.hosts = [
            (self.dice.choice(models), self.dice.choice((2, 4, 4)))
            for _ in range(self.dice.randint(2, 7))
        ]
        self.models = sorted({model for model, _ in self.hosts})

    def fleet(self) -> Fleet:
        blocks = []
        for model in self.models:
            ranks = [rank for rank, host in enumerate(self.hosts) if host[0] == model]
            blocks.append(Block(ranks, [self.hosts[rank][1] for rank in ranks]))
        return Fleet(blocks)

    def trace(self, num_jobs: int, weights: list[float], *, is_exact: bool) -> Trace:
        dice, at = self.dice, 0.0
        submitted, seconds, lengths, shapes = [], [], [], []
        for _ in range(num_jobs):
            at += dice.choice((0, 1, 20, 60, 200))
            blocks = tuple(range(len(self.models)))
            if len(blocks) > 1 and dice.random() < 0.3:
                blocks = (1,)  # for a job that needs more memory than the first model has
            submitted.append(at)
            seconds.append(float(dice.choice((50, 100, 400, 1500, 2 * DAY))))
            shapes.append(Shape(dice.choice((1, 1, 1, 2, 3)), dice.choice((1, 1, 2, 4)), blocks))
            factor = 1.25 if is_exact else dice.choice((0.5, 1.0, 1.25, 3.0))
            unknown = not is_exact and dice.random() < 0.2
            lengths.append(FOREVER if unknown else seconds[-1] * factor + 60)
        teams = [dice.randrange(len(weights)) for _ in range(num_jobs)]
        priorities = [dice.choice((0, 0, 0, 1, -1)) for _ in range(num_jobs)]
        names = [str(team) for team in range(len(weights))]
        return Trace(submitted, seconds, lengths, shapes, teams, names, weights, priorities)


class Reference:
    """The same events, each decided anew by the queue's module on a snapshot of everything."""

    def __init__(self, case: Case, trace: Trace) -> None:
        self.case, self.trace = case, trace
        self.holds: dict[str, tuple[int, float]] = {}  # by device: job and forecast end
        self.uses: list[tuple[int, int, float, float]] = []  # team, devices, from, to
        self.waiting: list[int] = []
        self.starts = [float("nan")] * len(trace)
        self.places: list[set[str]] = [set() for _ in range(len(trace))]
        self.ends: list[tuple[float, int]] = []

    def run(self) -> None:
        events = [(at, 1, job) for job, at in enumerate(self.trace.submitted)]
        while events or self.ends:
            if self.ends and (not events or self.ends[0][0] <= events[0][0]):
                now, job = heappop(self.ends)
                self.holds = {d: hold for d, hold in self.holds.items() if hold[0] != job}
            else:
                now, _, job = events.pop(0)
                if self.is_possible(self.trace.shapes[job]):
                    self.waiting.append(job)
            self.decide(now)

    def is_possible(self, shape: Shape) -> bool:
        wide = [m for m, num in self.case.hosts if num >= shape.devices]
        return any(wide.count(self.case.models[b]) >= shape.num_hosts for b in shape.blocks)

    def decide(self, now: float) -> None:
        snapshot = Snapshot(tuple(self.hosts(now)), tuple(map(self.demand, self.waiting)),
                            self.used(now), dict(enumerate_names(self.trace.weights)))  # fmt: skip
        for grant in decide(snapshot).grants:
            job = int(grant.job)
            self.waiting.remove(job)
            self.starts[job] = now
            devices = {device for _, ids in grant.places for device in ids}
            self.places[job] = devices
            self.holds |= dict.fromkeys(devices, (job, now + self.trace.lengths[job]))
            end = now + self.trace.seconds[job]
            heappush(self.ends, (end, job))
            self.uses.append((self.trace.teams[job], len(devices), now, end))

    def hosts(self, now: float):
        for rank, (model, num) in enumerate(self.case.hosts):
            devices = []
            for index in range(num):
                name = f"{rank}.{index}"
                job, end = self.holds.get(name, (None, 0.0))
                left = end - now if now < end < FOREVER else UNKNOWN
                holds = () if job is None else (Hold(str(job), left),)
                memory = 1 + self.case.models.index(model)
                devices.append(Device(name, index, "gpu", model, memory, holds))
            yield Host(str(rank), tuple(devices))

    def demand(self, job: int) -> Demand:
        shape, length = self.trace.shapes[job], self.trace.lengths[job]
        return Demand(
            job=str(job).zfill(6),
            team=str(self.trace.teams[job]),
            queued_at=self.trace.submitted[job],
            priority=self.trace.priorities[job],
            num_hosts=shape.num_hosts,
            devices_per_host=shape.devices,
            min_memory_bytes=1 + shape.blocks[0],
            seconds=None if length >= FOREVER else length,
        )

    def used(self, now: float) -> dict[str, float]:
        since = now - FAIR_DAYS * DAY
        seconds = dict.fromkeys(map(str, range(len(self.trace.weights))), 0.0)
        for team, num, start, end in self.uses:
            seconds[str(team)] += num * max(0.0, min(end, now) - max(start, since))
        return {team: each / self.trace.weights[int(team)] for team, each in seconds.items()}


def enumerate_names(weights):
    return ((str(team), weight) for team, weight in enumerate(weights))


def devices_of(case: Case, fleet: Fleet, held: Held | None) -> set[str]:
    if held is None:
        return set()
    ranks = fleet.blocks[held.block].ranks
    return {f"{ranks[host]}.{device}" for host, devices in held.taken for device in devices}


def test_a_replay_starts_each_job_when_and_where_whole_decisions_do():
    num_waited = 0
    for seed in range(12):
        case = Case(Random(seed))  # noqa: S311 -- it only has to be repeatable
        weights = [1.0, 2.0, 0.5][: 1 + seed % 3]
        trace = case.trace(40, weights, is_exact=seed % 2 == 0)
        expected = Reference(case, trace)
        expected.run()
        fleet = case.fleet()
        found = replay(trace, fleet, keeps_places=True)
        assert found.held is not None
        for job in range(len(trace)):
            place = devices_of(case, fleet, found.held[job])
            assert place == expected.places[job], (seed, job)
            assert not place or found.starts[job] == expected.starts[job], (seed, job)
        pairs = zip(found.starts, trace.submitted, strict=True)
        num_waited += sum(start > at for start, at in pairs)
    assert num_waited > 100  # else there was nothing to decide
