"""How many layers each stage of a served pipeline takes where the stages' devices are unlike.

A stage is busy with a request while it reads the prompt and while it makes its share of each
token. Dynamic programming proposes splits in which requests go round soonest within the memory of
each stage: for prompts, for tokens and for both, with many requests at once and with few. What is
asked for then decides by its own formulas, among these and what a few moved layers make of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import cast

import numpy as np
import numpy.typing as npt

from planner.cost.equation import Unrecorded
from planner.cost.partition import split_in_flight
from planner.cost.quantity import Quantity
from planner.cost.weights import stage_layers
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.workload.capacity import room_by_stage
from planner.workload.generate import (
    batch_load,
    decode_work,
    generate,
    micro_batches,
    prefill_work,
)
from planner.workload.inference_memory import inference_memory, stage_limits
from planner.workload.operators import Pass
from planner.workload.outcome import Outcome
from planner.workload.serve import MAX_SEARCHED_CONCURRENCY, serve
from planner.workload.setting import Setting
from planner.workload.staged import stage_passes

Floats = npt.NDArray[np.float64]
Splits = npt.NDArray[np.int64]
GRID_STEP = 4.0
MOVED_LAYERS = (1, 2, 4)
MAX_ROUNDS = 6
FEW_STAGES = 4  # beyond, layers move between neighbours alone
DIGITS = 10  # rates that differ beyond these are equal: one cell and a column decide alike


@dataclass(frozen=True)
class _Times:
    """Seconds of one request on each stage by its layers, and how many requests it has room for.

    Rows are stages, columns numbers of layers from none to all; ``held`` requests at once are
    tried, one a slice of the last dimension, of which ``in_flight`` micro-batches go round.
    """

    reading: Floats
    writing: Floats
    room: Floats
    held: Floats
    in_flight: Floats

    def proposals(self, known: dict[bytes, tuple[int, ...] | None]) -> Iterator[tuple[int, ...]]:
        """Yield the best splits for prompts, for tokens and for both, as memory allows.

        ``known`` keeps what was found: cells of a block have many a table in common.
        """
        stages, places = self.room.shape
        yield stage_layers(places - 1, stages)
        tables = (self.reading + self.writing, self.reading, self.writing)
        for table, at in product(tables, range(len(self.held))):
            bounded = np.where(self.room >= self.held[at], table[..., at], np.inf)
            key = bounded.tobytes() + self.in_flight[at].tobytes()
            if key not in known:
                known[key] = split_in_flight(bounded, float(self.in_flight[at]))
            found = known[key]
            if found is not None:
                yield found


def split_of(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> tuple[Quantity, ...]:
    """Return how many layers each stage takes; of a block's columns, one split a row."""
    shape = np.broadcast_shapes(*(np.shape(value) for value in vars(setting.layout).values()))
    best = _best(setting, workload, _proposed(setting, workload, shape))
    for _ in range(MAX_ROUNDS):
        better = _best(setting, workload, _moved(best))
        if np.array_equal(better, best):
            break
        best = better
    return tuple(one if shape else int(one) for one in best)


def _proposed(
    setting: Setting, workload: ServeWorkload | GenerateWorkload, shape: tuple[int, ...]
) -> Splits:
    """Return proposed splits: one a row, then the stages, then the cells of a block."""
    if isinstance(workload, ServeWorkload):
        times = _served(setting, workload, shape)
    else:
        times = _generated(setting, workload, shape)
    cells, known = {}, dict[bytes, tuple[int, ...] | None]()
    for cell in np.ndindex(*shape):
        own = replace(
            times,
            reading=times.reading[(..., *cell)],
            writing=times.writing[(..., *cell)],
            room=times.room[(..., *cell)],
        )
        cells[cell] = list(dict.fromkeys(own.proposals(known)))
    most = max(map(len, cells.values()))
    found = np.empty((most, len(setting.places), *shape), dtype=np.int64)
    for cell, splits in cells.items():
        found[(slice(None), slice(None), *cell)] = splits + splits[:1] * (most - len(splits))
    return found


def _moved(split: Splits) -> Splits:
    """Return a split and those that some moved layers make of it."""
    found = [split]
    stages = len(split)
    pairs = permutations(range(stages), 2)
    near = [pair for pair in pairs if stages <= FEW_STAGES or abs(pair[0] - pair[1]) == 1]
    for (giver, taker), layers in product(near, MOVED_LAYERS):
        other = split.copy()
        given = np.minimum(layers, split[giver] - 1)  # every stage keeps one
        other[giver] -= given
        other[taker] += given
        found.append(other)
    return np.stack(found)


def _best(setting: Setting, workload: ServeWorkload | GenerateWorkload, splits: Splits) -> Splits:
    """Return the split that fits and serves most, and among equals the one that waits least."""
    shape = splits[:, 0].shape
    columns = cast("tuple[Quantity, ...]", tuple(splits[:, at] for at in range(splits.shape[1])))
    outcome = _costed(replace(setting, split=columns), workload)
    performance = outcome.performance
    short = np.where(outcome.fits, 0.0, outcome.memory.filled_ratio)
    keys = (performance.latency_seconds, -cast("float", performance.requests_per_second), short)
    rounded = [_rounded(np.broadcast_to(np.asarray(key), shape)) for key in keys]
    first = np.lexsort(rounded, axis=0)[0]
    chosen: Splits = np.take_along_axis(splits, first[None, None], axis=0)[0]
    return chosen


def _costed(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> Outcome:
    if isinstance(workload, ServeWorkload):
        return serve(setting, workload, Unrecorded())
    return generate(setting, workload, Unrecorded())


def _rounded(values: Floats) -> Floats:
    size = np.where(values == 0, 1.0, np.abs(values))
    unit = 10.0 ** (np.floor(np.log10(size)) - DIGITS)
    found: Floats = np.rint(values / unit) * unit
    return found


def _served(setting: Setting, workload: ServeWorkload, shape: tuple[int, ...]) -> _Times:
    stages = len(setting.places)
    free = _with_any_layers(setting, shape)
    room = _from_none([most for most, _ in room_by_stage(free, workload)], free, shape)
    held = _grid(setting, workload, float(room.max(axis=1).min(axis=0).max()))
    along = held.reshape(-1, *(1 for _ in shape))
    context = workload.input_tokens + workload.output_tokens / 2
    cached = workload.input_tokens * workload.prefix_share_ratio
    lanes = float(setting.layout.attention_data)
    prompt = prefill_work(setting, lanes, workload.input_tokens - cached, cached)
    micro = cast("float", np.maximum(1.0, along / stages))
    steps = (workload.output_tokens - 1) / micro
    whole = (len(held), *shape)
    return _Times(
        reading=_seconds(setting, prompt, 1 / lanes, whole),
        writing=_seconds(setting, decode_work(setting, micro, context), steps, whole),
        room=room,
        held=held,
        in_flight=np.minimum(held, stages),
    )


def _grid(setting: Setting, workload: ServeWorkload, most: float) -> Floats:
    """Return the requests at once to try, of one replica: as many as are offered and fit."""
    callers = workload.concurrency or workload.burst_requests
    offered = callers / setting.layout.data if callers else MAX_SEARCHED_CONCURRENCY
    top = max(1.0, min(float(np.max(offered)), most))
    count = int(np.ceil(np.log(top) / np.log(GRID_STEP)))
    grid = np.unique(np.maximum(1.0, top / GRID_STEP ** np.arange(count + 1)))
    # Between one request and one a stage the first and the last of these say enough.
    kept: Floats = grid[(grid == top) | (grid == 1.0) | (grid >= len(setting.places))]
    return kept


def _generated(setting: Setting, workload: GenerateWorkload, shape: tuple[int, ...]) -> _Times:
    free = _with_any_layers(setting, shape)
    memory = inference_memory(free, Unrecorded(), batch_load(setting, workload))
    pairs = zip(memory.stages, stage_limits(setting), strict=True)
    room = [np.where(stage.peak_bytes <= usable, np.inf, 0.0) for stage, (_, usable) in pairs]
    batch = workload.batch_size / setting.layout.data
    micro = batch / micro_batches(setting, batch)
    context = workload.input_tokens + workload.output_tokens / 2
    steps = float(workload.output_tokens - 1)
    prompts = prefill_work(setting, micro, workload.input_tokens)
    whole = (1, *shape)
    return _Times(
        reading=_seconds(setting, prompts, 1.0, whole),
        writing=_seconds(setting, decode_work(setting, micro, context), steps, whole),
        room=_from_none(room, free, shape),
        held=np.ones(1),
        in_flight=np.ones(1),
    )


def _with_any_layers(setting: Setting, shape: tuple[int, ...]) -> Setting:
    """Return a setting in which every stage holds each number of layers from one to all."""
    counts = np.arange(1.0, setting.model.num_hidden_layers + 1)
    column = counts.reshape(-1, *(1 for _ in shape))
    return replace(setting, split=(column,) * len(setting.places))


def _from_none(rows: Sequence[object], free: Setting, shape: tuple[int, ...]) -> Floats:
    """Return the rows of each stage by its layers, from none to all."""
    whole = (free.model.num_hidden_layers, *shape)
    found = np.stack([np.broadcast_to(np.asarray(row), whole) for row in rows])
    return np.concatenate([np.zeros((len(rows), 1, *shape)), found], axis=1)


def _seconds(setting: Setting, work: Pass, times: float, shape: tuple[int, ...]) -> Floats:
    """Return the seconds of a pass on each stage by its layers, from none to all."""
    total = setting.model.num_hidden_layers
    counts = np.arange(0.0, total + 1).reshape(-1, *(1 for _ in shape))
    passes = list(stage_passes(setting, Unrecorded(), work))
    last = len(passes) - 1
    return np.stack(
        [
            np.broadcast_to(
                times * found.of(counts, total, is_last=stage == last).total_s,
                (total + 1, *shape),
            )
            for stage, found in enumerate(passes)
        ]
    )
