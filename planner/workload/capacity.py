"""The number of concurrent requests of a serving workload that fit in memory."""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

from planner.cost.columns import Flag, any_of, both, ceil, floor, maximum, minimum, negate, where
from planner.cost.equation import Unrecorded
from planner.specs.workload import ServeWorkload
from planner.workload.inference_memory import Load, stage_limits, usable_bytes
from planner.workload.setting import Setting
from planner.workload.speculate import held_memory

# Launch scripts of published sweeps fill 0.95 of a device if weights alone exceed TIGHT_RATIO
# (InferenceX, benchmarks/single_node/fixed_seq_len/dsr1_fp8_b200.sh, 2026-08).
TIGHT_RATIO, RAISED_RATIO = 0.8, 0.95
MAX_SEARCHED_CONCURRENCY = 4096
UNLIMITED = 1e9  # requests, where each takes no memory of a tier
CHORDS = 4  # steps to the limit of a convex peak
ROUNDING = 1e-9  # tolerance for quotients of whole numbers


class HeldRequests(NamedTuple):
    """The full-length requests of one replica that fit in memory.

    ``whole`` has whole requests on every data-parallel attention rank: it is a multiple of the
    ranks, or 0. ``usual`` and ``raised`` are means over the ranks, usually and with the raised
    memory limit of launch scripts whose weights leave little memory.
    """

    whole: float
    usual: float
    raised: float


def max_concurrency(setting: Setting, workload: ServeWorkload) -> float:
    """Return the number of full-length requests that fit in one replica's memory."""
    return held_at_once(setting, workload).whole


def held_at_once(setting: Setting, workload: ServeWorkload) -> HeldRequests:
    """Return the full-length requests that fit in one replica's memory.

    The result is cached, because a search needs it twice per setting: to check the fit and to cost
    it.
    """
    if workload is not setting.workload:
        return _held(setting, workload)
    return setting.once("held_at_once", lambda: _held(setting, workload))


def _held(setting: Setting, workload: ServeWorkload) -> HeldRequests:
    ranks = setting.layout.attention_data
    usual, raised = (
        reduce(minimum, room) for room in zip(*room_by_stage(setting, workload), strict=True)
    )
    whole = ranks * floor(maximum(0.0, usual) / ranks + ROUNDING)
    return HeldRequests(
        whole, where(whole > 0, floor(usual), 0.0), where(whole > 0, floor(raised), 0.0)
    )


def room_by_stage(setting: Setting, workload: ServeWorkload) -> Iterator[tuple[float, float]]:
    """Yield the full-length requests that fit on each stage, usually and with a raised limit.

    The peak of a stage grows linearly from the first request on: by its cache and by the logits of
    one more sampled token. Steps grow too once more requests run than a prompt has tokens.
    """
    ranks = setting.layout.attention_data
    uses = [
        held_memory(setting, Unrecorded(), load_of(setting, workload, requests * ranks))
        for requests in (1.0, 2.0)
    ]
    cluster = setting.cluster
    offloaded = ranks * minimum(
        _room_in_tier(cluster.host_memory_bytes, cluster.nodes, [use.host_bytes for use in uses]),
        _room_in_tier(
            cluster.disk_capacity_bytes, cluster.nodes, [use.disk_bytes for use in uses]
        ),
    )
    stages = zip(uses[0].stages, uses[1].stages, strict=True)
    uniform = [(setting.device.memory_bytes, usable_bytes(setting))] * len(uses[0].stages)
    limits = stage_limits(setting) or uniform
    for at, ((one, two), (whole, usable)) in enumerate(zip(stages, limits, strict=True)):
        first = one.peak_bytes
        each = two.peak_bytes - first
        filled = first - each
        tight = where(filled > TIGHT_RATIO * whole, maximum(usable, RAISED_RATIO * whole), usable)
        if setting.strategy.gpu_memory_utilization is not None:
            tight = usable
        usual, raised = (
            minimum(offloaded, ranks * _requests(setting, workload, at, (limit, first, each)))
            for limit in (usable, tight)
        )
        yield usual, raised


def _requests(
    setting: Setting, workload: ServeWorkload, stage: int, sizes: tuple[float, float, float]
) -> float:
    """Return the requests of one rank that fit into a stage's limit, 0 if not even one does.

    ``sizes`` are the limit, the peak with one request and the bytes of the second. Between the
    counts at which the tokens of a step begin or stop to grow, the peak is convex in the requests,
    because its fullest moment changes: a chord never holds too many.
    """
    limit, peak, each = sizes
    most, prompt = float(step_requests(setting)), float(workload.input_tokens)
    # Beyond its prompt's tokens a step of requests has a token of each, up to its budget.
    grown = minimum(most, maximum(prompt, setting.layout.batch_tokens))
    fits: Flag = peak <= limit
    known = 1.0
    held = where(fits, 1.0, 0.0)
    for knee in (minimum(prompt, most), grown, most, UNLIMITED):
        tried = minimum(maximum(known, knee), known + _quotient(limit - peak, each))
        for _ in range(CHORDS):
            at_tried = _peak(setting, workload, stage, maximum(1.0, tried))
            inside = both(fits, at_tried <= limit * (1 + ROUNDING))
            held = where(inside, maximum(held, tried), held)
            if not any_of(both(fits, negate(inside))):
                break
            chord = known + _quotient((limit - peak) * (tried - known), at_tried - peak)
            tried = where(inside, tried, chord)
        fits = both(fits, held >= knee)
        if not any_of(fits):
            return held
        known = maximum(known, knee)
        peak, after = (_peak(setting, workload, stage, known + more) for more in (0.0, 1.0))
        each = after - peak
    return held


def _quotient(room: float, each: float) -> float:
    """Return how many times ``each`` byte count fits, ``UNLIMITED`` if it is 0."""
    return where(each > 0, room / where(each > 0, each, 1.0), UNLIMITED)


def _peak(setting: Setting, workload: ServeWorkload, stage: int, requests: float) -> float:
    """Return the peak of a stage with this many requests on each rank."""
    load = load_of(setting, workload, requests * setting.layout.attention_data)
    return held_memory(setting, Unrecorded(), load).stages[stage].peak_bytes


def _room_in_tier(per_node: int | None, nodes: int, needed: list[float]) -> float:
    """Return the requests per rank whose offloaded cache fits in host memory, or on the disks.

    ``needed`` are the bytes there with one and with two requests per rank.
    """
    available, (first, second) = (per_node or 0) * nodes, needed
    if not available or not any_of(second > first):
        return UNLIMITED
    requests = where(first <= available, 1 + _quotient(available - first, second - first), 0.0)
    return where(second > first, requests, UNLIMITED)


def places(setting: Setting, workload: ServeWorkload, held: float) -> float:
    """Return the concurrency where ``held`` full-length requests fit in memory.

    In a closed loop, an engine that allocates KV cache as outputs grow holds half an output per
    request on average.
    """
    if setting.engine.reserves_whole_requests:
        return held
    answer = workload.output_tokens
    full_tokens = workload.input_tokens + answer
    return floor(held * full_tokens / (full_tokens - answer / 2))


def step_requests(setting: Setting) -> int:
    """Return the most requests of one rank whose tokens one step samples."""
    return setting.engine.max_batch_requests or MAX_SEARCHED_CONCURRENCY


def on_every_rank(setting: Setting, requests: float) -> float:
    """Return the requests of a replica if each attention rank holds as many as the busiest."""
    ranks = setting.layout.attention_data
    return maximum(1.0, ceil(requests / ranks - ROUNDING)) * ranks


def load_of(setting: Setting, workload: ServeWorkload, sequences: float) -> Load:
    """Return the memory load of a replica with ``sequences`` full-length requests."""
    prompt = workload.input_tokens
    budget = where(setting.layout.batch_tokens > 0, setting.layout.batch_tokens, prompt)
    sequences = sequences / setting.layout.attention_data
    decoded = minimum(sequences, float(step_requests(setting)))
    return Load(
        sequences=sequences,
        tokens_per_sequence=prompt + workload.output_tokens,
        step_tokens=minimum(budget, maximum(prompt, decoded)),
        sampled_tokens=maximum(1.0, decoded),
        paged=setting.engine.role == "serving",
        shared_tokens=prompt * workload.prefix_share_ratio,
    )
