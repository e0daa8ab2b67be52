"""Serving on unlike groups of devices: split prefill and decode, unequal stages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TypeVar, cast

from planner.catalog.engines import client_of_sweeps, get_engine
from planner.cost.communication import transfer_seconds
from planner.cost.memory import MemoryUse
from planner.cost.quantity import (
    Flag,
    Ledger,
    NullLedger,
    Quantity,
    both,
    equation,
    is_column,
    largest,
    maximum,
    minimum,
)
from planner.cost.queueing import (
    mean_over_replica_kinds,
    poisson_prompts_before,
    rate_of_both,
    request_share,
)
from planner.specs.base import BadRequestError, NotCoveredError, NotPossibleError
from planner.specs.estimate import Performance
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.workload.device_groups import ReplicaGroup, group_replicas, plain_layout, split_of
from planner.workload.forward import PassCost, suffixed_ledger
from planner.workload.generate import (
    DecodeCost,
    batch_load,
    decode_cost,
    generate,
    held_memory,
    max_concurrency,
    memory_load,
    prefill_cost,
)
from planner.workload.inference_memory import MemoryLoad, inference_memory
from planner.workload.outcome import Outcome, performance_of
from planner.workload.resolve import with_device_overhead
from planner.workload.serve import saturation_rate, serve
from planner.workload.setting import Setting
from planner.workload.topology import exchange_link

# ---------------------------------------------------------------------------
# Serving with prefill and decode on different devices: two pools and the KV transfer between.
#
# A prefill replica reads the prompt, the KV cache is sent over the link, and a decode replica
# generates the other tokens without interruption by prompts. The slower pool limits the rate.
#
# Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670; Patel et al. 2023 (Splitwise),
# arXiv:2311.18677.
# ---------------------------------------------------------------------------


GROUP = "serving"
DISTSERVE = "Zhong et al. 2024 (DistServe), arXiv:2401.09670"
BISECTIONS = 24
UNEVEN = 2  # warn if a pool is this many times faster than the other


@equation(
    "X_p = n_p / t_slot",
    unit="requests/s",
    symbols={"prefill_replicas": "n_p", "slot_s": "t_slot"},
    source=DISTSERVE,
)
def prefill_pool_rate(*, prefill_replicas: Quantity, slot_s: Quantity) -> Quantity:
    """Return the requests per second of the prefill pool."""
    return prefill_replicas / slot_s


@equation(
    "X_d = n_d · b / ((s_out - 1) · t_decode)",
    unit="requests/s",
    symbols={
        "decode_replicas": "n_d",
        "running": "b",
        "output_tokens": "s_out",
        "decode_s": "t_decode",
    },
    source=f"{DISTSERVE}; Little 1961",
)
def decode_pool_rate(
    *, decode_replicas: Quantity, running: Quantity, output_tokens: Quantity, decode_s: Quantity
) -> Quantity:
    """Return the requests per second of the decode pool with ``running`` per replica."""
    return decode_replicas * running / ((output_tokens - 1) * decode_s)


@equation(
    "TTFT = t_prefill + n · t_slot + t_transfer + wait",
    unit="s",
    symbols={
        "prefill_s": "t_prefill",
        "prompts_before": "n",
        "slot_s": "t_slot",
        "transfer_s": "t_transfer",
        "wait_s": "wait",
    },
    source=f"{DISTSERVE}; the first token counts once the cache has arrived",
)
def disaggregated_first_token(
    *,
    prefill_s: Quantity,
    prompts_before: Quantity,
    slot_s: Quantity,
    transfer_s: Quantity,
    wait_s: Quantity,
) -> Quantity:
    """Return the mean time to the first token of disaggregated serving."""
    return prefill_s + prompts_before * slot_s + transfer_s + wait_s


@equation(
    "n = f · (c-1)/2 + (1-f) · min(u/(2·(1-u)), (c-1)/2)",
    unit="prompts",
    symbols={"callers": "c", "burst_ratio": "f", "busy_ratio": "u"},
    source="mean place in a burst of c; otherwise Pollaczek-Khinchine (M/D/1), at most that",
)
def prompts_before_in_pool(
    *, callers: Quantity, burst_ratio: Quantity, busy_ratio: Quantity
) -> Quantity:
    """Return the mean number of prefills that a replica of the pool does before a request's."""
    burst = (callers - 1) / 2
    usual = minimum(poisson_prompts_before(busy_ratio=busy_ratio), burst)
    return burst_ratio * burst + (1 - burst_ratio) * usual


@dataclass(frozen=True)
class _Pools:
    """The load-independent costs of both pools; ``most`` is the limit per decode replica."""

    prefill_replicas: int
    decode_replicas: int
    most: float
    prefill: PassCost
    slot_s: float
    transfer_s: float

    @property
    def prefill_rate(self) -> float:
        """Return the maximum requests per second of the prefill pool."""
        return self.prefill_replicas / self.slot_s


@dataclass(frozen=True)
class _SteadyFlow:
    """The request rate, the running requests per decode replica and their decode step."""

    rate: float
    running: float
    decode: DecodeCost


def serve_disaggregated(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of serving with separate prefill and decode pools.

    Raises:
        NotPossibleError: a pool is not a multiple of the replica size.
        BadRequestError: ``output_tokens`` is 1, so the decode pool is unused.
    """
    pools = _pools(setting, workload, ledger)
    flow = _flow(setting, workload, pools)
    memory = _memory(setting, workload, ledger, flow.running)
    flow = replace(flow, decode=_decode(setting, workload, ledger, flow.running))
    ttft = _first_token(setting, workload, ledger, pools, flow)
    limit = _record_rates(setting, workload, ledger, pools)
    steps = workload.output_tokens / flow.running
    decode, prefill = flow.decode.per_token.by_class, pools.prefill.by_class
    return Outcome(
        memory=memory,
        fits=pools.most >= 1 and memory.fits,
        seconds_by_class={name: prefill[name] + steps * decode[name] for name in decode},
        phases={"prefill": prefill, "decode": decode},
        energy_tokens_per_second=flow.rate * workload.output_tokens,
        performance=_performance(setting, workload, pools, flow, (ttft, limit)),
        warnings=_warnings(workload, pools, limit),
    )


def _pools(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> _Pools:
    split, layout = setting.strategy.disaggregated, setting.layout
    if split is None:
        raise BadRequestError(
            "disaggregated is not set: give prefill_devices and decode_devices",
            "strategy.disaggregated",
        )
    if workload.output_tokens == 1:
        raise BadRequestError(
            "output_tokens is 1: a decode pool would have nothing to do; leave disaggregated out",
            "workload.output_tokens",
        )
    size = layout.devices // layout.data
    for name, devices in split:
        if devices % size:
            raise NotPossibleError(
                f"{name} is {devices}: it must be a multiple of the {size} devices that one "
                "replica takes",
                f"strategy.disaggregated.{name}",
            )
    total = split.prefill_devices + split.decode_devices
    if layout.devices != total:
        raise NotPossibleError(
            f"data_parallel_size is {setting.strategy.data_parallel_size}: prefill_devices and "
            f"decode_devices are {total} devices together, in replicas of {size}; leave "
            f"data_parallel_size out, or set it to {total // size}",
            "strategy.data_parallel_size",
        )
    cached = workload.input_tokens * workload.prefix_share_ratio
    lanes = _lanes(setting, workload, split.prefill_devices // size)
    prefill = prefill_cost(setting, ledger, lanes, workload.input_tokens - cached, cached)
    return _Pools(
        prefill_replicas=split.prefill_devices // size,
        decode_replicas=split.decode_devices // size,
        most=max_concurrency(setting, workload),
        prefill=prefill,
        slot_s=prefill.total_s / layout.pipeline / lanes,
        transfer_s=_transfer(setting, workload, ledger),
    )


def _lanes(setting: Setting, workload: ServeWorkload, replicas: int) -> float:
    """Return the number of data-parallel attention ranks per replica that read prompts."""
    ranks: float = setting.layout.attention_data
    callers = workload.callers
    return ranks if callers is None else maximum(1.0, minimum(ranks, callers / replicas))


def _transfer(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> float:
    """Return the transfer seconds of one prompt's KV cache; each rank sends its shard."""
    prompt = float(workload.input_tokens)
    with_prompt, without = (
        held_memory(setting, NullLedger(), MemoryLoad(n, prompt, 1.0, 1.0, paged=False)).fullest
        for n in (1.0, 0.0)
    )
    payload = with_prompt.by_class["kv_cache"] - without.by_class["kv_cache"]
    rates = setting.rates
    transfer_s = ledger.term(
        transfer_seconds,
        setting.line(GROUP, "Cache to the decode pool", "communication", "kv_transfer"),
        payload_bytes=payload,
        link_bytes_per_s=exchange_link(setting, rates, setting.layout.devices),
    )
    return transfer_s + rates.latency_s


def _decode(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float
) -> DecodeCost:
    context = workload.decoding_context_tokens
    return decode_cost(setting, ledger, max(1.0, running / setting.layout.pipeline), context)


def _flow(setting: Setting, workload: ServeWorkload, pools: _Pools) -> _SteadyFlow:
    """Return the steady flow: the offered load or the limit of the slower pool."""

    def at(running: float) -> _SteadyFlow:
        decode = _decode(setting, workload, NullLedger(), running)
        life = (workload.output_tokens - 1) * decode.per_token.total_s
        return _SteadyFlow(pools.decode_replicas * running / life, running, decode)

    def too_much(flow: _SteadyFlow) -> bool:
        if flow.rate > pools.prefill_rate:
            return True
        offered_rate = workload.request_rate_per_second
        if offered_rate is not None:
            return flow.rate > offered_rate
        callers = workload.callers
        if callers is None:
            return False
        outside_decode_s = pools.prefill.total_s + pools.transfer_s
        if workload.burst_requests is None:
            before = _prompts_before(setting, workload, NullLedger(), pools, flow.rate)
            outside_decode_s += before * pools.slot_s
        return flow.rate * outside_decode_s + pools.decode_replicas * flow.running > callers

    low, high = 0.0, max(1.0, pools.most)
    if not too_much(at(high)):
        return at(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if too_much(at(middle)) else (middle, high)
    # Below one running request, a decode replica is partly idle.
    return replace(at(max(1.0, low)), rate=at(low).rate)


def _prompts_before(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, pools: _Pools, rate: float
) -> float:
    """Return the mean prompts that a prefill replica reads before a request's, at a rate."""
    line = setting.line(GROUP, "Prompts before its own", key="prompts_before")
    busy = rate / pools.prefill_rate
    if workload.request_rate_per_second is not None:
        return ledger.term(poisson_prompts_before, line, busy_ratio=busy)
    in_flight = workload.callers or pools.prefill_replicas
    return ledger.term(
        prompts_before_in_pool,
        line,
        callers=max(1.0, in_flight / pools.prefill_replicas),
        burst_ratio=1.0 if workload.burst_requests else 1 / client_of_sweeps().calls,
        busy_ratio=busy,
    )


def _first_token(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, pools: _Pools, flow: _SteadyFlow
) -> float:
    """Return the mean TTFT: queued prompts, own prompt, KV transfer and waiting time."""
    wait, callers = 0.0, workload.concurrency
    before = _prompts_before(setting, workload, ledger, pools, flow.rate)
    busy_s = pools.prefill.total_s + before * pools.slot_s + pools.transfer_s
    if callers is not None:
        # Little's law: requests in neither phase wait, whichever pool is the bottleneck.
        life = (workload.output_tokens - 1) * flow.decode.per_token.total_s
        wait = max(0.0, callers / flow.rate - life - busy_s)
    return ledger.term(
        disaggregated_first_token,
        setting.line(GROUP, "Time to first token", key="ttft"),
        prefill_s=pools.prefill.total_s,
        prompts_before=before,
        slot_s=pools.slot_s,
        transfer_s=pools.transfer_s,
        wait_s=wait,
    )


def _record_rates(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, pools: _Pools
) -> tuple[float, float]:
    """Return and record the maximum requests per second of each pool."""
    prefill_rate = ledger.term(
        prefill_pool_rate,
        setting.line(GROUP, "Prefill pool", key="prefill_pool"),
        prefill_replicas=pools.prefill_replicas,
        slot_s=pools.slot_s,
    )
    full = max(1.0, pools.most)
    decode = _decode(setting, workload, NullLedger(), full)
    decode_rate = ledger.term(
        decode_pool_rate,
        setting.line(GROUP, "Decode pool", key="decode_pool"),
        decode_replicas=pools.decode_replicas,
        running=full,
        output_tokens=workload.output_tokens,
        decode_s=decode.per_token.total_s,
    )
    return prefill_rate, decode_rate


def _memory(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float
) -> MemoryUse:
    """Return the memory of a device of each pool: prompts in prefill and decoding requests."""
    decode = held_memory(setting, ledger, memory_load(setting, workload, max(1.0, running)))
    budget = setting.strategy.max_batch_tokens or workload.input_tokens
    prompts = max(1.0, budget / workload.input_tokens)
    load = replace(
        memory_load(setting, workload, prompts), tokens_per_sequence=float(workload.input_tokens)
    )
    prefill = held_memory(setting, NullLedger(), load)
    return replace(decode, stages=(*decode.stages, *prefill.stages))


def _performance(
    setting: Setting,
    workload: ServeWorkload,
    pools: _Pools,
    flow: _SteadyFlow,
    ttft_and_limits: tuple[float, tuple[float, float]],
) -> Performance:
    ttft, limits = ttft_and_limits
    gap = flow.decode.per_token
    token_rate = flow.rate * workload.output_tokens
    request_s = pools.prefill.total_s + workload.output_tokens * gap.total_s
    communication_s = pools.prefill.communication_s + workload.output_tokens * gap.communication_s
    return Performance(
        tokens_per_second=token_rate,
        output_tokens_per_second=token_rate,
        prefill_tokens_per_second=pools.prefill_rate * workload.input_tokens,
        decode_tokens_per_second=pools.decode_replicas * flow.running / gap.total_s,
        tokens_per_second_per_device=token_rate / setting.layout.devices,
        requests_per_second=flow.rate,
        ttft_seconds=ttft,
        tpot_seconds=gap.total_s,
        latency_seconds=ttft + (workload.output_tokens - 1) * gap.total_s,
        queue_seconds=maximum(0.0, ttft - pools.prefill.total_s - pools.transfer_s),
        prefill_seconds=pools.prefill.total_s,
        max_concurrency=int(pools.most) * pools.decode_replicas,
        max_requests_per_second=min(limits),
        communication_ratio=communication_s / request_s,
    )


def _warnings(
    workload: ServeWorkload, pools: _Pools, limits: tuple[float, float]
) -> tuple[str, ...]:
    prefill, decode = limits
    rate, warnings = workload.request_rate_per_second, []
    if max(limits) > UNEVEN * min(limits):
        uneven = (
            f"uneven pools: prefill takes up to {prefill:.3g} requests a second on "
            f"{pools.prefill_replicas} replicas, decode {decode:.3g} on {pools.decode_replicas}"
        )
        warnings.append(uneven)
    if rate is not None and rate >= min(limits):
        most = f"{rate:g} requests a second cannot be served: the most is {min(limits):.3g}"
        warnings.append(most)
    return tuple(warnings)


# ---------------------------------------------------------------------------
# Serving and batch generation on heterogeneous nodes: mixed replicas and mixed pipelines.
#
# Each kind of replica is costed separately with its share of the requests. Latencies are means
# over all requests, rates are summed, and a batch ends with its slowest replica.
# ---------------------------------------------------------------------------


TITLES = {"ttft": "Time to first token", "tpot": "Time per output token"}
Work = TypeVar("Work", bound=ServeWorkload | GenerateWorkload)
ROUNDS = 3  # iterations that rebalance a batch by the times of the previous shares
NEARBY, FLAT = 1.1, 1e-9


@dataclass(frozen=True)
class ReplicaShare:
    """Identical replicas and their share of the workload; ``rate`` is the speed of one."""

    setting: Setting
    dealt: ReplicaGroup
    rate: float
    share: float = 1.0

    @property
    def title(self) -> str:
        """Return a label with the number of replicas and their devices."""
        count = self.dealt.replicas
        return f"{count} replica{'s' if count > 1 else ''} on {self.dealt.title}"

    def load(self, workload: Work) -> Work:
        """Return the workload scaled to the share of these replicas."""
        names = ("concurrency", "burst_requests", "request_rate_per_second", "batch_size")
        totals = {name: getattr(workload, name, None) for name in names}
        scaled = {name: value * self.share for name, value in totals.items() if value is not None}
        return cast("Work", workload.model_copy(update=scaled))


def replica_shares(
    setting: Setting, workload: ServeWorkload | GenerateWorkload
) -> tuple[ReplicaShare, ...]:
    """Return the kinds of replicas, each with its share of the workload.

    Raises:
        NotCoveredError: the strategy uses a feature without a model for heterogeneous stages.
    """
    if setting.strategy.disaggregated:
        raise NotCoveredError(
            "pools for prefill and decode are costed on nodes of one kind: leave disaggregated "
            "out, or ask for one kind of node",
            "strategy.disaggregated",
        )
    setting = replace(setting, layout=plain_layout(setting.layout))
    parts = [_replica_share(setting, dealt, workload) for dealt in group_replicas(setting)]
    if isinstance(workload, GenerateWorkload) and len(parts) > 1:
        for _ in range(ROUNDS):
            parts = _balanced(_shared(parts), workload)
    return _shared(parts)


def _balanced(parts: Sequence[ReplicaShare], workload: GenerateWorkload) -> list[ReplicaShare]:
    """Return the replicas with rates that make all of them finish a batch together.

    The time of each kind is linearised in its sequences around its current share. Each replica
    keeps at least one sequence.
    """
    lines = [_line(part, workload) for part in parts]
    rates = [1 / slope for _, slope in lines]
    end_s = (workload.batch_size + sum(base / slope for base, slope in lines)) / sum(rates)
    loads = [
        maximum((end_s - base) / slope, float(part.dealt.replicas))
        for part, (base, slope) in zip(parts, lines, strict=True)
    ]
    final = _within_memory(loads, [_most_sequences(part, workload) for part in parts], workload)
    return [
        replace(part, rate=load / part.dealt.replicas / end_s)
        for part, load in zip(parts, final, strict=True)
    ]


def _within_memory(
    loads: Sequence[float], most: Sequence[float], workload: GenerateWorkload
) -> list[float]:
    """Return the loads, with the excess of full kinds moved to kinds with free memory."""
    clipped = [minimum(load, limit) for load, limit in zip(loads, most, strict=True)]
    free = [limit - load for load, limit in zip(clipped, most, strict=True)]
    excess = maximum(0.0, workload.batch_size - sum(clipped))
    ratio = excess / maximum(sum(free), FLAT)
    return [load + ratio * room for load, room in zip(clipped, free, strict=True)]


def _most_sequences(part: ReplicaShare, workload: GenerateWorkload) -> float:
    """Return the sequences that fit in memory over all replicas of a kind, at least one each.

    Memory is linearised in the sequences around the current share.
    """

    def filled_ratio(load: GenerateWorkload) -> float:
        return inference_memory(
            part.setting, NullLedger(), batch_load(part.setting, load)
        ).filled_ratio

    filled, slope = _linear(part, workload, filled_ratio)
    limit = workload.batch_size * part.share + (1 - FLAT - filled) / slope
    return maximum(limit, float(part.dealt.replicas))


def _line(part: ReplicaShare, workload: GenerateWorkload) -> tuple[float, float]:
    """Return the linear time of a kind: base seconds and seconds per sequence."""

    def seconds(load: GenerateWorkload) -> float:
        latency = generate(part.setting, load, NullLedger()).performance.latency_seconds
        return cast("float", latency)

    base, slope = _linear(part, workload, seconds)
    return base - slope * (workload.batch_size * part.share), slope


def _linear(
    part: ReplicaShare, workload: GenerateWorkload, figure: Callable[[GenerateWorkload], float]
) -> tuple[float, float]:
    """Return a figure at a kind's current share, and its growth per sequence there."""
    sequences = workload.batch_size * part.share
    here = figure(part.load(workload))
    more = figure(replace(part, share=part.share * NEARBY).load(workload))
    slope = (more - here) / (sequences * (NEARBY - 1))
    return here, maximum(slope, FLAT * here / sequences)


def _shared(parts: Sequence[ReplicaShare]) -> tuple[ReplicaShare, ...]:
    """Return the replicas with shares of the workload proportional to their rates."""
    total = sum(part.dealt.replicas * part.rate for part in parts)
    return tuple(replace(part, share=part.dealt.replicas * part.rate / total) for part in parts)


def _replica_share(
    setting: Setting, dealt: ReplicaGroup, workload: ServeWorkload | GenerateWorkload
) -> ReplicaShare:
    own = _setting_of(setting, dealt)
    even = ReplicaShare(setting, dealt, 0.0, dealt.replicas / setting.layout.data).load(workload)
    if dealt.is_uneven:
        if setting.strategy.offload:
            raise NotCoveredError(
                "offload is costed on pipelines of one kind of device: leave it out, or ask for "
                "one kind of node",
                "strategy.offload",
            )
        own = replace(own, split=split_of(own, even))
    return ReplicaShare(own, dealt, _speed(own, even))


def _setting_of(setting: Setting, dealt: ReplicaGroup) -> Setting:
    """Return a setting with only the replicas of one kind."""
    slowest = min(dealt.places, key=lambda place: place.device.memory_bandwidth_bytes_per_second)
    widest = max(dealt.places, key=lambda place: place.cluster.devices_per_node)
    engine = get_engine(setting.engine.key, slowest.device.kind)
    return replace(
        setting,
        device=slowest.device,
        cluster=slowest.cluster if dealt.is_uneven else widest.cluster,
        engine=with_device_overhead(engine, slowest.device, training=False),
        layout=replace(setting.layout, data=dealt.replicas),
        places=dealt.places if dealt.is_uneven else (),
        split=(),
    )


def _speed(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> float:
    """Return one replica's maximum requests per second, or sequences per second of a batch."""
    if isinstance(workload, ServeWorkload):
        most = max_concurrency(setting, workload)
        return saturation_rate(setting, workload, most) / setting.layout.data
    latency = generate(setting, workload, NullLedger()).performance.latency_seconds
    return workload.batch_size / cast("float", latency) / setting.layout.data


def serve_heterogeneous(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of serving on heterogeneous replicas or pipeline stages."""
    return serve_replica_shares(replica_shares(setting, workload), workload, ledger)


def serve_replica_shares(
    parts: tuple[ReplicaShare, ...], workload: ServeWorkload, ledger: Ledger
) -> Outcome:
    """Return the cost of serving on replicas with known shares."""
    return _aggregate_groups(parts, workload, ledger, serve)


def generate_heterogeneous(
    setting: Setting, workload: GenerateWorkload, ledger: Ledger
) -> Outcome:
    """Return the cost of a batch on heterogeneous replicas or pipeline stages."""
    return _aggregate_groups(replica_shares(setting, workload), workload, ledger, generate)


def _aggregate_groups(
    parts: tuple[ReplicaShare, ...],
    workload: Work,
    ledger: Ledger,
    run: Callable[[Setting, Work, Ledger], Outcome],
) -> Outcome:
    if len(parts) == 1:
        return _with_stages(run(parts[0].setting, workload, ledger), parts)
    _record_shares(parts, ledger)
    outcomes = [
        run(part.setting, part.load(workload), suffixed_ledger(ledger, part.dealt.title))
        for part in parts
    ]
    shared = AggregatePerformance(parts, outcomes, ledger)
    performance = shared.performance(workload)
    flags: list[Flag] = [one.fits for one in outcomes]
    whole = Outcome(
        memory=_stage_memory(outcomes),
        fits=cast("bool", reduce(both, flags)),
        seconds_by_class=shared.by_class([one.seconds_by_class for one in outcomes]),
        phases={
            phase: shared.by_class([one.phases[phase] for one in outcomes])
            for phase in outcomes[0].phases
        },
        energy_tokens_per_second=performance.tokens_per_second,
        performance=performance,
        warnings=_stage_warnings(parts, outcomes),
    )
    return _with_stages(whole, parts)


def _with_stages(outcome: Outcome, parts: Iterable[ReplicaShare]) -> Outcome:
    """Return an outcome with the layers and device of each stage of one replica per kind."""
    layers = [cast("int", share.layers) for part in parts for share in part.setting.shares]
    devices = [place.device.id for part in parts for place in part.dealt.places]
    return replace(outcome, stage_layers=tuple(layers), stage_devices=tuple(devices))


def _record_shares(parts: tuple[ReplicaShare, ...], ledger: Ledger) -> None:
    total = sum(part.dealt.replicas * part.rate for part in parts)
    for part in parts:
        ledger.term(
            request_share,
            part.setting.line(GROUP, f"Share of the requests for {part.title}", key="share"),
            replicas=part.dealt.replicas,
            own_rate=part.rate,
            total_rate=total,
        )


def _stage_memory(outcomes: list[Outcome]) -> MemoryUse:
    """Return the memory use of the stages of one replica per kind, with each stage's limits."""
    limits: list[tuple[int, float]] = []
    for outcome in outcomes:
        use = outcome.memory
        limits += use.limits or [(use.capacity_bytes, use.usable_bytes)] * len(use.stages)
    return MemoryUse(
        stages=tuple(stage for one in outcomes for stage in one.memory.stages),
        capacity_bytes=min(capacity for capacity, _ in limits),
        usable_bytes=min(usable for _, usable in limits),
        host_bytes=largest(one.memory.host_bytes for one in outcomes),
        disk_bytes=largest(one.memory.disk_bytes for one in outcomes),
        limits=tuple(limits),
    )


def _stage_warnings(parts: tuple[ReplicaShare, ...], outcomes: list[Outcome]) -> tuple[str, ...]:
    if is_column(*(part.share for part in parts)):
        return ()
    shares = ", ".join(f"{part.share:.0%} to {part.title}" for part in parts)
    own = (
        f"{part.title}: {warning}"
        for part, one in zip(parts, outcomes, strict=True)
        for warning in one.warnings
    )
    return (f"a router must share the requests: {shares}", *own)


@dataclass(frozen=True)
class AggregatePerformance:
    """The combined performance of replicas that share the requests."""

    parts: tuple[ReplicaShare, ...]
    outcomes: Sequence[Outcome]
    ledger: Ledger

    def figures(self, name: str) -> list[float]:
        """Return a performance figure of each kind of replica that has it."""
        values = [getattr(one.performance, name) for one in self.outcomes]
        return [value for value in values if value is not None]

    @cached_property
    def weights(self) -> list[float]:
        """Return the share of all requests that each kind of replica serves."""
        rates = self.figures("requests_per_second")
        return [rate / sum(rates) for rate in rates]

    def mean(self, name: str) -> float:
        """Return the mean of a figure over all requests."""
        pairs = zip(self.weights, self.figures(name), strict=True)
        return sum(weight * value for weight, value in pairs)

    def by_class(self, seconds_by_class: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the seconds by operator class, averaged over all requests."""
        return {
            name: sum(w * one[name] for w, one in zip(self.weights, seconds_by_class, strict=True))
            for name in seconds_by_class[0]
        }

    def mean_time(self, name: str) -> float:
        """Return the mean of "ttft" or "tpot" over all requests, in seconds, and record it.

        Each kind of replica counts by its share of the requests.
        """
        whole, weight = self.figures(f"{name}_seconds")[0], self.weights[0]
        for at, part in enumerate(self.parts[1:], start=1):
            before, weight = weight, weight + self.weights[at]
            key = name if at == len(self.parts) - 1 else f"{name}_so_far"
            whole = self.ledger.term(
                mean_over_replica_kinds,
                part.setting.line(GROUP, f"{TITLES[name]}, of all replicas", key=key),
                first_s=whole,
                second_s=self.figures(f"{name}_seconds")[at],
                first_ratio=before / weight,
            )
        return whole

    def rate(self) -> float:
        """Return the requests per second of all replicas and record them."""
        rates = self.figures("requests_per_second")
        whole = rates[0]
        for at, part in enumerate(self.parts[1:], start=1):
            key = "all_requests" if at == len(self.parts) - 1 else "requests_so_far"
            whole = self.ledger.term(
                rate_of_both,
                part.setting.line(GROUP, "Requests per second of all replicas", key=key),
                first_rate=whole,
                second_rate=rates[at],
            )
        return whole

    def performance(self, workload: ServeWorkload | GenerateWorkload) -> Performance:
        """Return the performance of all replicas combined."""
        if isinstance(workload, ServeWorkload):
            return self._serving_performance(workload)
        return self._generation_performance(workload)

    def _serving_performance(self, workload: ServeWorkload) -> Performance:
        """Return the performance of serving; a burst ends with its slowest replica."""
        rate = self.rate()
        if workload.burst_requests is not None:
            pairs = zip(self.parts, self.figures("requests_per_second"), strict=True)
            rate = 1 / largest(part.share / own for part, own in pairs)
        ttft, tpot = self.mean_time("ttft"), self.mean_time("tpot")
        produced = rate * workload.output_tokens
        return performance_of(
            **self._common(produced, rate),
            prefill_tokens_per_second=workload.input_tokens / self.mean("prefill_seconds"),
            ttft_seconds=ttft,
            tpot_seconds=tpot,
            latency_seconds=self.mean("latency_seconds"),
            queue_seconds=self.mean("queue_seconds"),
            max_concurrency=sum(self.figures("max_concurrency")),
        )

    def _generation_performance(self, workload: GenerateWorkload) -> Performance:
        """Return the performance of a batch, which ends with its slowest replica."""
        latency = largest(self.figures("latency_seconds"))
        rate = workload.batch_size / latency
        steps = workload.output_tokens > 1
        return performance_of(
            **self._common(rate * workload.output_tokens, rate),
            prefill_tokens_per_second=sum(self.figures("prefill_tokens_per_second")),
            ttft_seconds=self.mean_time("ttft"),
            tpot_seconds=self.mean_time("tpot") if steps else None,
            latency_seconds=latency,
        )

    def _common(self, token_rate: float, rate: float) -> dict[str, float | None]:
        devices = sum(part.setting.layout.devices for part in self.parts)
        decode = self.figures("decode_tokens_per_second")
        return {
            "tokens_per_second": token_rate,
            "output_tokens_per_second": token_rate,
            "tokens_per_second_per_device": token_rate / devices,
            "requests_per_second": rate,
            "decode_tokens_per_second": sum(decode) if len(decode) == len(self.parts) else None,
            "prefill_seconds": self.mean("prefill_seconds"),
            "communication_ratio": self.mean("communication_ratio"),
        }
