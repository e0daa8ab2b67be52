"""Serve with prefill and decode on different devices: two pools and the cache's way between them.

A request is read by one of the prefill replicas, its cache travels over the link, and one of the
decode replicas makes the other tokens, which no prompt interrupts. The slower pool sets the rate.

Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670; Patel et al. 2023 (Splitwise),
arXiv:2311.18677.
"""

from dataclasses import dataclass, replace

from planner.cost.communication import transfer_seconds
from planner.cost.equation import Ledger, Unrecorded, equation
from planner.cost.memory import MemoryUse
from planner.cost.quantity import Quantity
from planner.cost.queueing import poisson_prompts_before, prompts_waited_for
from planner.errors import BadRequestError, NotPossibleError
from planner.specs.estimate import Performance
from planner.specs.workload import ServeWorkload
from planner.workload.capacity import load_of, max_concurrency
from planner.workload.forward import PassCost
from planner.workload.inference_memory import Load
from planner.workload.operators import link_for
from planner.workload.outcome import Outcome
from planner.workload.serve import arrival_habits
from planner.workload.setting import Setting
from planner.workload.speculate import Decoding, decoding, held_memory, prefilling

GROUP = "serving"
DISTSERVE = "Zhong et al. 2024 (DistServe), arXiv:2401.09670"
BISECTIONS = 24
UNEVEN = 2  # a pool this many times faster than the other is worth a word


@equation(
    "X_p = n_p / t_slot",
    unit="requests/s",
    symbols={"prefill_replicas": "n_p", "slot_s": "t_slot"},
    source=DISTSERVE,
)
def prefill_pool_rate(*, prefill_replicas: Quantity, slot_s: Quantity) -> Quantity:
    """Return the requests per second that the prefill replicas read."""
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
    """Return the requests per second that leave decode replicas with ``running`` at once."""
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
    """Return the mean seconds to the first token when another pool decodes."""
    return prefill_s + prompts_before * slot_s + transfer_s + wait_s


@dataclass(frozen=True)
class _Pools:
    """The two pools, costed as far as no load is needed; ``most`` is per decode replica."""

    prefill_replicas: int
    decode_replicas: int
    most: float
    prefill: PassCost
    slot_s: float
    transfer_s: float

    @property
    def prefill_rate(self) -> float:
        """Return the most requests per second that are read."""
        return self.prefill_replicas / self.slot_s


@dataclass(frozen=True)
class _Flow:
    """Requests per second, requests at once on each decode replica, and their decode steps."""

    rate: float
    running: float
    decode: Decoding


def serve_disaggregated(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return what serving costs with a pool of devices for each phase.

    Raises:
        NotPossibleError: a pool is no whole number of replicas.
        BadRequestError: answers of one token leave the decode pool nothing to do.
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
    each = layout.devices // layout.data
    for name, devices in split:
        if devices % each:
            raise NotPossibleError(
                f"{name} is {devices}: it must be a multiple of the {each} devices that one "
                "replica takes",
                f"strategy.disaggregated.{name}",
            )
    cached = workload.input_tokens * workload.prefix_share_ratio
    lanes = _lanes(setting, workload, split.prefill_devices // each)
    prefill = prefilling(setting, ledger, lanes, workload.input_tokens - cached, cached)
    return _Pools(
        prefill_replicas=split.prefill_devices // each,
        decode_replicas=split.decode_devices // each,
        most=max_concurrency(setting, workload),
        prefill=prefill,
        slot_s=prefill.total_s / layout.pipeline / lanes,
        transfer_s=_transfer(setting, workload, ledger),
    )


def _lanes(setting: Setting, workload: ServeWorkload, replicas: int) -> float:
    """Return how many data-parallel attention ranks of a replica read a prompt at once."""
    ranks = float(setting.layout.attention_data)
    callers = workload.concurrency or workload.burst_requests
    return ranks if callers is None else max(1.0, min(ranks, callers / replicas))


def _transfer(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> float:
    """Return the seconds in which the cache of one prompt travels, each rank sending its part."""
    prompt = float(workload.input_tokens)
    with_prompt, without = (
        held_memory(setting, Unrecorded(), Load(n, prompt, 1.0, 1.0, paged=False)).fullest
        for n in (1.0, 0.0)
    )
    payload = with_prompt.by_class["kv_cache"] - without.by_class["kv_cache"]
    rates = setting.rates
    sent = ledger.term(
        transfer_seconds,
        setting.line(GROUP, "Cache to the decode pool", "communication", "kv_transfer"),
        payload_bytes=payload,
        link_bytes_per_s=link_for(setting, rates, setting.layout.devices),
    )
    return sent + rates.latency_s


def _decode(setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float) -> Decoding:
    context = workload.input_tokens + workload.output_tokens / 2
    return decoding(setting, ledger, max(1.0, running / setting.layout.pipeline), context)


def _flow(setting: Setting, workload: ServeWorkload, pools: _Pools) -> _Flow:
    """Return the steady flow: what is asked, or what the slower pool lets through."""

    def at(running: float) -> _Flow:
        decode = _decode(setting, workload, Unrecorded(), running)
        life = (workload.output_tokens - 1) * decode.per_token.total_s
        return _Flow(pools.decode_replicas * running / life, running, decode)

    def too_much(flow: _Flow) -> bool:
        if flow.rate > pools.prefill_rate:
            return True
        asked = workload.request_rate_per_second
        if asked is not None:
            return flow.rate > asked
        callers = workload.concurrency or workload.burst_requests
        if callers is None:
            return False
        apart = pools.prefill.total_s + pools.transfer_s
        return flow.rate * apart + pools.decode_replicas * flow.running > callers

    low, high = 0.0, max(1.0, pools.most)
    if not too_much(at(high)):
        return at(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if too_much(at(middle)) else (middle, high)
    # Below one request at a time a decode replica idles between them.
    return replace(at(max(1.0, low)), rate=at(low).rate)


def _first_token(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, pools: _Pools, flow: _Flow
) -> float:
    """Return the mean TTFT: one's own prompt, those before it, the cache's way, and the rest."""
    line = setting.line(GROUP, "Prompts before its own", key="prompts_before")
    wait, callers = 0.0, workload.concurrency
    if workload.request_rate_per_second is not None:
        busy = flow.rate / pools.prefill_rate
        before = ledger.term(poisson_prompts_before, line, busy_ratio=busy)
    else:
        habits = arrival_habits(setting, workload)
        asked = callers or workload.burst_requests or pools.prefill_replicas
        before = ledger.term(
            prompts_waited_for,
            line,
            running=max(1.0, asked / pools.prefill_replicas),
            burst_ratio=habits.burst_ratio,
            prompts_ahead=habits.prompts_ahead,
        )
    known = pools.prefill.total_s + before * pools.slot_s + pools.transfer_s
    if callers is not None:
        # Little: who neither is read nor decodes waits, whatever the pool that is in the way.
        life = (workload.output_tokens - 1) * flow.decode.per_token.total_s
        wait = max(0.0, callers / flow.rate - life - known)
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
    """Return the most requests per second of each pool, both recorded."""
    read = ledger.term(
        prefill_pool_rate,
        setting.line(GROUP, "Prefill pool", key="prefill_pool"),
        prefill_replicas=pools.prefill_replicas,
        slot_s=pools.slot_s,
    )
    full = max(1.0, pools.most)
    decode = _decode(setting, workload, Unrecorded(), full)
    left = ledger.term(
        decode_pool_rate,
        setting.line(GROUP, "Decode pool", key="decode_pool"),
        decode_replicas=pools.decode_replicas,
        running=full,
        output_tokens=workload.output_tokens,
        decode_s=decode.per_token.total_s,
    )
    return read, left


def _memory(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, running: float
) -> MemoryUse:
    """Return what a device of each pool holds: prompts in work, and requests that decode."""
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
    found: tuple[float, tuple[float, float]],
) -> Performance:
    ttft, limits = found
    gap = flow.decode.per_token
    produced = flow.rate * workload.output_tokens
    spent = pools.prefill.total_s + workload.output_tokens * gap.total_s
    linked = pools.prefill.communication_s + workload.output_tokens * gap.communication_s
    return Performance(
        tokens_per_second=produced,
        output_tokens_per_second=produced,
        prefill_tokens_per_second=pools.prefill_rate * workload.input_tokens,
        decode_tokens_per_second=pools.decode_replicas * flow.running / gap.total_s,
        tokens_per_second_per_device=produced / setting.layout.devices,
        requests_per_second=flow.rate,
        ttft_seconds=ttft,
        tpot_seconds=gap.total_s,
        latency_seconds=ttft + (workload.output_tokens - 1) * gap.total_s,
        queue_seconds=ttft - pools.prefill.total_s - pools.transfer_s,
        prefill_seconds=pools.prefill.total_s,
        max_concurrency=int(pools.most) * pools.decode_replicas,
        max_requests_per_second=min(limits),
        communication_ratio=linked / spent,
    )


def _warnings(
    workload: ServeWorkload, pools: _Pools, limits: tuple[float, float]
) -> tuple[str, ...]:
    read, left = limits
    rate, found = workload.request_rate_per_second, []
    if max(limits) > UNEVEN * min(limits):
        uneven = (
            f"uneven pools: prefill takes up to {read:.3g} requests a second on "
            f"{pools.prefill_replicas} replicas, decode {left:.3g} on {pools.decode_replicas}"
        )
        found.append(uneven)
    if rate is not None and rate >= min(limits):
        most = f"{rate:g} requests a second cannot be served: the most is {min(limits):.3g}"
        found.append(most)
    return tuple(found)
