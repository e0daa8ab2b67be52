"""Request arrivals, and a report row from client timings: means with intervals, percentiles."""

import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from runners.jobs.load.client import RequestOutcome
from runners.jobspec.benchmark import (
    DISTRIBUTED,
    PERCENTILES,
    Arrivals,
    ClosedLoop,
    LoadOptions,
    LoadRow,
    OpenLoop,
)

# Request arrivals: closed loop, Poisson process or burst; and the generator's own delay.


TICK_SECONDS = 0.01
Prompt = Sequence[int]
Ask = Callable[[Prompt, float], Awaitable[RequestOutcome]]
Alive = Callable[[], bool]


@dataclass
class Repetition:
    """Results of one repetition of one load point."""

    began: float
    ended: float = 0.0
    answered: list[RequestOutcome] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # delays of the event loop itself

    @property
    def seconds(self) -> float:
        """Return the duration in seconds."""
        return self.ended - self.began


async def repetition(
    arrivals: Arrivals, point: float, prompts: Sequence[Prompt], ask: Ask, alive: Alive, seed: str
) -> Repetition:
    """Send every prompt according to the arrivals and return the answers.

    Once ``alive`` returns False no more requests are sent; pending ones end with their connection.
    """
    result = Repetition(time.monotonic())
    watch = asyncio.ensure_future(_record_lags(result.lags))
    try:
        if isinstance(arrivals, ClosedLoop):
            result.answered = await _closed(prompts, round(point), ask, alive)
        elif isinstance(arrivals, OpenLoop):
            source = random.Random(seed)  # noqa: S311 - the same instants again, no secret
            result.answered = await _open(prompts, point, ask, alive, source)
        else:
            now = time.monotonic()
            result.answered = list(await asyncio.gather(*(ask(each, now) for each in prompts)))
    finally:
        watch.cancel()
    result.ended = time.monotonic()
    return result


async def _closed(
    prompts: Sequence[Prompt], clients: int, send: Ask, alive: Alive
) -> list[RequestOutcome]:
    shared_prompts, answered = iter(prompts), list[RequestOutcome]()

    async def client(queue: Iterator[Prompt]) -> None:
        for each in queue:  # shared by all clients: the next free client takes the next prompt
            answered.append(await send(each, time.monotonic()))
            if not alive():
                return

    await asyncio.gather(*(client(shared_prompts) for _ in range(clients)))
    return answered


async def _open(
    prompts: Sequence[Prompt], rate: float, send: Ask, alive: Alive, source: random.Random
) -> list[RequestOutcome]:
    due, pending = time.monotonic(), list[asyncio.Future[RequestOutcome]]()
    for each in prompts:
        due += source.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if not alive():
            break
        pending.append(asyncio.ensure_future(send(each, due)))
    return list(await asyncio.gather(*pending))


async def _record_lags(lags: list[float]) -> None:
    """Record how late the event loop wakes, which bounds the error of all its timestamps."""
    while True:
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.monotonic() - due))


# Quantiles for an 80 % interval: Student's t with 1, 2 ... 10 degrees of freedom, and the normal.
STUDENT_80 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
NORMAL_80 = 1.282
BEYOND = 10  # minimum number of values beyond a percentile for it to be reliable
LATE_SECONDS = 0.005
LATE_SHARE = 0.1  # of the mean time to the first token
KEPT_UP = 0.9  # of the arrival rate
WIDE = 0.2  # half-width relative to the mean
WORDS = {
    "tokens_per_second": "tokens a second",
    "requests_per_second": "requests a second",
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per token",
    "latency_seconds": "whole answer",
}


def row_of(
    options: LoadOptions, point: float, repetitions: Sequence[Repetition], output_tokens: int
) -> LoadRow:
    """Return one point's row from its repetitions."""
    answered = [each for one in repetitions for each in one.answered]
    means = [_means(each) for each in repetitions]
    names = [name for name in means[0] if all(name in each for each in means)]
    measured = {name: statistics.fmean(each[name] for each in means) for name in names}
    interval = {name: _interval([each[name] for each in means]) for name in names}
    measured |= _percentiles(answered)
    known = {name: ends for name, ends in interval.items() if ends is not None}
    spread = {name: known[name] for name in known if name in WORDS}
    known |= _percentile_intervals(repetitions)
    errors = Counter(each.error for each in answered if each.error)
    return LoadRow(
        point=point,
        requests=len(answered),
        failed=errors.total(),
        repetitions=len(repetitions),
        duration_seconds=sum(each.seconds for each in repetitions),
        measured=measured,
        interval=known,
        errors=dict(errors),
        notes=tuple(
            chain(
                _failure_warnings(answered),
                _sample_size_warnings(answered),
                _spread_warnings(measured, spread, len(repetitions)),
                _generator_lag_warnings(repetitions, measured),
                _short_answer_warnings(answered, output_tokens),
                _overload_warnings(options, point, measured),
                _edge_effect_warnings(options, point),
            )
        ),
    )


# Figures


def _means(repetition: Repetition) -> dict[str, float]:
    """Return a repetition's means under the planner's names, without unmeasured ones."""
    complete = [each for each in repetition.answered if not each.error]
    seconds = max(repetition.seconds, 1e-9)
    figures = {
        "tokens_per_second": sum(each.output_tokens for each in complete) / seconds,
        "requests_per_second": len(complete) / seconds,
    }
    means = {f"{name}_seconds": values_of(complete, name) for name in DISTRIBUTED}
    return figures | {name: statistics.fmean(values) for name, values in means.items() if values}


def values_of(answered: Iterable[RequestOutcome], name: str) -> list[float]:
    """Return the complete answers' ``ttft``, ``tpot`` or ``latency`` in seconds, sorted."""
    values = (getattr(each, f"{name}_seconds") for each in answered if not each.error)
    return sorted(each for each in values if each is not None)


def _percentiles(answered: Sequence[RequestOutcome]) -> dict[str, float]:
    return {
        f"{name}_p{percent}_seconds": percentile(values, percent)
        for name in DISTRIBUTED
        if (values := values_of(answered, name))
        for percent in PERCENTILES
    }


def _percentile_intervals(repetitions: Sequence[Repetition]) -> dict[str, tuple[float, float]]:
    """Return the 80 % interval of each percentile over the repetitions."""
    by_repetition = [_percentiles(one.answered) for one in repetitions]
    names = [
        name
        for name in by_repetition[0]
        if all(name in percentiles for percentiles in by_repetition)
    ]
    ends = {
        name: _interval([percentiles[name] for percentiles in by_repetition]) for name in names
    }
    return {name: interval for name, interval in ends.items() if interval is not None}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of sorted values (nearest rank)."""
    return values[max(0, math.ceil(percent * len(values) / 100) - 1)]


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 80 % interval of the mean over repetitions, or None for a single one."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    factor = STUDENT_80[freedom - 1] if freedom <= len(STUDENT_80) else NORMAL_80
    half = factor * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


# Caveats


def _failure_warnings(answered: Sequence[RequestOutcome]) -> Iterable[str]:
    errors = Counter(each.error for each in answered if each.error)
    if errors:
        summary = ", ".join(f"{words} ({count})" for words, count in errors.most_common(3))
        share = f"{errors.total()} of {len(answered)} requests failed"
        yield f"{share}, and no figure has them: {summary}"


def _sample_size_warnings(answered: Sequence[RequestOutcome]) -> Iterable[str]:
    count = sum(not each.error for each in answered)
    for percent in PERCENTILES:
        needed = round(BEYOND * 100 / (100 - percent))
        if count < needed:
            yield f"{count} answers are few for a p{percent}: {needed:,} would be enough"
            return


def _spread_warnings(
    measured: dict[str, float], interval: dict[str, tuple[float, float]], count: int
) -> Iterable[str]:
    if count == 1:
        yield "one repetition has no interval"
    wide = [
        name
        for name, (low, high) in interval.items()
        if high - low > 2 * WIDE * abs(measured[name])
    ]
    if wide:
        summary = ", ".join(WORDS[name] for name in wide)
        yield f"repetitions differ by more than {WIDE:.0%} in {summary}"


def _generator_lag_warnings(
    repetitions: Sequence[Repetition], measured: dict[str, float]
) -> Iterable[str]:
    """Yield caveats if the generator was late: its event loop woke, or its requests went, late."""
    limit = max(LATE_SECONDS, LATE_SHARE * measured.get("ttft_seconds", 0.0))
    lags = sorted(chain.from_iterable(each.lags for each in repetitions))
    sent = sorted(each.sent - each.due for one in repetitions for each in one.answered)
    for values, words in ((lags, "its clock ran"), (sent, "its requests went out")):
        if values and (late := percentile(values, 99)) > limit:
            yield f"the generator itself fell behind: {words} up to {late:.3f} s late (p99)"


def _short_answer_warnings(
    answered: Sequence[RequestOutcome], output_tokens: int
) -> Iterable[str]:
    short = sum(not each.error and each.output_tokens < output_tokens for each in answered)
    if short:
        yield f"{short} answers ended before their {output_tokens} tokens"


def _overload_warnings(
    options: LoadOptions, point: float, measured: dict[str, float]
) -> Iterable[str]:
    done = measured["requests_per_second"]
    if options.arrivals.kind == "open" and done < KEPT_UP * point:
        yield (
            f"the endpoint did not keep up: {done:.3g} of {point:g} requests a second, so waiting "
            "times grow for as long as it is asked"
        )


def _edge_effect_warnings(options: LoadOptions, point: float) -> Iterable[str]:
    if options.arrivals.kind == "closed" and options.requests_at(point) < 2 * point:
        yield "fewer than two requests a client: the start and the end weigh in it"
