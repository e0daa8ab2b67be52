"""Simulates requests that arrive at a continuously batching engine, event by event.

Requests wait in order, enter while a place is free, are prefilled within the step's token budget
and then make one token a step. Between two events every step is alike, so that a run of decode
steps is one event and thousands of requests take milliseconds. The only randomness is in the
arrivals and in the lengths of answers, both from a seeded generator: equal inputs, equal answers.

Source: Yu et al. 2022 (Orca), OSDI (batching by iteration); Agrawal et al. 2024
(Sarathi-Serve), arXiv:2403.02310 (chunked prefill beside decode).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from planner.workload.step_costs import StepCosts

Floats = npt.NDArray[np.float64]
DUST_TOKENS = 1e-9
LINEAR_GROWTH = 1e-9


@dataclass(frozen=True)
class Batching:
    """How the simulated engine schedules.

    ``slots`` is how many requests hold a cache at once; ``budget_tokens`` how many tokens a step
    takes in, decoding requests included; with ``prefill_first`` decoding pauses while prompts
    wait.
    """

    slots: int
    budget_tokens: float
    prefill_first: bool = False


@dataclass(frozen=True)
class Traffic:
    """Who asks: the first calls, and how often each caller calls again once it is answered.

    ``length_spread`` is how far answers are longer or shorter than ``output_tokens``, as a ratio.
    """

    prompt_tokens: float
    output_tokens: int
    calls_s: Sequence[float]
    calls_per_caller: int = 1
    length_spread: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Timeline:
    """When each request was sent, got its first token and was done, and how long it was."""

    sent_s: Floats
    first_s: Floats
    done_s: Floats
    output_tokens: Floats
    events: int

    @property
    def ttft_s(self) -> Floats:
        """Return the seconds to the first token of each request."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> Floats:
        """Return the mean gap between the tokens of each request that has more than one."""
        gaps = self.output_tokens - 1
        return (self.done_s - self.first_s)[gaps > 0] / gaps[gaps > 0]

    @property
    def latency_s(self) -> Floats:
        """Return the seconds to the last token of each request."""
        return self.done_s - self.sent_s

    @property
    def requests_per_s(self) -> float:
        """Return how many requests were done per second, from the first call to the last token."""
        return len(self.done_s) / float(self.done_s.max() - self.sent_s.min())


@dataclass
class _Request:
    sent_s: float
    calls_left: int
    output_tokens: int
    prompt_left: float
    first_s: float = math.nan
    done_s: float = math.nan


@dataclass
class _Engine:
    """The state of one replica; ``finishing`` holds (step of the last token, request)."""

    batching: Batching
    traffic: Traffic
    costs: StepCosts
    now_s: float = 0.0
    step: int = 0
    events: int = 0
    held: int = 0
    context_tokens: float = 0.0
    requests: list[_Request] = field(default_factory=list)
    calls: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    finishing: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.traffic.seed)
        for at in self.traffic.calls_s:
            self.call(at, self.traffic.calls_per_caller)

    def call(self, at_s: float, calls_left: int) -> None:
        """Put a request on its way to the queue."""
        traffic = self.traffic
        scale = 1.0
        if traffic.length_spread:
            scale += traffic.length_spread * (2 * self.random.random() - 1)
        length = max(1, round(traffic.output_tokens * scale))
        heappush(self.calls, (at_s, len(self.requests)))
        self.requests.append(_Request(at_s, calls_left - 1, length, traffic.prompt_tokens))

    def run(self) -> None:
        """Take the next event until nobody calls, waits or decodes."""
        while self.calls or self.waiting or self.finishing:
            self.events += 1
            while self.calls and self.calls[0][0] <= self.now_s:
                self.waiting.append(heappop(self.calls)[1])
            if self.can_prefill():
                self.prefill()
            elif self.finishing:
                self.decode()
            else:
                self.now_s = self.calls[0][0]

    def can_prefill(self) -> bool:
        """Return whether the first of the queue may go on or come in."""
        if not self.waiting:
            return False
        begun = self.requests[self.waiting[0]].prompt_left < self.traffic.prompt_tokens
        return begun or self.held < self.batching.slots

    def prefill(self) -> None:
        """Take one step that reads prompts, beside a token of each decoding request."""
        beside = 0 if self.batching.prefill_first else len(self.finishing)
        taken, started = self.take_prompts(max(1.0, self.batching.budget_tokens - beside))
        seconds = self.costs.prefill_seconds(taken)
        if beside:
            seconds += self.costs.decode_seconds(beside, self.context_tokens)
        self.now_s += seconds
        if beside:
            self.advance(1)
        for index in started:
            self.start(index)

    def take_prompts(self, budget: float) -> tuple[float, list[int]]:
        """Return the prompt tokens that this step reads, and which prompts it ends."""
        taken, started = 0.0, []
        while self.can_prefill() and budget > DUST_TOKENS:
            request = self.requests[self.waiting[0]]
            if request.prompt_left >= self.traffic.prompt_tokens:
                self.held += 1
            part = min(request.prompt_left, budget)
            request.prompt_left -= part
            taken, budget = taken + part, budget - part
            if request.prompt_left > DUST_TOKENS:
                break
            started.append(self.waiting.popleft())
        return taken, started

    def start(self, index: int) -> None:
        """Give a request its first token."""
        request = self.requests[index]
        request.first_s = self.now_s
        if request.output_tokens == 1:
            self.finish(index)
            return
        heappush(self.finishing, (self.step + request.output_tokens - 1, index))
        self.context_tokens += self.traffic.prompt_tokens + 1

    def decode(self) -> None:
        """Take decode steps until a request ends or the next one calls."""
        steps = self.finishing[0][0] - self.step
        first, growth = self.costs.decode_line(len(self.finishing), self.context_tokens)
        if self.calls:
            steps = min(steps, steps_until(self.calls[0][0] - self.now_s, first, growth))
        self.now_s += steps * first + growth * steps * (steps - 1) / 2
        self.advance(steps)

    def advance(self, steps: int) -> None:
        """Give every decoding request so many tokens, and let go those that are done."""
        self.step += steps
        self.context_tokens += steps * len(self.finishing)
        while self.finishing and self.finishing[0][0] <= self.step:
            index = heappop(self.finishing)[1]
            kept = self.traffic.prompt_tokens + self.requests[index].output_tokens
            self.context_tokens -= kept
            self.finish(index)

    def finish(self, index: int) -> None:
        """End a request: its place is free, and its caller calls again."""
        request = self.requests[index]
        request.done_s = self.now_s
        self.held -= 1
        if request.calls_left > 0:
            self.call(self.now_s, request.calls_left)


def steps_until(seconds: float, first_s: float, growth_s: float) -> int:
    """Return how many steps begin before ``seconds`` have passed, at least one.

    The first takes ``first_s`` and each next one ``growth_s`` more.
    """
    if seconds <= 0:
        return 1
    if growth_s * seconds < LINEAR_GROWTH * first_s**2:
        return max(1, math.ceil(seconds / first_s))
    slope = first_s - growth_s / 2
    return max(1, math.ceil((math.sqrt(slope**2 + 2 * growth_s * seconds) - slope) / growth_s))


def poisson_calls(rate_per_s: float, count: int, seed: int = 0) -> list[float]:
    """Return the times of ``count`` independent calls; a seed gives one pattern, stretched."""
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    return list(np.cumsum(gaps) / rate_per_s)


def simulate(batching: Batching, traffic: Traffic, costs: StepCosts) -> Timeline:
    """Return when every request was sent, first answered and done."""
    engine = _Engine(batching, traffic, costs)
    engine.run()
    return Timeline(
        sent_s=np.array([one.sent_s for one in engine.requests]),
        first_s=np.array([one.first_s for one in engine.requests]),
        done_s=np.array([one.done_s for one in engine.requests]),
        output_tokens=np.array([float(one.output_tokens) for one in engine.requests]),
        events=engine.events,
    )
