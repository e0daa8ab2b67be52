"""Place weights, cache and activations over device, host memory and disk."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.catalog.engines import Engine, get_engine
from planner.cost.column import Varying
from planner.cost.memory import overlapped_seconds
from planner.cost.quantity import Equation, Ledger, Line, NullLedger
from planner.search.linear import minimised
from planner.search.question import Question
from planner.search.space import Block
from planner.specs.base import JsonObject, PlannerError
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.units import GIB
from planner.specs.workload import GenerateWorkload, OffloadSpec, Strategy
from planner.workload.costing import estimate_request
from planner.workload.generate import generate
from planner.workload.resolve import resolve
from planner.workload.setting import Setting

Columns = npt.NDArray[np.float64]
SHARES = ("weights_cpu", "weights_disk", "kv_cpu", "kv_disk", "activations_cpu")
TOGETHER = (("weights_cpu", "weights_disk"), ("kv_cpu", "kv_disk"))  # shares of one class
PHASES = ("prefill", "decode")
CHANNELS = ("work_s", "load_s", "store_s", "disk_s")
# Breakpoints of the experts' convex cost, as shares of all experts.
EXPERT_BENDS = (0.5, 0.75, 0.9, 1.0)
DIGITS = 4
HEADROOM = 0.998  # rounded shares must still fit
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
# Penalty in seconds per GiB above a tier's capacity: more than any pass takes.
SECONDS_PER_GIB_OVER = 1e7
TOLERANCE_GIB = 1e-6
HAIR = 1e-4


@dataclass(frozen=True)
class PlacementCosts:
    """One placement's costs per micro-batch size: seconds by phase and channel, bytes by tier."""

    channels_s: Columns
    tiers_bytes: Columns


@dataclass(frozen=True)
class OffloadPiece:
    """An offloadable piece of one share, from a start to an end."""

    share: str
    start: float
    end: float

    @property
    def width(self) -> float:
        """Return the piece's part of the share."""
        return self.end - self.start


@dataclass(frozen=True)
class Placement:
    """Offloaded shares for one micro-batch size, with the estimate that verifies them."""

    offload: OffloadSpec
    micro_batch_size: int
    estimate: Estimate


class _Channels(NullLedger):
    """Compute terms as columns, and record the overlapping channels by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs_by_phase: dict[str, dict[str, Any]] = {}

    def term(self, formula: Equation[Any], line: Line, /, *args: Any, **kwargs: Any) -> Varying:
        """Return the formula's value; record the channels of an overlap."""
        if formula is overlapped_seconds:
            self.inputs_by_phase[line.group] = kwargs
        return super().term(formula, line, *args, **kwargs)


def placement_costs(
    setting: Setting, offload: OffloadSpec, sizes: Sequence[int]
) -> PlacementCosts:
    """Return a placement's costs at each micro-batch size.

    Raises:
        TypeError: the workload is not batch generation.
    """
    workload = setting.workload
    if not isinstance(workload, GenerateWorkload):
        raise TypeError("only generated batches are placed")
    fields = {**dict(setting.strategy), "offload": offload}
    fields["micro_batch_size"] = np.array(sizes, dtype=np.float64)
    placed = replace(setting, strategy=Strategy.model_construct(**fields))
    ledger = _Channels()
    outcome = generate(placed, workload, ledger)
    channels_s = np.zeros((len(PHASES), len(CHANNELS), len(sizes)))
    for row, phase in enumerate(PHASES):
        channels_s[row, 0] = sum(outcome.phases[phase].values())
        for column, channel in enumerate(CHANNELS):
            if phase in ledger.inputs_by_phase:
                channels_s[row, column] = ledger.inputs_by_phase[phase][channel]
    memory = outcome.memory
    tiers = np.zeros((3, len(sizes)))
    for tier, tier_bytes in enumerate((memory.peak_bytes, memory.host_bytes, memory.disk_bytes)):
        tiers[tier] = tier_bytes
    return PlacementCosts(channels_s, tiers)


def offload_pieces(setting: Setting, shares: Iterable[str] = SHARES) -> tuple[OffloadPiece, ...]:
    """Return the offloadable pieces: one per share, several for experts."""
    counts = setting.counts
    bends = [0.0, 1.0]
    if setting.model.is_moe:
        experts = counts.experts / counts.layer_linear
        bends = sorted({0.0, 1.0, *(experts * bend for bend in EXPERT_BENDS)})
    full_range = [0.0, 1.0]
    return tuple(
        OffloadPiece(share, start, end)
        for share in shares
        for start, end in pairwise(bends if share == "weights_cpu" else full_range)
    )


@dataclass(frozen=True)
class LinearProgramme:
    """The linear programme: base costs, and their change per offloaded piece."""

    moves: tuple[OffloadPiece, ...]
    base: PlacementCosts
    channel_slopes: Columns
    tier_slopes: Columns

    @property
    def sizes(self) -> int:
        """Return the number of micro-batch sizes, one block each."""
        return int(self.base.tiers_bytes.shape[-1])

    def rows(self, block: int, limits_bytes: Columns) -> tuple[Columns, Columns]:
        """Return one block's inequalities: channels within phases, tiers within limits.

        The unknowns are the pieces, the seconds of both phases, and the GiB over capacity.
        """
        times = len(PHASES)
        rows, bounds = [], []
        for phase, channel in product(range(times), range(len(CHANNELS))):
            ends = np.zeros(times + 1)
            ends[phase] = -1.0
            rows.append([*self.channel_slopes[:, phase, channel, block], *ends])
            bounds.append(-self.base.channels_s[phase, channel, block])
        for tier in np.flatnonzero(np.isfinite(limits_bytes)):
            slopes = self.tier_slopes[:, tier, block] / GIB
            rows.append([*slopes, *np.zeros(times), -1.0])
            free_bytes = limits_bytes[tier] - self.base.tiers_bytes[tier, block]
            bounds.append(free_bytes / GIB)
        for pair in TOGETHER:
            within = [float(move.share in pair) for move in self.moves]
            rows.append([*within, *np.zeros(times + 1)])
            bounds.append(1.0)
        return np.array(rows), np.array(bounds)


def linear_programme(
    setting: Setting, sizes: Sequence[int], shares: Iterable[str] = SHARES
) -> LinearProgramme:
    """Return a setting's programme, each coefficient taken from its own estimate."""
    moves = offload_pieces(setting, shares)
    base = placement_costs(setting, OffloadSpec(), sizes)
    costs_at = {(move.share, 0.0): base for move in moves}
    for move in moves:
        offload = OffloadSpec.model_validate({move.share: move.end})
        costs_at[move.share, move.end] = placement_costs(setting, offload, sizes)
    channels, tiers = [], []
    for move in moves:
        before, after = costs_at[move.share, move.start], costs_at[move.share, move.end]
        channels.append((after.channels_s - before.channels_s) / move.width)
        tiers.append((after.tiers_bytes - before.tiers_bytes) / move.width)
    return LinearProgramme(moves, base, np.array(channels), np.array(tiers))


def solve(
    programme: LinearProgramme, limits_bytes: Columns, steps: float
) -> list[tuple[float, OffloadSpec] | None]:
    """Return each block's least seconds and its shares, or None if nothing fits.

    ``steps`` is the number of decode steps after one prefill.
    """
    placements_by_block: list[tuple[float, OffloadSpec] | None] = []
    widths = np.array([move.width for move in programme.moves])
    for block in range(programme.sizes):
        rows, bounds = programme.rows(block, limits_bytes)
        within = np.eye(len(widths), rows.shape[1])
        goals = [*_offload_penalties(programme, block, steps), 1.0, steps, SECONDS_PER_GIB_OVER]
        unknowns = minimised(
            np.array(goals),
            np.vstack([rows, within]),
            np.concatenate([bounds, widths]),
            len(PHASES) + 1,
        )
        if unknowns is None:
            placements_by_block.append(None)
            continue
        *pieces, prefill, decode, excess = unknowns.tolist()
        fits = excess <= TOLERANCE_GIB
        placements_by_block.append(
            (prefill + steps * decode, _shares(programme, pieces)) if fits else None
        )
    return placements_by_block


def _offload_penalties(programme: LinearProgramme, block: int, steps: float) -> list[float]:
    """Return a small cost per offloaded piece, so that ties prefer the faster tier."""
    prefill, decode = programme.base.channels_s[:, 0, block]
    hair = HAIR * float(prefill + steps * decode)
    return [hair * (2 if move.share.endswith("disk") else 1) for move in programme.moves]


def _shares(programme: LinearProgramme, pieces: Sequence[float]) -> OffloadSpec:
    """Return the rounded sum of the pieces of each share."""
    shares = dict.fromkeys(SHARES, 0.0)
    for move, piece in zip(programme.moves, pieces, strict=True):
        shares[move.share] += float(piece)
    return OffloadSpec.model_validate(
        {name: min(1.0, abs(round(share, DIGITS))) for name, share in shares.items()}
    )


def memory_tier_limits(setting: Setting, usable_bytes: float) -> Columns:
    """Return the usable bytes of device, host and disk; unspecified tiers are unlimited."""
    cluster = setting.cluster
    host, disk = cluster.host_memory_bytes, cluster.disk_capacity_bytes
    nodes = cluster.nodes
    return HEADROOM * np.array(
        [usable_bytes, (host or np.inf) * nodes, (disk or np.inf) * nodes], dtype=float
    )


def micro_sizes(batch_size: int) -> Iterator[int]:
    """Yield the micro-batch sizes that divide a batch, and the batch itself."""
    for size in (*MICRO_BATCHES, batch_size):
        if size <= batch_size and batch_size % size == 0:
            yield size


def placements(
    request: EstimateRequest, sizes: Sequence[int], shares: Iterable[str] = SHARES
) -> Iterator[Placement]:
    """Yield placements of a request, fastest first, each verified by an estimate.

    Raises:
        PlannerError: the request is invalid.
    """
    changed = {"micro_batch_size": sizes[0], "offload": None}
    strategy = request.strategy.model_copy(update=changed)
    setting = resolve(request.model_copy(update={"strategy": strategy}))
    workload = setting.workload
    if not isinstance(workload, GenerateWorkload):
        return
    usable = generate(setting, workload, Ledger()).memory.usable_bytes
    steps = max(0, workload.output_tokens - 1)
    limits = memory_tier_limits(setting, usable)
    candidates: list[tuple[float, OffloadSpec, int]] = []
    for offered in _share_sets(setting, tuple(shares)):
        solved = solve(linear_programme(setting, sizes, offered), limits, steps)
        candidates = [
            (*candidate, size)
            for candidate, size in zip(solved, sizes, strict=True)
            if candidate is not None
        ]
        if candidates:
            break
    for _, offload, size in sorted(candidates, key=lambda candidate: (candidate[0], candidate[2])):
        placed = strategy.model_copy(update={"offload": offload, "micro_batch_size": size})
        estimate = estimate_request(request.model_copy(update={"strategy": placed}), explain=False)
        if estimate.fits:
            yield Placement(offload, size, estimate)


def _share_sets(setting: Setting, shares: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield sets of shares to try; experts go to disk only if host memory is too small.

    The breakpoints of the experts' convex cost hold for one tier; a second tier would restart the
    curve.
    """
    if setting.model.is_moe:
        yield tuple(share for share in shares if share != "weights_disk")
    yield shares


def best_placement(request: EstimateRequest, shares: Iterable[str] = SHARES) -> Placement | None:
    """Return the placement and micro-batch size of highest throughput, or None if nothing fits.

    Raises:
        PlannerError: the request is invalid.
    """
    workload = request.workload
    if not isinstance(workload, GenerateWorkload):
        return None
    per_replica = max(1, workload.batch_size // (request.strategy.data_parallel_size or 1))
    pinned_size = request.strategy.micro_batch_size
    sizes = [pinned_size] if pinned_size else sorted(set(micro_sizes(per_replica)))
    return next(placements(request, sizes, tuple(shares)), None)


def best_batch(request: EstimateRequest, batch_sizes: Iterable[int]) -> Placement | None:
    """Return the best placement over several batch sizes, as FlexGen's policy search does.

    Raises:
        PlannerError: the request is invalid.
    """
    workload = request.workload
    best_per_size = (
        best_placement(
            request.model_copy(
                update={"workload": workload.model_copy(update={"batch_size": size})}
            )
        )
        for size in batch_sizes
    )
    feasible = [placement for placement in best_per_size if placement is not None]
    return max(feasible, key=tokens_per_second, default=None)


def tokens_per_second(placement: Placement) -> float:
    """Return a placement's throughput."""
    return placement.estimate.performance.tokens_per_second or 0.0


def placed_strategy(request: EstimateRequest, shares: Iterable[str] = SHARES) -> Strategy | None:
    """Return the request's strategy with its best placement, or None if none fits."""
    try:
        best = best_placement(request, shares)
    except PlannerError:
        return None
    if best is None:
        return None
    changed = {"offload": best.offload, "micro_batch_size": best.micro_batch_size}
    return request.strategy.model_copy(update=changed)


# Search candidates that offload part of the weights, cache or activations.
#
# They are generated only if the request describes the host of the GPU, and only for weight formats
# of which nothing fits on the devices alone: a strategy that fits is faster without offloading.


FORMAT = ("weight_dtype", "activation_dtype", "quantization", "kv_cache_dtype")
# Engines that offload caches run a block of micro-batches layer by layer.
MICRO = frozenset({"kv_cpu"})
ON_DISK = frozenset({"weights_disk", "kv_disk"})
WEIGHTS_ALONE = ("weights_cpu",)
# Shares that each serving engine can offload; runners stream any of them, block by block.
BY_ENGINE: dict[str, tuple[str, ...]] = {
    "flexgen": SHARES,
    "deepspeed_zero_inference": ("weights_cpu", "weights_disk", "kv_cpu"),
    "vllm": WEIGHTS_ALONE,
    "sglang": WEIGHTS_ALONE,
}


def offload_fractions_of(engine: Engine) -> tuple[str, ...]:
    """Return the names of the offload fractions that an engine supports."""
    if engine.role == "runner":
        return SHARES
    return BY_ENGINE.get(engine.key, WEIGHTS_ALONE if engine.computes_on_host else ())


def offloaded_placements(
    question: Question, blocks: Sequence[tuple[Block, bool]]
) -> Iterator[Strategy]:
    """Yield the best placement of each weight format of which nothing fits on the devices.

    ``blocks`` are pairs of a block and whether any of its strategies fits.
    """
    shares, workload = _offloadable_shares(question), question.request.workload
    if not shares or not isinstance(workload, GenerateWorkload):
        return
    fits: dict[tuple[object, ...], bool] = {}
    shared: dict[tuple[object, ...], JsonObject] = {}
    for block, fitting in blocks:
        key = tuple(block.shared.get(name) for name in FORMAT)
        fits[key] = fits.get(key, False) or fitting
        shared.setdefault(key, block.shared)
    for key, fitting in fits.items():
        if not fitting:
            yield from _placements_of_format(question, shared[key], shares, workload.batch_size)


def _offloadable_shares(question: Question) -> tuple[str, ...]:
    """Return the shares that can move to the described host and disk."""
    cluster, device = question.cluster, question.device
    pinned = question.pinned.get("offload") or question.pinned.get("pipeline_parallel_size", 1) > 1
    if device.kind != "gpu" or not cluster.host_memory_bytes or pinned:
        return ()
    shares = offload_fractions_of(get_engine(question.request.engine, question.device.kind))
    return tuple(s for s in shares if s not in ON_DISK or cluster.disk_capacity_bytes)


def _placements_of_format(
    question: Question, shared: JsonObject, shares: tuple[str, ...], batch: int
) -> Iterator[Strategy]:
    """Yield the placement of one format, one replica per device if the batch divides."""
    devices = question.cluster.num_devices
    spread = devices if batch % devices == 0 else 1
    replicas = question.pinned.get("data_parallel_size") or spread
    base = {**shared, **question.pinned, "pipeline_parallel_size": 1}
    strategy = Strategy.model_validate({**base, "data_parallel_size": replicas})
    # The other engines run a batch as one micro-batch, and cannot be told one.
    splits_batch = set(shares) >= MICRO or strategy.micro_batch_size
    if not splits_batch:
        strategy = strategy.model_copy(update={"micro_batch_size": batch // replicas})
    placed = placed_strategy(question.estimate_request(strategy), shares)
    if placed is not None:
        yield placed if splits_batch else placed.model_copy(update={"micro_batch_size": None})
