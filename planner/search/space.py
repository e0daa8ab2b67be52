"""Blocks of strategies, and the formats that an engine runs on a device."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from planner.catalog.engines import get_engine, refusal, serving_engine, sixteen_bit_dtype
from planner.cost.weights import SIXTEEN_BIT, WIDE
from planner.search.question import Question
from planner.specs.base import Dtype, JsonObject
from planner.specs.workload import Strategy
from planner.workload.resolve import default_activation_dtype
from planner.workload.setting import Setting

# A block of strategies: shared fields as plain values, varying fields as a grid of numbers.


Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


# Values that a strategy omits because they have no effect.
NEUTRAL = {
    "zero_shard_size": 0,
    "context_parallel_size": 1,
    "virtual_pipeline_size": 1,
    "attention_data_parallel_size": 1,
    "max_batch_tokens": 0,
    "chunked_prefill": 0,
    "kv_cache_dtype": None,
}
FLAGS = frozenset({"sequence_parallel", "chunked_prefill"})


def axes(choices: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return each choice along its own dimension, so that the choices broadcast to a grid.

    >>> [axis.shape for axis in axes({"t": np.ones(2), "c": np.ones(3)}).values()]
    [(2, 1), (1, 3)]
    """
    count = len(choices)
    return {
        name: values.reshape([-1 if axis == own else 1 for axis in range(count)])
        for own, (name, values) in enumerate(choices.items())
    }


def scalars(columns: Mapping[str, object]) -> JsonObject:
    """Return one-element columns as scalars: scalars are costed several times faster.

    >>> scalars({"tensor": np.ones((1, 1)), "data": 2})
    {'tensor': 1.0, 'data': 2}
    """
    return {
        name: values.item() if isinstance(values, np.ndarray) and values.size == 1 else values
        for name, values in columns.items()
    }


@dataclass(frozen=True)
class Block:
    """Strategies that differ only in numbers.

    ``shared`` has the fields common to all strategies. ``sizes`` has the other fields as arrays
    that broadcast to one grid. ``setting`` is the shared setting with the grid in its layout.
    ``keep`` marks the grid cells that are valid strategies. ``caches`` lists the KV cache formats
    that the size ``kv_cache_dtype`` indexes; the engine's default comes first.
    """

    question: Question
    shared: JsonObject
    sizes: Mapping[str, Numbers]
    setting: Setting
    keep: Flags
    caches: tuple[Dtype | None, ...] = (None,)

    @cached_property
    def cells(self) -> Rows:
        """Return the flat positions of the strategies in the grid."""
        return cast("Rows", np.flatnonzero(self.keep))

    def column(self, values: object) -> Numbers:
        """Return a figure of the whole grid as one number per strategy."""
        numbers = np.asarray(values, dtype=np.float64)
        if not numbers.ndim:  # a broadcast of one number takes several times as long
            return np.full(len(self.cells), numbers)
        grid = numbers
        if numbers.shape != self.keep.shape:
            grid = np.broadcast_to(numbers, self.keep.shape)
        return grid[self.keep]

    def fields(self, row: int) -> JsonObject:
        """Return the fields of one strategy, without sizes that have no effect."""
        where = np.unravel_index(int(self.cells[row]), self.keep.shape)
        own: dict[str, Any] = {}
        for name, values in self.sizes.items():
            number = np.broadcast_to(values, self.keep.shape)[where].item()
            own[name] = bool(number) if name in FLAGS else int(number)
        if "kv_cache_dtype" in own:
            own["kv_cache_dtype"] = self.caches[own["kv_cache_dtype"]]
        pinned = self.question.pinned
        explicit = {n: v for n, v in own.items() if n in pinned or NEUTRAL.get(n) != v}
        return {**self.shared, **explicit}

    def strategy(self, row: int) -> Strategy:
        """Return one strategy of the block."""
        return Strategy.model_validate(self.fields(row))

    @property
    def compact(self) -> "Block":
        """Return the block with its strategies in one row, so that no empty cell is costed."""

        def row(values: object) -> object:
            return self.column(values) if isinstance(values, np.ndarray) else values

        layout = self.setting.layout
        rows = {field.name: row(getattr(layout, field.name)) for field in fields(layout)}
        return replace(
            self,
            sizes={name: self.column(values) for name, values in self.sizes.items()},
            setting=replace(self.setting, layout=replace(layout, **cast("JsonObject", rows))),
            keep=np.ones(len(self.cells), dtype=bool),
        )


MAX_TENSOR_RANKS = 16
FRUGAL = frozenset({"cost", "energy", "memory"})
# (weights, activations) that each kind of engine supports.
RUNNER_FORMATS: tuple[tuple[Dtype, Dtype], ...] = (
    ("bf16", "bf16"),
    ("int8", "bf16"),
    ("int4", "bf16"),
)
SERVING_FORMATS: tuple[tuple[Dtype, Dtype], ...] = (
    ("bf16", "bf16"),
    ("fp8", "fp8"),
    ("int8", "int8"),
    ("int4", "bf16"),
    ("nvfp4", "nvfp4"),
)
FULL_PRECISION_CPU: tuple[tuple[Dtype, Dtype], ...] = (("fp32", "fp32"),)
# Formats that need units of their own, without which nobody converts a checkpoint to them.
NEEDS_PEAK: frozenset[Dtype] = frozenset({"fp8", "nvfp4"})


def formats(question: Question) -> tuple[tuple[Dtype, Dtype], ...]:
    """Return the (weight, activation) formats that the engine and the devices support."""
    return tuple(
        pair for pair in candidate_formats(question) if not refusal_reason(question, pair)
    )


def refused_formats(question: Question) -> dict[Dtype, str]:
    """Return why the engine refuses formats on these devices, by weight dtype."""
    return {
        pair[0]: reason
        for pair in candidate_formats(question)
        if (reason := refusal_reason(question, pair))
    }


def refusal_reason(question: Question, pair: tuple[Dtype, Dtype]) -> str | None:
    """Return why the engine refuses a pair of formats on one of the devices, None if it runs."""
    for device in question.devices:
        engine = get_engine(question.request.engine, device.kind)
        found = refusal(engine, device, question.model, (*pair, None))
        if found:
            return found.message
    return None


def candidate_formats(question: Question) -> tuple[tuple[Dtype, Dtype], ...]:
    """Return the formats that an engine of this kind may run, before the devices are asked."""
    device, model = question.device, question.model
    engine = get_engine(question.request.engine, device.kind)
    published = model.weight_dtype
    # An engine that converts checkpoints to files of its own keeps a format that files have.
    as_stored = serving_engine(engine.key).starts_as_stored or published in engine.file_formats
    if as_stored and published is not None and published not in WIDE:
        return ((published, _activation(published, question)),)
    offered = RUNNER_FORMATS if engine.role == "runner" else SERVING_FORMATS
    half = sixteen_bit_dtype(device, published)
    pairs = [
        (
            half if weight in SIXTEEN_BIT else weight,
            half if activation in SIXTEEN_BIT else activation,
        )
        for weight, activation in offered
        if weight not in NEEDS_PEAK
        or all(weight in each.peak_flops_per_second for each in question.devices)
    ]
    if engine.role == "runner" and device.kind == "cpu":
        pairs = [*FULL_PRECISION_CPU, *pairs]
    stored_alone = published in NEEDS_PEAK and not serving_engine(engine.key).loads_gguf_alone
    if stored_alone and any(weight == published for weight, _ in pairs):
        return tuple(pair for pair in pairs if pair[0] == published)
    return tuple(pairs)


def _activation(weight: Dtype, question: Question) -> Dtype:
    """Return the activations of a stored format; those of the weakest device."""
    computed: Dtype | None = "int8" if weight == "int8" else None
    wanted = [default_activation_dtype(weight, device, computed) for device in question.devices]
    return next((dtype for dtype in wanted if dtype in WIDE), wanted[0])
