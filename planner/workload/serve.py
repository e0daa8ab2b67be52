"""Serving with continuous batching: concurrency, time per token, saturation."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.cost.memory import with_queue
from planner.cost.quantity import (
    Ledger,
    NullLedger,
    any_of,
    both,
    ceil,
    either,
    falling_root,
    is_column,
    maximum,
    minimum,
    negate,
    where,
)
from planner.cost.queueing import (
    chance_of_decode_overlap,
    cycle_seconds,
    device_wait,
    first_token_of_many,
    mean_token_gap,
    mixed_steps,
    slot_wait,
    time_to_first_token,
    token_gap_of_waves,
    usual_time_to_first_token,
    waves_seconds,
)
from planner.cost.weights import GEMM_SPEEDUP
from planner.specs.estimate import Performance
from planner.specs.workload import ServeWorkload
from planner.workload.forward import PassCost, forward_pass, wait_for_slowest_stage
from planner.workload.generate import (
    MAX_SEARCHED_CONCURRENCY,
    batch_limit,
    decode_cost,
    decode_work,
    held_at_once,
    held_memory,
    longest_load,
    memory_load,
    prefill_cost,
    replica_requests,
)
from planner.workload.mixed_steps import (
    Load,
    decoding_share,
    load_of,
    mixed_steps_of,
    mixed_work,
    step_budget,
)
from planner.workload.outcome import AT_ONCE, Admission, Outcome, performance_of
from planner.workload.setting import Setting

# Serving at saturation: every slot is taken and steps mix prefill and decode.
#
# When one request ends, the next begins; its prompt is read in chunks that fill the step's token
# budget next to the decode tokens. Weights are read once for both, so a request costs less than a
# separate prefill and decode steps.


SATURATION_GROUP = "saturation"
PACKED, BESIDE = "packed", "beside"


@dataclass(frozen=True)
class Saturation:
    """The latencies and request rate of one replica with every slot taken."""

    tpot_s: float
    ttft_s: float
    requests_per_s: float


@dataclass(frozen=True)
class _Cycle:
    """One cycle that serves every slot once: decoding requests, step counts and step times."""

    running: float
    reading: float
    mixed_s: float
    packed_s: float
    cycle_s: float
    prompt_steps: float


def saturation(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float
) -> Saturation:
    """Return the performance of one replica whose slots are refilled immediately.

    Requests that do not decode wait for their prefill (Little's law).
    """
    cycle = _cycle(setting, workload, ledger, places)
    rate = cycle.running / cycle.cycle_s
    ttft = ledger.term(
        first_token_of_many,
        setting.line(SATURATION_GROUP, "Time to first token", key="full_ttft"),
        waited_s=maximum(0.0, places / rate - cycle.cycle_s),
        own_steps=cycle.prompt_steps,
        mixed_s=cycle.mixed_s,
    )
    return Saturation(cycle.cycle_s / workload.output_tokens, ttft, rate)


@dataclass(frozen=True)
class Burst:
    """A burst on one replica: its rate, and the time per token of those who wait for a place."""

    tpot_s: float
    waiting_ratio: float
    requests_per_s: float


def burst_at(setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float) -> Burst:
    """Return how one replica serves a burst of requests.

    The time runs from the first prompt to the last token of the replica's share of
    ``workload.burst_requests``. At most ``places`` requests run at once: the burst is served in
    waves of equal size, one after the other.

    Source: ``planner.cost.queueing.waves_seconds``.
    """
    burst = 1 if workload.burst_requests is None else workload.burst_requests
    requests = maximum(1.0, burst / setting.layout.data)
    cycle = _cycle(
        setting, workload, ledger, requests / ceil(requests / minimum(places, requests))
    )
    seconds = ledger.term(
        waves_seconds,
        setting.line(SATURATION_GROUP, "The whole burst", key="burst"),
        waves=requests / cycle.running,
        cycle_s=cycle.cycle_s,
        mixed_steps=cycle.reading,
        packed_s=cycle.packed_s,
    )
    waiting = maximum(0.0, 1 - places / requests)
    return Burst(cycle.cycle_s / workload.output_tokens, waiting, requests / seconds)


def _cycle(setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float) -> _Cycle:
    """Return one cycle over ``places`` slots, limited by the step's token budget."""
    prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
    answer = workload.output_tokens
    ranks = setting.layout.pipeline * setting.layout.attention_data
    budget = step_budget(setting, prompt)
    decoding = minimum(places / ranks, budget * answer / (prompt + answer))
    chunk = budget - decoding
    work = decode_work(
        setting, decoding * setting.layout.attention_data, workload.decoding_context_tokens
    )
    steps = (
        (replace(work, group=PACKED), None),
        (
            mixed_work(setting, workload, decoding, chunk),
            replace(work, group=BESIDE),
        ),
    )
    packed, mixed = (
        wait_for_slowest_stage(
            setting,
            ledger,
            forward_pass(setting, ledger, main, extra),
            main.group,
            setting.layout.pipeline,
        ).total_s
        for main, extra in steps
    )
    reading = ledger.term(
        mixed_steps,
        setting.line(SATURATION_GROUP, "Steps that read prompts", key="mixed_steps"),
        running=decoding,
        prompt_tokens=prompt,
        chunk_tokens=chunk,
    )
    cycle = ledger.term(
        cycle_seconds,
        setting.line(SATURATION_GROUP, "All places once", key="cycle"),
        mixed_steps=reading,
        mixed_s=mixed,
        output_tokens=answer,
        packed_s=packed,
    )
    return _Cycle(decoding * ranks, reading, mixed, packed, cycle, maximum(1.0, prompt / chunk))


GROUP = "serving"
USUAL_STEPS_AWAITED = 1.5
RUNNING_STEP = 0.5


@dataclass(frozen=True)
class _Steady:
    """The steady state of one replica: ``decoding`` of its ``running`` requests decode."""

    running: float
    decoding: float
    prefill: PassCost
    decode: PassCost
    tpot_s: float
    ttft_s: float
    latency_s: float
    queue_s: float
    life_s: float
    service_s: float
    admission: Admission
    requests_per_s: float | None = None


def serve(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of serving the workload at the concurrency that fits."""
    held = held_at_once(setting, workload)
    most = held.whole
    room = held.mean if fills_every_slot(setting, workload) else most
    slots = minimum(room, batch_limit(setting, workload))
    offered = _offered_concurrency(setting, workload, slots)
    running = maximum(1.0, minimum(offered, slots))
    # The busiest rank holds whole requests, at least one.
    full_requests = replica_requests(setting, minimum(running, maximum(1.0, most)))
    load = memory_load(setting, workload, full_requests)
    if workload.max_request_tokens:
        # What does not fit is shown with the longest request: it is the one that does not.
        longest = longest_load(setting, workload).tokens_per_sequence
        tokens = where(most >= 1, load.tokens_per_sequence, longest)
        load = replace(load, tokens_per_sequence=tokens)
    memory = held_memory(setting, ledger, load)
    # A rank whose requests are more than it holds whole fills its cache with a part of the next,
    # unless the engine runs no more than fit.
    waits = both(offered > most, both(room <= slots, most >= 1))
    if any_of(waits) and not setting.strategy.offload:
        line = setting.line("memory", "KV cache of the queue", key="kv_cache")
        memory = with_queue(memory, waits, ledger, line)
    prompt = _prompt(setting, workload, ledger, running)
    burst = None
    if workload.burst_requests is not None and fills_every_slot(setting, workload):
        burst = burst_at(setting, workload, ledger, running)
    steady = _steady(setting, workload, ledger, (running, offered), prompt, burst)
    if burst is None and fills_every_slot(setting, workload):
        steady = _saturated_state(setting, workload, ledger, steady)
    return Outcome(
        memory=memory,
        fits=most >= 1,
        seconds_by_class=_seconds_by_class(steady, workload),
        phases={"prefill": steady.prefill.by_class, "decode": steady.decode.by_class},
        energy_tokens_per_second=_rate(setting, workload, steady) * workload.output_tokens,
        performance=_performance(setting, workload, steady, most),
        warnings=_warnings(setting, workload, steady, (offered, slots, most)),
        admission=steady.admission,
    )


def fills_every_slot(setting: Setting, workload: ServeWorkload) -> bool:
    """Return whether the queue is never empty, so steps mix prefill and decode.

    Speculative decoding and offload keep prefill and decode in separate steps.
    """
    open_end = workload.concurrency is None and workload.request_rate_per_second is None
    return open_end and not setting.strategy.speculative and not setting.strategy.offload


def _saturated_state(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, steady: _Steady
) -> _Steady:
    """Return the steady state with every slot taken and mixed prefill and decode steps."""
    full = saturation(setting, workload, ledger, steady.running)
    latency = full.ttft_s + (workload.output_tokens - 1) * full.tpot_s
    return replace(
        steady,
        tpot_s=full.tpot_s,
        ttft_s=full.ttft_s,
        latency_s=latency,
        queue_s=maximum(0.0, full.ttft_s - steady.prefill.total_s),
        admission=AT_ONCE,
        requests_per_s=full.requests_per_s,
    )


def _offered_concurrency(setting: Setting, workload: ServeWorkload, most: float) -> float:
    """Return the offered concurrency of one replica.

    In an open loop, requests in flight are arrival rate times latency (Little's law).
    """
    replicas = setting.layout.data
    concurrency = workload.concurrency
    callers = workload.burst_requests if concurrency is None else concurrency
    if callers is not None:
        return maximum(1.0, callers / replicas)
    if workload.request_rate_per_second is None:
        return minimum(maximum(most, 1.0), float(MAX_SEARCHED_CONCURRENCY))
    rate = workload.request_rate_per_second / replicas
    return _requests_in_flight(setting, workload, rate, maximum(1.0, most))


def _requests_in_flight(
    setting: Setting, workload: ServeWorkload, rate: float, most: float
) -> float:
    """Return the requests in flight at which throughput equals the arrival rate.

    If that exceeds ``most`` slots, return the required concurrency, which is larger than ``most``.
    """
    # The prompt cost depends on concurrency only if attention ranks read several at once.
    alone = not any_of(setting.layout.attention_data > 1)
    prompt = _prompt(setting, workload, NullLedger(), 1.0) if alone else None

    def excess(running: float) -> float:
        prompt_cost = prompt or _prompt(setting, workload, NullLedger(), running)
        steady = _steady(setting, workload, NullLedger(), (running, running), prompt_cost)
        return rate * steady.latency_s - running

    above, below = excess(1.0), excess(most)
    idle, overloaded = above <= 0, below >= 0
    overload = most + below
    outside = either(idle, overloaded)
    if not any_of(negate(outside)):
        return where(idle, 1.0, overload)
    above, below = where(outside, 1.0, above), where(outside, -1.0, below)
    settled = falling_root(excess, (1.0, most), (above, below))
    return where(idle, 1.0, where(overloaded, overload, settled))


@dataclass(frozen=True)
class _Prompt:
    """The prefill of ``lanes`` requests at once, one per attention rank."""

    cost: PassCost
    lanes: float

    def concurrent_passes(self, setting: Setting) -> float:
        """Return the number of prompts per lane that the pipeline stages process in parallel."""
        return self.cost.concurrent_passes(setting.layout.pipeline)


def _prompt(setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float) -> _Prompt:
    cached = workload.input_tokens * workload.prefix_share_ratio
    # Each data-parallel attention rank reads one prompt at a time.
    lanes = minimum(running, setting.layout.attention_data)
    uncached = workload.input_tokens - cached
    return _Prompt(prefill_cost(setting, ledger, lanes, uncached, cached), lanes)


def _steady(
    setting: Setting,
    workload: ServeWorkload,
    ledger: Ledger,
    load: tuple[float, float],
    prompt: _Prompt,
    burst: Burst | None = None,
) -> _Steady:
    """Return the steady state for ``load``, the (running, offered) requests."""
    running, offered = load
    stages, prefill = setting.layout.pipeline, prompt.cost
    context = workload.decoding_context_tokens
    decoding = maximum(1.0, running * decoding_share(setting, workload, running))
    step = decode_cost(setting, ledger, maximum(1.0, decoding / stages), context)
    decode = wait_for_slowest_stage(
        setting, ledger, step.per_token, "decode", minimum(running, stages)
    )
    paced = decode.total_s / step.per_token.total_s
    alone = prefill.total_s, decode.total_s * step.tokens, step.tokens
    lane = load_of(setting, workload, running, alone)
    steps = mixed_steps_of(setting, workload, ledger, lane)
    tpot = ledger.term(
        mean_token_gap,
        setting.line(GROUP, "Time per output token", key="tpot"),
        decode_s=decode.total_s,
        mixed_ratio=steps.schedule.mixed_ratio,
        mixed_s=paced * steps.between_s,
        step_s=paced * step.step_s,
        tokens_per_step=step.tokens,
    )
    life = prefill.total_s + (workload.output_tokens - 1) * tpot
    life = maximum(life, steps.schedule.life_steps * tpot * step.tokens)
    if burst is not None and any_of(burst.waiting_ratio > 0):
        tpot = ledger.term(
            token_gap_of_waves,
            setting.line(GROUP, "Time per output token of a burst", key="burst_tpot"),
            first_s=tpot,
            full_s=burst.tpot_s,
            waiting_ratio=burst.waiting_ratio,
        )
        full_life = workload.output_tokens * burst.tpot_s
        life = (1 - burst.waiting_ratio) * life + burst.waiting_ratio * full_life
    wait = _slot_wait(setting, workload, ledger, (offered, running, life))
    schedule = steps.schedule
    awaited, intake = steps_awaited(setting, workload), intake_seconds(setting)
    overlap = _decoding_ratio(setting, workload, ledger, lane)
    usual = ledger.term(
        usual_time_to_first_token,
        setting.line(GROUP, "Usual time to first token", key="usual_ttft"),
        steps=schedule.steps,
        read_s=steps.until_first_s,
        steps_awaited=awaited.steps,
        decoding_ratio=overlap,
        step_s=decode.total_s,
    )
    ttft = ledger.term(
        time_to_first_token,
        setting.line(GROUP, "Time to first token", key="ttft"),
        usual_s=usual,
        burst_ratio=schedule.burst_ratio,
        burst_steps=schedule.burst_steps,
        burst_s=steps.burst_s,
        wait_s=wait,
        intake_s=intake,
    )
    step_s = (1 - schedule.burst_ratio) * overlap * decode.total_s
    admission = Admission(intake + awaited.same * step_s, awaited.looks * step_s)
    latency = ttft + (workload.output_tokens - 1) * tpot
    service = _service_seconds(setting, workload, prompt, (decode, decoding))
    busy = 0.0
    if workload.request_rate_per_second is None:
        callers = running if workload.concurrency is None else maximum(offered, running)
        busy = _device_wait(setting, ledger, callers, service, latency)
    queue = steps.waited_s(lane.prompt) + wait + busy
    return _Steady(
        running=running,
        decoding=decoding,
        prefill=prefill,
        decode=decode,
        tpot_s=tpot,
        ttft_s=ttft + busy,
        latency_s=latency + busy,
        queue_s=queue,
        life_s=life,
        service_s=service,
        admission=admission,
        requests_per_s=None if burst is None else burst.requests_per_s,
    )


def _service_seconds(
    setting: Setting, workload: ServeWorkload, prompt: _Prompt, step: tuple[PassCost, float]
) -> float:
    """Return the least seconds of a replica's devices per request: arithmetic or reads.

    Prompts that are read together, or beside decoding, share the weights: what remains of each is
    its arithmetic, at the share of the peak that the engine reaches. ``step`` is the cost of a
    decode step and the requests that share it.
    """
    decode, running = step
    rates, cost = setting.rates, prompt.cost
    peak = rates.peak_flops_per_s * (GEMM_SPEEDUP if setting.skips_zeros else 1)
    products = setting.part_line("prefill", "Linear layers", "linear", "compute")
    arithmetic = products.factor * cost.flops / (peak * rates.compute_efficiency)
    least = maximum(cost.flops / peak, minimum(arithmetic, cost.total_s))
    reading = maximum(cost.compute_s, least)
    share = prompt.concurrent_passes(setting) * prompt.lanes
    tokens = (workload.output_tokens - 1) / running
    return maximum(reading / share + tokens * decode.compute_s, tokens * decode.memory_s)


def _device_wait(
    setting: Setting, ledger: Ledger, callers: float, service: float, latency: float
) -> float:
    """Return the seconds that callers wait because the devices are busy with the others."""
    if not any_of(callers * service > latency):
        return 0.0
    return ledger.term(
        device_wait,
        setting.line(GROUP, "Waiting for the devices", key="device_wait"),
        callers=callers,
        service_s=service,
        latency_s=latency,
    )


def intake_seconds(setting: Setting) -> float:
    """Return the seconds to accept a request before the engine's first step."""
    return setting.engine.request_latency_s * setting.serving_factor("intake")


class Awaited(NamedTuple):
    """The mean decode steps that pass until a step reads a new request's prompt.

    Every request waits for ``same``, for the rest of the running step, and for ``looks``, any
    number of steps up to twice that being as likely.
    """

    same: float
    rest: float = 0.0
    looks: float = 0.0

    @property
    def steps(self) -> float:
        """Return all of them."""
        return self.same + self.rest + self.looks


def steps_awaited(setting: Setting, workload: ServeWorkload) -> Awaited:
    """Return the decode steps that pass until a step reads a new request's prompt.

    Half of the running one where requests come at any time, and those that are scheduled already;
    those who call again when a step ends wait for the next one, and where sweeps of closed loops
    show it for some more, at most until the others have their answers. An engine that looks for
    requests every few steps lets them pass unseen: half of them on average, and all of them in a
    closed loop, by InferenceX's sweeps of SGLang at intervals of 1, 10 and 30.
    """
    unseen = (setting.strategy.scheduler_recv_interval or 1) - 1
    if workload.concurrency is None:
        return Awaited(float(setting.engine.steps_scheduled_ahead), RUNNING_STEP, unseen / 2)
    if setting.strategy.offload:
        return Awaited(USUAL_STEPS_AWAITED + unseen)
    steps = USUAL_STEPS_AWAITED * setting.sweep_factors.factor("steps_awaited") + unseen
    return Awaited(minimum(steps, maximum(USUAL_STEPS_AWAITED, workload.output_tokens)))


def _decoding_ratio(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, load: Load
) -> float:
    """Return the probability that other requests decode when a request arrives.

    In an open loop, the number of others in flight is Poisson distributed.
    """
    decoding = load.callers_others * load.decoding_share
    if workload.request_rate_per_second is None:
        return minimum(1.0, decoding)
    line = setting.line(GROUP, "Chance to find others decoding", key="decoding_ratio")
    return ledger.term(chance_of_decode_overlap, line, in_flight=decoding)


def _slot_wait(
    setting: Setting,
    workload: ServeWorkload,
    ledger: Ledger,
    load: tuple[float, float, float],
) -> float:
    offered, running, life = load
    if workload.burst_requests is not None:
        # Without repeated calls, half of the queue is ahead on average.
        offered = (offered + running) / 2
    if not any_of(offered > running):
        return 0.0
    return ledger.term(
        slot_wait,
        setting.line(GROUP, "Waiting for a place in the batch", key="slot_wait"),
        offered=maximum(offered, running),
        running=running,
        life_s=life,
    )


def saturation_rate(setting: Setting, workload: ServeWorkload, most: float) -> float:
    """Return the maximum requests per second of all replicas with independent callers."""
    full = maximum(
        1.0,
        minimum(most, minimum(batch_limit(setting, workload), float(MAX_SEARCHED_CONCURRENCY))),
    )
    calls = {
        "concurrency": full,
        "burst_requests": None,
        "request_rate_per_second": None,
        "length_variation": None,  # it spreads the calls of a loop, which full slots have not
    }
    closed_loop = workload.model_copy(update=calls)
    prompt = _prompt(setting, workload, NullLedger(), full)
    steady = _steady(setting, closed_loop, NullLedger(), (full, full), prompt)
    return setting.layout.data * minimum(full / steady.life_s, 1 / steady.service_s)


def _rate(setting: Setting, workload: ServeWorkload, steady: _Steady) -> float:
    """Return the requests per second of all replicas, at most the arrival rate."""
    if steady.requests_per_s is not None:
        return setting.layout.data * steady.requests_per_s
    if workload.concurrency is not None:
        return workload.concurrency / steady.latency_s
    slots = setting.layout.data * steady.running
    if workload.request_rate_per_second is not None:
        most = minimum(slots / steady.life_s, setting.layout.data / steady.service_s)
        return minimum(most, workload.request_rate_per_second)
    return slots / steady.latency_s


def _performance(
    setting: Setting, workload: ServeWorkload, steady: _Steady, most: float
) -> Performance:
    rate = _rate(setting, workload, steady)
    token_rate = rate * workload.output_tokens
    seconds = _seconds_by_class(steady, workload)
    return performance_of(
        tokens_per_second=token_rate,
        output_tokens_per_second=token_rate,
        prefill_tokens_per_second=workload.input_tokens / steady.prefill.total_s,
        decode_tokens_per_second=setting.layout.data * steady.decoding / steady.decode.total_s,
        tokens_per_second_per_device=token_rate / setting.layout.devices,
        requests_per_second=rate,
        ttft_seconds=steady.ttft_s,
        tpot_seconds=steady.tpot_s,
        latency_seconds=steady.latency_s,
        queue_seconds=steady.queue_s,
        prefill_seconds=steady.prefill.total_s,
        max_concurrency=most * setting.layout.data,
        communication_ratio=seconds["communication"] / sum(seconds.values()),
    )


def _seconds_by_class(steady: _Steady, workload: ServeWorkload) -> dict[str, float]:
    """Return one request's seconds by operator class, with its share of decode steps."""
    steps = workload.output_tokens / steady.decoding
    decode, prefill = steady.decode.by_class, steady.prefill.by_class
    return {name: prefill[name] + steps * decode[name] for name in decode}


def _warnings(
    setting: Setting,
    workload: ServeWorkload,
    steady: _Steady,
    load: tuple[float, float, float],
) -> tuple[str, ...]:
    offered, slots, held = load
    if is_column(steady.latency_s):
        return ()
    warnings = []
    if 1 <= slots < offered:
        by = "memory holds" if held <= slots else f"{setting.engine.title} by default runs"
        warnings.append(
            f"{by} {slots * setting.layout.data:.0f} requests at once, "
            f"{round(offered * setting.layout.data)} are offered: the rest wait"
        )
    for name, value, limit in (
        ("ttft_seconds", steady.ttft_s, workload.ttft_slo_seconds),
        ("tpot_seconds", steady.tpot_s, workload.tpot_slo_seconds),
    ):
        if limit is not None and value > limit:
            warnings.append(f"{name} is {value:.3g} s, above the objective of {limit:g} s")
    return tuple(warnings)
