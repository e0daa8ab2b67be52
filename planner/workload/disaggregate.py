"""Serving with prefill and decode on different devices: two pools and the KV transfer between.

A prefill replica reads the prompt, the KV cache is sent over the link, and a decode replica
generates the other tokens without interruption by prompts. The slower pool limits the rate.

Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670; Patel et al. 2023 (Splitwise),
arXiv:2311.18677.
"""

from dataclasses import dataclass, replace

from planner.cost.communication import transfer_seconds
from planner.cost.memory import MemoryUse
from planner.cost.quantity import Ledger, Quantity, Unrecorded, equation
from planner.cost.queueing import poisson_prompts_before, prompts_waited_for
from planner.errors import BadRequestError, NotPossibleError
from planner.specs.estimate import Performance
from planner.specs.workload import ServeWorkload
from planner.workload.capacity import load_of, max_concurrency
from planner.workload.forward import PassCost
from planner.workload.generate import Decoding, decoding, held_memory, prefilling
from planner.workload.inference_memory import Load
from planner.workload.operators import link_for
from planner.workload.outcome import Outcome
from planner.workload.serve import arrival_habits
from planner.workload.setting import Setting

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
class _Flow:
    """The request rate, the running requests per decode replica and their decode step."""

    rate: float
    running: float
    decode: Decoding


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
        raise BadRequestError("two pools need their devices", "strategy.disaggregated")
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
    cached = workload.input_tokens * workload.prefix_share_ratio
    lanes = _lanes(setting, workload, split.prefill_devices // size)
    prefill = prefilling(setting, ledger, lanes, workload.input_tokens - cached, cached)
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
    ranks = float(setting.layout.attention_data)
    callers = workload.concurrency or workload.burst_requests
    return ranks if callers is None else max(1.0, min(ranks, callers / replicas))


def _transfer(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> float:
    """Return the transfer seconds of one prompt's KV cache; each rank sends its shard."""
    prompt = float(workload.input_tokens)
    with_prompt, without = (
        held_memory(setting, Unrecorded(), Load(n, prompt, 1.0, 1.0, paged=False)).fullest
        for n in (1.0, 0.0)
    )
    payload = with_prompt.by_class["kv_cache"] - without.by_class["kv_cache"]
    rates = setting.rates
    transfer_s = ledger.term(
        transfer_seconds,
        setting.line(GROUP, "Cache to the decode pool", "communication", "kv_transfer"),
        payload_bytes=payload,
        link_bytes_per_s=link_for(setting, rates, setting.layout.devices),
    )
    return transfer_s + rates.latency_s


def _decode(setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float) -> Decoding:
    context = workload.input_tokens + workload.output_tokens / 2
    return decoding(setting, ledger, max(1.0, running / setting.layout.pipeline), context)


def _flow(setting: Setting, workload: ServeWorkload, pools: _Pools) -> _Flow:
    """Return the steady flow: the offered load or the limit of the slower pool."""

    def at(running: float) -> _Flow:
        decode = _decode(setting, workload, Unrecorded(), running)
        life = (workload.output_tokens - 1) * decode.per_token.total_s
        return _Flow(pools.decode_replicas * running / life, running, decode)

    def too_much(flow: _Flow) -> bool:
        if flow.rate > pools.prefill_rate:
            return True
        offered_rate = workload.request_rate_per_second
        if offered_rate is not None:
            return flow.rate > offered_rate
        callers = workload.concurrency or workload.burst_requests
        if callers is None:
            return False
        outside_decode_s = pools.prefill.total_s + pools.transfer_s
        return flow.rate * outside_decode_s + pools.decode_replicas * flow.running > callers

    low, high = 0.0, max(1.0, pools.most)
    if not too_much(at(high)):
        return at(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if too_much(at(middle)) else (middle, high)
    # Below one running request, a decode replica is partly idle.
    return replace(at(max(1.0, low)), rate=at(low).rate)


def _first_token(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, pools: _Pools, flow: _Flow
) -> float:
    """Return the mean TTFT: queued prompts, own prompt, KV transfer and waiting time."""
    line = setting.line(GROUP, "Prompts before its own", key="prompts_before")
    wait, callers = 0.0, workload.concurrency
    if workload.request_rate_per_second is not None:
        busy = flow.rate / pools.prefill_rate
        before = ledger.term(poisson_prompts_before, line, busy_ratio=busy)
    else:
        habits = arrival_habits(setting, workload)
        in_flight = callers or workload.burst_requests or pools.prefill_replicas
        before = ledger.term(
            prompts_waited_for,
            line,
            running=max(1.0, in_flight / pools.prefill_replicas),
            burst_ratio=habits.burst_ratio,
            prompts_ahead=habits.prompts_ahead,
        )
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
    decode = _decode(setting, workload, Unrecorded(), full)
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
    decode = held_memory(setting, ledger, load_of(setting, workload, max(1.0, running)))
    budget = setting.strategy.max_batch_tokens or workload.input_tokens
    prompts = max(1.0, budget / workload.input_tokens)
    load = replace(
        load_of(setting, workload, prompts), tokens_per_sequence=float(workload.input_tokens)
    )
    prefill = held_memory(setting, Unrecorded(), load)
    return replace(decode, stages=(*decode.stages, *prefill.stages))


def _performance(
    setting: Setting,
    workload: ServeWorkload,
    pools: _Pools,
    flow: _Flow,
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
        queue_seconds=ttft - pools.prefill.total_s - pools.transfer_s,
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
