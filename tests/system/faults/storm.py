"""Random kills while short jobs run, drawn from a seed; and what came of it."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from runners.supervision import child, procfs
from tests.stack import FINAL, wait_for
from tests.system.faults.site import SERVER, Site

# Each kind of strike with its weight.
KINDS = {
    "web": 3, "control": 3, "ticker": 2, "redis": 3, "agent": 4, "worker": 3, "supervisor": 2,
    "job": 2, "freeze agent": 2, "empty redis": 1, "server": 1, "everything": 1,
}  # fmt: skip
ON_JOBS = frozenset({"supervisor", "job", "agent", "everything"})
# How a job may end that one of those strikes hit; any other ends as its drill says.
STRUCK = frozenset({"supervisor_lost", "killed_externally", "never_started", "internal"})
MAX_OPEN = 12  # jobs at once; a person may have no more than 100 in queues
ENDINGS = {"well": 8, "exit_code": 1, "oom_gpu": 1, "signal": 1}
REASONS = {"well": "ok", "exit_code": "exit_nonzero", "oom_gpu": "oom_gpu", "signal": "signal"}


class Strike(NamedTuple):
    """What is done, when, to which host, and for how long a part stays down."""

    at_seconds: float
    kind: str
    host: str
    down_seconds: float


class Drill(NamedTuple):
    """A job that is launched at an instant."""

    at_seconds: float
    host: str
    steps: int
    ending: str


class Outcome(NamedTuple):
    """What a storm left behind."""

    jobs: int
    ended_once: int
    lost: int
    doubled: list[str]
    orphans: int
    wrong: list[str]
    broken: dict[str, Any]
    strikes: dict[str, int]
    reasons: dict[str, int]
    seconds: float


def strikes(chance: random.Random, seconds: float, hosts: list[str]) -> Iterator[Strike]:
    """Draw strikes, one every few seconds."""
    at = 0.0
    while (at := at + chance.uniform(1.0, 4.0)) < seconds:
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        yield Strike(at, kind, chance.choice(hosts), chance.uniform(0.0, 1.5))


def drills(
    chance: random.Random, seconds: float, hosts: list[str], num_jobs: int
) -> Iterator[Drill]:
    """Draw short jobs, evenly over the time."""
    for number in range(num_jobs):
        (ending,) = chance.choices(list(ENDINGS), list(ENDINGS.values()))
        host = hosts[number % len(hosts)]
        yield Drill(number * seconds / num_jobs, host, chance.randint(2, 12), ending)


class Storm:
    """Launches and strikes as drawn, and returns what came of it."""

    def __init__(self, site: Site, *, seed: int, seconds: float, num_jobs: int) -> None:
        self.site = site
        self.seed = seed
        hosts = sorted(site.hosts)
        chance = random.Random(seed)  # noqa: S311 (a test, not a secret)
        self.plan = [
            *strikes(chance, seconds, hosts),
            *drills(chance, seconds, hosts, num_jobs),
        ]
        self.plan.sort(key=lambda one: one.at_seconds)
        self.launched: dict[str, Drill] = {}
        self.done: Counter[str] = Counter()
        self._due: list[tuple[float, Callable[[], object]]] = []

    def run(self) -> Outcome:
        """Do everything that was drawn, in its order, then let all jobs end.

        On a busy machine it takes longer: nothing is launched or struck while too many wait.
        """
        started, late = time.monotonic(), 0.0
        for one in self.plan:
            self._wait_until(started + one.at_seconds + late)
            if isinstance(one, Drill):
                while self._num_open() >= MAX_OPEN:
                    self._wait_until(time.monotonic() + 0.5)
                late = max(late, time.monotonic() - started - one.at_seconds)
                job = self.site.submit(one.host, steps=one.steps, ending=one.ending)
                self.launched[job] = one
            else:
                self._strike(one)
        self._wait_until(time.monotonic() + 2.0)
        self._finish()
        self.site.mend(patience_s=300.0, stops_jobs=False)
        return self._outcome(time.monotonic() - started)

    def _num_open(self) -> int:
        states = self.site.desk.states()
        return sum(number for state, number in states.items() if state not in {*FINAL, "draft"})

    def _wait_until(self, instant: float) -> None:
        """Start again what is due meanwhile."""
        while True:
            for due in [due for due in self._due if due[0] <= time.monotonic()]:
                self._due.remove(due)
                due[1]()
            rest = instant - time.monotonic()
            if rest <= 0:
                return
            time.sleep(min(rest, 0.05))

    def _finish(self) -> None:
        for _, act in self._due:
            act()
        self._due.clear()

    def _strike(self, strike: Strike) -> None:
        self.done[strike.kind] += 1
        site, host = self.site, strike.host
        parts: tuple[str, ...] = ()
        if strike.kind in SERVER:
            parts = (strike.kind,)
        elif strike.kind == "server":
            parts = SERVER
        elif strike.kind == "everything":
            parts = (*SERVER, *site.hosts)
        elif strike.kind == "agent":
            parts = (host,)
        elif strike.kind == "empty redis":
            self._empty()
        elif strike.kind == "freeze agent":
            site.freeze(*(pid for pid in site.agents(host) if procfs.read_process(pid)))
            self._later(strike.down_seconds * 2, site.thaw)
        else:
            self._kill_on(host, strike.kind)
        site.kill(*parts)
        for part in parts:
            self._later(strike.down_seconds, lambda part=part: self._begin(part))

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    def _begin(self, part: str) -> None:
        if not self.site.is_alive(part):
            self.site.begin(part)

    def _empty(self) -> None:
        if self.site.is_alive("redis"):
            with self.site.broker() as broker:
                wait_for(broker.flushall, "an emptied broker", every_s=0.05)

    def _kill_on(self, host: str, kind: str) -> None:
        """Kill a host's Celery worker, or a running attempt's supervisor or job."""
        if kind == "worker":
            for pid in self.site.workers(host)[:1] if self.site.is_alive(host) else []:
                os.kill(pid, signal.SIGKILL)
            return
        names = (
            ("pid", "start_ticks") if kind == "supervisor" else ("child_pid", "child_start_ticks")
        )
        for path in (self.site.hosts[host] / "attempts").glob(f"*/{child.SUPERVISOR}"):
            if identity := child.read_json(path):
                procfs.send_signal(
                    int(identity[names[0]]), int(identity[names[1]]), signal.SIGKILL
                )

    def _outcome(self, seconds: float) -> Outcome:
        views = {job: self.site.view(job) for job in self.launched}
        ends = {
            job: [one for one in view["states"] if one in FINAL] for job, view in views.items()
        }
        exits = {
            job: sum(each["num_exited"] for each in view["attempts"] if each["is_claimed"])
            for job, view in views.items()
        }
        starts = {
            job: max((each["num_started"] for each in view["attempts"]), default=0)
            for job, view in views.items()
        }
        broken = self.site.broken_promises()
        return Outcome(
            jobs=len(views),
            ended_once=sum(len(ends[job]) == 1 for job in views),
            lost=sum(not ends[job] for job in views)
            + len(broken.get("I1 events are contiguous", [])),
            doubled=[
                *(f"{job}: {views[job]}" for job in views if starts[job] > 1 or exits[job] > 1),
                *broken.get("P1 two trees", []),
            ],
            orphans=len(broken.get("P1 survivors", {})),
            wrong=[f"{job}: {views[job]}" for job in views if self._is_wrong(job, views[job])],
            broken=broken,
            strikes=dict(self.done),
            reasons=dict(Counter(view["reason"] for view in views.values())),
            seconds=seconds,
        )

    def _is_wrong(self, job: str, view: dict[str, Any]) -> bool:
        return view["reason"] not in STRUCK | {REASONS[self.launched[job].ending]}


def told(seed: int, outcome: Outcome) -> str:
    """Return a storm's outcome as it is printed."""
    return (
        f"soak seed {seed}: {outcome.ended_once}/{outcome.jobs} ended once, {outcome.lost} lost, "
        f"{len(outcome.doubled)} doubled, {outcome.orphans} orphans, {len(outcome.wrong)} wrong; "
        f"{sum(outcome.strikes.values())} strikes in {outcome.seconds:.0f} s {outcome.strikes}; "
        f"reasons {outcome.reasons}" + (f"; broken {outcome.broken}" if outcome.broken else "")
    )
