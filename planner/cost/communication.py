"""Time of collectives, and of pipeline stages with their bubbles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from planner.cost.quantity import Flag, Quantity, any_of, ceil, equation, is_column, maximum, where
from planner.cost.weights import stage_layers, stage_vocabulary
from planner.specs.model import ModelSpec

# ---------------------------------------------------------------------------
# Communication time of collectives: latency plus volume over bandwidth.
#
# Ring collectives move ``(n-1)/n`` of the payload per pass; an all-reduce is a reduce-scatter and
# an all-gather. With one rank, every collective is free.
# ---------------------------------------------------------------------------


RING = "Thakur et al. 2005, optimisation of collective communication in MPICH"
SYMBOLS = {
    "payload_bytes": "S",
    "ranks": "n",
    "link_bytes_per_s": "B",
    "latency_s": "l",
    "count": "m",
}


@equation("t = m · (2 · (n-1)/n · S/B + l) for n > 1", unit="s", symbols=SYMBOLS, source=RING)
def all_reduce_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    count: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of ``count`` all-reduces of ``payload_bytes`` over ``ranks``."""
    volume = 2 * (ranks - 1) / ranks * payload_bytes
    return where(ranks > 1, count * (volume / link_bytes_per_s + latency_s), 0.0)


@equation("t = m · ((n-1)/n · S/B + l) for n > 1", unit="s", symbols=SYMBOLS, source=RING)
def all_gather_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    count: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of ``count`` all-gathers (or reduce-scatters) of the whole payload."""
    volume = (ranks - 1) / ranks * payload_bytes
    return where(ranks > 1, count * (volume / link_bytes_per_s + latency_s), 0.0)


@equation("t = (n-1) · m · (S/B + l)", unit="s", symbols=SYMBOLS)
def point_to_point_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    count: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of passing a payload through ``ranks`` pipeline stages."""
    return (ranks - 1) * count * (payload_bytes / link_bytes_per_s + latency_s)


@equation(
    "t = S / B",
    unit="s",
    symbols={"payload_bytes": "S", "link_bytes_per_s": "B"},
)
def transfer_seconds(*, payload_bytes: Quantity, link_bytes_per_s: Quantity) -> Quantity:
    """Return the seconds of moving bytes between a device, its host and its disk."""
    return payload_bytes / link_bytes_per_s


@equation(
    "t = m · (2 · (n-1)/n · S/B + l) for n > 1",
    unit="s",
    symbols=SYMBOLS,
    source="two all-to-alls, dispatch and combine",
)
def all_to_all_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    count: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of dispatching tokens to experts and combining their outputs."""
    volume = 2 * (ranks - 1) / ranks * payload_bytes
    return where(ranks > 1, count * (volume / link_bytes_per_s + latency_s), 0.0)


@equation(
    "t = c · (n-1)/n · S/B + k · l for n > 1",
    unit="s",
    symbols={
        **{name: symbol for name, symbol in SYMBOLS.items() if name != "count"},
        "ring_passes": "c",
        "starts": "k",
    },
    source=RING,
)
def ring_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    ring_passes: Quantity,
    starts: Quantity,
) -> Quantity:
    """Return the seconds of ``ring_passes`` around a ring, in ``starts`` collectives."""
    volume = ring_passes * (ranks - 1) / ranks * payload_bytes
    return where(ranks > 1, volume / link_bytes_per_s + starts * latency_s, 0.0)


# ---------------------------------------------------------------------------
# The share of the model per pipeline stage, and the slowest stage of a pipeline.
# ---------------------------------------------------------------------------


# Layer splits over pipeline stages with different devices, by dynamic programming.
#
# The slowest stage limits a pipeline, so the first objective is the smallest maximum; among these
# splits, the one with the smallest sum fills the pipeline fastest. Source: Zheng et al. 2022
# (Alpa), arXiv:2201.12023, section 5 (stages bounded by the slowest).


Table = npt.NDArray[np.float64]
EVENNESS = 1e-9
TINY = 1e-300
NEARLY = 1 + 1e-12  # tolerance for sums in a different order


def split_layers(seconds: Table) -> tuple[int, ...] | None:
    """Return the number of layers per stage, at least 1 each; None if nothing fits.

    ``seconds`` has a row per stage and a column per number of layers from 0 to all, infinite where
    the layers do not fit.

    >>> split_layers(np.array([[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0]]))
    (2, 1)
    """
    table = np.array(seconds, dtype=np.float64)
    table[:, 0] = np.inf
    slowest, _ = _fill(table, np.maximum)
    if not np.isfinite(slowest):
        return None
    table[table > slowest * NEARLY] = np.inf
    # Among equal sums, the smallest sum of squares is the most even split.
    _, layers = _fill(table + EVENNESS * table**2 / max(slowest, TINY), np.add)
    return layers


def split_in_flight(seconds: Table, in_flight: float) -> tuple[int, ...] | None:
    """Return the fastest split for ``in_flight`` micro-batches; None if nothing fits.

    A round takes the sum over all stages, but at least ``in_flight`` times the slowest stage. With
    one micro-batch only the sum counts, with one per stage only the slowest stage.

    >>> split_in_flight(np.array([[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0]]), 1)
    (2, 1)
    """
    if in_flight >= len(seconds):
        return split_layers(seconds)
    table = np.array(seconds, dtype=np.float64)
    table[:, 0] = np.inf
    least, layers = _fill(table, np.add)
    if not np.isfinite(least):
        return None
    if in_flight * _slowest(table, layers) <= least:
        return layers
    bounds = np.unique(table[np.isfinite(table)])
    low, high = -1, len(bounds) - 1
    # The sum falls as the bound rises: the optimum is next to their crossing.
    while high - low > 1:
        middle = (low + high) // 2
        crossed = _within(table, bounds[middle])[0] <= in_flight * bounds[middle]
        low, high = (low, middle) if crossed else (middle, high)
    candidates = [_within(table, bounds[at]) for at in (low, high) if at >= 0]
    return min(
        candidates,
        key=lambda candidate: max(candidate[0], in_flight * _slowest(table, candidate[1])),
    )[1]


def _within(table: Table, bound: float) -> tuple[float, tuple[int, ...]]:
    """Return the smallest sum with every stage within a bound, and its split."""
    return _fill(np.where(table > bound * NEARLY, np.inf, table), np.add)


def _slowest(table: Table, layers: tuple[int, ...]) -> float:
    return max(float(table[stage, count]) for stage, count in enumerate(layers))


def _fill(table: Table, combine: Callable[[Table, Table], Table]) -> tuple[float, tuple[int, ...]]:
    """Return the smallest combined time over all stages, and its split."""
    stages, counts = table.shape
    best = np.full(counts, np.inf)
    best[0] = 0.0
    earlier_layers = (
        np.arange(counts)[:, None] - np.arange(counts)[None, :]
    )  # layers on earlier stages
    chosen = np.zeros((stages, counts), dtype=np.int64)
    for stage in range(stages):
        earlier = np.where(earlier_layers >= 0, best[np.maximum(earlier_layers, 0)], np.inf)
        combined = combine(earlier, table[stage][None, :])
        chosen[stage] = combined.argmin(axis=1)
        best = combined.min(axis=1)
    remaining, layers = counts - 1, []
    for stage in reversed(range(stages)):
        layers.append(int(chosen[stage, remaining]))
        remaining -= layers[-1]
    return cast("float", best[-1]), tuple(reversed(layers))


@dataclass(frozen=True)
class StageShare:
    """The layers and vocabulary parameters of one pipeline stage."""

    layers: Quantity
    vocabulary: Quantity
    is_last: Flag


Column = npt.NDArray[np.float64]


def stage_shares(
    model: ModelSpec, stages: Quantity, split: Sequence[Quantity] = ()
) -> tuple[StageShare, ...]:
    """Return the share of the model per stage, by a given split of the layers or an even one.

    For a column of stage counts, return only the stages that can be the fullest: the first, the
    fullest inner one and the last.
    """
    if is_column(stages):
        return _bottleneck_stage_shares(model, cast("Column", stages))
    count = int(cast("float", stages))
    layers = split or stage_layers(model.num_hidden_layers, count)
    return tuple(
        StageShare(stage_count, stage_vocabulary(model, index, count), index == count - 1)
        for index, stage_count in enumerate(layers)
    )


def _bottleneck_stage_shares(model: ModelSpec, stages: Column) -> tuple[StageShare, ...]:
    counts, inverse = np.unique(stages, return_inverse=True)
    rows = np.array([_ends(model, int(count)) for count in counts], dtype=np.float64)
    ends = rows[inverse.reshape(stages.shape)]
    last = (stages == 1, np.zeros(stages.shape, dtype=bool), np.ones(stages.shape, dtype=bool))
    return tuple(StageShare(ends[..., at, 0], ends[..., at, 1], last[at]) for at in range(3))


def _ends(model: ModelSpec, count: int) -> list[tuple[int, int]]:
    """Return layers and vocabulary of the first, the fullest inner and the last stage."""
    # More stages than layers is invalid; such cells only need some value.
    layers = stage_layers(model.num_hidden_layers, min(count, model.num_hidden_layers))
    first, last = ((layers[at], stage_vocabulary(model, at % count, count)) for at in (0, -1))
    inner = [(count_of_stage, 0) for count_of_stage in layers[1:-1]]
    return [first, max(inner, default=first), last]


@dataclass(frozen=True)
class Pace:
    """The work of the slowest stage, which limits the pipeline.

    ``layers`` and ``heads`` are its layers and output heads; ``even_stages`` is the time of all
    stages divided by its own, at most the number of stages. ``even_work`` is the same ratio of
    FLOP, for stages with different devices.
    """

    layers: float
    heads: float
    even_stages: float
    even_work: float | None = None


@equation(
    "t_s = k · t_layer + t_rest",
    unit="s",
    symbols={"layers": "k", "layer_s": "t_layer", "rest_s": "t_rest"},
    source="of a micro-batch, forward and backward; the slowest stage sets the pace",
)
def stage_time(*, layers: Quantity, layer_s: Quantity, rest_s: Quantity) -> Quantity:
    """Return the seconds of a micro-batch on one stage: layers, embedding, head and sends."""
    return layers * layer_s + rest_s


@equation(
    "t = e · t_max",
    unit="s",
    symbols={"slowest_s": "t_max", "even_stages": "e"},
    source="one pass visits the stages in turn: e is their sum over the slowest of them",
)
def pass_time(*, slowest_s: Quantity, even_stages: Quantity) -> Quantity:
    """Return the seconds of a pass through stages with different times."""
    return slowest_s * even_stages


@equation(
    "t = t_pass · max(1, m/e)",
    unit="s",
    symbols={"pass_s": "t_pass", "in_flight": "m", "even_stages": "e"},
    source="m micro-batches go round; each waits for the slowest stage, t_pass/e a turn",
)
def paced_time(*, pass_s: Quantity, in_flight: Quantity, even_stages: Quantity) -> Quantity:
    """Return the seconds between two passes of a micro-batch when several share a pipeline."""
    return pass_s * maximum(1.0, in_flight / even_stages)


def pace_of(
    num_layers: int,
    stages: int,
    layer_parameters: float,
    head_parameters: float,
    chunks: float = 1,
) -> Pace:
    """Return the pace of the busiest stage, measured by parameters per token.

    With interleaved ``chunks`` of uneven layers, every chunk takes as long as the longest.

    >>> pace_of(8, 4, 1.0, 2.0)
    Pace(layers=2, heads=1, even_stages=2.5, even_work=None)
    """
    shares = stage_layers(num_layers, stages)
    most: float = max(shares)
    if any_of(chunks > 1):
        most = maximum(most, chunks * ceil(num_layers / (stages * chunks)))
    last = shares[-1]
    middle = most * layer_parameters if stages > 1 else 0.0
    end = last * layer_parameters + head_parameters
    whole = num_layers * layer_parameters + head_parameters
    inner = middle > end
    busiest = where(inner, middle, end)
    return Pace(where(inner, most, last), where(inner, 0, 1), whole / busiest)
