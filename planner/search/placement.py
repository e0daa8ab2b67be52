"""Places weights, cache and activations over device, host memory and disk: FlexGen's programme.

Every time and every byte of a pass is linear in the shares that leave the device, so that a linear
programme finds the best shares. Its coefficients are what the planner's own estimate says when one
share alone leaves; nothing of a formula is written twice. All splits into micro-batches are costed
as columns and solved as one programme, a block for each. Experts that leave are met the less often
the more of them have left: their cost is convex, and enters piece by piece.

Source: Sheng et al. 2023 (FlexGen), arXiv:2303.06865, section 4.3.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.cost.equation import Equation, Ledger, Line, Unrecorded
from planner.cost.offload import overlapped_seconds
from planner.errors import PlannerError
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.strategy import OffloadSpec, Strategy
from planner.specs.workload import GenerateWorkload
from planner.workload.estimator import estimate_request
from planner.workload.generate import generate
from planner.workload.resolve import resolve
from planner.workload.setting import Setting

Columns = npt.NDArray[np.float64]
SHARES = ("weights_cpu", "weights_disk", "kv_cpu", "kv_disk", "activations_cpu")
TOGETHER = (("weights_cpu", "weights_disk"), ("kv_cpu", "kv_disk"))  # shares of one class
PHASES = ("prefill", "decode")
CHANNELS = ("work_s", "load_s", "store_s", "disk_s")
# Where the experts' convex cost bends, as shares of all experts.
EXPERT_BENDS = (0.5, 0.75, 0.9, 1.0)
DIGITS = 4
HEADROOM = 0.998  # rounded shares must still fit
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
GIB = 1024.0**3
# What a GiB too much in a tier costs a programme in seconds: more than any pass takes.
SECONDS_PER_GIB_OVER = 1e7
TOLERANCE_GIB = 1e-6
HAIR = 1e-4


@dataclass(frozen=True)
class Costs:
    """One placement at every micro-batch size: seconds by phase and channel, bytes by tier."""

    channels_s: Columns
    tiers_bytes: Columns


@dataclass(frozen=True)
class Move:
    """A piece of one share that leaves the device, from a start to an end."""

    share: str
    start: float
    end: float

    @property
    def width(self) -> float:
        """Return how much of the share the piece is."""
        return self.end - self.start


@dataclass(frozen=True)
class Placement:
    """Shares that leave the device for one micro-batch size, and the estimate that proves it."""

    offload: OffloadSpec
    micro_batch_size: int
    estimate: Estimate


class _Channels(Unrecorded):
    """Computes terms as columns, and keeps what overlaps by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, Any]] = {}

    def term(self, formula: Equation[Any], line: Line, /, *args: Any, **kwargs: Any) -> float:
        """Return the formula's value; remember the channels of what works beside each other."""
        if formula is overlapped_seconds:
            self.found[line.group] = kwargs
        return super().term(formula, line, *args, **kwargs)


def costs_of(setting: Setting, offload: OffloadSpec, sizes: Sequence[int]) -> Costs:
    """Return what a placement costs at each micro-batch size.

    Raises:
        TypeError: the setting generates no batch.
    """
    workload = setting.workload
    if not isinstance(workload, GenerateWorkload):
        raise TypeError("only generated batches are placed")
    fields = {**dict(setting.strategy), "offload": offload}
    fields["micro_batch_size"] = np.array(sizes, dtype=np.float64)
    placed = replace(setting, strategy=Strategy.model_construct(**fields))
    ledger = _Channels()
    outcome = generate(placed, workload, ledger)
    found = np.zeros((len(PHASES), len(CHANNELS), len(sizes)))
    for row, phase in enumerate(PHASES):
        found[row, 0] = sum(outcome.phases[phase].values())
        for column, channel in enumerate(CHANNELS):
            if phase in ledger.found:
                found[row, column] = ledger.found[phase][channel]
    memory = outcome.memory
    tiers = np.zeros((3, len(sizes)))
    for tier, held in enumerate((memory.peak_bytes, memory.host_bytes, memory.disk_bytes)):
        tiers[tier] = held
    return Costs(found, tiers)


def moves_of(setting: Setting, shares: Iterable[str] = SHARES) -> tuple[Move, ...]:
    """Return the pieces that may leave the device: a whole share each, experts in several."""
    counts = setting.counts
    bends = [0.0, 1.0]
    if setting.model.is_moe:
        experts = counts.experts / counts.layer_linear
        bends = sorted({0.0, 1.0, *(experts * bend for bend in EXPERT_BENDS)})
    whole = [0.0, 1.0]
    return tuple(
        Move(share, start, end)
        for share in shares
        for start, end in pairwise(bends if share == "weights_cpu" else whole)
    )


@dataclass(frozen=True)
class Programme:
    """What leaving the device costs: a base, and how it changes as each piece alone leaves."""

    moves: tuple[Move, ...]
    base: Costs
    channel_slopes: Columns
    tier_slopes: Columns

    @property
    def sizes(self) -> int:
        """Return how many micro-batch sizes the programme has a block for."""
        return int(self.base.tiers_bytes.shape[-1])

    def rows(self, block: int, limits_bytes: Columns) -> tuple[Columns, Columns]:
        """Return the inequalities of one block: channels within phases, tiers within limits.

        The unknowns are the pieces, the seconds of both phases, and the GiB too much.
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
            left = limits_bytes[tier] - self.base.tiers_bytes[tier, block]
            bounds.append(left / GIB)
        for pair in TOGETHER:
            within = [float(move.share in pair) for move in self.moves]
            rows.append([*within, *np.zeros(times + 1)])
            bounds.append(1.0)
        return np.array(rows), np.array(bounds)


def programme_of(
    setting: Setting, sizes: Sequence[int], shares: Iterable[str] = SHARES
) -> Programme:
    """Return the programme of a setting, each coefficient an estimate of its own."""
    moves = moves_of(setting, shares)
    base = costs_of(setting, OffloadSpec(), sizes)
    known = {(move.share, 0.0): base for move in moves}
    for move in moves:
        away = OffloadSpec.model_validate({move.share: move.end})
        known[move.share, move.end] = costs_of(setting, away, sizes)
    channels, tiers = [], []
    for move in moves:
        before, after = known[move.share, move.start], known[move.share, move.end]
        channels.append((after.channels_s - before.channels_s) / move.width)
        tiers.append((after.tiers_bytes - before.tiers_bytes) / move.width)
    return Programme(moves, base, np.array(channels), np.array(tiers))


def solve(
    programme: Programme, limits_bytes: Columns, steps: float
) -> list[tuple[float, OffloadSpec] | None]:
    """Return the seconds and the shares of least time of each block, or nothing if none fit.

    ``steps`` are the decode steps that follow one prefill.
    """
    # Loaded here: the solver takes half a second, and few questions need it.
    from scipy.optimize import linprog
    from scipy.sparse import block_diag

    blocks = [programme.rows(block, limits_bytes) for block in range(programme.sizes)]
    goals = [
        [*_reluctance(programme, block, steps), 1.0, steps, SECONDS_PER_GIB_OVER]
        for block in range(programme.sizes)
    ]
    ranges = [(0.0, move.width) for move in programme.moves] + [(0.0, None)] * 3
    solved = linprog(
        np.concatenate(goals),
        A_ub=block_diag([rows for rows, _ in blocks], format="csr"),
        b_ub=np.concatenate([bounds for _, bounds in blocks]),
        bounds=ranges * programme.sizes,
        method="highs",
    )
    if not solved.success:
        return [None] * programme.sizes
    found: list[tuple[float, OffloadSpec] | None] = []
    for unknowns in solved.x.reshape(programme.sizes, -1):
        *pieces, prefill, decode, over = unknowns
        fits = over <= TOLERANCE_GIB
        found.append((prefill + steps * decode, _shares(programme, pieces)) if fits else None)
    return found


def _reluctance(programme: Programme, block: int, steps: float) -> list[float]:
    """Return a hair of seconds for each piece that leaves, so that of equals the nearest wins."""
    prefill, decode = programme.base.channels_s[:, 0, block]
    hair = HAIR * float(prefill + steps * decode)
    return [hair * (2 if move.share.endswith("disk") else 1) for move in programme.moves]


def _shares(programme: Programme, pieces: Sequence[float]) -> OffloadSpec:
    """Return the pieces of each share together, rounded."""
    whole = dict.fromkeys(SHARES, 0.0)
    for move, piece in zip(programme.moves, pieces, strict=True):
        whole[move.share] += float(piece)
    return OffloadSpec.model_validate(
        {name: min(1.0, abs(round(share, DIGITS))) for name, share in whole.items()}
    )


def limits_of(setting: Setting, usable_bytes: float) -> Columns:
    """Return the bytes that device, host and disk may hold; what nobody said is unlimited."""
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
    """Yield placements of a request, the fastest first, each proven by its estimate.

    Raises:
        PlannerError: the request itself is wrong.
    """
    changed = {"micro_batch_size": sizes[0], "offload": None}
    strategy = request.strategy.model_copy(update=changed)
    setting = resolve(request.model_copy(update={"strategy": strategy}))
    workload = setting.workload
    if not isinstance(workload, GenerateWorkload):
        return
    usable = generate(setting, workload, Ledger()).memory.usable_bytes
    steps = max(0, workload.output_tokens - 1)
    limits = limits_of(setting, usable)
    told: list[tuple[float, OffloadSpec, int]] = []
    for offered in _offered(setting, tuple(shares)):
        solved = solve(programme_of(setting, sizes, offered), limits, steps)
        told = [(*one, size) for one, size in zip(solved, sizes, strict=True) if one is not None]
        if told:
            break
    for _, offload, size in sorted(told, key=lambda one: (one[0], one[2])):
        placed = strategy.model_copy(update={"offload": offload, "micro_batch_size": size})
        found = estimate_request(request.model_copy(update={"strategy": placed}), explain=False)
        if found.fits:
            yield Placement(offload, size, found)


def _offered(setting: Setting, shares: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the shares that may leave: of experts to a disk only where the host has no room.

    Pieces of the experts' convex cost hold for one tier; a second one would start it anew.
    """
    if setting.model.is_moe:
        yield tuple(share for share in shares if share != "weights_disk")
    yield shares


def placement_of(request: EstimateRequest, micro_batch_size: int) -> Placement | None:
    """Return the best placement of a request for one micro-batch size, proven by its estimate.

    Raises:
        PlannerError: the request itself is wrong.
    """
    return next(placements(request, [micro_batch_size]), None)


def best_placement(request: EstimateRequest, shares: Iterable[str] = SHARES) -> Placement | None:
    """Return the placement and micro-batch size of highest throughput, or nothing that fits.

    Raises:
        PlannerError: the request itself is wrong.
    """
    workload = request.workload
    if not isinstance(workload, GenerateWorkload):
        return None
    per_replica = max(1, workload.batch_size // (request.strategy.data_parallel_size or 1))
    asked = request.strategy.micro_batch_size
    sizes = [asked] if asked else sorted(set(micro_sizes(per_replica)))
    return next(placements(request, sizes, tuple(shares)), None)


def best_batch(request: EstimateRequest, batch_sizes: Iterable[int]) -> Placement | None:
    """Return the best placement over several batch sizes: what FlexGen's policy search answers.

    Raises:
        PlannerError: the request itself is wrong.
    """
    workload = request.workload
    found = (
        best_placement(
            request.model_copy(
                update={"workload": workload.model_copy(update={"batch_size": size})}
            )
        )
        for size in batch_sizes
    )
    kept = [placement for placement in found if placement is not None]
    return max(kept, key=tokens_per_second, default=None)


def tokens_per_second(placement: Placement) -> float:
    """Return a placement's throughput."""
    return placement.estimate.performance.tokens_per_second or 0.0


def placed_strategy(request: EstimateRequest, shares: Iterable[str] = SHARES) -> Strategy | None:
    """Return the request's strategy with its best placement, or nothing when none fits."""
    try:
        best = best_placement(request, shares)
    except PlannerError:
        return None
    if best is None:
        return None
    changed = {"offload": best.offload, "micro_batch_size": best.micro_batch_size}
    return request.strategy.model_copy(update=changed)
