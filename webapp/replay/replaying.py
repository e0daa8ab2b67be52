"""The replay of a trace, event by event, and what became of each job."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from webapp.replay.blocks import FOREVER
from webapp.replay.fleet import Fleet, Held, Queue
from webapp.replay.traces import Trace, without_forecasts

Policy = Literal["fair-share", "first-come", "short-first", "no-forecasts"]
POLICIES: dict[Policy, str] = {
    "fair-share": "the queue as it is: fair shares of teams, backfill by forecasts",
    "first-come": "one line for all teams and priorities, as they were submitted, with backfill",
    "short-first": "jobs with a forecast within an hour have high priority, whatever their own",
    "no-forecasts": "fair shares, but nobody knows how long a job takes: no backfill",
}
SHORT_SECONDS = 3600.0


@dataclass(frozen=True)
class Replay:
    """When each job started, in seconds; NaN: never, because no host could take it.

    ``held`` is given if it was asked for. ``num_cut`` of ``num_decisions`` ended with the last
    turn that they had.
    """

    starts: Sequence[float]
    num_decisions: int
    num_cut: int
    most_waiting: int
    held: Sequence[Held | None] | None = None


def replay(
    trace: Trace,
    fleet: Fleet,
    policy: Policy = "fair-share",
    *,
    interval: float = 0.0,
    turns: int | None = None,
    keeps_places: bool = False,
) -> Replay:
    """Replay a trace on an idle fleet.

    The queue decides at every submission and every end of a job; with an ``interval``, while jobs
    wait, only at its multiples, in seconds. ``turns``: for how many jobs that must wait a decision
    reserves devices, the first in the queue's order; None: for all of them.
    """
    return _Run(trace, fleet, policy, keeps_places=keeps_places).run(interval, turns)


class _Run:
    """One replay: the fleet, the queue, and what comes next."""

    def __init__(self, trace: Trace, fleet: Fleet, policy: Policy, *, keeps_places: bool) -> None:
        self.trace, self.fleet = trace, fleet
        is_blind, is_short = policy == "no-forecasts", policy == "short-first"
        self.lengths = without_forecasts(trace) if is_blind else trace.lengths
        is_one_line = policy == "first-come"
        self.teams = [0] * len(trace) if is_one_line else trace.teams
        priorities = [0] * len(trace) if is_one_line else trace.priorities
        if is_short:
            priorities = [int(length <= SHORT_SECONDS) for length in self.lengths]
        weights = [1.0] if is_one_line else trace.weights
        self.queue = Queue(trace.shapes, self.lengths, self.teams, priorities, weights)
        self.starts = [math.nan] * len(trace)
        self.held: list[Held | None] = [None] * len(trace)
        self.keeps_places = keeps_places
        self.events: list[tuple[float, int]] = []  # ends, and as ~job: forecasts that are exceeded
        self.num_decisions = self.num_cut = self.most_waiting = 0

    def run(self, interval: float, turns: int | None) -> Replay:
        submitted, events, queue = self.trace.submitted, self.events, self.queue
        following, num_jobs, due = 0, len(submitted), math.inf
        while True:
            arrives = submitted[following] if following < num_jobs else math.inf
            ends = events[0][0] if events else math.inf
            now = min(arrives, ends, due)
            if now == math.inf:
                break
            if ends == now:
                if not self._end(now):
                    continue  # a forecast alone asks for no decision
            elif arrives == now:
                self._arrive(now, following)
                following += 1
            else:
                due = math.inf
                self._decide(now, turns)
                continue
            if queue and due == math.inf:
                if not interval:
                    self._decide(now, turns)
                else:
                    due = (now // interval + 1) * interval
        return Replay(
            self.starts,
            self.num_decisions,
            self.num_cut,
            self.most_waiting,
            self.held if self.keeps_places else None,
        )

    def _end(self, now: float) -> bool:
        """Free the devices of a job that ends, or forget a forecast; return whether one ended."""
        _, job = heappop(self.events)
        is_over = job >= 0
        held = self.held[job if is_over else ~job]
        if held is None:
            raise AssertionError(f"job {job} holds nothing")
        block = self.fleet.blocks[held.block]
        if not is_over:
            block.forget_end(held.taken)
            return False
        block.release(held.taken)
        self.queue.usage[self.teams[job]].change(now, -self.trace.shapes[job].num_devices)
        if not self.keeps_places:
            self.held[job] = None
        return True

    def _arrive(self, now: float, job: int) -> None:
        shape = self.trace.shapes[job]
        if not self.queue:
            held = self.fleet.place(shape, now + self.lengths[job])
            if held:
                self._start(now, job, held)
                return
        if self.fleet.is_possible(shape):
            self.queue.add(job)
            self.most_waiting = max(self.most_waiting, len(self.queue))

    def _decide(self, now: float, turns: int | None) -> None:
        self.num_decisions += 1
        grants, is_cut = self.fleet.decide(now, self.queue, self.trace.shapes, self.lengths, turns)
        self.num_cut += is_cut
        for job, held in grants.items():
            self.queue.remove(job)
            self._start(now, job, held)

    def _start(self, now: float, job: int, held: Held) -> None:
        self.starts[job], self.held[job] = now, held
        seconds, length = self.trace.seconds[job], self.lengths[job]
        heappush(self.events, (now + seconds, job))
        if length < seconds and length < FOREVER:
            heappush(self.events, (now + length, ~job))
        self.queue.usage[self.teams[job]].change(now, self.trace.shapes[job].num_devices)
