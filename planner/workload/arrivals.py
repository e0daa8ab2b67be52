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
SPAN = 2**32  # more than there are requests


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


class _Requests:
    """What is known of each request, a list a fact: calls to come are added as they are made."""

    def __init__(self, traffic: Traffic) -> None:
        most = len(traffic.calls_s) * traffic.calls_per_caller
        self.output_tokens = _lengths(traffic, most)
        self.sent_s = list(traffic.calls_s)
        self.calls_left = [traffic.calls_per_caller - 1] * len(self.sent_s)
        self.first_s = [math.nan] * most
        self.done_s = [math.nan] * most

    def call_again(self, index: int, now_s: float) -> int:
        """Return the next request of a caller that was just answered."""
        self.sent_s.append(now_s)
        self.calls_left.append(self.calls_left[index] - 1)
        return len(self.sent_s) - 1


def _lengths(traffic: Traffic, count: int) -> list[int]:
    """Return how many tokens the answer to each request has."""
    if not traffic.length_spread:
        return [max(1, traffic.output_tokens)] * count
    uneven = 2 * np.random.default_rng(traffic.seed).random(count) - 1
    tokens = np.rint(traffic.output_tokens * (1 + traffic.length_spread * uneven))
    return [int(length) for length in np.maximum(1, tokens)]


@dataclass
class _Engine:
    """The state of one replica.

    ``finishing`` holds the step of a request's last token, times ``SPAN``, plus the request;
    ``head_left`` is what the first of the queue still has to read.
    """

    batching: Batching
    traffic: Traffic
    costs: StepCosts
    now_s: float = 0.0
    step: int = 0
    events: int = 0
    held: int = 0
    context_tokens: float = 0.0
    waiting: deque[int] = field(default_factory=deque)
    called_again: list[int] = field(default_factory=list)
    finishing: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requests = _Requests(self.traffic)
        self.prompt = self.head_left = self.traffic.prompt_tokens
        self.slots, self.budget = self.batching.slots, self.batching.budget_tokens
        self.alone = self.batching.prefill_first
        sent = self.requests.sent_s
        # The next first call is the last of this list.
        self.calls = sorted(range(len(sent)), key=lambda index: (-sent[index], -index))

    def run(self) -> None:
        """Take the next event until nobody calls, waits or decodes."""
        while self.calls or self.called_again or self.waiting or self.finishing:
            self.events += 1
            self.admit()
            if self.waiting and (self.head_left < self.prompt or self.held < self.slots):
                self.prefill()
            elif self.finishing:
                self.decode()
            else:
                self.now_s = self.requests.sent_s[self.calls[-1]]

    def admit(self) -> None:
        """Put who has called by now into the queue."""
        calls, sent = self.calls, self.requests.sent_s
        while calls and sent[calls[-1]] <= self.now_s:
            self.waiting.append(calls.pop())
        if self.called_again:
            self.waiting.extend(self.called_again)
            self.called_again = []

    def prefill(self) -> None:
        """Take one step that reads prompts, beside a token of each decoding request."""
        beside = 0 if self.alone else len(self.finishing)
        left = self.budget - beside
        taken, started = self.take_prompts(left if left > 1 else 1.0)
        seconds = self.costs.prefill_seconds(taken)
        if beside:
            seconds += self.costs.decode_seconds(beside, self.context_tokens)
        self.now_s += seconds
        if beside:
            self.advance(1)
        if started:
            self.start(started)

    def take_prompts(self, budget: float) -> tuple[float, list[int]]:
        """Return the prompt tokens that this step reads, and which prompts it ends."""
        waiting, left = self.waiting, budget
        started: list[int] = []
        if self.head_left < self.prompt:  # it was begun in a step before
            part = min(left, self.head_left)
            left, self.head_left = left - part, self.head_left - part
            if self.head_left > DUST_TOKENS:
                return budget - left, started
            started.append(waiting.popleft())
        whole = int((left + DUST_TOKENS) / self.prompt)
        if whole:
            whole = min(whole, len(waiting), self.slots - self.held)
            started += [waiting.popleft() for _ in range(whole)]
            self.held += whole
        self.head_left, left = self.prompt, left - whole * self.prompt
        if left > DUST_TOKENS and waiting and self.held < self.slots:
            self.held += 1
            self.head_left, left = self.prompt - left, 0.0
        return budget - left, started

    def start(self, started: list[int]) -> None:
        """Give requests their first token."""
        requests, step, now_s = self.requests, self.step - 1, self.now_s
        for index in started:
            requests.first_s[index] = now_s
            length = requests.output_tokens[index]
            if length == 1:
                self.finish(index)
                continue
            heappush(self.finishing, (step + length) * SPAN + index)
            self.context_tokens += self.prompt + 1

    def decode(self) -> None:
        """Take decode steps until a request ends or the next one calls."""
        steps = self.finishing[0] // SPAN - self.step
        first, growth = self.costs.decode_line(len(self.finishing), self.context_tokens)
        if self.calls:
            until_s = self.requests.sent_s[self.calls[-1]] - self.now_s
            steps = min(steps, steps_until(until_s, first, growth))
        self.now_s += steps * first + growth * steps * (steps - 1) / 2
        self.advance(steps)

    def advance(self, steps: int) -> None:
        """Give every decoding request so many tokens, and let go those that are done."""
        self.step += steps
        self.context_tokens += steps * len(self.finishing)
        end, finishing = (self.step + 1) * SPAN, self.finishing
        while finishing and finishing[0] < end:
            index = heappop(finishing) % SPAN
            self.context_tokens -= self.prompt + self.requests.output_tokens[index]
            self.finish(index)

    def finish(self, index: int) -> None:
        """End a request: its place is free, and its caller calls again."""
        requests = self.requests
        requests.done_s[index] = self.now_s
        self.held -= 1
        if requests.calls_left[index] > 0:
            self.called_again.append(requests.call_again(index, self.now_s))


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
    found = engine.requests
    return Timeline(
        sent_s=np.array(found.sent_s),
        first_s=np.array(found.first_s),
        done_s=np.array(found.done_s),
        output_tokens=np.array(found.output_tokens, dtype=np.float64),
        events=engine.events,
    )
