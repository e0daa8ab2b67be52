"""Event simulation of requests that arrive at an engine, from the costs of its steps."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from typing import cast

import numpy as np
import numpy.typing as npt

from planner.cost.quantity import NullLedger
from planner.specs.workload import ServeWorkload
from planner.workload.forward import PassCost, wait_for_slowest_stage
from planner.workload.generate import decode_pass, prefill_pass
from planner.workload.setting import Setting

# The cost of one step of a serving engine, interpolated between a few costed passes.
#
# A simulation has thousands of steps, of which the cost model computes a handful. Decode steps are
# linear in the cached tokens, at batch sizes a factor of four apart; prefill steps are linear in
# the prompt tokens.


Floats = npt.NDArray[np.float64]
BATCH_STEP = 4
PREFILL_TOKENS = (32.0, 128.0, 512.0, 2048.0)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of steps at sampled sizes: prefill by tokens, decode by batch and cached tokens."""

    prefill_tokens: Sequence[float]
    prefill_s: Sequence[float]
    batches: Sequence[float]
    decode_base_s: Sequence[float]
    decode_context_s: Sequence[float]
    known: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False)
    read: dict[float, float] = field(default_factory=dict, compare=False)

    def prefill_seconds(self, tokens: float) -> float:
        """Return the seconds of a prefill step of ``tokens`` tokens."""
        seconds = self.read.get(tokens)
        if seconds is None:
            seconds = self.read[tokens] = _interpolated(
                tokens, self.prefill_tokens, self.prefill_s
            )
        return seconds

    def decode_seconds(self, batch: int, context_tokens: float) -> float:
        """Return the seconds of a decode step with ``context_tokens`` cached tokens in total."""
        base, each = self._decode_terms_of(batch)
        return base + each * context_tokens

    def mixed_seconds(self, tokens: float, batch: int, context_tokens: float) -> float:
        """Return the seconds of a step that reads ``tokens`` and decodes ``batch`` requests.

        Everything but attention runs once for the tokens of both.
        """
        seconds = self.prefill_seconds(tokens + batch)
        return seconds + self._decode_terms_of(batch)[1] * context_tokens if batch else seconds

    def decode_line(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """Return the seconds of the next decode step and the growth per further step."""
        base, each = self._decode_terms_of(batch)
        return base + each * context_tokens, each * batch

    def decode_terms(self, batches: Floats) -> tuple[Floats, Floats]:
        """Return the base seconds and the seconds per cached token of several decode steps."""
        return (
            _interpolated_all(batches, self.batches, self.decode_base_s),
            _interpolated_all(batches, self.batches, self.decode_context_s),
        )

    def _decode_terms_of(self, batch: int) -> tuple[float, float]:
        terms = self.known.get(batch)
        if terms is None:
            terms = self.known[batch] = (
                _interpolated(batch, self.batches, self.decode_base_s),
                _interpolated(batch, self.batches, self.decode_context_s),
            )
        return terms


def _interpolated(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the linear interpolation at ``at``, extrapolated beyond the last point."""
    left = min(max(bisect_right(places, at) - 1, 0), len(places) - 2)
    share = (at - places[left]) / (places[left + 1] - places[left])
    return values[left] + (values[left + 1] - values[left]) * share


def _interpolated_all(at: Floats, places: Sequence[float], values: Sequence[float]) -> Floats:
    """Return ``_interpolated`` for several sizes, bit-identical to single calls."""
    x, y = np.asarray(places, dtype=np.float64), np.asarray(values, dtype=np.float64)
    left = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    share = (at - x[left]) / (x[left + 1] - x[left])
    result: Floats = y[left] + (y[left + 1] - y[left]) * share
    return result


def step_costs(setting: Setting, workload: ServeWorkload, slots: int, budget: float) -> StepCosts:
    """Return the step costs of one replica with up to ``slots`` running requests."""
    tokens, batches = _prefill_sizes(budget), _batch_sizes(slots)
    base, per_token = _decode_lines(setting, workload, np.array(batches))
    return StepCosts(
        prefill_tokens=tokens,
        prefill_s=_prefill(setting, workload, np.array(tokens)).tolist(),
        batches=batches,
        decode_base_s=base.tolist(),
        decode_context_s=per_token.tolist(),
    )


class StepColumns:
    """The step costs of settings whose layout has columns, costed once per size."""

    def __init__(self, setting: Setting, workload: ServeWorkload, most_slots: int) -> None:
        self._setting, self._workload = setting, workload
        self._batches = _batch_sizes(most_slots)
        self._read: dict[float, Floats] = {}  # by budget

    @cached_property
    def _decode(self) -> tuple[Floats, Floats]:
        return _decode_lines(self._setting, self._workload, _as_rows(self._batches))

    def costs(self, column: int, slots: int, budget: float) -> StepCosts:
        """Return the step costs of one column, equal to ``step_costs`` of its setting."""
        tokens, num = _prefill_sizes(budget), len(_batch_sizes(slots))
        if budget not in self._read:
            self._read[budget] = _prefill(self._setting, self._workload, _as_rows(tokens))
        base, each = self._decode
        return StepCosts(
            prefill_tokens=tokens,
            prefill_s=_column(self._read[budget], column),
            batches=self._batches[:num],
            decode_base_s=_column(base, column)[:num],
            decode_context_s=_column(each, column)[:num],
        )


def _as_rows(sizes: Sequence[float]) -> Floats:
    """Return the sizes as rows that broadcast against the columns of a layout."""
    return np.array(sizes)[:, np.newaxis]


def _column(values: Floats, column: int) -> list[float]:
    """Return one column, or the only column if all are equal."""
    result: list[float] = values[:, column if values.shape[1] > 1 else 0].tolist()
    return result


def _prefill_sizes(budget: float) -> list[float]:
    longest = max(budget, 2.0)
    return [*([size for size in PREFILL_TOKENS if size < longest] or [longest / 2]), longest]


def _batch_sizes(slots: int) -> list[float]:
    batches = [1.0]
    while batches[-1] < max(slots, 2):
        batches.append(batches[-1] * BATCH_STEP)
    return batches


def _prefill(setting: Setting, workload: ServeWorkload, tokens: Floats) -> Floats:
    """Return the seconds of prefill steps that read part of a prompt or several prompts."""
    prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
    sequences = np.maximum(1.0, tokens / prompt)
    read = prefill_pass(setting, NullLedger(), cast("float", sequences), prompt)
    whole = _seconds_to_next_step(setting, read, tokens)
    parts = tokens[np.ravel(tokens) < prompt]
    cut = prefill_pass(setting, NullLedger(), cast("float", np.ones(1)), cast("float", parts))
    # A chunk also attends to earlier chunks: its share of the whole prompt is a lower bound.
    least = whole[: len(parts)] * parts / prompt
    cut_s = _seconds_to_next_step(setting, cut, parts)
    return np.concatenate([np.maximum(cut_s, least), whole[len(parts) :]])


def _decode_lines(
    setting: Setting, workload: ServeWorkload, batches: Floats
) -> tuple[Floats, Floats]:
    """Return base seconds and seconds per cached token of a decode step of each batch size."""
    low, high = workload.input_tokens, workload.input_tokens + workload.output_tokens
    stages = setting.layout.pipeline
    sequences, in_flight = np.maximum(1.0, batches / stages), np.minimum(batches, stages)
    # The start and end of an output are costed in one call with columns.
    contexts = np.concatenate([np.full(batches.shape, float(at)) for at in (low, high)])
    twice = [cast("float", np.concatenate([each, each])) for each in (sequences, in_flight)]
    step = decode_pass(setting, NullLedger(), twice[0], cast("float", contexts))
    paced_step = wait_for_slowest_stage(setting, NullLedger(), step, "decode", twice[1])
    first, last = np.split(_seconds(paced_step, contexts), 2)
    each = (last - first) / (batches * (high - low))
    return first - each * batches * low, each


def _seconds_to_next_step(setting: Setting, cost: PassCost, sizes: Floats) -> Floats:
    """Return the seconds until the next step can begin, set by the slowest stage."""
    return _seconds(cost, sizes) / cost.concurrent_passes(setting.layout.pipeline)


def _seconds(cost: PassCost, sizes: Floats) -> Floats:
    """Return the seconds of a pass for each size and each column."""
    total = np.asarray(cost.total_s, dtype=np.float64)
    return np.broadcast_to(total, np.broadcast_shapes(total.shape, sizes.shape))


Places = npt.NDArray[np.intp]
MAX_LOOPS = 64  # closed loops in the cache: up to 100 kB each
NOTHING = StepCosts((0.0, 1.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0))
DUST_TOKENS = 1e-9
LINEAR_GROWTH = 1e-9
SPAN = 2**32  # exceeds the number of requests
FEW_LENGTHS = 200  # a mean of fewer is no mean of their distribution
UNIFORM_VARIATION = 1 / math.sqrt(3)  # of lengths from none to twice the mean


@dataclass(frozen=True)
class Batching:
    """The scheduling parameters of the simulated engine.

    ``slots`` is the maximum number of running requests; ``budget_tokens`` the tokens per step,
    decode tokens included.
    """

    slots: int
    budget_tokens: float


@dataclass(frozen=True)
class Traffic:
    """The arriving requests: times of the first calls and the number of calls per caller.

    Prompts and answers are drawn with ``length_variation``, a standard deviation over the mean;
    without it prompts are alike, and answers differ by at most ``length_spread`` of their length.
    A request of more than ``longest_tokens`` is as long as that.
    """

    prompt_tokens: float
    output_tokens: int
    calls_s: Sequence[float]
    calls_per_caller: int = 1
    length_spread: float = 0.0
    seed: int = 0
    length_variation: float = 0.0
    longest_tokens: float = math.inf


@dataclass(frozen=True)
class Timeline:
    """The send, first-token and end time and the output length of each request."""

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
        """Return the mean inter-token time of each request with more than one token."""
        gaps = self.output_tokens - 1
        return (self.done_s - self.first_s)[gaps > 0] / gaps[gaps > 0]

    @property
    def latency_s(self) -> Floats:
        """Return the seconds to the last token of each request."""
        return self.done_s - self.sent_s

    @property
    def requests_per_s(self) -> float:
        """Return the completed requests per second from the first call to the last token."""
        return len(self.done_s) / float(self.done_s.max() - self.sent_s.min())


class _Requests:
    """The state of all requests, one list per attribute; repeated calls are appended."""

    def __init__(self, traffic: Traffic) -> None:
        most = len(traffic.calls_s) * traffic.calls_per_caller
        self.prompt_tokens, self.output_tokens = _lengths(traffic, most)
        self.sent_s = list(traffic.calls_s)
        self.calls_left = [traffic.calls_per_caller - 1] * len(self.sent_s)
        self.first_s = [math.nan] * most
        self.done_s = [math.nan] * most

    def call_again(self, index: int, now_s: float) -> int:
        """Add the next request of a caller whose request ended and return its index."""
        self.sent_s.append(now_s)
        self.calls_left.append(self.calls_left[index] - 1)
        return len(self.sent_s) - 1


def _lengths(traffic: Traffic, count: int) -> tuple[list[float], list[int]]:
    """Return the prompt and the answer of each request in tokens."""
    draw = np.random.default_rng(traffic.seed)
    prompts = np.full(count, traffic.prompt_tokens)
    answers = np.full(count, float(traffic.output_tokens))
    if traffic.length_variation:
        prompts *= _drawn(draw, traffic.length_variation, count)
        answers *= _drawn(draw, traffic.length_variation, count)
    elif traffic.length_spread:
        answers *= 1 + traffic.length_spread * (2 * draw.random(count) - 1)
    kept = np.minimum(1.0, traffic.longest_tokens / (prompts + answers))
    prompts, answers = kept * prompts, kept * answers
    whole = np.maximum(1, np.rint(answers))
    return np.maximum(1.0, prompts).tolist(), [int(length) for length in whole]


def _drawn(draw: np.random.Generator, variation: float, count: int) -> Floats:
    """Return random lengths of mean 1.

    They are uniform as those of load generators, which vary by at most ``UNIFORM_VARIATION``; if
    they vary more, gamma distributed as those of users.
    """
    if variation <= UNIFORM_VARIATION:
        lengths = 1 + math.sqrt(3) * variation * (2 * draw.random(count) - 1)
    else:
        lengths = draw.gamma(variation**-2, variation**2, count)
    result: Floats = lengths / lengths.mean() if count >= FEW_LENGTHS else lengths
    return result


@dataclass
class _Engine:
    """The state of one replica.

    ``finishing`` is a heap of (step of the last token) * ``SPAN`` + request index; ``head_left``
    is the number of unread prompt tokens of the first request in the queue, 0 before it has a
    place.
    """

    batching: Batching
    traffic: Traffic
    costs: StepCosts
    now_s: float = 0.0
    step: int = 0
    events: int = 0
    held: int = 0
    context_tokens: float = 0.0
    head_left: float = 0.0
    waiting: deque[int] = field(default_factory=deque)
    called_again: list[int] = field(default_factory=list)
    finishing: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requests = _Requests(self.traffic)
        self.slots, self.budget = self.batching.slots, self.batching.budget_tokens
        sent = self.requests.sent_s
        # Sorted in reverse: the next call is the last item.
        self.calls = sorted(range(len(sent)), key=lambda index: (-sent[index], -index))

    def run(self) -> None:
        """Process events until all requests are done."""
        while self.calls or self.called_again or self.waiting or self.finishing:
            self.events += 1
            self.admit()
            if self.waiting and (self.head_left or self.held < self.slots):
                self.prefill()
            elif self.finishing:
                self.decode()
            else:
                self.now_s = self.requests.sent_s[self.calls[-1]]

    def admit(self) -> None:
        """Queue the requests that have arrived by now."""
        calls, sent = self.calls, self.requests.sent_s
        while calls and sent[calls[-1]] <= self.now_s:
            self.waiting.append(calls.pop())
        if self.called_again:
            self.waiting.extend(self.called_again)
            self.called_again = []

    def prefill(self) -> None:
        """Run a step that reads prompts and makes one token of each decoding request."""
        decoding = len(self.finishing)
        budget = self.budget - decoding
        tokens, started = self.take_prompts(budget if budget > 1 else 1.0)
        self.now_s += self.costs.mixed_seconds(tokens, decoding, self.context_tokens)
        if decoding:
            self.advance(1)
        if started:
            self.start(started)

    def take_prompts(self, budget: float) -> tuple[float, list[int]]:
        """Return the prompt tokens read in this step and the requests with a completed prompt."""
        waiting, left = self.waiting, budget
        started: list[int] = []
        while waiting and left > DUST_TOKENS:
            if not self.head_left:
                if self.held >= self.slots:
                    break
                self.held += 1
                self.head_left = self.requests.prompt_tokens[waiting[0]]
            part = min(left, self.head_left)
            left, self.head_left = left - part, self.head_left - part
            if self.head_left > DUST_TOKENS:
                break
            self.head_left = 0.0
            started.append(waiting.popleft())
        return budget - left, started

    def start(self, started: list[int]) -> None:
        """Record the first token of requests and start decoding them."""
        requests, step, now_s = self.requests, self.step - 1, self.now_s
        for index in started:
            requests.first_s[index] = now_s
            length = requests.output_tokens[index]
            if length == 1:
                self.finish(index)
                continue
            heappush(self.finishing, (step + length) * SPAN + index)
            self.context_tokens += requests.prompt_tokens[index] + 1

    def decode(self) -> None:
        """Run decode steps until a request ends or the next one arrives."""
        steps = self.finishing[0] // SPAN - self.step
        first, growth = self.costs.decode_line(len(self.finishing), self.context_tokens)
        if self.calls:
            until_s = self.requests.sent_s[self.calls[-1]] - self.now_s
            steps = min(steps, steps_until(until_s, first, growth))
        self.now_s += steps * first + growth * steps * (steps - 1) / 2
        self.advance(steps)

    def advance(self, steps: int) -> None:
        """Add ``steps`` tokens to every decoding request and end those that are done."""
        self.step += steps
        self.context_tokens += steps * len(self.finishing)
        end, finishing = (self.step + 1) * SPAN, self.finishing
        while finishing and finishing[0] < end:
            index = heappop(finishing) % SPAN
            self.context_tokens -= self.requests.prompt_tokens[index]
            self.context_tokens -= self.requests.output_tokens[index]
            self.finish(index)

    def finish(self, index: int) -> None:
        """End a request: free its slot and queue its caller's next request."""
        requests = self.requests
        requests.done_s[index] = self.now_s
        self.held -= 1
        if requests.calls_left[index] > 0:
            self.called_again.append(requests.call_again(index, self.now_s))


def steps_until(seconds: float, first_s: float, growth_s: float) -> int:
    """Return the number of steps that begin within ``seconds``, at least one.

    The first step takes ``first_s``, each further one ``growth_s`` more than the one before.
    """
    if seconds <= 0:
        return 1
    if growth_s * seconds < LINEAR_GROWTH * first_s**2:
        return max(1, math.ceil(seconds / first_s))
    slope = first_s - growth_s / 2
    return max(1, math.ceil((math.sqrt(slope**2 + 2 * growth_s * seconds) - slope) / growth_s))


def poisson_calls(rate_per_s: float, count: int, seed: int = 0) -> list[float]:
    """Return ``count`` Poisson arrival times; the rate only scales the pattern of a seed."""
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    return list(np.cumsum(gaps) / rate_per_s)


@dataclass(frozen=True)
class _Steps:
    """The steps of a closed loop, whose order does not depend on their costs.

    ``read`` is the prompt tokens that a step reads, 0 for decode steps; ``count`` the number of
    identical decode steps, 0 for a prefill step. ``sent``, ``first`` and ``done`` are the steps
    after which each request was sent, got its first token and ended.
    """

    read: Floats
    batch: Floats
    context: Floats
    count: Floats
    sent: Places
    first: Places
    done: Places
    output_tokens: Floats

    def timeline(self, costs: StepCosts) -> Timeline:
        """Return the times of the requests for given step costs."""
        base, context_s = costs.decode_terms(self.batch)
        decode_s = base + context_s * self.context
        tokens = self.read + self.batch
        prefill_s = _interpolated_all(tokens, costs.prefill_tokens, costs.prefill_s)
        attended_s = np.where(self.batch > 0, context_s * self.context, 0.0)
        growth = context_s * self.batch
        run_s = self.count * decode_s + growth * self.count * (self.count - 1) / 2
        step_s = np.where(self.count > 0, run_s, prefill_s + attended_s)
        ends_s = np.concatenate([np.zeros(1), np.cumsum(step_s)])
        return Timeline(
            sent_s=ends_s[self.sent],
            first_s=ends_s[self.first],
            done_s=ends_s[self.done],
            output_tokens=self.output_tokens,
            events=len(step_s),
        )


class _Recorder(_Engine):
    """Records the steps of a closed loop; its clock is the number of steps so far."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.record: list[tuple[float, int, float, int]] = []

    def prefill(self) -> None:
        """Record a step that reads prompts and makes one token of each decoding request."""
        decoding, context = len(self.finishing), self.context_tokens
        budget = self.budget - decoding
        tokens, started = self.take_prompts(budget if budget > 1 else 1.0)
        self._write(tokens, decoding, context, 0)
        if decoding:
            self.advance(1)
        if started:
            self.start(started)

    def decode(self) -> None:
        """Record the decode steps until a request ends."""
        steps = self.finishing[0] // SPAN - self.step
        self._write(0.0, len(self.finishing), self.context_tokens, steps)
        self.advance(steps)

    def _write(self, read: float, batch: int, context: float, count: int) -> None:
        self.record.append((read, batch, context, count))
        self.now_s = len(self.record)


@lru_cache(maxsize=MAX_LOOPS)
def _closed_loop(batching: Batching, traffic: Traffic) -> _Steps:
    """Return the steps of callers who start together and call again after each answer."""
    engine = _Recorder(batching, traffic, NOTHING)
    engine.run()
    read, batch, context, count = np.array(engine.record, dtype=np.float64).T
    requests = engine.requests
    sent, first, done = (
        np.array(each, dtype=np.intp)
        for each in (requests.sent_s, requests.first_s, requests.done_s)
    )
    tokens = np.array(requests.output_tokens, dtype=np.float64)
    return _Steps(read, batch, context, count, sent, first, done, tokens)


def simulate(batching: Batching, traffic: Traffic, costs: StepCosts) -> Timeline:
    """Return the send, first-token and end time of every request.

    The order of a closed loop's steps does not depend on their costs, so it is cached.
    """
    if traffic.calls_s and not any(traffic.calls_s):
        return _closed_loop(batching, replace(traffic, calls_s=tuple(traffic.calls_s))).timeline(
            costs
        )
    engine = _Engine(batching, traffic, costs)
    engine.run()
    requests = engine.requests
    return Timeline(
        sent_s=np.array(requests.sent_s),
        first_s=np.array(requests.first_s),
        done_s=np.array(requests.done_s),
        output_tokens=np.array(requests.output_tokens, dtype=np.float64),
        events=engine.events,
    )
