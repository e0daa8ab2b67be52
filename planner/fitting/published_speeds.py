"""Speeds that others published, which no factor was fitted to: errors and the spread of sources.

The sources of one half give the log spread between collections of benchmarks, which intervals of
serving include; those of the other half validate it.
"""

import math
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from planner.fitting.evidence import Row, table
from planner.fitting.held_out import summary
from planner.specs.estimate import Estimate, EstimateRequest
from planner.workload.estimator import estimate_request
from planner.workload.intervals import SOURCE_SPREAD, Z_80

COVERED = 0.8
WORDS = """Speeds of serving that others published with their conditions, asked as they were
measured and never fitted: decode time per token, or output tokens per second where only they are
stated. Every row is kept that states its conditions; none uses speculative decoding or a shared
prefix. The sources of the first line gave the spread between sources that 80 % intervals of
serving include, those of the second had no part in anything.
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
        return zlib.crc32(source_name(self.row["source"]).encode()) % 2 == 0

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
        sources = sorted({source_name(speed.row["source"]) for speed in half})
        s = summary([speed.error for speed in half])
        shares = " | ".join(f"{s[key]:.1%}" for key in ("mean", "median", "p90"))
        covered = sum(speed.is_covered for speed in half) / len(half)
        lines.append(f"| {', '.join(sources)} | {s['n']} | {shares} | {covered:.1%} |")
    return "\n".join(lines) + "\n"
