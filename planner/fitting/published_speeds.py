"""Evaluations on what no factor was fitted to: published speeds and layout sweeps."""

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.fitting.evidence import Row, table
from planner.fitting.held_out import summary
from planner.fitting.left_out import STEP, LeftOut
from planner.fitting.serving.factors import SEEN, UNSEEN
from planner.specs.estimate import Estimate, EstimateRequest
from planner.workload.estimator import estimate_request
from planner.workload.outcome import SOURCE_SPREAD, Z_80

# Evaluate the planner's first choice of layout on published sweeps.
#
# A sweep is one source's runs of one model, batch and number of devices. Predictions are made with
# the sweep's model left out of the fit.


SAME = (
    "source_id",
    "engine",
    "model",
    "num_attention_heads",
    "gpu",
    "num_gpus",
    "global_batch_size",
    "sequence_length",
    "precision",
    "method",
)
LAYOUT = ("tp", "pp", "micro_batch_size", "recompute", "zero_stage")
MIN_LAYOUTS = 4
WITHIN = 0.03


@dataclass(frozen=True)
class Choice:
    """The predicted best layout of a sweep, compared with the fastest measured one."""

    source: str
    model: str
    devices: int
    runs: int
    chosen: str
    best: str
    lost: float

    @property
    def is_close(self) -> bool:
        """Return whether the choice is within 3 % of the fastest."""
        return self.lost <= WITHIN


def layout_of(row: Row) -> str:
    """Return a row's layout as text.

    >>> layout_of({"tp": "2", "pp": "4", "micro_batch_size": "1", "recompute": "none",
    ...            "zero_stage": "1"})
    'tensor 2, pipeline 4, micro-batch 1, none recomputed'
    """
    return (
        f"tensor {row['tp'] or 1}, pipeline {row['pp'] or 1}, "
        f"micro-batch {row['micro_batch_size'] or '?'}, {row['recompute'] or '?'} recomputed"
    )


def choices(predictions: Iterable[LeftOut]) -> list[Choice]:
    """Return the choice in every sweep of at least four runs over at least two layouts.

    For an engine with only one model, the source is left out instead of the model.
    """
    steps = [row for row in predictions if row.figure == STEP]
    predictions_by_row: dict[str, LeftOut] = {}
    for error_class in (UNSEEN, SEEN):
        predictions_by_row |= {row.row_id: row for row in steps if row.error_class == error_class}
    sweeps: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in table("training"):
        if row["row_id"] in predictions_by_row:
            sweeps[tuple(row[name] for name in SAME)].append(row)
    valid_sweeps = (rows for _, rows in sorted(sweeps.items()) if _is_sweep(rows))
    return [_choice(rows, predictions_by_row) for rows in valid_sweeps]


def _is_sweep(rows: list[Row]) -> bool:
    layouts = {tuple(row[name] for name in LAYOUT) for row in rows}
    return len(rows) >= MIN_LAYOUTS and len(layouts) > 1


def _choice(rows: list[Row], predictions_by_row: dict[str, LeftOut]) -> Choice:
    first = min(rows, key=lambda row: predictions_by_row[row["row_id"]].predicted)
    best = min(rows, key=lambda row: predictions_by_row[row["row_id"]].measured)
    chosen_seconds, fastest = (predictions_by_row[row["row_id"]].measured for row in (first, best))
    return Choice(
        source=first["source_id"],
        model=first["model"],
        devices=int(first["num_gpus"]),
        runs=len(rows),
        chosen=layout_of(first),
        best=layout_of(best),
        lost=chosen_seconds / fastest - 1,
    )


COVERED = 0.8
WORDS = """Speeds of serving that others published with their conditions, asked as they were
measured and never fitted: decode time per token, or output tokens per second where only they are
stated. Every row is kept that states its conditions; none uses speculative decoding or a shared
prefix. The sources of the first line gave the spread between sources that 80 % intervals of
serving include. Those of the second check it, but not blindly: both lines were looked at before
the width was fixed (0.37 became 0.34), and most rows of the second are of one collection
(sgl-cookbook) whose publisher is in the first line too.
"""
FRESH_WORDS = """A third set was written down before the planner was asked, then asked once;
nothing is tuned to it. NVIDIA and Qwen publish two of its collections and are in the first line
too. What the tables do not say is assumed: SXM cards, default settings, and the lengths in each
row's notes (`planner/validation/fresh_speeds.csv`). Ratios are predicted over published
times per token.
"""


@dataclass(frozen=True)
class PublishedSpeed:
    """A published figure and its prediction; the log ratio is positive if predicted too slow."""

    row: Row
    log_ratio: float
    spread: float

    @property
    def error(self) -> float:
        """Return the relative error of the predicted time per token."""
        return math.expm1(self.log_ratio)

    @property
    def is_covered(self) -> bool:
        """Return whether the 80 % interval holds the published figure."""
        return abs(self.log_ratio) <= Z_80 * self.spread

    @property
    def gives_spread(self) -> bool:
        """Return whether the row's source gives the spread, instead of validating it."""
        return zlib.crc32(collection_of(self.row).encode()) % 2 == 0

    @property
    def between_sources(self) -> float:
        """Return the least spread between sources with which the interval holds the figure."""
        own = self.spread**2 - SOURCE_SPREAD**2
        return math.sqrt(max(0.0, (self.log_ratio / Z_80) ** 2 - own))


def source_name(text: str) -> str:
    """Return the collection of a source: its repository or site.

    >>> source_name("QwenLM/Qwen3@c7f51a1 docs/speed.md"), source_name("vllm-project/vllm pull 1")
    ('QwenLM/Qwen3', 'vllm-project/vllm')
    """
    return text.split("@", maxsplit=1)[0].split(" ", maxsplit=1)[0].split("/p/", maxsplit=1)[0]


def collection_of(row: Row) -> str:
    """Return the collection of a row."""
    return source_name(row["source"])


def load_of(row: Row) -> str:
    """Return the load of a row in words."""
    return "one request at a time" if int(row["concurrency"]) == 1 else "several requests"


def question_of(row: Row) -> EstimateRequest:
    """Return a row as a question; copies within one tensor group share the attention."""
    tensor, data = int(row["tensor_parallel_size"]), int(row["data_parallel_size"])
    shared = tensor == int(row["gpus"])
    question: dict[str, Any] = {
        "model": row["model"],
        "cluster": {"device": row["gpu"], "devices_per_node": int(row["gpus"]), "nodes": 1},
        "workload": {
            "kind": "serve",
            **{name: int(row[name]) for name in ("input_tokens", "output_tokens", "concurrency")},
        },
        "strategy": {
            "tensor_parallel_size": tensor,
            "attention_data_parallel_size" if shared else "data_parallel_size": data,
            "expert_parallel_size": int(row["expert_parallel_size"]),
            "kv_cache_dtype": row["kv_cache_dtype"] or None,
            "quantization": row.get("quantization") or None,
        },
        "engine": row["engine"],
    }
    return EstimateRequest.model_validate(question)


def compared(row: Row, answer: Estimate) -> PublishedSpeed:
    """Return a row beside its prediction, by the time per token or the rate of all requests."""
    if row["tpot_ms"]:
        name, sign, measured = "tpot_seconds", 1, float(row["tpot_ms"]) / 1e3
    else:
        name, sign = "output_tokens_per_second", -1
        measured = float(row["output_tokens_per_second"])
    predicted, (_, high) = getattr(answer.performance, name), answer.interval[name]
    return PublishedSpeed(
        row, sign * math.log(predicted / measured), math.log(high / predicted) / Z_80
    )


@cache
def published_speeds() -> tuple[PublishedSpeed, ...]:
    """Return every row beside its prediction."""
    rows = table("published_speeds")
    return tuple(compared(row, estimate_request(question_of(row), explain=False)) for row in rows)


@cache
def fresh_speeds() -> tuple[tuple[PublishedSpeed, ...], tuple[Row, ...]]:
    """Return the rows written down before they were asked: with predictions, and refused ones."""
    speeds, refused = [], []
    for row in table("fresh_speeds"):
        try:
            answer = estimate_request(question_of(row), explain=False)
        except PlannerError:
            refused.append(row)
        else:
            speeds.append(compared(row, answer))
    return tuple(speeds), tuple(refused)


def source_spread() -> float:
    """Return the spread with which four of five rows of the first half lie inside."""
    needed = [speed.between_sources for speed in published_speeds() if speed.gives_spread]
    return float(np.quantile(needed, COVERED))


def published_section() -> str:
    """Return the errors of both halves as a section of the accuracy page."""
    lines = [
        "## Published speeds of others\n",
        WORDS,
        "| Sources | n | Mean | Median | 90th percentile | Inside 80 % intervals |",
        "|---|---|---|---|---|---|",
    ]
    for gives in (True, False):
        half = [speed for speed in published_speeds() if speed.gives_spread == gives]
        sources = sorted({collection_of(speed.row) for speed in half})
        s = summary([speed.error for speed in half])
        shares = " | ".join(f"{s[key]:.1%}" for key in ("mean", "median", "p90"))
        covered = sum(speed.is_covered for speed in half) / len(half)
        lines.append(f"| {', '.join(sources)} | {s['n']} | {shares} | {covered:.1%} |")
    return "\n".join(lines) + "\n\n" + fresh_section()


def fresh_section() -> str:
    """Return the errors of the third set by engine and by source."""
    speeds, refused = fresh_speeds()
    groups: dict[str, list[PublishedSpeed]] = defaultdict(list)
    for name_of in (lambda row: row["engine"], load_of, collection_of, lambda _: "all"):
        for speed in speeds:
            groups[name_of(speed.row)].append(speed)
    lines = [
        FRESH_WORDS,
        "| Rows of | n | Median | 90th percentile | Median ratio | Inside 80 % intervals |",
        "|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        s = summary([speed.error for speed in group])
        ratio = math.exp(float(np.median([speed.log_ratio for speed in group])))
        covered = sum(speed.is_covered for speed in group) / len(group)
        shares = f"{s['median']:.1%} | {s['p90']:.1%} | {ratio:.2f} | {covered:.1%}"
        lines.append(f"| {name} | {s['n']} | {shares} |")
    if refused:
        asked = "; ".join(f"{row['model']} on {row['gpus']} {row['gpu']}" for row in refused)
        lines.append(f"\nPublished but refused by the planner: {asked}.")
    return "\n".join(lines) + "\n"
