"""The number of concurrent requests of a serving workload that fit in memory."""

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import cycle
from typing import NamedTuple, cast

from planner.cost.memory import MemoryUse
from planner.cost.quantity import (
    Flag,
    Unrecorded,
    any_of,
    both,
    ceil,
    floor,
    maximum,
    minimum,
    negate,
    where,
)
from planner.cost.stages import Share
from planner.specs.workload import ServeWorkload
from planner.workload.generate import held_memory
from planner.workload.inference_memory import (
    Load,
    stage_limits,
    step_activation_bytes,
    step_cache_bytes,
    usable_bytes,
)
from planner.workload.setting import Setting

# Launch scripts of published sweeps fill 0.95 of a device if weights alone exceed TIGHT_RATIO
# (InferenceX, benchmarks/single_node/fixed_seq_len/dsr1_fp8_b200.sh, 2026-08).
TIGHT_RATIO, RAISED_RATIO = 0.8, 0.95
MAX_SEARCHED_CONCURRENCY = 4096
UNLIMITED = 1e9  # requests, where each takes no memory of a tier
LAST_SEGMENT = 3  # of a step's bytes by requests
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


def holds_a_request(setting: Setting, workload: ServeWorkload) -> Flag:
    """Return whether ``max_concurrency`` is at least 1, at a fraction of its cost."""
    one = _use(setting, workload, 1.0)
    fits: Flag = True
    limits = [usable for _, usable in stage_limits(setting)] or [usable_bytes(setting)]
    for stage, usable in zip(one.stages, cycle(limits), strict=False):
        fits = both(fits, stage.peak_bytes <= usable)
    if any_of(one.host_bytes > 0) or any_of(one.disk_bytes > 0):
        uses = [one, _use(setting, workload, 2.0)]
        fits = both(fits, _room_in_tiers(setting, uses) >= 1)
    return fits


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
    uses = [_use(setting, workload, requests) for requests in (1.0, 2.0)]
    steps = Steps(setting, workload)
    offloaded = ranks * _room_in_tiers(setting, uses)
    stages = zip(uses[0].stages, uses[1].stages, _layer_shares(setting, uses[0]), strict=True)
    uniform = [(setting.device.memory_bytes, usable_bytes(setting))] * len(uses[0].stages)
    limits = stage_limits(setting) or uniform
    for (one, two, share), (whole, usable) in zip(stages, limits, strict=True):
        first = one.peak_bytes
        each = two.peak_bytes - first
        start = steps.segment(0)
        cache = each - start.each.of(share)
        peaks = Peaks(first - start.at_start.of(share) - cache, cache, share, steps)
        filled = first - each
        usual = minimum(offloaded, ranks * _requests(usable, peaks))
        is_tight: Flag = filled > TIGHT_RATIO * whole
        if setting.strategy.gpu_memory_utilization is not None or not any_of(is_tight):
            yield usual, usual
            continue
        tight = where(is_tight, maximum(usable, RAISED_RATIO * whole), usable)
        yield usual, minimum(offloaded, ranks * _requests(tight, peaks))


class StepBytes(NamedTuple):
    """The bytes that depend on the tokens of a step, on one device.

    ``activations`` are the same on every stage; ``cache`` are those of all layers.
    """

    activations: float
    cache: float

    def of(self, layers: float) -> float:
        """Return the bytes on a stage with this share of the layers."""
        return self.activations + layers * self.cache

    def less(self, other: "StepBytes") -> "StepBytes":
        """Return the difference of both."""
        return StepBytes(self.activations - other.activations, self.cache - other.cache)


class Segment(NamedTuple):
    """Requests of one rank between which the tokens of a step grow alike, or not at all.

    ``at_start`` are a step's bytes there, and ``each`` those of one more request.
    """

    start: float
    end: float
    at_start: StepBytes
    each: StepBytes
    is_linear: bool


class Steps:
    """The bytes of a step by the requests of one rank."""

    def __init__(self, setting: Setting, workload: ServeWorkload) -> None:
        self._setting, self._workload = setting, workload
        most, prompt = float(step_requests(setting)), float(workload.input_tokens)
        # Beyond its prompt's tokens a step of requests has a token of each, up to its budget.
        grown = minimum(most, maximum(prompt, setting.layout.batch_tokens))
        self._ends = (1.0, maximum(1.0, minimum(prompt, most)), grown, most, UNLIMITED)
        self._segments: dict[int, Segment] = {}

    def of(self, requests: float) -> StepBytes:
        """Return the bytes with this many requests on each rank."""
        setting = self._setting
        load = load_of(setting, self._workload, requests * setting.layout.attention_data)
        return StepBytes(step_activation_bytes(setting, load), step_cache_bytes(setting, load))

    def segment(self, at: int) -> Segment:
        """Return the segment of this number, computed once; the last has no end."""
        if at not in self._segments:
            start, end = self._ends[at], self._ends[at + 1]
            first = self.of(start)
            each = self.of(start + 1.0).less(first)
            is_linear = at == LAST_SEGMENT or all(
                not any_of(abs(last - begun - more * (end - start)) > ROUNDING * last)
                for last, begun, more in zip(self.of(end), first, each, strict=True)
            )
            self._segments[at] = Segment(start, end, first, each, is_linear)
        return self._segments[at]


class Peaks(NamedTuple):
    """The peak bytes of a stage by the requests of one rank.

    ``empty`` are the bytes without requests and steps, ``cache`` those of one request's cache and
    ``layers`` the stage's share of the layers.
    """

    empty: float
    cache: float
    layers: float
    steps: Steps


def _layer_shares(setting: Setting, use: MemoryUse) -> list[float]:
    """Return the share of the layers on each stage of a use; equal stages appear once in it."""
    shares: Iterable[Share] = setting.shares
    if len(use.stages) < len(setting.shares):
        shares = dict.fromkeys(setting.shares)
    layers = setting.model.num_hidden_layers
    return [cast("float", share.layers / layers) for share in shares]


def _use(setting: Setting, workload: ServeWorkload, requests: float) -> MemoryUse:
    """Return the memory with this many requests on each rank."""
    load = load_of(setting, workload, requests * setting.layout.attention_data)
    return held_memory(setting, Unrecorded(), load)


def _room_in_tiers(setting: Setting, uses: list[MemoryUse]) -> float:
    """Return the requests per rank whose offloaded cache host memory and disks hold."""
    cluster = setting.cluster
    return minimum(
        _room_in_tier(cluster.host_memory_bytes, cluster.nodes, [use.host_bytes for use in uses]),
        _room_in_tier(
            cluster.disk_capacity_bytes, cluster.nodes, [use.disk_bytes for use in uses]
        ),
    )


def _requests(limit: float, peaks: Peaks) -> float:
    """Return the requests of one rank that fit into a stage's limit, 0 if not even one does.

    Within a segment the peak is convex in the requests, because the fullest moment of a step
    changes: a chord never holds too many.
    """
    fits: Flag = True
    held = 0.0
    for at in range(LAST_SEGMENT + 1):
        start, end, step, step_each, is_linear = peaks.steps.segment(at)
        peak = peaks.empty + start * peaks.cache + step.of(peaks.layers)
        each = peaks.cache + step_each.of(peaks.layers)
        if at == 0:
            fits = peak <= limit
            held = where(fits, 1.0, 0.0)
        tried = minimum(end, start + _quotient(limit - peak, each))
        if is_linear:
            held = where(fits, maximum(held, tried), held)
        else:
            held = _along_chords(limit, peaks, (start, peak), (tried, fits, held))
        fits = both(fits, held >= end)
        if not any_of(fits):
            break
    return held


def _along_chords(
    limit: float,
    peaks: Peaks,
    known: tuple[float, float],
    found: tuple[float, Flag, float],
) -> float:
    """Return the requests that fit on a convex segment, from a count and its peak that do.

    ``found`` are the requests to try first, where they may be tried, and those held already.
    """
    start, peak = known
    tried, fits, held = found
    for _ in range(CHORDS):
        step = peaks.steps.of(tried).of(peaks.layers)
        at_tried = peaks.empty + tried * peaks.cache + step
        inside = both(fits, at_tried <= limit * (1 + ROUNDING))
        held = where(inside, maximum(held, tried), held)
        if not any_of(both(fits, negate(inside))):
            break
        chord = start + _quotient((limit - peak) * (tried - start), at_tried - peak)
        tried = where(inside, tried, chord)
    return held


def _quotient(room: float, each: float) -> float:
    """Return how many times ``each`` byte count fits, ``UNLIMITED`` if it is 0."""
    return where(each > 0, room / where(each > 0, each, 1.0), UNLIMITED)


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
