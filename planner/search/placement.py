"""Places weights, cache and activations over device, host memory and disk: FlexGen's programme.

Every time and every byte of a pass is linear in the shares that leave the device, so that a linear
programme finds the best shares of one split into micro-batches. Its coefficients are what the
planner's own estimate says when one share alone leaves; nothing of a formula is written twice.

Source: Sheng et al. 2023 (FlexGen), arXiv:2303.06865, section 4.3.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from planner.cost.equation import Ledger
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
TOGETHER = ((0, 1), (2, 3))  # shares of one class
PHASES = ("prefill", "decode")
CHANNELS = ("work s", "load s", "store s", "disk s")
DIGITS = 4
HEADROOM = 0.998  # rounded shares must still fit
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
GIB = 1024.0**3


@dataclass(frozen=True)
class Costs:
    """One placement: the seconds of each channel by phase, and the bytes of each tier."""

    channels_s: Columns
    tiers_bytes: Columns


@dataclass(frozen=True)
class Placement:
    """Shares that leave the device for one micro-batch size, and the estimate that proves it."""

    offload: OffloadSpec
    micro_batch_size: int
    estimate: Estimate


def costs_of(setting: Setting, offload: OffloadSpec) -> Costs:
    """Return what a placement costs, read from the record of the estimate."""
    workload = setting.workload
    if not isinstance(workload, GenerateWorkload):
        raise TypeError("only generated batches are placed")
    placed = replace(setting, strategy=setting.strategy.model_copy(update={"offload": offload}))
    ledger = Ledger()
    outcome = generate(placed, workload, ledger)
    found = np.zeros((len(PHASES), len(CHANNELS)))
    for row, phase in enumerate(PHASES):
        found[row, 0] = sum(outcome.phases[phase].values())
    for entry in ledger.entries:
        if entry.key == "overlap" and entry.group in PHASES:
            values = {one.name: float(one.value) for one in entry.inputs()}
            found[PHASES.index(entry.group)] = [values[name] for name in CHANNELS]
    memory = outcome.memory
    return Costs(found, np.array([memory.peak_bytes, memory.host_bytes, memory.disk_bytes]))


@dataclass(frozen=True)
class Programme:
    """What leaving the device costs: a base, and how it changes as each share alone leaves."""

    base: Costs
    slopes: tuple[Costs, ...]

    def rows(self, limits_bytes: Columns) -> tuple[Columns, Columns]:
        """Return the inequalities: channels within their phase, tiers within limits, shares."""
        times = len(PHASES)
        rows, bounds = [], []
        for phase, channel in product(range(times), range(len(CHANNELS))):
            at = (phase, channel)
            slopes = [cost.channels_s[at] - self.base.channels_s[at] for cost in self.slopes]
            ends = np.zeros(times)
            ends[phase] = -1.0
            rows.append([*slopes, *ends])
            bounds.append(-self.base.channels_s[at])
        for tier in np.flatnonzero(np.isfinite(limits_bytes)):
            before = self.base.tiers_bytes[tier]
            slopes = [(cost.tiers_bytes[tier] - before) / GIB for cost in self.slopes]
            rows.append([*slopes, *np.zeros(times)])
            bounds.append((limits_bytes[tier] - before) / GIB)
        for pair in TOGETHER:
            rows.append([float(index in pair) for index in range(len(SHARES) + times)])
            bounds.append(1.0)
        return np.array(rows), np.array(bounds)


def programme_of(setting: Setting) -> Programme:
    """Return the programme of a setting, each coefficient an estimate of its own."""
    slopes = [costs_of(setting, OffloadSpec.model_validate({name: 1.0})) for name in SHARES]
    return Programme(costs_of(setting, OffloadSpec()), tuple(slopes))


def solve(programme: Programme, limits_bytes: Columns, steps: float) -> OffloadSpec | None:
    """Return the shares of least time within the tiers' bytes, or nothing when none fit.

    ``steps`` are the decode steps that follow one prefill.
    """
    # Loaded here: the solver takes half a second, and few questions need it.
    from scipy.optimize import linprog

    rows, bounds = programme.rows(limits_bytes)
    goal = np.array([*np.zeros(len(SHARES)), 1.0, steps])
    ranges = [(0.0, 1.0)] * len(SHARES) + [(0.0, None)] * len(PHASES)
    solved = linprog(goal, A_ub=rows, b_ub=bounds, bounds=ranges, method="highs")
    if not solved.success:
        return None
    pairs = zip(SHARES, solved.x, strict=False)
    return OffloadSpec.model_validate(
        {name: abs(round(float(value), DIGITS)) for name, value in pairs}
    )


def limits_of(setting: Setting, usable_bytes: float) -> Columns:
    """Return the bytes that device, host and disk may hold; what nobody said is unlimited."""
    cluster = setting.cluster
    host, disk = cluster.host_memory_bytes, cluster.disk_capacity_bytes
    nodes = cluster.nodes
    return HEADROOM * np.array(
        [usable_bytes, (host or np.inf) * nodes, (disk or np.inf) * nodes], dtype=float
    )


def placement_of(request: EstimateRequest, micro_batch_size: int) -> Placement | None:
    """Return the best placement of a request for one micro-batch size, proven by its estimate.

    Raises:
        PlannerError: the request itself is wrong.
    """
    changed = {"micro_batch_size": micro_batch_size, "offload": None}
    strategy = request.strategy.model_copy(update=changed)
    setting = resolve(request.model_copy(update={"strategy": strategy}))
    workload = setting.workload
    if not isinstance(workload, GenerateWorkload):
        return None
    usable = generate(setting, workload, Ledger()).memory.usable_bytes
    steps = max(0, workload.output_tokens - 1)
    offload = solve(programme_of(setting), limits_of(setting, usable), steps)
    if offload is None:
        return None
    placed = strategy.model_copy(update={"offload": offload})
    found = estimate_request(request.model_copy(update={"strategy": placed}), explain=False)
    return Placement(offload, micro_batch_size, found) if found.fits else None


def micro_sizes(batch_size: int) -> Iterator[int]:
    """Yield the micro-batch sizes that divide a batch, and the batch itself."""
    for size in (*MICRO_BATCHES, batch_size):
        if size <= batch_size and batch_size % size == 0:
            yield size


def best_placement(request: EstimateRequest) -> Placement | None:
    """Return the placement and micro-batch size of highest throughput, or nothing that fits.

    Raises:
        PlannerError: the request itself is wrong.
    """
    workload = request.workload
    if not isinstance(workload, GenerateWorkload):
        return None
    per_replica = workload.batch_size // (request.strategy.data_parallel_size or 1)
    found = (placement_of(request, size) for size in sorted(set(micro_sizes(per_replica))))
    return fastest(found)


def best_batch(request: EstimateRequest, batch_sizes: Iterable[int]) -> Placement | None:
    """Return the best placement over several batch sizes: what FlexGen's policy search answers.

    Raises:
        PlannerError: the request itself is wrong.
    """
    workload = request.workload
    return fastest(
        best_placement(
            request.model_copy(
                update={"workload": workload.model_copy(update={"batch_size": size})}
            )
        )
        for size in batch_sizes
    )


def fastest(found: Iterable[Placement | None]) -> Placement | None:
    """Return the placement of highest throughput, or nothing when there is none."""
    kept = [placement for placement in found if placement is not None]
    return max(kept, key=tokens_per_second, default=None)


def tokens_per_second(placement: Placement) -> float:
    """Return a placement's throughput."""
    return placement.estimate.performance.tokens_per_second or 0.0


def placed_strategy(request: EstimateRequest) -> Strategy | None:
    """Return the request's strategy with its best placement, or nothing when none fits."""
    try:
        best = best_placement(request)
    except PlannerError:
        return None
    if best is None:
        return None
    changed = {"offload": best.offload, "micro_batch_size": best.micro_batch_size}
    return request.strategy.model_copy(update=changed)
