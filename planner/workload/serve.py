"""Serve requests with continuous batching: how many run at once, how long each token takes.

A request's life is one prefill and a decode step per further token. While it decodes, the other
requests of the batch are prefilled in between, which lengthens the gap between its tokens.
"""

from dataclasses import dataclass, replace

from planner.cost.columns import any_of, either, is_column, maximum, minimum, negate, where
from planner.cost.equation import Ledger, Unrecorded
from planner.cost.queueing import (
    ArrivalHabits,
    chance_of_company,
    mean_token_gap,
    poisson_prompts_before,
    prompt_slot,
    prompts_waited_for,
    slot_wait,
    time_to_first_token,
)
from planner.cost.root import falling_root
from planner.specs.estimate import Performance
from planner.specs.workload import ServeWorkload
from planner.workload.capacity import held_at_once, load_of, places
from planner.workload.forward import PassCost
from planner.workload.outcome import Outcome, performance_of
from planner.workload.saturated import burst_rate, saturation
from planner.workload.setting import Setting
from planner.workload.speculate import decoding, held_memory, prefilling
from planner.workload.staged import paced

GROUP = "serving"
MAX_SEARCHED_CONCURRENCY = 4096


@dataclass(frozen=True)
class _Steady:
    """The steady state of one replica with ``running`` requests at once."""

    running: float
    prefill: PassCost
    decode: PassCost
    tpot_s: float
    ttft_s: float
    latency_s: float
    queue_s: float
    life_s: float
    requests_per_s: float | None = None


def serve(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return what serving the workload costs, with the requests that fit at once."""
    most, raised = held_at_once(setting, workload)
    closed = workload.concurrency is not None
    slots = places(setting, workload, raised) if closed else most
    offered = _offered(setting, workload, slots)
    running = maximum(1.0, minimum(offered, slots))
    # The busiest rank holds a whole one.
    held = maximum(minimum(running, maximum(1.0, most)), setting.layout.attention_data)
    memory = held_memory(setting, ledger, load_of(setting, workload, held))
    prompt = _prompt(setting, workload, ledger, running)
    steady = _steady(setting, workload, ledger, (running, offered), prompt)
    if fills_places(setting, workload):
        steady = _filled(setting, workload, ledger, steady)
    return Outcome(
        memory=memory,
        fits=most >= 1,
        seconds_by_class=_seconds_by_class(steady, workload),
        phases={"prefill": steady.prefill.by_class, "decode": steady.decode.by_class},
        energy_tokens_per_second=_rate(setting, workload, steady) * workload.output_tokens,
        performance=_performance(setting, workload, steady, most),
        warnings=_warnings(setting, workload, steady, (offered, slots)),
    )


def fills_places(setting: Setting, workload: ServeWorkload) -> bool:
    """Return whether requests never run out, so that steps read prompts and decode at once.

    Guesses of a draft model and what lives off the device keep prefill and decode apart.
    """
    open_end = workload.concurrency is None and workload.request_rate_per_second is None
    return open_end and not setting.strategy.speculative and not setting.strategy.offload


def _filled(setting: Setting, workload: ServeWorkload, ledger: Ledger, steady: _Steady) -> _Steady:
    """Return the steady state with every place taken, by steps that do both."""
    most = setting.engine.max_batch_requests or MAX_SEARCHED_CONCURRENCY
    places = minimum(steady.running, most * setting.layout.attention_data)
    if workload.burst_requests is not None:
        rate = burst_rate(setting, workload, ledger, places)
        return replace(steady, requests_per_s=rate)
    full = saturation(setting, workload, ledger, places)
    latency = full.ttft_s + (workload.output_tokens - 1) * full.tpot_s
    return replace(
        steady,
        tpot_s=full.tpot_s,
        ttft_s=full.ttft_s,
        latency_s=latency,
        queue_s=maximum(0.0, full.ttft_s - steady.prefill.total_s),
        requests_per_s=full.requests_per_s,
    )


def _offered(setting: Setting, workload: ServeWorkload, most: float) -> float:
    """Return the requests that want to run at once on one replica.

    An open loop settles where arrivals times latency equals the requests in flight (Little).
    """
    replicas = setting.layout.data
    loop = workload.concurrency
    callers = workload.burst_requests if loop is None else loop
    if callers is not None:
        return maximum(1.0, callers / replicas)
    if workload.request_rate_per_second is None:
        return minimum(maximum(most, 1.0), float(MAX_SEARCHED_CONCURRENCY))
    rate = workload.request_rate_per_second / replicas
    return _in_flight(setting, workload, rate, maximum(1.0, most))


def _in_flight(setting: Setting, workload: ServeWorkload, rate: float, most: float) -> float:
    """Return the requests in flight at which they leave as fast as they arrive.

    Beyond the ``most`` places it is what would have to run at once: more than can.
    """
    # A prompt costs the same however many decode, unless attention ranks read several at once.
    alone = not any_of(setting.layout.attention_data > 1)
    prompt = _prompt(setting, workload, Unrecorded(), 1.0) if alone else None

    def excess(running: float) -> float:
        own = prompt or _prompt(setting, workload, Unrecorded(), running)
        steady = _steady(setting, workload, Unrecorded(), (running, running), own)
        return rate * steady.latency_s - running

    above, below = excess(1.0), excess(most)
    idle, crowded = above <= 0, below >= 0
    crowd = most + below
    outside = either(idle, crowded)
    if not any_of(negate(outside)):
        return where(idle, 1.0, crowd)
    above, below = where(outside, 1.0, above), where(outside, -1.0, below)
    settled = falling_root(excess, (1.0, most), (above, below))
    return where(idle, 1.0, where(crowded, crowd, settled))


@dataclass(frozen=True)
class _Prompt:
    """Reading the prompts of ``lanes`` requests at once, one per attention rank."""

    cost: PassCost
    lanes: float

    def turns(self, setting: Setting) -> float:
        """Return on how many prompts of a lane the stages of a pipeline work at once."""
        return self.cost.turns(setting.layout.pipeline)


def _prompt(setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float) -> _Prompt:
    cached = workload.input_tokens * workload.prefix_share_ratio
    # Data-parallel attention ranks read a prompt each at the same time.
    lanes = minimum(running, setting.layout.attention_data)
    own = workload.input_tokens - cached
    return _Prompt(prefilling(setting, ledger, lanes, own, cached), lanes)


def _steady(
    setting: Setting,
    workload: ServeWorkload,
    ledger: Ledger,
    load: tuple[float, float],
    prompt: _Prompt,
) -> _Steady:
    """Return the steady state of (running, offered) requests."""
    running, offered = load
    stages, prefill = setting.layout.pipeline, prompt.cost
    context = workload.input_tokens + workload.output_tokens / 2
    round_ = decoding(setting, ledger, maximum(1.0, running / stages), context)
    decode = paced(setting, ledger, round_.per_token, "decode", minimum(running, stages))
    habits = arrival_habits(setting, workload)
    slot = _slot(setting, workload, ledger, prompt)
    tpot = ledger.term(
        mean_token_gap,
        setting.line(GROUP, "Time per output token", key="tpot"),
        decode_s=decode.total_s,
        running=running,
        output_tokens=workload.output_tokens,
        slot_s=slot,
        burst_ratio=habits.burst_ratio,
    )
    life = prefill.total_s + (workload.output_tokens - 1) * tpot
    before = _prompts_before(setting, workload, ledger, running, slot / life)
    wait = _slot_wait(setting, workload, ledger, (offered, running, life))
    ttft = ledger.term(
        time_to_first_token,
        setting.line(GROUP, "Time to first token", key="ttft"),
        prefill_s=prefill.total_s,
        prompts_before=before,
        slot_s=slot,
        decode_s=round_.step_s * (decode.total_s / round_.per_token.total_s),
        decoding_ratio=_decoding_ratio(setting, workload, ledger, running, life),
        wait_s=wait,
        intake_s=intake_seconds(setting),
        steps_awaited=habits.steps_awaited,
    )
    latency = ttft + (workload.output_tokens - 1) * tpot
    queue = before * slot + wait
    return _Steady(running, prefill, decode, tpot, ttft, latency, queue, life)


def _slot(setting: Setting, workload: ServeWorkload, ledger: Ledger, prompt: _Prompt) -> float:
    """Return by how much one prompt delays the others, who are spread over stages and lanes."""
    habits = arrival_habits(setting, workload)
    alone, share = prompt.cost.total_s, prompt.turns(setting) * prompt.lanes
    cached = workload.input_tokens * workload.prefix_share_ratio
    own = workload.input_tokens - cached
    beside = alone
    if any_of(habits.company_ratio > 0):
        more = prefilling(setting, Unrecorded(), 2 * prompt.lanes, own, cached)
        beside = maximum(0.0, more.total_s - alone)
    return ledger.term(
        prompt_slot,
        setting.line(GROUP, "What one prompt delays the others", key="slot"),
        beside_s=beside / share,
        alone_s=alone / share,
        company_ratio=habits.company_ratio,
        prompts_per_pass=prompts_per_pass(setting, own),
    )


def intake_seconds(setting: Setting) -> float:
    """Return what taking a request in costs before the engine's first step."""
    return setting.engine.request_latency_s * setting.serving_factor("intake")


def prompts_per_pass(setting: Setting, tokens: float) -> float:
    """Return how many prompts of so many tokens the budget of one step has room for."""
    return maximum(1.0, setting.layout.batch_tokens / maximum(1.0, tokens))


def arrival_habits(setting: Setting, workload: ServeWorkload) -> ArrivalHabits:
    """Return how the callers fall together; independent in an open loop, all in a burst."""
    if workload.request_rate_per_second is not None:
        return ArrivalHabits()
    if workload.burst_requests is not None:
        return ArrivalHabits(burst_ratio=1.0)
    return setting.swept.habits


def _decoding_ratio(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float, life: float
) -> float:
    """Return how often a request finds others decoding.

    Independent callers find n others in flight with Poisson's chances around the mean.
    """
    rate = workload.request_rate_per_second
    if rate is None:
        return where(running > 1, 1.0, 0.0)
    in_flight = minimum(running, rate / setting.layout.data * life)
    line = setting.line(GROUP, "Chance to find others decoding", key="decoding_ratio")
    return ledger.term(chance_of_company, line, in_flight=in_flight)


def _prompts_before(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float, share: float
) -> float:
    """Return the prefills that come before a request's own; one takes ``share`` of a life."""
    line = setting.line(GROUP, "Prompts before its own", key="prompts_before")
    if workload.request_rate_per_second is not None:
        return ledger.term(poisson_prompts_before, line, busy_ratio=running * share)
    habits = arrival_habits(setting, workload)
    return ledger.term(
        prompts_waited_for,
        line,
        running=running,
        burst_ratio=habits.burst_ratio,
        prompts_ahead=habits.prompts_ahead,
    )


def _slot_wait(
    setting: Setting,
    workload: ServeWorkload,
    ledger: Ledger,
    load: tuple[float, float, float],
) -> float:
    offered, running, life = load
    if workload.burst_requests is not None:
        offered = (offered + running) / 2  # nobody calls again: half of the rest is before one
    withheld = arrival_habits(setting, workload).withheld_slots
    if not withheld and not any_of(offered > running):
        return 0.0
    return ledger.term(
        slot_wait,
        setting.line(GROUP, "Waiting for a place in the batch", key="slot_wait"),
        offered=maximum(offered, running),
        running=running,
        withheld_slots=withheld,
        life_s=life,
    )


def saturation_rate(setting: Setting, workload: ServeWorkload, most: float) -> float:
    """Return the requests per second of all replicas with every place taken, callers apart."""
    full = maximum(1.0, minimum(most, float(MAX_SEARCHED_CONCURRENCY)))
    alone, prompt = _open_loop(workload), _prompt(setting, workload, Unrecorded(), full)
    steady = _steady(setting, alone, Unrecorded(), (full, full), prompt)
    return setting.layout.data * full / steady.life_s


def _open_loop(workload: ServeWorkload) -> ServeWorkload:
    """Return the workload with independent callers; their rate is not asked for."""
    others: dict[str, int | float | None] = {"concurrency": None, "burst_requests": None}
    return workload.model_copy(update={**others, "request_rate_per_second": 1.0})


def _rate(setting: Setting, workload: ServeWorkload, steady: _Steady) -> float:
    """Return the requests per second of all replicas, never more than arrive."""
    if steady.requests_per_s is not None:
        return setting.layout.data * steady.requests_per_s
    if workload.concurrency is not None:
        return workload.concurrency / steady.latency_s
    places = setting.layout.data * steady.running
    if workload.request_rate_per_second is not None:
        return minimum(places / steady.life_s, workload.request_rate_per_second)
    return places / steady.latency_s


def _performance(
    setting: Setting, workload: ServeWorkload, steady: _Steady, most: float
) -> Performance:
    rate = _rate(setting, workload, steady)
    produced = rate * workload.output_tokens
    share = _seconds_by_class(steady, workload)
    return performance_of(
        tokens_per_second=produced,
        output_tokens_per_second=produced,
        prefill_tokens_per_second=workload.input_tokens / steady.prefill.total_s,
        decode_tokens_per_second=setting.layout.data * steady.running / steady.decode.total_s,
        tokens_per_second_per_device=produced / setting.layout.devices,
        requests_per_second=rate,
        ttft_seconds=steady.ttft_s,
        tpot_seconds=steady.tpot_s,
        latency_seconds=steady.latency_s,
        queue_seconds=steady.queue_s,
        prefill_seconds=steady.prefill.total_s,
        max_concurrency=most * setting.layout.data,
        communication_ratio=share["communication"] / sum(share.values()),
    )


def _seconds_by_class(steady: _Steady, workload: ServeWorkload) -> dict[str, float]:
    """Return the seconds of one request's work by class, decode steps shared by the batch."""
    steps = workload.output_tokens / steady.running
    decode, prefill = steady.decode.by_class, steady.prefill.by_class
    return {name: prefill[name] + steps * decode[name] for name in decode}


def _warnings(
    setting: Setting,
    workload: ServeWorkload,
    steady: _Steady,
    load: tuple[float, float],
) -> tuple[str, ...]:
    offered, most = load
    if is_column(steady.latency_s):
        return ()
    found = []
    if 1 <= most < offered:
        found.append(
            f"memory holds {most * setting.layout.data:.0f} requests at once, "
            f"{round(offered * setting.layout.data)} are offered: the rest wait"
        )
    for name, value, limit in (
        ("ttft_seconds", steady.ttft_s, workload.ttft_slo_seconds),
        ("tpot_seconds", steady.tpot_s, workload.tpot_slo_seconds),
    ):
        if limit is not None and value > limit:
            found.append(f"{name} is {value:.3g} s, above the objective of {limit:g} s")
    return tuple(found)
